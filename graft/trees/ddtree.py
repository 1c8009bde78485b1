"""DDTree: the most probable paths under the drafter's marginals, every depth independent of the one
before it.
"""

from __future__ import annotations

import numpy as np
import torch

from graft.core.types import Draft, DraftTree
from graft.trees.best_first import expand


class DDTree:
    """Best-first over products of marginals, as in the DDTree paper, section 3."""

    def __init__(self) -> None:
        tokens, log_probs, cosines = np.zeros((1, 1), np.int64), *np.zeros((2, 1, 1), np.float32)
        # Compile now, not inside the first round.
        expand(Draft(0, tokens, log_probs, cosines[0, :0], torch.empty(1, 0)), 1)

    def build(self, draft: Draft, budget: int) -> DraftTree:
        return expand(draft, budget)
