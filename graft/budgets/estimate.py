"""Least squares and Poisson likelihood for gains, with errors that know that rounds of one response
are alike: sandwich estimates, clustered by response (Liang and Zeger, 1986).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from scipy.optimize import least_squares as minimise

from graft.budgets.observed import Observed

STEPS, TOLERANCE = 100, 1e-8  # of Newton's method


def least_squares(
    curve: Callable[[np.ndarray], np.ndarray],
    start: Mapping[str, float],
    rounds: Observed,
    budgets: np.ndarray,
    *,
    at_least: Mapping[str, float] | None = None,
) -> tuple[dict[str, float], dict[str, float]]:
    """Numbers that bring `curve` [R, J] closest to what the rounds show, and their errors.

    A number on its bound has none.
    """
    tokens = rounds.tokens(budgets)
    known = ~np.isnan(tokens)
    low = [(at_least or {}).get(name, -np.inf) for name in start]
    found = minimise(
        lambda theta: (curve(theta) - tokens)[known], list(start.values()), bounds=(low, np.inf)
    )
    free = ~np.isclose(found.x, low, atol=1e-4)
    jacobian = found.jac[:, free]
    owners = np.broadcast_to(rounds.responses[:, None], known.shape)[known]
    covariance = _sandwich(jacobian.T @ jacobian, jacobian * found.fun[:, None], owners)
    errors = np.sqrt(np.maximum(np.diag(covariance), 0))
    names = [name for name, is_free in zip(start, free, strict=True) if is_free]
    values = np.where(free, found.x, low)
    return (
        dict(zip(start, map(float, values), strict=True)),
        dict(zip(names, map(float, errors), strict=True)),
    )


def poisson(
    counts: np.ndarray,
    exposure: np.ndarray,
    x: np.ndarray,
    middles: np.ndarray,
    responses: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """alpha [S], gamma [3], kappa [3], and their covariance; of counts [R, S] and x [R, 3]."""
    S, logs = counts.shape[1], np.log(middles)
    # Half an arrival more in every bin: one that none came to has no logarithm.
    alpha = np.log((counts.sum(0) + 0.5) / np.maximum(exposure.sum(0), 1))
    theta = np.concatenate([alpha, np.zeros(6)])

    def moved(weights: np.ndarray) -> np.ndarray:
        """Of what weights [R, S] each number takes part in: [R, S + 6]."""
        slopes = x * weights.sum(1)[:, None], x * (weights @ logs)[:, None]
        return np.concatenate([weights, *slopes], 1)

    for _ in range(STEPS):
        slope = (x @ theta[S : S + 3])[:, None] + (x @ theta[S + 3 :])[:, None] * logs
        mean = exposure * np.exp(theta[:S] + slope)
        information = _information(mean, x, logs)
        step = np.linalg.solve(information, moved(counts - mean).sum(0))
        theta = theta + step
        if np.abs(step).max() < TOLERANCE:
            break
    return theta, _sandwich(information, moved(counts - mean), responses)


def _information(mean: np.ndarray, x: np.ndarray, logs: np.ndarray) -> np.ndarray:
    """Fisher's, [S + 6, S + 6], and a trace of a prior against bins without arrivals."""
    S = mean.shape[1]
    out = np.zeros((S + 6, S + 6))
    out[:S, :S] = np.diag(mean.sum(0) + 1e-3)
    out[:S, S : S + 3] = mean.T @ x
    out[:S, S + 3 :] = logs[:, None] * (mean.T @ x)
    for i, j, weights in ((0, 0, mean.sum(1)), (0, 3, mean @ logs), (3, 3, mean @ logs**2)):
        out[S + i : S + i + 3, S + j : S + j + 3] = x.T @ (x * weights[:, None])
    return np.triu(out) + np.triu(out, 1).T


def _sandwich(bread: np.ndarray, scores: np.ndarray, owners: np.ndarray) -> np.ndarray:
    """Covariance of estimates whose scores [n, p] are alike within an owner [n]."""
    _, owner = np.unique(owners, return_inverse=True)
    groups = int(owner.max()) + 1
    sums = np.stack([np.bincount(owner, column, groups) for column in scores.T], 1)
    inverse = np.linalg.pinv(bread)
    return inverse @ (sums.T @ sums) @ inverse * groups / max(groups - 1, 1)
