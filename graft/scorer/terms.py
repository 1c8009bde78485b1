"""The learned part f of an edge's score, one class for a rung or two of the ladder.

A term gives f in rows over the K candidates and the none-of-these class beside them: a row for
every parent and, where a term looks at it, one for every grandparent. An edge's f is the sum of its
two, so the K * K pairs of a depth cost 2 K rows. Token embeddings enter through per-token tables
alone (`side`): computed from the target's embedding in training, once for the whole vocabulary in
decoding, gathered and combined by the same code.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from graft.scorer.edges import Edges

Sides = dict[str, torch.Tensor]  # by name, [tokens, R]: what a term keeps of each token


class Nothing(nn.Module):
    """f = 0: temperatures alone (r0, r1)."""

    names: tuple[str, ...] = ()  # of the sides
    uses_hidden = False

    def __init__(self, **_: Any) -> None:
        super().__init__()

    def side(self, name: str, embedding: torch.Tensor) -> torch.Tensor:
        """What is kept [..., R] of tokens with these embeddings [..., H], in this role."""
        return getattr(self, name)(embedding)

    def forward(self, edges: Edges, sides: dict[str, torch.Tensor]) -> torch.Tensor:
        """f [B, P + G, K + 1], none last, by parent and then by grandparent: G = P, or 0 where they
        do not matter. `sides` of parents and grandparents [B, P, R], of candidates [B, K, R].
        """
        (B, P), K = edges.parents.shape, edges.candidates.shape[1]
        return edges.log_probs.new_zeros(B, P, K + 1)


RANK_BINS = (0, 1, 2, 4, 8)  # first rank of each


class Ranks(Nothing):
    """Tables of offsets by depth and by the ranks of child, parent and grandparent (r2).

    No token is looked at: what it gains has nothing to do with which token follows which.
    """

    def __init__(self, *, depth: int, **_: Any) -> None:
        super().__init__()
        bins = len(RANK_BINS)
        self.depth = nn.Parameter(torch.zeros(depth, bins + 1))  # by the child's bin, none last
        self.parent = nn.Parameter(torch.zeros(bins, bins + 1))
        self.grandparent = nn.Parameter(torch.zeros(bins, bins + 1))

    def forward(self, edges: Edges, sides: Sides) -> torch.Tensor:
        K = edges.candidates.shape[1]
        bounds = torch.tensor(RANK_BINS[1:], device=edges.depths.device)
        child = torch.bucketize(torch.arange(K, device=bounds.device), bounds, right=True)
        child = torch.cat((child, child.new_tensor([len(RANK_BINS)])))  # [K + 1]
        parent = torch.bucketize(edges.parent_ranks, bounds, right=True)
        grandparent = torch.bucketize(edges.grand_ranks, bounds, right=True)
        own = self.depth[edges.depths - 1][:, None] + self.parent[parent]
        return torch.cat((own, self.grandparent[grandparent]), 1)[..., child]


class MLP(Nothing):
    """The paper's: w . relu(W [g_p(e_p); g_c(e_c); e_d] + b) + b0, times a positive scale (r3, r4).

    W splits into three blocks, so W_p g_p and W_c g_c are per-token tables (DESIGN 5.3).
    """

    names = ("parent", "child")

    def __init__(
        self, *, depth: int, hidden_size: int, width: int, projection: int, dropout: float, **_: Any
    ) -> None:
        super().__init__()
        self.parent = nn.Sequential(
            nn.Linear(hidden_size, projection, bias=False), nn.Linear(projection, width, bias=False)
        )
        self.child = nn.Sequential(
            nn.Linear(hidden_size, projection, bias=False), nn.Linear(projection, width, bias=False)
        )
        self.depth = nn.Embedding(depth, projection)
        self.of_depth = nn.Linear(projection, width)  # its bias is b
        self.none = nn.Parameter(torch.zeros(width))  # stands for the child in the none class
        self.out = nn.Linear(width, 1)
        self.log_scale = nn.Parameter(torch.zeros(()))
        self.drop = nn.Dropout(dropout)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, edges: Edges, sides: Sides) -> torch.Tensor:
        child = _with_none(sides["child"], self.none)  # [B, K + 1, R]
        depth = self.of_depth(self.depth(edges.depths - 1))  # [B, R]
        inside = sides["parent"][:, :, None] + child[:, None] + depth[:, None, None]
        return self.log_scale.exp() * self.out(self.drop(inside.relu())).squeeze(-1)


class Bilinear(Nothing):
    """<A e_p * gate + S h, B e_c>, h the drafter's state at the child's depth, the gate a function
    of it (r5). With `two_parents` the grandparent's own projection is added to the parent's (r6).
    """

    uses_hidden = True

    def __init__(
        self,
        *,
        depth: int,
        hidden_size: int,
        state_size: int,
        width: int,
        dropout: float,
        two_parents: bool = False,
        **_: Any,
    ) -> None:
        super().__init__()
        self._two_parents = two_parents
        self.names = ("parent", "child", *(("grandparent",) if two_parents else ()))
        self.parent = nn.Linear(hidden_size, width, bias=False)
        self.child = nn.Linear(hidden_size, width, bias=False)
        self.gate = nn.Linear(state_size, width)
        self.state = nn.Linear(state_size, width, bias=False)  # the state's own say on the child
        self.depth = nn.Embedding(depth, width)
        self.none = nn.Parameter(torch.zeros(width))
        self.drop = nn.Dropout1d(dropout)  # of a fan's parent and grandparent, the same channels
        nn.init.zeros_(self.depth.weight)
        nn.init.normal_(self.child.weight, std=0.1 * hidden_size**-0.5)
        if two_parents:
            self.grandparent = nn.Linear(hidden_size, width, bias=False)
            nn.init.zeros_(self.grandparent.weight)

    def forward(self, edges: Edges, sides: Sides) -> torch.Tensor:
        state = unit(edges.hidden)
        gate = 2 * torch.sigmoid(self.gate(state) + self.depth(edges.depths - 1))[:, None]
        query = torch.addcmul(self.state(state)[:, None], sides["parent"], gate)  # [B, P, R]
        if self._two_parents:
            known = (edges.depths > 1)[:, None, None]  # the root's predecessor is not in a draft
            query = torch.cat((query, sides["grandparent"] * (gate * known)), 1)
        child = _with_none(sides["child"], self.none)
        return (child @ self.drop(query.transpose(1, 2))).transpose(1, 2)


def _with_none(child: torch.Tensor, none: torch.Tensor) -> torch.Tensor:
    """Sides of the candidates [B, K, R] and of none of them: [B, K + 1, R]."""
    return torch.cat((child, none.to(child.dtype).expand(len(child), 1, -1)), 1)


def unit(x: torch.Tensor) -> torch.Tensor:
    """Scaled to a root mean square of 1 over the last axis."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
