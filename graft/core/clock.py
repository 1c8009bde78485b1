"""A stage timer that waits for the device, so that a stage pays for the kernels it launched and not
for others'.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Clock:
    """Seconds by stage: `with clock("verify"): ...`; `lap()` hands out those since the last lap."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lap: dict[str, float] = {}
        self.totals: dict[str, float] = defaultdict(float)

    def now(self) -> float:
        """Seconds on a monotonic clock, once the device has done all it was given."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        start = self.now()
        yield
        seconds = self.now() - start
        self._lap[stage] = self._lap.get(stage, 0.0) + seconds
        self.totals[stage] += seconds

    def lap(self) -> dict[str, float]:
        """Hand out the stages since the last call and start anew."""
        lap, self._lap = self._lap, {}
        return lap
