"""What crosses a seam, as frozen dataclasses, and the letters used in every shape comment.

    D draft depth (block size - 1)     N nodes of a tree, root included (N = budget + 1)
    K candidates kept per depth        B budget: drafted nodes in a round, root excluded
    V vocabulary    H hidden size      T context length: tokens in the target's cache

What the host works on (tokens, parents, scores, masks) is numpy; what lives on the device is torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F

from graft.core.clock import decode_seconds
from graft.core.errors import InputError


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """The drafter's marginals for the D positions after the root, best candidates first."""

    root: int
    tokens: np.ndarray  # [D, K] int64
    log_probs: (
        np.ndarray
    )  # [D, K] float32, <= 0, non-increasing along K, normalised over all the drafter can propose
    cosines: np.ndarray  # [D - 1] float32, r_d: of the states of adjacent depths
    hidden: torch.Tensor  # [D, H] the drafter's states, on its device; H = 0 if they were not kept

    @classmethod
    def from_logits(
        cls, root: int, logits: torch.Tensor, hidden: torch.Tensor, *, candidates: int
    ) -> Draft:
        """Keep the best `candidates` of logits [D, V]; only they leave the device."""
        return Drafts.from_logits([root], logits[None], hidden[None], candidates=candidates)[0]


@dataclass(frozen=True, slots=True, eq=False)
class Drafts:
    """Drafts at A roots; indexing gives one."""

    roots: np.ndarray  # [A] int64
    tokens: np.ndarray  # [A, D, K], and so on as in `Draft`
    log_probs: np.ndarray
    cosines: np.ndarray  # [A, D - 1]
    hidden: torch.Tensor  # [A, D, H]

    def __len__(self) -> int:
        return len(self.roots)

    def __getitem__(self, i: int) -> Draft:
        return Draft(
            int(self.roots[i]), self.tokens[i], self.log_probs[i], self.cosines[i], self.hidden[i]
        )

    @property
    def depth(self) -> int:
        """D."""
        return self.tokens.shape[1]

    @classmethod
    def from_logits(
        cls,
        roots: Sequence[int],
        logits: torch.Tensor,
        hidden: torch.Tensor,
        *,
        candidates: int,
        vocabulary: torch.Tensor | None = None,
    ) -> Drafts:
        """From logits [A, D, V] and hidden [A, D, H].

        `vocabulary` [V'] says which tokens logits [A, D, V'] stand for.
        """
        tokens, log_probs, cosines = ranked(
            logits, hidden, candidates=candidates, vocabulary=vocabulary
        )
        return cls(
            roots=np.array(roots, np.int64),
            tokens=tokens.cpu().numpy(),
            log_probs=log_probs.cpu().numpy(),
            cosines=cosines.cpu().numpy(),
            hidden=hidden,
        )

    @classmethod
    def concatenate(cls, parts: Sequence[Drafts]) -> Drafts:
        """One behind the other."""
        return cls(
            roots=np.concatenate([part.roots for part in parts]),
            tokens=np.concatenate([part.tokens for part in parts]),
            log_probs=np.concatenate([part.log_probs for part in parts]),
            cosines=np.concatenate([part.cosines for part in parts]),
            hidden=torch.cat([part.hidden for part in parts]),
        )


def ranked(
    logits: torch.Tensor,
    hidden: torch.Tensor,
    *,
    candidates: int,
    vocabulary: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """A draft's tokens [..., D, K], log-probs [..., D, K] and cosines [..., D - 1], on its device.

    From logits [..., D, V] and hidden [..., D, H].
    """
    logits = logits.float()
    best = logits.topk(min(candidates, logits.shape[-1]))
    log_probs = best.values - logits.logsumexp(-1, keepdim=True)
    tokens = best.indices if vocabulary is None else vocabulary[best.indices]
    states = hidden.float()
    cosines = F.cosine_similarity(states[..., 1:, :], states[..., :-1, :], dim=-1)
    return [tokens, log_probs, cosines]


@dataclass(frozen=True, slots=True, eq=False)
class DraftTree:
    """A token tree in admission order: root first, parents before children, any prefix a tree."""

    tokens: np.ndarray  # [N] int64
    parents: np.ndarray  # [N] int64, -1 at the root
    depths: np.ndarray  # [N] int64, 0 at the root
    log_scores: np.ndarray  # [N] float32, log score of the path from the root; 0 at the root
    visible: np.ndarray  # [N, N] bool, row i marks the ancestors of i and i itself

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        """Whether every node hangs under the one before it: causal attention is then its mask."""
        return int(self.depths[-1]) == len(self) - 1

    @property
    def chances(self) -> np.ndarray:
        """[N - 1] the builder's probability of each drafted node after its parent."""
        return np.exp(self.log_scores[1:] - self.log_scores[self.parents[1:]])

    def prefix(self, budget: int) -> DraftTree:
        """The tree of the first `budget` drafted nodes, which is what a smaller budget builds."""
        n = budget + 1
        if n >= len(self):
            return self
        return DraftTree(
            self.tokens[:n],
            self.parents[:n],
            self.depths[:n],
            self.log_scores[:n],
            self.visible[:n, :n],
        )


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """What one pass of the target returns. After `prefill`, logits hold the last position only."""

    logits: torch.Tensor  # [N, V] in the target's dtype
    taps: (
        torch.Tensor
    )  # [N, n_taps * H] outputs of the tapped blocks, [N, 0] when nothing is tapped
    best: np.ndarray | None = None  # [N] int64 argmax of the logits, where the pass gave it


@dataclass(frozen=True)
class RoundState:
    """What a budget policy may look at before the tree is built (DESIGN 5.4)."""

    draft: Draft
    context_length: int  # T
    accepted: Sequence[int]  # accepted drafted tokens of every earlier round of this response

    @cached_property
    def conf(self) -> float:
        """Mean probability of the best candidate over depths."""
        best = self.draft.log_probs[:, 0].tolist()  # a few numbers: faster than as an array
        return sum(map(math.exp, best)) / len(best)

    @cached_property
    def degen(self) -> float:
        """How alike the drafter's states are and become: mean(r) + (r_last - r_first), 0 if D = 1.

        High where it drafts the same thing over and over.
        """
        r = self.draft.cosines.tolist()
        return sum(r) / len(r) + r[-1] - r[0] if r else 0.0

    def hist(self, window: int) -> float:
        """Mean accepted length of the last `window` rounds, 0 before the first."""
        last = self.accepted[-window:]
        return sum(last) / len(last) if last else 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Round:
    """One pass through the seven verbs of `decode/loop.py`, as the on-round hook sees it."""

    index: int
    state: RoundState  # before this round's commit
    budget: int  # what the policy allocated; the tree may hold fewer nodes
    tree: DraftTree
    step: Step
    path: list[int]  # accepted nodes, root first
    bonus: int  # the target's own token after the path
    seconds: dict[str, float]  # by stage (core/clock.py); they sum to the round


@dataclass(frozen=True, slots=True)
class Request:
    """One response to make. Raises `InputError` where a value makes no sense."""

    prompt: Sequence[int]
    max_new_tokens: int
    temperature: float = 0.0  # 0 is greedy
    top_p: float = 1.0  # keep the smallest set of tokens with at least this mass
    top_k: int = 0  # keep this many tokens; 0 keeps all
    seed: int = 0
    stop_tokens: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "temperature", "top_p", "top_k", "seed"):
            if not isinstance(value := getattr(self, name), int | float):
                raise InputError(f"{name} must be a number, not {value!r}")
        checks = {
            "the prompt is empty": len(self.prompt) > 0,
            f"max_new_tokens must be at least 1, not {self.max_new_tokens}": self.max_new_tokens
            >= 1,
            f"temperature must be 0 (greedy) or positive, not {self.temperature}": self.temperature
            >= 0,
            f"top_p must lie in (0, 1], not {self.top_p}": 0 < self.top_p <= 1,
            f"top_k must be 0 (off) or positive, not {self.top_k}": self.top_k >= 0,
        }
        for message, holds in checks.items():
            if not holds:
                raise InputError(message)


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished response and what it took."""

    tokens: list[int]  # the response, the stop token included
    stopped: bool  # ended by a stop token rather than by max_new_tokens
    committed: list[int]  # tokens committed by each round, bonus included; the last counts in full
    nodes: list[int]  # drafted nodes verified in each round
    seconds: dict[str, float]  # total by stage (core/clock.py), "prefill" among them

    @property
    def mat(self) -> float:
        """Mean tokens committed per round (nan without rounds)."""
        return sum(self.committed) / len(self.committed) if self.committed else math.nan

    @property
    def decode_seconds(self) -> float:
        """All the time of decoding: first draft pass included, prefill and callbacks not."""
        return decode_seconds(self.seconds)

    @property
    def overhead_seconds(self) -> float:
        """Decoding time outside the drafter's and the target's passes (`propose`, `verify`)."""
        passes = self.seconds.get("propose", 0.0) + self.seconds.get("verify", 0.0)
        return self.decode_seconds - passes

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed; the first token comes from the prefill and counts on neither side."""
        decoded = len(self.tokens) - 1
        return decoded / self.decode_seconds if decoded else math.nan
