"""The edge scorer in one call (`native`), for a CPU: after a pass has gone through all weights of a
model nothing is left in the processor's caches, and forty small calls of torch cost four times what
they do in a benchmark. `net.Scorer` is the reference.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from graft.native.build import library
from graft.native.calls import BLOCK
from graft.native.scoring import BilinearScorer
from graft.scorer.net import Scorer
from graft.scorer.terms import Bilinear


def compiled(
    net: Scorer, tables: Mapping[str, torch.Tensor], candidates: int
) -> BilinearScorer | None:
    """The scorer as the kernels run it; None where they know no such scorer, or are not there."""
    term = net.term
    if not isinstance(term, Bilinear) or net.mode != "normalised" or library() is None:
        return None
    if net.shrink.device.type != "cpu" or any(n % BLOCK for n in term.gate.weight.shape):
        return None
    return BilinearScorer(
        gate=term.gate.weight,
        bias=term.gate.bias,
        state=term.state.weight,
        depth=term.depth.weight,
        none=term.none,
        scales=(net.log_temperature.exp(), net.log_rest.exp(), net.none),
        tables=tables,
        candidates=candidates,
        shrink=float(net.shrink),
    )
