"""SABA as the paper prints it (arXiv 2608.20375): B = argmax a B^beta / (c_v B + c_f).

a = mean(accepted + 1) over the last rounds. It multiplies every budget's gain alike and cancels: in
the open range the optimum is beta c_f / ((1 - beta) c_v), a constant of the machine, whatever the
round looks like. It is kept as the faithful row. What c_f and c_v are is left open in the paper:

    whole     c_f and c_v of a line through measured rounds (DESIGN 5.4)
    draft     c_f is the drafter's pass, c_v the line's slope
    per_node  c_f is the drafter's pass, c_v a verify pass over its nodes, as the paper words it;
              weights that are read once are then charged to every node
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from graft.budgets.constants import Constants
from graft.budgets.cost import CostTable
from graft.core.errors import InputError
from graft.core.interfaces import ANY_CONTEXT
from graft.core.types import DraftTree, RoundState

READINGS = ("whole", "draft", "per_node")
PASS = 64  # nodes of the verify pass that `per_node` divides


def costs(table: CostTable, reading: str, context: float) -> tuple[float, float]:
    """c_f and c_v in seconds, at a context length. Raises InputError for an unknown reading."""
    if reading not in READINGS:
        raise InputError(f"budget.reading must be one of {', '.join(READINGS)}, not {reading}")
    line = table.line(context)
    draft = float(table.at(context, table.draft))
    if reading == "whole":
        return line.fixed, line.per_node
    if reading == "draft":
        return draft, line.per_node
    nodes = min(PASS, int(table.nodes[-1]))
    verify = float(np.interp(nodes, table.nodes, table.at(context, table.verify)))
    return draft, verify / nodes


class Paper:
    """One of the three readings at one context length, in the paper's range of 32..512 nodes.

    The range ends with the cost table, so that rounds can be priced; so does the context.
    """

    max_context = ANY_CONTEXT  # it is the same at all of them

    def __init__(
        self,
        cost: CostTable,
        *,
        beta: float = 0.5,
        reading: str = "whole",
        context: int = 256,
        window: int = 8,
        least: int = 32,
        largest: int = 512,
    ) -> None:
        if not 0 < beta < 1:
            raise InputError(f"budget.beta must lie in 0..1, not {beta}")
        if not 1 <= least <= largest:
            raise InputError(f"1 <= budget.least <= budget.largest, not {least} and {largest}")
        fixed, per_node = costs(cost, reading, min(context, int(cost.contexts[-1])))
        self.cost, self._window = cost, window
        end = int(cost.nodes[-1])
        self._budgets = np.arange(min(least, end), min(largest, end) + 1)
        self._shape = self._budgets**beta / (per_node * self._budgets + fixed)

    @classmethod
    def load(cls, constants: str, **options: Any) -> Paper:
        """With the cost table among the constants of a folder."""
        return cls(Constants.load(Path(constants)).cost, **options)

    def check_fits(self, made_by: Mapping[str, Any]) -> None:
        """Refuse costs of other models or another machine (InputError); any builder will do."""
        self.cost.check_fits({key: made_by[key] for key in made_by if key != "builder"})

    def allocate(self, state: RoundState) -> int:
        a = state.hist(self._window) + 1
        return int(self._budgets[(a * self._shape).argmax()])

    def trim(self, tree: DraftTree, context_length: int) -> int:
        return len(tree) - 1
