"""What a scorer looks at: the K candidates of one depth, P parents and their P grandparents.

Training has one true parent a fan (P = 1) and B fans from anywhere; decoding has a draft's D depths
(B = D) and all of a depth's possible parents. Both go through the same code.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from graft.core.types import Draft


@dataclass(frozen=True, slots=True, eq=False)
class Edges:
    """Fans of edges (grandparent, parent, child, depth)."""

    depths: torch.Tensor  # [B] int64, of the children, 1 .. D
    parents: torch.Tensor  # [B, P] int64, tokens; at depth 1 the root
    grandparents: torch.Tensor  # [B, P] int64, tokens; the parent again where it is the root
    parent_ranks: torch.Tensor  # [B, P] int64, among the candidates of their depth; 0 for the root
    grand_ranks: torch.Tensor  # [B, P] int64
    candidates: torch.Tensor  # [B, K] int64, tokens
    log_probs: torch.Tensor  # [B, K] float32, the drafter's
    hidden: torch.Tensor  # [B, H] float32, the drafter's state at the children's depth; H may be 0


def edges_of(draft: Draft, device: torch.device) -> Edges:
    """All that a tree over this draft may look at: B = D, P = K, in the order of the ranks.

    At depth 1 every parent is the root, at depth 2 every grandparent.
    """
    D, K = draft.tokens.shape
    root = np.full((2, K), draft.root)
    tokens = torch.from_numpy(np.concatenate((root, draft.tokens))).to(device)
    depths, ranks = _places(D, K, device)
    return Edges(
        depths=depths,
        parents=tokens[1:-1],
        grandparents=tokens[:-2],
        parent_ranks=ranks[1:-1],
        grand_ranks=ranks[:-2],
        candidates=tokens[2:],
        log_probs=torch.from_numpy(draft.log_probs).to(device),
        hidden=draft.hidden.to(device, torch.float32),
    )


@cache
def _places(depth: int, candidates: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Depths [D], and ranks [D + 2, K] of candidates behind two rows for the root."""
    ranks = torch.arange(candidates, device=device).repeat(depth + 2, 1)
    ranks[:2] = 0
    return torch.arange(1, depth + 1, device=device), ranks
