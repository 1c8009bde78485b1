"""What a scorer looks at: the K candidates of one depth under P parents, many times over.

Training has one true parent a fan (P = 1) and B fans from anywhere; decoding has a draft's D depths
(B = D) and all of a depth's possible parents. Both go through the same code.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from graft.core.types import Draft


@dataclass(frozen=True, slots=True, eq=False)
class Edges:
    """Fans of edges (parent, child, depth), [B, P, K] of them."""

    depths: torch.Tensor  # [B] int64, of the children, 1 .. D
    parents: torch.Tensor  # [B, P] int64, tokens; at depth 1 the root
    grandparents: torch.Tensor  # [B, P] int64, tokens; the parent again where it is the root
    parent_ranks: torch.Tensor  # [B, P] int64, among the candidates of their depth; 0 for the root
    grand_ranks: torch.Tensor  # [B, P] int64
    candidates: torch.Tensor  # [B, K] int64, tokens
    log_probs: torch.Tensor  # [B, K] float32, the drafter's
    hidden: torch.Tensor  # [B, H] float32, the drafter's state at the children's depth; H may be 0


def edges_of(draft: Draft, device: torch.device, *, pairs: bool) -> Edges:
    """All edges a tree over this draft may have: B = D, P = K, in the order of the parents' ranks.

    With `pairs` a parent is looked at under every grandparent: P = K * K, grandparent first. At
    depth 1 every parent is the root, at depth 2 every grandparent.
    """
    tokens = torch.from_numpy(draft.tokens).to(device)
    D, K = tokens.shape
    before = torch.cat((tokens.new_full((1, K), draft.root), tokens[:-1]))  # [D, K] parents
    above = torch.cat((tokens.new_full((1, K), draft.root), before[:-1]))  # [D, K] grandparents
    ranks = torch.arange(K, device=device).repeat(D, 1)
    ranks[0] = 0
    grand_ranks = torch.cat((ranks.new_zeros(1, K), ranks[:-1]))
    if pairs:
        before, ranks = before.repeat(1, K), ranks.repeat(1, K)
        above, grand_ranks = above.repeat_interleave(K, 1), grand_ranks.repeat_interleave(K, 1)
    else:  # the likeliest one stands for all
        above, grand_ranks = above[:, :1].expand(D, K), grand_ranks[:, :1].expand(D, K)
    return Edges(
        depths=torch.arange(1, D + 1, device=device),
        parents=before,
        grandparents=above,
        parent_ranks=ranks,
        grand_ranks=grand_ranks,
        candidates=tokens,
        log_probs=torch.from_numpy(draft.log_probs).to(device),
        hidden=draft.hidden.to(device, torch.float32),
    )
