"""Batches by step: what a step trains on is a function of its number, so a resumed run sees what an
uninterrupted one would have seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

Batch = TypeVar("Batch")


class StepBatches(Generic[Batch]):
    """A loader of `steps` batches for one rank; its state is how many were taken."""

    def __init__(self, steps: int) -> None:
        self._steps, self._taken = steps, 0

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[Batch]:
        while self._taken < self._steps:
            self._taken += 1  # before the yield: whoever saves the state has got this batch
            yield self.batch(self._taken - 1)
        self._taken = 0

    def state_dict(self) -> dict[str, int]:
        return {"taken": self._taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._taken = state["taken"]

    def batch(self, step: int) -> Batch:
        """The batch of a step."""
        raise NotImplementedError
