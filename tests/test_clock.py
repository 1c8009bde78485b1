"""Where decoding time goes: nothing is hidden, and every part pays for its own."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
from conftest import PROMPT

from graft.budgets.fixed import Fixed
from graft.core.clock import PYTHON, Clock, Part, by_verb, decode_seconds
from graft.core.types import Request
from graft.decode import autoregressive, loop
from graft.drafters.noisy import Noisy
from graft.eval.metrics import PARTS, parts_of
from graft.targets import tiny
from graft.trees.ddtree import DDTree

NAP = 0.02
CPU = torch.device("cpu")


class Slow:
    """An object one of whose methods sleeps before it does what it does."""

    def __init__(self, inner, method: str) -> None:
        self._inner, self._method = inner, method

    def __getattr__(self, name: str):
        found = getattr(self._inner, name)
        if name != self._method:
            return found

        def sleeping(*arguments):
            time.sleep(NAP)
            return found(*arguments)

        return sleeping


@pytest.fixture
def parts() -> dict:
    """A target and what drafts for it, once warm."""
    target = tiny.load(device="cpu")
    found = {"target": target, "drafter": Noisy(target), "builder": DDTree(), "budget": Fixed(8)}
    loop.generate(Request(PROMPT, 20), **found)
    return found


def timed(rounds, think: float = 0.0):
    """The generation, and the wall time inside the generator after the first token."""
    next(rounds)
    wall = 0.0
    while True:
        time.sleep(think)  # the caller's
        start = time.perf_counter()
        try:
            next(rounds)
        except StopIteration as end:
            return end.value, wall + time.perf_counter() - start
        wall += time.perf_counter() - start


def test_the_stages_sum_to_the_wall_time_of_decoding(parts):
    rounds, request = [], Request(PROMPT, 80)
    slow = parts | {"target": Slow(parts["target"], "verify")}
    found, wall = timed(loop.stream(request, **slow, on_round=rounds.append), think=2e-3)
    assert found.decode_seconds == pytest.approx(wall, rel=0.01)
    laps = [sum(one.seconds.values()) for one in rounds]
    assert sum(laps) == pytest.approx(found.decode_seconds, rel=0.01)
    assert sum(parts_of(found.seconds).values()) == pytest.approx(found.decode_seconds)
    found, wall = timed(autoregressive.stream(request, target=slow["target"]), think=2e-3)
    assert found.decode_seconds == pytest.approx(wall, rel=0.01)


@pytest.mark.parametrize(
    ("part", "method", "stage"),
    [
        ("target", "verify", "target's pass"),
        ("drafter", "propose", "drafter's pass"),
        ("builder", "build", "building"),
        ("budget", "trim", "budget"),
        ("target", "commit", "cache"),
    ],
)
def test_time_is_charged_to_the_part_that_took_it(parts, part, method, stage):
    slow = parts | {part: Slow(parts[part], method)}
    found = loop.generate(Request(PROMPT, 24), **slow)
    nap = NAP * len(found.committed)
    took = parts_of(found.seconds)
    assert took[stage] > nap
    assert sum(took.values()) - took[stage] < nap, "nobody else slept"


def test_time_between_verbs_and_of_callbacks(parts, monkeypatch):
    monkeypatch.setattr(loop, "RoundState", Slow(loop, "RoundState").RoundState)
    seen = []

    def on_round(done) -> None:
        seen.append(done)
        time.sleep(NAP)

    found = loop.generate(Request(PROMPT, 24), **parts, on_round=on_round)
    between = found.seconds[PYTHON]
    nap = NAP * len(seen)
    assert nap < between < 1.5 * nap, "between verbs is a part, the caller's time is none"
    assert found.decode_seconds < 2 * nap


def test_sampling_is_told_from_the_walk(parts):
    hot = loop.generate(Request(PROMPT, 24, temperature=1.0), **parts)
    assert hot.seconds["accept/sample"] > 0
    assert parts_of(hot.seconds)["sampling"] == hot.seconds["accept/sample"]
    assert by_verb(hot.seconds)["accept"] == hot.seconds["accept"] + hot.seconds["accept/sample"]


def test_masks_are_told_from_the_pass():
    target = tiny.load(device="cpu", passes="eager")
    parts = {"drafter": Noisy(target), "builder": DDTree(), "budget": Fixed(8)}
    found = loop.generate(Request(PROMPT, 24), target=target, **parts)
    assert 0 < found.seconds["verify/masks"] < found.seconds["verify"]


def test_a_part_belongs_to_the_verb_that_runs_it():
    clock, part = Clock(CPU), Part("score")
    with part:
        pass  # no clock runs: nothing
    with clock(PYTHON):
        with clock("build"), part, part:
            time.sleep(NAP)
        with clock("allocate"), part:
            pass
        with clock.paused(), part:
            time.sleep(NAP)
    assert set(clock.totals) == {PYTHON, "build", "build/score", "allocate", "allocate/score"}
    assert clock.totals["build/score"] >= NAP
    assert decode_seconds(clock.totals) < 2 * NAP
    assert clock.lap() == clock.totals
    assert clock.lap() == {}


def test_clocks_of_two_streams_do_not_mix(parts):
    """Streams take turns; one is dropped in the middle of a round of the other's."""
    one, two = Clock(CPU), Clock(CPU)

    def stream(clock: Clock) -> Iterator[None]:
        with clock(PYTHON):
            while True:
                with clock("verify"), Part("masks"):
                    pass
                with clock.paused():
                    yield

    first, second = stream(one), stream(two)
    next(first), next(second), next(first)
    with two("build"):
        first.close()
        with Part("score"):
            time.sleep(NAP)
    assert two.totals["build/score"] >= NAP
    assert "build/score" not in one.totals


def test_an_error_leaves_no_clock_running(parts):
    broken = parts | {"builder": None}
    with pytest.raises(AttributeError):
        loop.generate(Request(PROMPT, 24), **broken)
    outside = Clock(CPU)
    with outside(PYTHON), Part("score"):
        pass
    assert set(outside.totals) == {PYTHON, "python/score"}


def test_every_stage_of_decoding_has_a_part(parts):
    found = loop.generate(Request(PROMPT, 24, temperature=1.0), **parts)
    assert parts_of(found.seconds).keys() == PARTS.keys()


def test_the_clock_costs_little():
    """A round has some thirty switches: tens of microseconds, against rounds of milliseconds."""
    clock, part = Clock(CPU), Part("score")
    start = time.perf_counter()
    with clock(PYTHON):
        for _ in range(1000):
            with clock("build"), part:
                pass
    assert time.perf_counter() - start < 0.1  # 4 microseconds a stage where it is quiet: 25 are let
