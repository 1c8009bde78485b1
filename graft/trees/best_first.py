"""Best-first expansion, compiled (`blackboard` is its plain reference): over products of marginals
(the heap of DDTree), and over scores of edges, which depend on the parent.

A frontier entry is a path given by (parent node, depth, rank). Pop the best, admit it as a node,
push its next sibling (rank + 1, same parent) and its first child (depth + 1, rank 0). All scores
are sums of log-probabilities <= 0, so an entry is never better than the one that pushed it, nodes
come out in order of score, and the first B of them are the B most probable paths: the tree that
maximises the expected accepted length under the factorised draft (DDTree, Prop. 1-3). Equal scores
go to the entry pushed first, so a draft has one tree, and a smaller budget a prefix of it.

Scores of edges change the order of children from parent to parent: siblings are pushed in the order
of their scores there. Where these are log-probabilities all of the above holds. Where they may be
positive (raw scores), nodes no longer come out in order of score; what comes out is still a tree,
and a smaller budget a prefix of it.
"""

from __future__ import annotations

import math

import numba
import numpy as np

from graft.core.types import Draft, DraftTree


def expand(draft: Draft, budget: int) -> DraftTree:
    """The tree of a draft's `budget` most probable paths, or of all there are."""
    return DraftTree(*_expand(draft.root, draft.tokens, draft.log_probs, budget))


@numba.njit(cache=True)
def _better(heap, scores, i, j):  # heap slots i, j: higher score first, then the entry pushed first
    a, b = heap[i], heap[j]
    return scores[a] > scores[b] or (scores[a] == scores[b] and a < b)


@numba.njit(cache=True)
def _pop(heap, size, scores):
    """Take the best of `size` entries off the heap."""
    entry = heap[0]
    size -= 1
    heap[0] = heap[size]
    i = 0
    while True:  # sift down
        child = 2 * i + 1
        if child >= size:
            return entry
        if child + 1 < size and _better(heap, scores, child + 1, child):
            child += 1
        if not _better(heap, scores, child, i):
            return entry
        heap[i], heap[child] = heap[child], heap[i]
        i = child


@numba.njit(cache=True)
def _push(heap, size, scores, entry):
    heap[size] = entry
    i = size
    while i > 0 and _better(heap, scores, i, (i - 1) // 2):  # sift up
        heap[i], heap[(i - 1) // 2] = heap[(i - 1) // 2], heap[i]
        i = (i - 1) // 2


@numba.njit(cache=True)
def _see_ancestors(visible, parents, node):
    """Mark a node's ancestors and itself: at most D steps, where copying a row would be N."""
    at = node
    while at >= 0:
        visible[node, at] = True
        at = parents[at]


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
        entry = _pop(heap, size, scores)
        size -= 1
        parent, depth, rank = parents[entry], depths[entry], ranks[entry]
        out_tokens[n], out_parents[n] = tokens[depth - 1, rank], parent
        out_depths[n], out_scores[n] = depth, scores[entry]
        _see_ancestors(visible, out_parents, n)
        if rank + 1 < K:  # next sibling
            scores[pushed] = out_scores[parent] + log_probs[depth - 1, rank + 1]
            parents[pushed], depths[pushed], ranks[pushed] = parent, depth, rank + 1
            _push(heap, size, scores, pushed)
            size, pushed = size + 1, pushed + 1
        if depth < D:  # first child
            scores[pushed] = scores[entry] + log_probs[depth, 0]
            parents[pushed], depths[pushed], ranks[pushed] = n, depth + 1, 0
            _push(heap, size, scores, pushed)
            size, pushed = size + 1, pushed + 1
        n += 1
    return out_tokens[:n], out_parents[:n], out_depths[:n], out_scores[:n], visible[:n, :n]


def expand_edges(
    root: int, tokens: np.ndarray, logits: np.ndarray, budget: int, *, spine: bool = False
) -> DraftTree:
    """The tree of the best paths by scores of edges over candidates [D, K].

    From logits in rows [D, 1 + K + G, K (+ 1)] as `fan` takes them; parents of depth 1 and
    grandparents of depths 1 and 2 have rank 0. With `spine` the drafter's own best path is admitted
    first, whatever its score.
    """
    return DraftTree(*_expand_edges(root, tokens, logits, budget, spine))


@numba.njit(cache=True)
def _fan(rows, grand, parent, candidates, out):  # what `blackboard.fan` gives, into out [K (+ 1)]
    for c in range(len(out)):
        out[c] = rows[0, c] + rows[1 + parent, c]
        if len(rows) > 1 + candidates:
            out[c] += rows[1 + candidates + grand, c]
    if len(out) > candidates:
        top, total = np.float64(out.max()), 0.0
        for x in out:
            total += math.exp(x - top)
        norm = top + math.log(total)
        for c in range(candidates):
            out[c] = out[c] - norm


@numba.njit(cache=True)
def _best(scores, left):  # of the candidates that are left, the first one of the best, or -1
    best = -1
    for c in range(len(left)):
        if left[c] and (best < 0 or scores[c] > scores[best]):
            best = c
    return best


@numba.njit(cache=True)
def _expand_edges(root, tokens, logits, budget, spine):
    (D, K), W = tokens.shape, logits.shape[2]
    N = budget + 1
    out_tokens, out_parents = np.empty(N, np.int64), np.full(N, -1, np.int64)
    out_depths, out_scores = np.zeros(N, np.int64), np.zeros(N, np.float32)
    out_ranks = np.zeros(N, np.int64)
    visible = np.zeros((N, N), np.bool_)
    out_tokens[0], visible[0, 0] = root, True
    # A node's fan is scored when it is opened: at most N of the 1 + K + (D - 2) * K * K there are.
    fans, left = np.empty((N, W), np.float32), np.ones((N, K), np.bool_)
    M = 2 * N + D + 1
    scores = np.empty(M, np.float32)
    parents, ranks, heap = np.empty(M, np.int64), np.empty(M, np.int64), np.empty(M, np.int64)
    size, pushed, n = 0, 0, 1

    if spine:
        for depth in range(min(D, budget)):
            _fan(logits[depth], 0, 0, K, fans[depth])
            left[depth, 0] = False
            out_tokens[n], out_parents[n], out_depths[n] = tokens[depth, 0], depth, n
            out_scores[n] = out_scores[depth] + fans[depth, 0]
            _see_ancestors(visible, out_parents, n)
            n += 1

    opened, again = 0, -1  # nodes with a fan, and the parent of the node just admitted
    while n < N:
        # Push what is due: the sibling behind the one just admitted, then first children.
        for node in range(opened - 1, n):
            parent = again if node < opened else node
            if parent < 0 or out_depths[parent] == D:
                continue
            if node >= opened:
                above = out_parents[node]
                grand = out_ranks[above] if above >= 0 else 0
                _fan(logits[out_depths[node]], grand, out_ranks[node], K, fans[node])
            child = _best(fans[parent], left[parent])
            if child >= 0:
                left[parent, child] = False
                scores[pushed] = out_scores[parent] + fans[parent, child]
                parents[pushed], ranks[pushed] = parent, child
                _push(heap, size, scores, pushed)
                size, pushed = size + 1, pushed + 1
        opened = n
        if size == 0:
            break
        entry = _pop(heap, size, scores)
        size -= 1
        again, child = parents[entry], ranks[entry]
        depth = out_depths[again]
        out_tokens[n], out_parents[n], out_ranks[n] = tokens[depth, child], again, child
        out_depths[n], out_scores[n] = depth + 1, scores[entry]
        _see_ancestors(visible, out_parents, n)
        n += 1
    return out_tokens[:n], out_parents[:n], out_depths[:n], out_scores[:n], visible[:n, :n]
