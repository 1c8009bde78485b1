"""A drafter made of the target itself, blurred: for tests and smoke runs, never for speed.

Depth d gets the target's own distribution at its greedy continuation, with seeded noise on the
logits; the more noise, the shorter the accepted paths. It reads the target through `verify` alone,
which leaves the context as it was.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from graft.core.errors import InputError
from graft.core.interfaces import Backbone, Target
from graft.core.tree import chain_tree
from graft.core.types import Draft


class _Verifying(Target, Backbone, Protocol):
    """A target that is at hand as both."""


class Noisy:
    """Drafts `depth` positions with Gaussian noise of deviation `noise` on the target's logits."""

    def __init__(
        self,
        target: _Verifying,
        *,
        depth: int = 7,
        candidates: int = 64,
        noise: float = 1.0,
        seed: int = 0,
    ) -> None:
        if depth < 1 or candidates < 1:
            raise InputError("drafter.depth and drafter.candidates must be at least 1")
        self._target, self._noise, self._seed = target, noise, seed
        self.depth, self.candidates = depth, min(candidates, target.vocab_size)
        self.name = f"the target itself, blurred by {noise}"
        self.fingerprint = f"noisy-{depth}-{candidates}-{noise}-{seed}"
        self.reset()

    def reset(self) -> None:
        self._generator = torch.Generator(self._target.device).manual_seed(self._seed)
        # The continuation, root first: tokens and the target's logits after them. At T > 0 it may
        # outlive a path that left it; the draft is then poorer, never wrong.
        self._ahead: list[tuple[int, torch.Tensor]] = []

    def propose(self, root: int, taps: torch.Tensor) -> Draft:
        """Roll the continuation D positions past the root, reusing what still holds of the last."""
        self._ahead = self._ahead[len(taps) :]
        if not self._ahead or self._ahead[0][0] != root:
            self._ahead = [(root, self._next([root]))]
        while len(self._ahead) < self.depth:
            token = int(self._ahead[-1][1].argmax())
            self._ahead.append((token, self._next([*(t for t, _ in self._ahead), token])))
        logits = torch.stack([logits for _, logits in self._ahead]).float()
        blur = torch.randn(logits.shape, generator=self._generator, device=logits.device)
        logits = logits + self._noise * blur
        hidden = logits.new_empty(self.depth, 0)
        return Draft.from_logits(root, logits, hidden, candidates=self.candidates)

    def _next(self, tokens: list[int]) -> torch.Tensor:
        """The target's logits [V] after the context and these tokens."""
        chain = chain_tree(
            tokens[0], np.array(tokens[1:], np.int64), np.zeros(len(tokens) - 1, np.float32)
        )
        return self._target.verify(chain).logits[-1]
