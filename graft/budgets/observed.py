"""Rounds as the fits of gains see them: how many nodes were seen, and when the target's own tokens
came among them. A smaller tree is a prefix of a larger one, so a round with a tree of N nodes shows
what every budget up to N would have earned; beyond, it is censored.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from graft.core.errors import InputError

STATE = ("conf", "degen", "hist")
LEAST = 200  # rounds that a fit needs


@dataclass(frozen=True, slots=True, eq=False)
class Observed:
    """R rounds and what they show."""

    arrivals: np.ndarray  # [R, D] the node, in admission order, that held the k-th token of the
    # target's continuation; a number beyond `seen` where none did
    seen: np.ndarray  # [R] drafted nodes of the tree
    states: np.ndarray  # [R, 3]
    responses: np.ndarray  # [R] int, which response a round is of

    def __len__(self) -> int:
        return len(self.seen)

    def __getitem__(self, rows: np.ndarray) -> Observed:
        return Observed(
            self.arrivals[rows], self.seen[rows], self.states[rows], self.responses[rows]
        )

    def tokens(self, budgets: np.ndarray) -> np.ndarray:
        """Committed at these budgets [J], bonus included: [R, J], nan where a tree was smaller."""
        got = 1.0 + (self.arrivals[:, :, None] <= budgets).sum(1)
        return np.where(self.seen[:, None] >= budgets, got, np.nan)

    def horizon(self, sizes: np.ndarray) -> np.ndarray:
        """Those of `sizes` that enough rounds reach. Raises InputError."""
        if len(self) < LEAST:
            raise InputError(
                f"{len(self)} rounds are too few to fit a gain; collect {LEAST} at least"
            )
        reached = sizes[[(self.seen >= size).sum() >= LEAST for size in sizes]]
        if not len(reached) or (reached[-1] < sizes[-1] and self.seen.min() == self.seen.max()):
            raise InputError(
                f"every round has a tree of {self.seen.max()} nodes, so what more would buy is not "
                "in the data; collect rounds with budget@method.budget=explore, which draws larger "
                "ones now and then, or fit on anchors: use=anchors"
            )
        return reached


def mean_gain(rounds: Observed, sizes: np.ndarray) -> np.ndarray:
    """Tokens of a mean round at `sizes`, those that enough rounds reach.

    Arrivals over popped nodes, bin by bin: censored rounds count as far as they were seen. Right if
    budgets were drawn without regard to the state, as fixed and explored ones are.
    """
    ends = rounds.horizon(sizes)
    counts, exposure = binned(rounds, ends)
    return 1 + np.cumsum(counts.sum(0) / exposure.sum(0) * np.diff(ends, prepend=0))


def binned(rounds: Observed, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Arrivals and popped nodes by bin, [R, S] each."""
    exposure = np.diff(np.minimum(ends, rounds.seen[:, None]), axis=1, prepend=0)
    came = np.where(rounds.arrivals <= rounds.seen[:, None], rounds.arrivals, 0)
    none = (came == 0).sum(1)[:, None]
    return np.diff((came[:, :, None] <= ends).sum(1), axis=1, prepend=none), exposure
