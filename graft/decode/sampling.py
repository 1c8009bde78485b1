"""Draw the target's token: argmax at T = 0, else from softmax(logits / T) in fp32 after top-k and
top-p.

One draw per committed token, in text order, from one seeded stream. Plain and tree decoding
therefore consume the stream identically, and the same seed gives the same text in both (up to the
rounding of the logits).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from graft.core.clock import Part
from graft.core.types import Request, Step


class Sampler:
    """The token draw of one response."""

    def __init__(self, request: Request, device: torch.device) -> None:
        self._request = request
        self._generator = torch.Generator(device).manual_seed(request.seed)

    @Part("sample")
    def draws(self, step: Step) -> Callable[[int], int]:
        """Give the function that maps a node of a pass to the target's token after it."""
        logits, best = step.logits, step.best
        if self._request.temperature > 0:
            return lambda node: self._draw(logits[node])
        if best is not None:
            return lambda node: int(best[node])
        # On a CPU only the rows on the path, by numpy: torch's argmax over all of them is slow.
        if logits.device.type == "cpu":
            return lambda node: _likeliest(logits[node])
        return logits.argmax(-1).tolist().__getitem__  # one launch and one copy for all nodes

    @Part("sample")
    def _draw(self, logits: torch.Tensor) -> int:
        probs = probabilities(logits, self._request)
        return int(torch.multinomial(probs, 1, generator=self._generator))


@Part("sample")
def _likeliest(logits: torch.Tensor) -> int:
    return int(logits.float().numpy().argmax())


def probabilities(logits: torch.Tensor, request: Request) -> torch.Tensor:
    """The distribution a token is drawn from at T > 0: logits [V] -> [V] float32.

    The k-th best and the token that completes the mass of top-p are kept, and so is everything tied
    with them: a cut between equal logits would depend on the sort.
    """
    scaled = logits.float() / request.temperature
    if 0 < request.top_k < len(scaled):
        scaled = scaled.masked_fill(scaled < scaled.topk(request.top_k).values[-1], -torch.inf)
    probs = scaled.softmax(-1)
    if request.top_p < 1:
        ranked = probs.sort(descending=True).values
        kept = int((ranked.cumsum(-1) < request.top_p).sum())  # ranks before the mass is reached
        probs = probs.masked_fill(probs < ranked[min(kept, len(ranked) - 1)], 0.0)
        probs = probs / probs.sum()
    return probs
