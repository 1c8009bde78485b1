"""Trees of one shape (root only, chain), the ancestor mask, and the walk that accepts a path.

The walk is the whole of verification (DESIGN 5.1): draw the target's token at a node; while it is
one of the node's children, move there; the first token that is not becomes the bonus. Each draw
depends on its own prefix only, so this is ancestral sampling from the target, whatever the tree and
whatever the temperature.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from graft.core.types import DraftTree


def ancestor_mask(parents: np.ndarray) -> np.ndarray:
    """Mark each node's ancestors and itself: parents [N] (-1 at the root) -> [N, N] bool."""
    visible = np.eye(len(parents), dtype=bool)
    for node in range(1, len(parents)):
        visible[node] |= visible[parents[node]]
    return visible


def chain_tree(root: int, tokens: np.ndarray, log_probs: np.ndarray) -> DraftTree:
    """One node per depth: tokens [B] int64, log_probs [B] float32; B = 0 gives the root alone."""
    n = len(tokens) + 1
    scores = np.zeros(n, np.float32)
    np.cumsum(log_probs, out=scores[1:])
    depths = np.arange(n)
    return DraftTree(np.append(root, tokens), depths - 1, depths, scores, np.tri(n, dtype=bool))


def accept(tree: DraftTree, draw: Callable[[int], int]) -> tuple[list[int], int]:
    """Walk from the root along the target's own tokens.

    `draw(node)` returns the target's token after `node`; it is called once per committed token, in
    text order, so a seeded sampler consumes its stream exactly as plain decoding would. Returns the
    path (root first) and the bonus.
    """
    parents, tokens = tree.parents.tolist(), tree.tokens.tolist()
    path, token = [0], draw(0)
    for node in range(1, len(tokens)):  # one sweep is enough: a parent precedes its children
        if parents[node] == path[-1] and tokens[node] == token:
            path.append(node)
            token = draw(node)
    return path, token
