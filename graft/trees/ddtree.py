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
        tiny = Draft(0, np.zeros((1, 1), np.int64), np.zeros((1, 1), np.float32), torch.empty(1, 0))
        expand(tiny, 1)  # compile now, not inside the first round

    def build(self, draft: Draft, budget: int) -> DraftTree:
        return expand(draft, budget)
