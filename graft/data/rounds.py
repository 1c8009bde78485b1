"""Recorded rounds of tree decoding: what was drafted, what was built, and what the target said.

One row a round; a tree of N nodes, root included; D depths, K candidates, both in the shard's
`shape`. Lists are flat, in C order.

    prompt_id         string        the set and a number in it, "gsm8k-00002"
    source            string        the set
    turn              int32         of the conversation, 0-based
    round             int32         of the response, 0-based
    context_length    int32         T, tokens committed before the root
    root              int32         the last committed token
    candidates        list<int32>   [D, K] the drafter's best tokens, best first
    log_probs         list<float>   [D, K] theirs, nats, over all the drafter can propose
    cosines           list<float>   [D - 1] of the drafter's states at adjacent depths
    conf              float         mean best probability over depths
    degen             float         mean(cosines) + last - first
    hist              float         mean accepted length of the `hist_window` rounds before
    budget            int32         what the policy allocated
    tokens            list<int32>   [N] the tree in admission order, root first
    parents           list<int32>   [N] -1 at the root
    depths            list<int32>   [N]
    log_scores        list<float>   [N] the builder's log score of each path
    target_logits     list<float>   [N, K] behind each node, over the candidates of the next depth;
                                    0 at depth D, where there are none
    target_log_norm   list<float>   [N] log sum exp of all its logits there
    target_argmax     list<int32>   [N] its best token there
    path              list<int32>   accepted nodes, root first; in a response's last round it may
                                    go on past the end
    bonus             int32         the target's own token behind the path
    seconds           struct        of each of the seven verbs, its parts included
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from graft.core.tree import ancestor_mask
from graft.core.types import Draft, DraftTree
from graft.data.collected import Shards

VERSION = 1
VERBS = ("propose", "allocate", "build", "trim", "verify", "accept", "commit")
SCHEMA = pa.schema(
    [
        ("prompt_id", pa.string()),
        ("source", pa.string()),
        ("turn", pa.int32()),
        ("round", pa.int32()),
        ("context_length", pa.int32()),
        ("root", pa.int32()),
        ("candidates", pa.list_(pa.int32())),
        ("log_probs", pa.list_(pa.float32())),
        ("cosines", pa.list_(pa.float32())),
        ("conf", pa.float32()),
        ("degen", pa.float32()),
        ("hist", pa.float32()),
        ("budget", pa.int32()),
        ("tokens", pa.list_(pa.int32())),
        ("parents", pa.list_(pa.int32())),
        ("depths", pa.list_(pa.int32())),
        ("log_scores", pa.list_(pa.float32())),
        ("target_logits", pa.list_(pa.float32())),
        ("target_log_norm", pa.list_(pa.float32())),
        ("target_argmax", pa.list_(pa.int32())),
        ("path", pa.list_(pa.int32())),
        ("bonus", pa.int32()),
        ("seconds", pa.struct([(verb, pa.float32()) for verb in VERBS])),
    ]
)


@dataclass(frozen=True, slots=True, eq=False)
class RecordedRound:
    """One row, as arrays."""

    prompt_id: str
    source: str
    turn: int
    index: int
    context_length: int
    draft: Draft
    conf: float
    degen: float
    hist: float
    budget: int
    tree: DraftTree
    target_logits: np.ndarray  # [N, K] float32
    target_log_norm: np.ndarray  # [N] float32
    target_argmax: np.ndarray  # [N] int64
    path: list[int]
    bonus: int
    seconds: dict[str, float]


class Rounds:
    """All rounds of one or several collections, memory-mapped. Raises InputError."""

    def __init__(self, folders: Sequence[Path]) -> None:
        key = ("prompt_id", "turn", "round")
        self._shards = Shards(folders, "rounds", VERSION, key=key)
        self.made_by = self._shards.made_by
        self.depth, self.candidates = self.made_by["shape"]["D"], self.made_by["shape"]["K"]

    def __len__(self) -> int:
        return len(self._shards)

    def __iter__(self) -> Iterator[RecordedRound]:
        return (self[i] for i in range(len(self)))

    def responses(self) -> dict[tuple[str, int], range]:
        """The rows of each (prompt_id, turn); the rounds of a response lie together."""
        keys = [(prompt, turn) for prompt, turn, _ in self._shards.keys]
        starts = [i for i, key in enumerate(keys) if i == 0 or key != keys[i - 1]]
        ends = [*starts[1:], len(keys)]
        return {keys[start]: range(start, end) for start, end in zip(starts, ends, strict=True)}

    def __getitem__(self, i: int) -> RecordedRound:
        row = self._shards[i]
        D, K = self.depth, self.candidates
        parents = row["parents"].astype(np.int64)
        draft = Draft(
            root=row["root"],
            tokens=row["candidates"].astype(np.int64).reshape(D, K),
            log_probs=row["log_probs"].reshape(D, K),
            cosines=row["cosines"],
            hidden=torch.empty(D, 0),
        )
        tree = DraftTree(
            tokens=row["tokens"].astype(np.int64),
            parents=parents,
            depths=row["depths"].astype(np.int64),
            log_scores=row["log_scores"],
            visible=ancestor_mask(parents),
        )
        return RecordedRound(
            prompt_id=row["prompt_id"],
            source=row["source"],
            turn=row["turn"],
            index=row["round"],
            context_length=row["context_length"],
            draft=draft,
            conf=row["conf"],
            degen=row["degen"],
            hist=row["hist"],
            budget=row["budget"],
            tree=tree,
            target_logits=row["target_logits"].reshape(-1, K),
            target_log_norm=row["target_log_norm"],
            target_argmax=row["target_argmax"].astype(np.int64),
            path=row["path"].tolist(),
            bonus=row["bonus"],
            seconds=row["seconds"],
        )
