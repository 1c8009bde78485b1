"""The edge scorer of kernels.cpp: logits of all edges of a draft in one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ctypes import byref

import numpy as np
import torch

from graft.native import structs
from graft.native.calls import Packed, address, address_or_none, kernels


class BilinearScorer:
    """The bilinear scorer (`scorer/terms.py`), normalised: logits of all edges of a draft."""

    def __init__(
        self,
        *,
        gate: torch.Tensor,
        bias: torch.Tensor,
        state: torch.Tensor,
        depth: torch.Tensor,
        none: torch.Tensor,
        scales: Sequence[torch.Tensor],
        tables: Mapping[str, torch.Tensor],
        candidates: int,
        shrink: float,
    ) -> None:
        """`scales`: temperature, rest and offset, [D] each; `tables` [V, width] in half precision
        of parent, child and perhaps grandparent.
        """
        stacked = torch.cat((gate, state)).float()
        self._projection = Packed(stacked, torch.cat((bias, torch.zeros_like(bias))))
        parts = [part.detach().float().contiguous() for part in (depth, none, *scales)]
        halves = {name: table.half().contiguous() for name, table in tables.items()}
        self._kept = parts, halves
        (width, hidden), self._depth, self._candidates = gate.shape, len(depth), candidates
        names = ("parent", "child", "grandparent")
        self._struct = structs.Scorer(
            self._projection.struct,
            *(part.data_ptr() for part in parts),
            *(address_or_none(halves.get(name)) for name in names),
            *(self._depth, candidates, width, hidden),
            shrink,
        )
        self._rows = 1 + candidates * (len(tables) - 1)

    def __call__(
        self, root: int, tokens: np.ndarray, log_probs: np.ndarray, hidden: torch.Tensor
    ) -> np.ndarray:
        """Rows of logits [D, 1 + K + G, K + 1] that add up, of candidates [D, >= K]."""
        hidden = hidden if hidden.dtype == torch.bfloat16 else hidden.float()
        hidden, tokens = hidden.contiguous(), np.ascontiguousarray(tokens)
        log_probs = np.ascontiguousarray(log_probs, np.float32)
        rows = np.empty((self._depth, self._rows, self._candidates + 1), np.float32)
        scored = structs.Scored(
            *(root, hidden.dtype == torch.bfloat16, tokens.shape[1]),
            *(address(tokens), address(log_probs), hidden.data_ptr(), address(rows)),
        )
        kernels().graft_score(byref(self._struct), byref(scored))
        return rows
