"""Where decoding time goes: a clock that runs in exactly one stage at a time, so that stages sum to
the time that passed.

`with clock("verify"):` is one of the loop's verbs. It waits for the device before it ends, so that
it pays for the kernels it launched and not for others'. What lies between verbs is the stage that
they are entered from, `PYTHON`. A verb's own parts are told apart where they are, by functions that
know of no clock: `with Part("score"):`, or as a decorator, counts as "build/score" if it is run by
"build", whose own time is then the rest. Parts do not wait: a device's work is paid for by the part
or verb that waits for its results.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ContextDecorator
from contextvars import ContextVar

import torch

PYTHON = "python"  # between the verbs


class Clock:
    """Seconds by stage, `totals`; `lap()` hands out those since the last lap. It begins paused."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._cuda = device, device.type == "cuda"
        self._stages: list[str | None] = [None]  # the last is the present one; None: paused
        self._since = 0.0
        self._lap: dict[str, float] = {}
        self.totals: dict[str, float] = {}
        self._outer: Clock | None = None  # what ran when this began to run

    def __call__(self, stage: str) -> _Stage:
        """The stage of a `with` block."""
        return _Stage(self, stage)

    def paused(self) -> _Stage:
        """A `with` block whose time is the caller's and counts nowhere."""
        return _Stage(self, None)

    def lap(self) -> dict[str, float]:
        """Hand out the stages since the last call and start anew."""
        self._switch(self._stages[-1], wait=False)
        lap, self._lap = self._lap, {}
        return lap

    def now(self) -> float:
        """Seconds on a monotonic clock, once the device has done all it was given."""
        if self._cuda:
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def enter(self, stage: str | None) -> None:
        """Be in another stage until `leave`."""
        self._switch(stage, wait=False)
        self._stages.append(stage)

    def enter_part(self, name: str) -> None:
        """Be in a part of the present verb until `leave`."""
        verb = (self._stages[-1] or PYTHON).partition("/")[0]
        self.enter(f"{verb}/{name}")

    def leave(self, *, wait: bool) -> None:
        """Return to the stage before; `wait` for the device first."""
        self._switch(self._stages[-2], wait=wait)
        self._stages.pop()

    def _switch(self, stage: str | None, *, wait: bool) -> None:
        now = self.now() if wait else time.perf_counter()
        before = self._stages[-1]
        if before is not None:
            seconds = now - self._since
            self._lap[before] = self._lap.get(before, 0.0) + seconds
            self.totals[before] = self.totals.get(before, 0.0) + seconds
        self._since = now
        if (before is None) != (stage is None):  # parts find the clock that runs
            if before is None:
                self._outer = _running.get()
            _running.set(self._outer if stage is None else self)


_running: ContextVar[Clock | None] = ContextVar("running", default=None)


class _Stage:
    __slots__ = ("_clock", "_stage")

    def __init__(self, clock: Clock, stage: str | None) -> None:
        self._clock, self._stage = clock, stage

    def __enter__(self) -> None:
        self._clock.enter(self._stage)

    def __exit__(self, *_: object) -> None:
        self._clock.leave(wait=True)


class Part(ContextDecorator):
    """A part of whatever stage it is run in; outside of decoding it is nothing."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        if (clock := _running.get()) is not None:
            clock.enter_part(self._name)

    def __exit__(self, *_: object) -> None:
        if (clock := _running.get()) is not None:
            clock.leave(wait=False)


def by_verb(seconds: Mapping[str, float]) -> dict[str, float]:
    """Seconds by stage with the parts of every verb back in it."""
    verbs: dict[str, float] = {}
    for stage, value in seconds.items():
        verb = stage.partition("/")[0]
        verbs[verb] = verbs.get(verb, 0.0) + value
    return verbs


def decode_seconds(seconds: Mapping[str, float]) -> float:
    """Of seconds by stage: all but the prefill's."""
    return sum(value for verb, value in by_verb(seconds).items() if verb != "prefill")
