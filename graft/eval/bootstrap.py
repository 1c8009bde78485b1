"""Intervals by resampling prompts: what another draw of prompts from the same sets would say."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

RESAMPLES = 2000
TOGETHER = 100  # resamples in memory at once


def resampled_means(
    values: np.ndarray,
    prompts: Sequence[str],
    *,
    seed: int | Sequence[int] = 0,
    resamples: int = RESAMPLES,
) -> np.ndarray:
    """Means of values [responses, M] over resampled prompts: [resamples, M].

    A prompt is drawn with all of its turns, and for all M columns alike: differences and ratios of
    columns are paired.
    """
    _, owner = np.unique(np.asarray(prompts), return_inverse=True)
    P = int(owner.max()) + 1
    sums = np.zeros((P, values.shape[1]))
    np.add.at(sums, owner, values)
    counts = np.bincount(owner)
    rng = np.random.default_rng(seed)
    means = []
    for first in range(0, resamples, TOGETHER):
        size = min(TOGETHER, resamples - first)
        drawn = rng.multinomial(P, np.full(P, 1 / P), size=size)  # how often each prompt
        means.append(drawn @ sums / (drawn @ counts)[:, None])
    return np.concatenate(means)


def interval(samples: np.ndarray, level: float = 0.95) -> tuple[float, float]:
    """The middle `level` of the samples."""
    low, high = np.quantile(samples, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
