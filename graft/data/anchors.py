"""Dense anchors: the target's own responses, and at every root in them what the drafter proposes
and what the target makes of it. All that exact replay and training an edge scorer need.

One row a response of L tokens; it has A = L - 1 roots (decoding ends before the last token becomes
one). D depths, K candidates, both in the shard's `shape`. Lists are flat, in C order.

    prompt_id            string         the set and a number in it, "gsm8k-00002"
    source               string         the set
    turn                 int32          of the conversation, 0-based
    prompt_token_ids     list<int32>    chat template and earlier turns included
    response_token_ids   list<int32>    [L] the stop token included
    beyond_token_ids     list<int32>    [D - 1] what the target says after it: rounds look so far
    stopped              bool           ended by a stop token
    candidates           list<int32>    [A, D, K] the drafter's best tokens, best first
    log_probs            list<float>    [A, D, K] theirs, nats, over all the drafter can propose
    cosines              list<float>    [A, D - 1] of the drafter's states at adjacent depths
    target_logits        list<float>    [A, D, K] the target's over the candidates of depth d, after
                                        the response's own d - 1 tokens behind the root
    target_log_norm      list<float>    [A + D - 1] log sum exp of the target's logits behind
                                        response token 0, 1, ...
    target_argmax        list<int32>    [A + D - 1] its best token there
    hidden               large_binary   [A, D, H] the drafter's states, float16 or int8; null unless
                                        asked for
    hidden_scale         list<float>    [A, D] what an int8 state is multiplied with; null if none
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from graft.core.errors import InputError
from graft.core.types import Drafts
from graft.data.collected import Shards

VERSION = 1
SCHEMA = pa.schema(
    [
        ("prompt_id", pa.string()),
        ("source", pa.string()),
        ("turn", pa.int32()),
        ("prompt_token_ids", pa.list_(pa.int32())),
        ("response_token_ids", pa.list_(pa.int32())),
        ("beyond_token_ids", pa.list_(pa.int32())),
        ("stopped", pa.bool_()),
        ("candidates", pa.list_(pa.int32())),
        ("log_probs", pa.list_(pa.float32())),
        ("cosines", pa.list_(pa.float32())),
        ("target_logits", pa.list_(pa.float32())),
        ("target_log_norm", pa.list_(pa.float32())),
        ("target_argmax", pa.list_(pa.int32())),
        ("hidden", pa.large_binary()),
        ("hidden_scale", pa.list_(pa.float32())),
    ]
)


@dataclass(frozen=True, slots=True, eq=False)
class AnchoredResponse:
    """One row, as arrays."""

    prompt_id: str
    source: str
    turn: int
    prompt: np.ndarray  # [T] int64
    response: np.ndarray  # [L] int64
    beyond: np.ndarray  # [D - 1] int64
    stopped: bool
    drafts: Drafts  # at response tokens 0 .. L - 2
    target_logits: np.ndarray  # [A, D, K] float32
    target_log_norm: np.ndarray  # [A + D - 1] float32
    target_argmax: np.ndarray  # [A + D - 1] int64

    def ranks(self) -> np.ndarray:
        """The rank among the candidates of the text's own token, [A, D]; K if it is none."""
        A, D, K = self.drafts.tokens.shape
        text = np.append(self.response, self.beyond)
        own = text[np.arange(A)[:, None] + np.arange(1, D + 1)]  # [A, D]
        found = self.drafts.tokens == own[..., None]
        return np.where(found.any(-1), found.argmax(-1), K)

    def to_row(self, hidden: str | None) -> dict[str, Any]:
        """As a row of SCHEMA; `hidden` is "float16", "int8" or None."""
        states, scale = _encode(self.drafts.hidden, hidden)
        return {
            "prompt_id": self.prompt_id,
            "source": self.source,
            "turn": self.turn,
            "prompt_token_ids": self.prompt,
            "response_token_ids": self.response,
            "beyond_token_ids": self.beyond,
            "stopped": self.stopped,
            "candidates": self.drafts.tokens.ravel(),
            "log_probs": self.drafts.log_probs.ravel(),
            "cosines": self.drafts.cosines.ravel(),
            "target_logits": self.target_logits.ravel(),
            "target_log_norm": self.target_log_norm,
            "target_argmax": self.target_argmax,
            "hidden": states,
            "hidden_scale": scale,
        }


class Anchors:
    """All responses of one or several collections, memory-mapped. Raises InputError."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._shards = Shards(folders, "anchors", VERSION, key=("prompt_id", "turn"))
        self.made_by = self._shards.made_by
        self.depth, self.candidates = self.made_by["shape"]["D"], self.made_by["shape"]["K"]

    def __len__(self) -> int:
        return len(self._shards)

    @property
    def keys(self) -> list[tuple[str, int]]:
        """Prompt and turn of every response."""
        return self._shards.keys

    def sources(self) -> dict[str, str]:
        """The prompts' ids, and the set of each."""
        prompts = (prompt for prompt, _ in self._shards.keys)
        return dict(zip(prompts, self._shards.column("source"), strict=True))

    def __iter__(self) -> Iterator[AnchoredResponse]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, i: int) -> AnchoredResponse:
        row = self._shards[i]
        D, K = self.depth, self.candidates
        response = np.array(row["response_token_ids"], np.int64)
        A = len(response) - 1

        def array(name: str, kind: type, *shape: int) -> np.ndarray:
            flat: np.ndarray = np.array(row[name], kind)
            if flat.size != np.prod(shape):
                wanted = " x ".join(map(str, shape))
                raise InputError(
                    f"{self._shards.file_of(i)}: response {row['prompt_id']} has {flat.size} "
                    f"{name}, not {wanted}; delete the shard and collect again"
                )
            return flat.reshape(shape)

        drafts = Drafts(
            roots=response[:-1],
            tokens=array("candidates", np.int64, A, D, K),
            log_probs=array("log_probs", np.float32, A, D, K),
            cosines=array("cosines", np.float32, A, D - 1),
            hidden=_decode(row["hidden"], row["hidden_scale"], (A, D)),
        )
        return AnchoredResponse(
            prompt_id=row["prompt_id"],
            source=row["source"],
            turn=row["turn"],
            prompt=np.array(row["prompt_token_ids"], np.int64),
            response=response,
            beyond=array("beyond_token_ids", np.int64, D - 1),
            stopped=row["stopped"],
            drafts=drafts,
            target_logits=array("target_logits", np.float32, A, D, K),
            target_log_norm=array("target_log_norm", np.float32, A + D - 1),
            target_argmax=array("target_argmax", np.int64, A + D - 1),
        )


def _encode(hidden: torch.Tensor, kind: str | None) -> tuple[bytes | None, np.ndarray | None]:
    """States [A, D, H] as bytes; int8 with one scale a state, its largest component / 127."""
    if kind is None:
        return None, None
    if kind == "float16":
        return hidden.to(torch.float16).cpu().numpy().tobytes(), None
    states = hidden.float().cpu()
    scale = states.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 127
    rounded = (states / scale).round().to(torch.int8)
    return rounded.numpy().tobytes(), scale.flatten().numpy()


def _decode(states: bytes | None, scale: Any, shape: tuple[int, int]) -> torch.Tensor:
    A, D = shape
    if states is None:
        return torch.empty(A, D, 0)
    if scale is None:
        whole = np.frombuffer(states, np.float16).astype(np.float32)
        return torch.from_numpy(whole.reshape(A, D, -1))
    parts = np.frombuffer(states, np.int8).reshape(A, D, -1).astype(np.float32)
    return torch.from_numpy(parts * np.array(scale, np.float32).reshape(A, D, 1))
