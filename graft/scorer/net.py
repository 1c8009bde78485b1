"""The score of an edge, from the drafter's marginal and a learned term f(parent, child, depth).

    raw          S = log q(c) + f                         the paper's; it can be positive
    normalised   S = log softmax over the K siblings and a none-of-these class of
                     a_d log q(c) + f(c)    and    b_d log(1 - sum q) + c_d + f(none)

A normalised score is the log of a sub-probability: never positive, so best-first search stays
optimal, a tree is the prefix of a larger one by score, and the probabilities of paths add up to an
expectation. Temperatures a_d, b_d and offsets c_d belong to every normalised scorer (r1).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from graft.scorer.edges import Edges
from graft.scorer.terms import Nothing, Sides, unit

LEAST = 1e-4  # of the drafter's mass is always left for tokens outside the candidates
CHUNK = 4096  # tokens whose table rows are made together


class Scorer(nn.Module):
    """A term and the temperatures around it."""

    shrink: torch.Tensor

    def __init__(self, term: Nothing, *, depth: int, mode: Literal["raw", "normalised"]) -> None:
        super().__init__()
        self.term, self.mode = term, mode
        if mode == "normalised":
            self.log_temperature = nn.Parameter(torch.zeros(depth))
            self.log_rest = nn.Parameter(torch.zeros(depth))
            self.none = nn.Parameter(torch.zeros(depth))
        self.register_buffer("shrink", torch.ones(()))  # of f, tuned after training

    def forward(self, edges: Edges, sides: Sides) -> torch.Tensor:
        """Logits of the candidates and of none of them, in rows that add up [B, 1 + P + G, K + 1]:
        the drafter's own, and f's by parent and by grandparent. `raw` has no none class.
        """
        return self.rows(edges, self.shrink * self.term(edges, sides))

    def rows(self, edges: Edges, f: torch.Tensor) -> torch.Tensor:
        """The same, with the term's f [B, P + G, K + 1] at hand."""
        if self.mode == "raw":
            return torch.cat((edges.log_probs[:, None], f[..., :-1]), 1)
        at = edges.depths - 1
        spread = edges.log_probs * self.log_temperature[at].exp()[:, None]
        rest = (1 - edges.log_probs.exp().sum(-1)).clamp_min(LEAST).log()
        rest = rest * self.log_rest[at].exp() + self.none[at]
        return torch.cat((torch.cat((spread, rest[:, None]), -1)[:, None], f), 1)

    def sides(self, edges: Edges, embedding: torch.Tensor) -> Sides:
        """What the term keeps of the edges' tokens, from the target's embedding [V, H]."""
        tokens = {
            "parent": edges.parents,
            "child": edges.candidates,
            "grandparent": edges.grandparents,
        }
        found = {}
        for name in self.term.names:
            # Text repeats itself: a batch's tokens are several times fewer than its edges.
            distinct, places = tokens[name].unique(return_inverse=True)
            found[name] = self.term.side(name, unit(embedding[distinct].float()))[places]
        return found

    @torch.no_grad()
    def tables(self, embedding: torch.Tensor) -> Sides:
        """The same for the whole vocabulary: [V, R] each, in half precision."""
        parts = [unit(rows.float()) for rows in embedding.split(CHUNK)]
        return {
            name: torch.cat([self.term.side(name, part).half() for part in parts])
            for name in self.term.names
        }
