"""The target library's own `generate`, timed as our loops are: what a user had before.

Its weights are a copy of the target's, one a precision, loaded at the first request.
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
from graft.targets.hf import HFTarget, parse_dtype


def generate(
    request: Request,
    *,
    target: HFTarget,
    precision: str | None = None,
    lookup: int | None = None,
    on_tokens: Callable[[list[int]], None] | None = None,
) -> Generation:
    """Decode one response by transformers. At temperature > 0 its draws are its own.

    `precision` other than the target's; `lookup` drafts so many tokens from where the last ones
    stood before (prompt lookup). A pass is a round; what it drafted in one is not told: 0 nodes.
    Raises InputError for a target without a checkpoint.
    """
    check_fits(request, target)
    dtype = target.dtype if precision is None else parse_dtype(precision)
    model = model_of(target.name, dtype, str(target.device))
    ids = torch.tensor([request.prompt], device=target.device)
    ticks = Ticks(Clock(target.device), on_tokens)
    warm = request.temperature > 0
    sampling: dict[str, Any] = {}
    if warm:  # a top_k of 0 is off, here as there
        sampling = {k: getattr(request, k) for k in ("temperature", "top_p", "top_k")}
    if lookup is not None:
        sampling["prompt_lookup_num_tokens"] = lookup
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
    committed = ticks.came[1:]
    # Looking up begins with the prompt's own pass, which may give several tokens: they came without
    # decoding, and the others' pace stands for theirs.
    share = (len(tokens) - 1) / sum(committed) if committed else 0.0
    return Generation(
        tokens=tokens,
        stopped=tokens[-1] in request.stop_tokens,
        committed=committed,
        nodes=[0] * len(committed),
        seconds={
            "prefill": ticks.first - ticks.start,
            "verify": share * (ticks.last - ticks.first),
        },
    )


class Ticks(BaseStreamer):
    """When the prompt was taken, when the first token came, and when the last; hands them on."""

    def __init__(self, clock: Clock, on_tokens: Callable[[list[int]], None] | None) -> None:
        self._clock, self._on_tokens, self._prompted = clock, on_tokens, False
        self.came: list[int] = []  # tokens a pass
        self.start = self.first = self.last = clock.now()

    def put(self, value: torch.Tensor) -> None:
        self.last = self._clock.now()
        if not self._prompted:  # the first call brings the prompt
            self._prompted = True
            return
        if not self.came:
            self.first = self.last
        self.came.append(value.numel())
        if self._on_tokens is not None:
            self._on_tokens(value.flatten().tolist())

    def end(self) -> None: ...


@lru_cache(maxsize=2)
def model_of(name: str, dtype: torch.dtype, device: str) -> Any:
    """A target's checkpoint as transformers runs it. Raises InputError where there is none."""
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, use_safetensors=True)
    except (OSError, ValueError) as error:
        raise InputError(
            f"transformers cannot load {name} for its own generate; leave it out: ~methods.library"
        ) from error
    return model.eval().to(device)
