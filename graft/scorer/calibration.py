"""Do probabilities come true? Bins of equal width, and the mean error over them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

BINS = 10


def reliability(probs: torch.Tensor, hits: torch.Tensor) -> list[tuple[float, float, int]]:
    """Mean prediction, share that came true, and count, in bins of equal width."""
    bins = (probs * BINS).long().clamp_max(BINS - 1)
    counts = torch.bincount(bins, minlength=BINS)
    predicted = torch.bincount(bins, probs.double(), minlength=BINS) / counts.clamp_min(1)
    observed = torch.bincount(bins, hits.double(), minlength=BINS) / counts.clamp_min(1)
    return list(zip(predicted.tolist(), observed.tolist(), counts.tolist(), strict=True))


def calibration_error(bins: Sequence[tuple[float, float, int]]) -> float:
    """Mean |predicted - observed|, weighted by what is in the bins."""
    total = sum(count for _, _, count in bins)
    return sum(abs(p - o) * count for p, o, count in bins) / max(1, total)
