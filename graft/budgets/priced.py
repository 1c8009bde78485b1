"""What policies share that weigh tokens against seconds:

    B = argmax over the measured sizes n of G(n) / C(n, T)

Only measured sizes are looked at. Within a bucket of a captured graph costs are flat and gains
rise, so the best size is a bucket's end; and no shape of the cost is assumed, so neither a knee nor
a step misleads the choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numba
import numpy as np

from graft.budgets.constants import Constants
from graft.core.errors import InputError
from graft.core.types import DraftTree


class Priced:
    """A policy over fitted constants. Subclasses say what each size earns."""

    def __init__(self, constants: Constants, *, least: int = 1, largest: int | None = None) -> None:
        """Choose among the measured sizes in `least`..`largest`. Raises InputError."""
        self.constants, self.cost = constants, constants.cost
        nodes = constants.nodes
        inside = (nodes >= least) & (nodes <= (nodes[-1] if largest is None else largest))
        if not inside.any():
            raise InputError(
                f"none of the measured sizes lies in budget.least={least}..budget.largest="
                f"{largest}; there are {', '.join(map(str, nodes))}"
            )
        self.inside = np.flatnonzero(inside)
        self.nodes = nodes[self.inside]
        self._shortest, self.max_context = map(int, self.cost.contexts[[0, -1]])
        rounds = np.ascontiguousarray(self.cost.rounds[:, self.inside])
        self._costs = self.cost.contexts, rounds

    @classmethod
    def load(cls, constants: str, **options: Any) -> Self:
        """With the constants of a folder."""
        return cls(Constants.load(Path(constants)), **options)

    def check_fits(self, made_by: Mapping[str, Any]) -> None:
        """Refuse other models, another builder or another machine (InputError)."""
        self.cost.check_fits(made_by)

    def choose(self, tokens: np.ndarray, context_length: int) -> int:
        """The size that earns most tokens a second; `tokens` of each of `nodes`.

        Raises InputError for a context beyond those measured.
        """
        self.check_context(context_length)
        return int(self.nodes[most_a_second(tokens, *self._costs, context_length)])

    def check_context(self, context_length: int) -> None:
        """Refuse a context beyond those measured (InputError)."""
        if not self._shortest <= context_length <= self.max_context:
            self.cost.curve(context_length)  # says so

    def trim(self, tree: DraftTree, context_length: int) -> int:
        """All that was built; policies that decide before building leave this as it is."""
        return len(tree) - 1


@numba.njit(cache=True)
def most_a_second(tokens, contexts, rounds, context):
    """The first place where tokens [S] over seconds is largest.

    Seconds lie on the line between rounds [C, S] at the two nearest contexts [C].
    """
    above = 0
    while above < len(contexts) - 1 and contexts[above] < context:
        above += 1
    below = max(above - 1, 0)
    share = 0.0
    if above > below:
        share = (context - contexts[below]) / (contexts[above] - contexts[below])
    best, most = 0, -1.0
    for i in range(len(tokens)):
        seconds = rounds[below, i] + share * (rounds[above, i] - rounds[below, i])
        if tokens[i] / seconds > most:
            best, most = i, tokens[i] / seconds
    return best
