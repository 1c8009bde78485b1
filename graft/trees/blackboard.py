"""Best-first expansion as on a blackboard: `best_first` must agree with it, array by array."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import numpy as np

from graft.core.tree import ancestor_mask
from graft.core.types import Draft, DraftTree


def expand_reference(draft: Draft, budget: int) -> DraftTree:
    """The expansion as on a blackboard; `expand` must agree with it, array by array."""
    log_probs = draft.log_probs
    D, K = log_probs.shape
    nodes = [(draft.root, -1, 0, np.float32(0.0))]
    pushed = 0
    heap = [(-log_probs[0, 0], pushed, 0, 1, 0)]  # (-score, pushed, parent, depth, rank)
    while heap and len(nodes) <= budget:
        negative, _, parent, depth, rank = heapq.heappop(heap)
        nodes.append((draft.tokens[depth - 1, rank], parent, depth, -negative))
        if rank + 1 < K:
            pushed += 1
            score = nodes[parent][3] + log_probs[depth - 1, rank + 1]
            heapq.heappush(heap, (-score, pushed, parent, depth, rank + 1))
        if depth < D:
            pushed += 1
            score = -negative + log_probs[depth, 0]
            heapq.heappush(heap, (-score, pushed, len(nodes) - 1, depth + 1, 0))
    return _tree_of(nodes)


def expand_edges_reference(
    root: int, tokens: np.ndarray, logits: np.ndarray, budget: int, *, spine: bool = False
) -> DraftTree:
    """`expand_edges` as on a blackboard."""
    D, K = tokens.shape
    nodes = [(root, -1, 0, np.float32(0.0))]
    ranks = [0]  # of each node among the candidates of its depth; 0 at the root
    heap: list[tuple[np.float32, int, int, int]] = []  # (-score, pushed, parent, place)
    pushed = 0

    def edges(parent: int) -> tuple[np.ndarray, np.ndarray]:
        """Scores of the children [K], and their order."""
        above, depth = nodes[parent][1], nodes[parent][2]
        grand = ranks[above] if above >= 0 else 0
        own = fan(logits[depth], grand=grand, parent=ranks[parent], candidates=K)
        return own, np.argsort(-own, kind="stable")

    def push(parent: int, place: int) -> None:
        nonlocal pushed
        own, sequence = edges(parent)
        while place < K and (parent, int(sequence[place])) in on_spine:
            place += 1
        if place < K:
            score = nodes[parent][3] + own[sequence[place]]
            heapq.heappush(heap, (-score, pushed, parent, place))
            pushed += 1

    def admit(parent: int, rank: int, score: np.float32) -> None:
        depth = nodes[parent][2] + 1
        nodes.append((tokens[depth - 1, rank], parent, depth, score))
        ranks.append(rank)

    on_spine = {(depth, 0) for depth in range(D)} if spine else set()
    if spine:
        for depth in range(min(D, budget)):
            admit(depth, 0, nodes[depth][3] + edges(depth)[0][0])
        for node in range(len(nodes)):
            if nodes[node][2] < D:
                push(node, 0)
    else:
        push(0, 0)
    while heap and len(nodes) <= budget:
        negative, _, parent, place = heapq.heappop(heap)
        admit(parent, int(edges(parent)[1][place]), -negative)
        push(parent, place + 1)
        if nodes[-1][2] < D:
            push(len(nodes) - 1, 0)
    return _tree_of(nodes)


def fan(rows: np.ndarray, *, grand: int, parent: int, candidates: int) -> np.ndarray:
    """Scores [K] of a depth's candidates under the parent of a rank, whose own parent has rank
    `grand`, from rows of logits [1 + K + G, K (+ 1)].

    The softmax is over the candidates and none of them, where rows have a place for that.
    """
    own = rows[0] + rows[1 + parent]
    if len(rows) > 1 + candidates:
        own = own + rows[1 + candidates + grand]
    if len(own) == candidates:
        return own
    top, total = float(own.max()), 0.0
    for x in own:  # not `sum`, which rounds in its own way
        total += math.exp(float(x) - top)
    norm = top + math.log(total)
    return np.array([float(x) - norm for x in own[:-1]], np.float32)


def _tree_of(nodes: Sequence[tuple]) -> DraftTree:
    """Out of (token, parent, depth, log score) of each node."""
    tokens, parents, depths, scores = zip(*nodes, strict=True)
    return DraftTree(
        np.array(tokens, np.int64),
        np.array(parents, np.int64),
        np.array(depths, np.int64),
        np.array(scores, np.float32),
        ancestor_mask(np.array(parents)),
    )
