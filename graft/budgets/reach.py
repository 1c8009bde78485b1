"""How likely a node is reached: a builder's path scores, made probabilities that come true.

A node is reached if it and all its ancestors are the target's own tokens. Its probability is the
product of its edges', each calibrated on recorded edges whose parent was reached:

    logit p = offset_depth + up * s - down * log(1 - e^s)        s the edge's log score

which holds Platt's map of the edge's logit (up = down), and still says something of raw scores
above 0. Edges are calibrated, not their product and not the sum over a tree: what a node adds
depends on its own path (DSpark, TreeSpark). The order of a tree's nodes stays the builder's: a
builder that wants calibrated odds in its heap learns them (scorer=r1).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numba
import numpy as np
from scipy.special import expit

from graft.core.errors import InputError
from graft.core.types import DraftTree

LEAST = 1000  # edges that a fit needs
NEAR = 1e-4  # a score this close to 0 says as much as 0
STEPS, TOLERANCE = 100, 1e-8  # of Newton's method
RIDGE = 1e-2  # keeps offsets of depths that are never reached finite


@dataclass(frozen=True)
class Reach:
    """The map of one tree builder."""

    offsets: list[float]  # [D]
    up: float
    down: float

    def __call__(self, tree: DraftTree) -> np.ndarray:
        """Probabilities of the drafted nodes, in admission order: [N - 1]."""
        return path_probabilities(tree.log_scores, tree.parents, tree.depths, *self.numbers)

    def of_paths(
        self, log_scores: np.ndarray, parents: np.ndarray, depths: np.ndarray
    ) -> np.ndarray:
        """Of many trees at once: drafted nodes [R, N] -> [R, N]; padding has depth 0."""
        return _of_paths(log_scores, parents, depths, *self.numbers)

    @cached_property
    def numbers(self) -> tuple[np.ndarray, float, float]:
        """Offsets [D], up, down."""
        return np.array(self.offsets), self.up, self.down

    @classmethod
    def fit(cls, scores: np.ndarray, depths: np.ndarray, hits: np.ndarray, depth: int) -> Reach:
        """By maximum likelihood on edges [E] below reached nodes: log scores, depths, outcomes.

        Raises InputError for too few, or none of either outcome.
        """
        if len(hits) < LEAST or hits.all() or not hits.any():
            raise InputError(
                f"{len(hits)} edges, {int(hits.sum())} of them accepted, are too few to calibrate "
                f"a builder; collect {LEAST} at least"
            )
        columns = [np.eye(depth)[depths - 1], scores[:, None], -_log_rest(scores)[:, None]]
        features = np.concatenate(columns, 1)
        theta = np.append(np.zeros(depth), [1.0, 1.0])
        prior = theta.copy()
        for _ in range(STEPS):
            p = expit(features @ theta)
            slope = features.T @ (hits - p) - RIDGE * (theta - prior)
            curvature = (features * (p * (1 - p))[:, None]).T @ features
            step = np.linalg.solve(curvature + RIDGE * np.eye(depth + 2), slope)
            theta = theta + step
            if np.abs(step).max() < TOLERANCE:
                break
        return cls(theta[:depth].tolist(), float(theta[-2]), float(theta[-1]))


@numba.njit(cache=True)
def _log_rest(scores):
    """log(1 - e^s), as if s were -NEAR at most."""
    return np.log(-np.expm1(np.minimum(scores, -NEAR)))


@numba.njit(cache=True)
def path_probabilities(log_scores, parents, depths, offsets, up, down):
    """Node 0 is the root; the others' probabilities, [N - 1]."""
    found = np.ones(len(parents))
    for node in range(1, len(parents)):
        score = np.float64(log_scores[node]) - np.float64(log_scores[parents[node]])
        rest = np.log(-np.expm1(min(score, -NEAR)))
        logit = offsets[depths[node] - 1] + up * score - down * rest
        found[node] = found[parents[node]] / (1 + np.exp(-logit))
    return found[1:]


@numba.njit(cache=True)
def _of_paths(log_scores, parents, depths, offsets, up, down):
    R, N = parents.shape
    found = np.zeros((R, N))
    scores, above, deep = np.zeros(N + 1, np.float32), np.zeros(N + 1, np.int64), np.zeros(N + 1)
    for row in range(R):
        scores[1:], above[1:], deep[1:] = log_scores[row], parents[row], depths[row]
        size = np.count_nonzero(deep) + 1
        found[row, : size - 1] = path_probabilities(
            scores[:size], above[:size], deep[:size].astype(np.int64), offsets, up, down
        )
    return found
