"""The DFlash chain (arXiv 2602.06036): the drafter's best token at every depth."""

from __future__ import annotations

from graft.core.tree import chain_tree
from graft.core.types import Draft, DraftTree


class Chain:
    """The argmax path, at most D nodes deep."""

    def build(self, draft: Draft, budget: int) -> DraftTree:
        return chain_tree(draft.root, draft.tokens[:budget, 0], draft.log_probs[:budget, 0])
