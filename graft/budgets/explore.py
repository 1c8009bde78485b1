"""A fixed budget, now and then a larger one at random: for recording rounds.

A round shows at which budgets its tree would have been accepted how far, up to its own budget and
no further. Without rounds at larger budgets the gain beyond the usual one is not in the data. The
larger budget is drawn log-uniformly, from the place in the text alone: a run that is interrupted
and goes on draws the same.
"""

from __future__ import annotations

import math
import random

from graft.budgets.fixed import MAX_NODES
from graft.core.errors import InputError
from graft.core.interfaces import ANY_CONTEXT
from graft.core.types import DraftTree, RoundState


class Explore:
    """`nodes` drafted nodes; in a `share` of the rounds more, up to `largest`."""

    max_context = ANY_CONTEXT

    def __init__(self, nodes: int, *, share: float, largest: int, seed: int = 0) -> None:
        if not 0 <= share <= 1:
            raise InputError(f"budget.share must lie in 0..1, not {share}")
        if not 1 <= nodes < largest <= MAX_NODES:
            raise InputError(
                f"1 <= budget.nodes < budget.largest <= {MAX_NODES} must hold, "
                f"not {nodes} and {largest}"
            )
        self._nodes, self._share, self._largest, self._seed = nodes, share, largest, seed

    def allocate(self, state: RoundState) -> int:
        draft = state.draft
        place = f"{self._seed} {state.context_length} {draft.root} {draft.tokens[0, 0]}"
        drawn = random.Random(place)
        if drawn.random() >= self._share:
            return self._nodes
        return round(math.exp(drawn.uniform(math.log(self._nodes + 1), math.log(self._largest))))

    def trim(self, tree: DraftTree, context_length: int) -> int:
        return len(tree) - 1
