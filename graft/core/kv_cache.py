"""One preallocated key/value buffer for all layers: written in place, committed in place, grown in
blocks.

The target keeps its context here and writes the rows of a tree behind it; the drafter keeps its
context features. `length` counts the committed rows; rows past it are scratch, so "crop" is simply
not advancing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from graft.native import calls
from graft.native.build import library

GROWTH = 256  # rows; growing copies the buffer, so it must be rare beside the rounds


class KVCache:
    """Keys and values of all layers for one sequence, each a view [1, heads, rows, head_dim]."""

    def __init__(
        self, *, layers: int, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.length = 0
        self._buffer = torch.empty(layers, 2, 1, heads, 0, head_dim, dtype=dtype, device=device)
        self._views: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def buffer(self) -> torch.Tensor:
        """[layers, 2, 1, heads, capacity, head_dim]; growing makes another one."""
        return self._buffer

    @property
    def capacity(self) -> int:
        """Rows allocated."""
        return self._buffer.shape[4]

    def reserve(self, rows: int) -> None:
        """Make room for `rows` scratch rows; growing keeps committed rows only."""
        needed = self.length + rows
        if needed <= self.capacity:
            return
        layers, _, _, heads, _, head_dim = self._buffer.shape
        # Zeros: a captured pass reads rows that it masks, and 0 * NaN would not be masked.
        grown = self._buffer.new_zeros(layers, 2, 1, heads, -(-needed // GROWTH) * GROWTH, head_dim)
        grown[..., : self.length, :] = self._buffer[..., : self.length, :]
        self._buffer = grown
        self._views = [(grown[layer, 0], grown[layer, 1]) for layer in range(layers)]

    def write(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, *, offset: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Put n rows [1, heads, n, head_dim] `offset` rows behind the committed ones.

        Returns keys and values of everything up to and including them, as views.
        """
        start = self.length + offset
        end = start + keys.shape[2]
        all_keys, all_values = self._views[layer]
        all_keys[:, :, start:end] = keys
        all_values[:, :, start:end] = values
        return all_keys[:, :, :end], all_values[:, :, :end]

    def commit(self, rows: Sequence[int]) -> None:
        """Keep these scratch rows (0-based, ascending) as committed, moved together."""
        start = self.length
        moved = [(to, row) for to, row in enumerate(rows) if to != row]
        if moved and self._buffer.device.type == "cpu" and library() is not None:
            calls.move_rows(self._buffer, start, start + np.array(rows, np.int64))
        elif moved:  # rows that already lie where they belong are not touched
            first = start + moved[0][0]
            source = torch.tensor([start + row for _, row in moved], device=self._buffer.device)
            self._buffer[..., first : first + len(moved), :] = self._buffer.index_select(4, source)
        self.length = start + len(rows)

    def rows(self) -> torch.Tensor:
        """The committed rows of all layers: [layers, 2, 1, heads, length, head_dim], a view."""
        return self._buffer[..., : self.length, :]

    def reset(self) -> None:
        """Forget the sequence, keep the memory."""
        self.length = 0
