"""The same budget every round: the policy every adaptive one has to beat."""

from __future__ import annotations

from graft.core.errors import InputError
from graft.core.interfaces import ANY_CONTEXT
from graft.core.types import DraftTree, RoundState

MAX_NODES = 4096  # the ancestor mask takes nodes^2 bytes, the logits nodes * V numbers


class Fixed:
    """Always `nodes` drafted nodes, root excluded."""

    max_context = ANY_CONTEXT

    def __init__(self, nodes: int) -> None:
        if not 1 <= nodes <= MAX_NODES:
            raise InputError(f"budget.nodes must lie in 1..{MAX_NODES}, not {nodes}")
        self.nodes = nodes

    def allocate(self, state: RoundState) -> int:
        return self.nodes

    def trim(self, tree: DraftTree, context_length: int) -> int:
        return self.nodes
