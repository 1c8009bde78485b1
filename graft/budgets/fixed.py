"""The same budget every round: the policy every adaptive one has to beat."""

from __future__ import annotations

from graft.core.errors import InputError
from graft.core.types import DraftTree, RoundState


class Fixed:
    """Always `nodes` drafted nodes, root excluded."""

    def __init__(self, nodes: int) -> None:
        if nodes < 1:
            raise InputError(
                f"the budget must be at least 1 node a round, not {nodes} (budget.nodes)"
            )
        self.nodes = nodes

    def allocate(self, state: RoundState) -> int:
        return self.nodes

    def trim(self, tree: DraftTree, context_length: int) -> int:
        return self.nodes
