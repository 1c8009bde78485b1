"""Plain decoding, one token a pass: the baseline of every speedup, and the oracle of losslessness.

It shares the target's pass, cache and sampler with `loop.generate`, and nothing else: no drafter,
no tree but the root, no walk. A baseline must not pay our overhead. As an oracle it is itself
checked against transformers' `generate` (tests/test_lossless.py, tests/test_default_target.py).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from graft.core.clock import PYTHON, Clock
from graft.core.interfaces import Target
from graft.core.tree import chain_tree
from graft.core.types import Generation, Request
from graft.decode.response import Response, Rounds, check_fits, drain
from graft.decode.sampling import Sampler


def generate(
    request: Request, *, target: Target, on_tokens: Callable[[list[int]], None] | None = None
) -> Generation:
    """Decode one response token by token. Every pass is a round that commits one token: MAT = 1."""
    return drain(stream(request, target=target), on_tokens)


def stream(request: Request, *, target: Target) -> Rounds:
    """The same, one token at a time. Raises InputError at the first."""
    check_fits(request, target)
    clock = Clock(target.device)
    sampler = Sampler(request, target.device)
    response = Response(request)
    nothing = np.empty(0, np.int64), np.empty(0, np.float32)
    with clock("prefill"):
        token = sampler.draws(target.prefill(request.prompt))(0)
    yield response.extend([token])
    with clock(PYTHON):
        while not response.finished:
            with clock("verify"):
                step = target.verify(chain_tree(token, *nothing))
            with clock("commit"):
                target.commit([0])
            with clock("accept"):
                token = sampler.draws(step)(0)
            tokens = response.extend([token])
            with clock.paused():
                yield tokens
    passes = len(response.tokens) - 1
    return Generation(
        tokens=response.tokens,
        stopped=response.stopped,
        committed=[1] * passes,
        nodes=[0] * passes,
        seconds=clock.totals,
    )
