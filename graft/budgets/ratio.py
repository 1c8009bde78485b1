"""SABA by the tree's own account: expected tokens over measured seconds, node by node.

    G(n) = (1 - trust) mean(n) + trust (1 + sum of the first n nodes' calibrated probabilities)

in admission order. The expected accepted nodes of a tree are the sum over its nodes of the
probability to be reached (CaDDTree, BASTION): no curve is fitted. The largest tree is built first,
which takes microseconds more than a small one (more than the cost table charges), and cut where
tokens a second are most.

The account is shrunk to that of the mean round, because the size with the largest claim is chosen:
an account that is right on average is too high where it is chosen, and odds that were calibrated on
other text (a scorer that has seen less code, say) are too high for whole responses.
"""

from __future__ import annotations

import numba
import numpy as np

from graft.budgets.constants import Constants
from graft.budgets.priced import Priced, most_a_second
from graft.budgets.reach import path_probabilities
from graft.core.errors import InputError
from graft.core.tree import chain_tree
from graft.core.types import DraftTree, RoundState


class Ratio(Priced):
    """Decides after building. `trust` 1 believes the tree, 0 decides as `Best` does."""

    def __init__(self, constants: Constants, *, trust: float = 0.5, **limits: int) -> None:
        super().__init__(constants, **limits)
        if not 0 <= trust <= 1:
            raise InputError(f"budget.trust must lie in 0..1, not {trust}")
        self._prior, self._trust = (1 - trust) * constants.mean[self.inside] + trust, trust
        # Compile now, not in the first round.
        alone = chain_tree(0, np.zeros(1, np.int64), np.zeros(1, np.float32))
        self.trim(alone, int(self.cost.contexts[0]))

    def allocate(self, state: RoundState) -> int:
        return int(self.nodes[-1])

    def trim(self, tree: DraftTree, context_length: int) -> int:
        self.check_context(context_length)
        place = _cut(
            *(tree.log_scores, tree.parents, tree.depths, *self.constants.reach.numbers),
            *(self.nodes, self._prior, self._trust, *self._costs, context_length),
        )
        return min(int(self.nodes[place]), len(tree) - 1)


@numba.njit(cache=True)
def _cut(
    log_scores, parents, depths, offsets, up, down, nodes, prior, trust, contexts, rounds, context
):
    """Where tokens a second are most. One call: it is a round's."""
    reached = path_probabilities(log_scores, parents, depths, offsets, up, down)
    tokens, total, node = prior.copy(), 0.0, 0
    for i in range(len(nodes)):
        while node < min(nodes[i], len(reached)):
            total += reached[node]
            node += 1
        tokens[i] += trust * total
    return most_a_second(tokens, contexts, rounds, context)
