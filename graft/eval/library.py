"""The target library's own `generate`, timed as our loops are: what a user had before.

Its weights are a second copy of the target's, loaded at the first request.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer

from graft.core.clock import Clock
from graft.core.errors import InputError
from graft.core.types import Generation, Request
from graft.decode.response import check_fits
from graft.targets.hf import HFTarget


def generate(
    request: Request, *, target: HFTarget, on_tokens: Callable[[list[int]], None] | None = None
) -> Generation:
    """Decode one response by transformers. At temperature > 0 its draws are its own.

    A pass is a round that commits one token. Raises InputError for a target without a checkpoint.
    """
    check_fits(request, target)
    model = _model(target.name, target.dtype, str(target.device))
    ids = torch.tensor([request.prompt], device=target.device)
    ticks = Ticks(Clock(target.device), on_tokens)
    warm = request.temperature > 0
    sampling: dict[str, Any] = {}
    if warm:  # a top_k of 0 is off, here as there
        sampling = {k: getattr(request, k) for k in ("temperature", "top_p", "top_k")}
    torch.manual_seed(request.seed)
    tokens = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=request.max_new_tokens,
        do_sample=warm,
        eos_token_id=sorted(request.stop_tokens) or None,
        pad_token_id=min(request.stop_tokens, default=0),
        streamer=ticks,
        **sampling,
    )[0, len(request.prompt) :].tolist()
    passes = len(tokens) - 1
    return Generation(
        tokens=tokens,
        stopped=tokens[-1] in request.stop_tokens,
        committed=[1] * passes,
        nodes=[0] * passes,
        seconds={"prefill": ticks.first - ticks.start, "verify": ticks.last - ticks.first},
    )


class Ticks(BaseStreamer):
    """When the prompt was taken, when the first token came, and when the last; hands them on."""

    def __init__(self, clock: Clock, on_tokens: Callable[[list[int]], None] | None) -> None:
        self._clock, self._calls, self._on_tokens = clock, 0, on_tokens
        self.start = self.first = self.last = clock.now()

    def put(self, value: torch.Tensor) -> None:
        self._calls += 1
        self.last = self._clock.now()
        if self._calls == 2:  # the first call brings the prompt
            self.first = self.last
        if self._calls > 1 and self._on_tokens is not None:
            self._on_tokens(value.tolist())

    def end(self) -> None: ...


@lru_cache(maxsize=1)
def _model(name: str, dtype: torch.dtype, device: str) -> Any:
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, use_safetensors=True)
    except (OSError, ValueError) as error:
        raise InputError(
            f"transformers cannot load {name} for its own generate; leave it out: ~methods.library"
        ) from error
    return model.eval().to(device)
