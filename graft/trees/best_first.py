"""Best-first expansion over products of marginals: the heap of DDTree, compiled, beside its plain
reference.

A frontier entry is a path given by (parent node, depth, rank). Pop the best, admit it as a node,
push its next sibling (rank + 1, same parent) and its first child (depth + 1, rank 0). All scores
are sums of log-probabilities <= 0, so an entry is never better than the one that pushed it, nodes
come out in order of score, and the first B of them are the B most probable paths: the tree that
maximises the expected accepted length under the factorised draft (DDTree, Prop. 1-3). Equal scores
go to the entry pushed first, so a draft has one tree, and a smaller budget a prefix of it.
"""

from __future__ import annotations

import heapq

import numba
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
    tokens, parents, depths, scores = zip(*nodes, strict=True)
    return DraftTree(
        np.array(tokens, np.int64),
        np.array(parents, np.int64),
        np.array(depths, np.int64),
        np.array(scores, np.float32),
        ancestor_mask(np.array(parents)),
    )


def expand(draft: Draft, budget: int) -> DraftTree:
    """The tree of a draft's `budget` most probable paths, or of all there are."""
    return DraftTree(*_expand(draft.root, draft.tokens, draft.log_probs, budget))


@numba.njit(cache=True)
def _better(heap, scores, i, j):  # heap slots i, j: higher score first, then the entry pushed first
    a, b = heap[i], heap[j]
    return scores[a] > scores[b] or (scores[a] == scores[b] and a < b)


@numba.njit(cache=True)
def _expand(root, tokens, log_probs, budget):
    D, K = log_probs.shape
    N = budget + 1
    out_tokens, out_parents = np.empty(N, np.int64), np.full(N, -1, np.int64)
    out_depths, out_scores = np.zeros(N, np.int64), np.zeros(N, np.float32)
    visible = np.zeros((N, N), np.bool_)
    out_tokens[0], visible[0, 0] = root, True

    # Every admitted node pushes at most two entries, so entries live in flat arrays and the heap
    # holds their indices, which are also the order they were pushed in.
    M = 2 * N + 1
    scores = np.empty(M, np.float32)
    parents, depths, ranks = np.empty(M, np.int64), np.empty(M, np.int64), np.empty(M, np.int64)
    heap = np.empty(M, np.int64)
    scores[0], parents[0], depths[0], ranks[0] = log_probs[0, 0], 0, 1, 0
    heap[0] = 0
    size, pushed, n = 1, 1, 1

    while size > 0 and n < N:
        entry = heap[0]
        size -= 1
        heap[0] = heap[size]
        i = 0
        while True:  # sift down
            child = 2 * i + 1
            if child >= size:
                break
            if child + 1 < size and _better(heap, scores, child + 1, child):
                child += 1
            if not _better(heap, scores, child, i):
                break
            heap[i], heap[child] = heap[child], heap[i]
            i = child

        parent, depth, rank = parents[entry], depths[entry], ranks[entry]
        out_tokens[n], out_parents[n] = tokens[depth - 1, rank], parent
        out_depths[n], out_scores[n] = depth, scores[entry]
        visible[n, n] = True
        while parent >= 0:  # at most D steps, where copying the parent's row would be N
            visible[n, parent] = True
            parent = out_parents[parent]
        parent = parents[entry]

        for push in range(2):
            if push == 0:  # next sibling
                if rank + 1 >= K:
                    continue
                scores[pushed] = out_scores[parent] + log_probs[depth - 1, rank + 1]
                parents[pushed], depths[pushed], ranks[pushed] = parent, depth, rank + 1
            else:  # first child
                if depth >= D:
                    continue
                scores[pushed] = scores[entry] + log_probs[depth, 0]
                parents[pushed], depths[pushed], ranks[pushed] = n, depth + 1, 0
            heap[size] = pushed
            i = size
            size += 1
            pushed += 1
            while i > 0 and _better(heap, scores, i, (i - 1) // 2):  # sift up
                heap[i], heap[(i - 1) // 2] = heap[(i - 1) // 2], heap[i]
                i = (i - 1) // 2
        n += 1
    return out_tokens[:n], out_parents[:n], out_depths[:n], out_scores[:n], visible[:n, :n]
