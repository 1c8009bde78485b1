"""TDES: the best paths by scores of edges, so that a child's place depends on its parent."""

from __future__ import annotations

import numpy as np

from graft.core.types import Draft, DraftTree
from graft.scorer import checkpoint
from graft.scorer.checkpoint import EdgeScorer
from graft.trees.best_first import expand_edges


class TDES:
    """Best-first over an edge scorer's paths (DESIGN 5.3).

    With `spine` the drafter's own best path is always in the tree: insurance for text that the
    scorer has not seen.
    """

    def __init__(self, scorer: EdgeScorer, *, spine: bool = False) -> None:
        self.scorer, self._spine = scorer, spine
        nothing = np.zeros((1, 2, 1), np.float32)  # compile now, not inside the first round
        expand_edges(0, np.zeros((1, 1), np.int64), nothing, 1, spine=spine)

    def build(self, draft: Draft, budget: int) -> DraftTree:
        tokens, logits = self.scorer.edge_logits(draft)
        return expand_edges(draft.root, tokens, logits, budget, spine=self._spine)


def load(scorer: str, *, spine: bool = False) -> TDES:
    """With a trained scorer's folder."""
    return TDES(checkpoint.load(scorer), spine=spine)
