"""Plain decoding of many requests at once: continuous batching, for making data.

As soon as a response ends, the next request takes its slot. Small models fall into loops; where the
text is for training, a response whose tail repeats itself is ended and cut where the first repeat
begins, so that a drafter is not taught to copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from graft.core.interfaces import BatchTarget
from graft.core.types import Request, Step
from graft.decode.response import Response, check_fits
from graft.decode.sampling import Sampler

LONGEST_PERIOD = 40  # tokens
COPIES, SPAN = 4, 24  # a loop is this many copies of a period, over at least so many tokens
CHECK_EVERY = 8  # tokens


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished response of one request."""

    key: Any  # what the caller gave with the request
    tokens: list[int]  # the stop token included
    beyond: list[int]  # what the target would say after it, if that was asked for
    stopped: bool  # ended by a stop token
    looped: bool  # ended because it repeated itself, and cut


def respond(
    requests: Iterable[tuple[Any, Request]],
    target: BatchTarget,
    *,
    cut_loops: bool = False,
    beyond: int = 0,
) -> Iterator[Answer | None]:
    """Answer every request; answers come as they finish, and None after every step.

    `beyond` tokens more are decoded past the end of each, be it a stop token: a round of tree
    decoding looks that far. Raises InputError for a request that outgrows the target's context.
    """
    waiting = iter(requests)
    running: list[_Running] = []
    while True:
        while target.occupied < target.size and (job := next(waiting, None)) is not None:
            key, request = job
            check_fits(request, target, beyond=beyond)
            sampler, response = Sampler(request, target.device), Response(request)
            response.extend([sampler.draws(target.admit(request.prompt))(0)])
            running.append(_Running(key, request, sampler, response, []))
        if not running:
            return
        # Backwards: `release` fills a hole with the last slot, which has then been looked at.
        for slot in reversed(range(len(running))):
            if (answer := running[slot].answer(cut_loops, beyond)) is not None:
                target.release(slot)
                running[slot] = running[-1]
                running.pop()
                yield answer
        if running:
            step = target.step([one.last for one in running])
            for one, token in zip(running, _draw(running, step), strict=True):
                one.extend(token)
            yield None


@dataclass(slots=True)
class _Running:
    key: Any
    request: Request
    sampler: Sampler
    response: Response
    beyond: list[int]

    @property
    def last(self) -> int:
        return (self.beyond or self.response.tokens)[-1]

    def extend(self, token: int) -> None:
        if self.response.finished:
            self.beyond.append(token)
        else:
            self.response.extend([token])

    def answer(self, cut_loops: bool, beyond: int) -> Answer | None:
        """The answer if it has ended."""
        tokens, stopped = self.response.tokens, self.response.stopped
        done = self.response.finished
        if cut_loops and not stopped and (done or len(tokens) % CHECK_EVERY == 0):
            loop = first_repeat(tokens)
            if loop is not None:
                return Answer(self.key, tokens[:loop], [], stopped=False, looped=True)
        if not done or len(self.beyond) < beyond:
            return None
        return Answer(self.key, tokens, self.beyond, stopped=stopped, looped=False)


def _draw(running: Sequence[_Running], step: Step) -> list[int]:
    """The next token of each slot; greedy ones share one pass over the logits."""
    greedy = next((one.sampler for one in running if one.request.temperature == 0), None)
    shared = greedy.draws(step) if greedy else None
    return [
        shared(slot) if shared and one.request.temperature == 0 else one.sampler.draws(step)(slot)
        for slot, one in enumerate(running)
    ]


def first_repeat(tokens: Sequence[int]) -> int | None:
    """Where the second copy of a looping tail begins, None if the tail does not loop."""
    x = np.asarray(tokens)
    for period in range(1, LONGEST_PERIOD + 1):
        span = max(COPIES * period, SPAN)
        if span > len(x):
            return None
        if (x[-span:-period] == x[-span + period :]).all():
            differs = np.flatnonzero(x[:-period] != x[period:])
            return (int(differs[-1]) + 1 if len(differs) else 0) + period
    return None
