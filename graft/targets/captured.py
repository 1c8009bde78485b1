"""A decoder's short passes as static-shape programs over a few sizes (`core/graphs.py`): captured
CUDA graphs on a GPU. Cache rows, mask, RoPE, blocks, final norm, head and argmax are all inside.

A pass of n rows runs as one of the next of `ROWS`. The rows that pad it lie behind the others in
the cache, as scratch; no node sees them. Attention runs over a power of two of cache rows and masks
what is not there. `decoder.Decoder` with a cache is the reference.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from graft.core.graphs import Graphs, Inputs, context_bucket
from graft.core.kv_cache import KVCache
from graft.core.types import DraftTree, Step
from graft.targets.decoder import Decoder

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
WORD = 32  # bits


class CapturedPasses:
    """The passes of one decoder behind one cache."""

    def __init__(self, decoder: Decoder, cache: KVCache, *, compile: bool = False) -> None:
        self._decoder, self._cache = decoder, cache
        self._device = cache.buffer.device
        self._graphs = Graphs(self._device, compile=compile)
        self._inputs: dict[int, Inputs] = {}

    def take(self, rows: int) -> bool:
        """Whether a pass of so many rows goes this way; where capture has failed, none does."""
        return rows <= ROWS[-1] and not self._graphs.refused

    def verify(self, tree: DraftTree) -> Step:
        """Logits [N, V] and taps [N, n_taps * H] of the nodes, as the eager pass gives them."""
        n, cache = len(tree), self._cache
        rows = next(size for size in ROWS if size >= n)
        context = context_bucket(cache.length + rows)
        cache.reserve(context - cache.length)
        self._graphs.over(cache.buffer)
        if rows not in self._inputs:
            self._inputs[rows] = Inputs(1 + rows * (2 + _words(rows)), self._device)
        inputs = self._inputs[rows]
        _pack(tree, cache.length, rows, into=inputs.words)
        inputs.send()
        key = rows, context, tuple(self._decoder.tapped)
        logits, taps, best = self._graphs.run(
            key, partial(self._program, rows, context, inputs.tensor)
        )
        # Cloned: the loop holds them while the drafter and, for its reader, later passes run.
        return Step(logits[:n].clone(), taps[:n].clone(), np.array(best[:n].cpu()))

    def _program(
        self, rows: int, context: int, words: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        length, tokens, depths, bits = words.split((1, rows, rows, rows * _words(rows)))
        places = length + torch.arange(rows, device=self._device)
        mask = self._mask(length, bits.view(rows, -1), context)
        attend = self._decoder.placed(self._cache.buffer, places.long(), mask)
        hidden, taps = self._decoder.run(tokens.long(), (depths + length).long(), attend)
        logits = self._decoder.logits(hidden)
        return logits, taps, logits.argmax(-1)

    def _mask(self, length: torch.Tensor, bits: torch.Tensor, context: int) -> torch.Tensor:
        """Additive mask [rows, context] from the tree's words [rows, rows / 32]."""
        rows, dtype = len(bits), self._cache.buffer.dtype
        shifts = torch.arange(WORD, device=self._device, dtype=torch.int32)
        tree = ((bits[..., None] >> shifts) & 1).view(rows, -1)[:, :rows].bool()
        node = torch.arange(context, device=self._device) - length  # of each cache row; < 0: text
        among = (node >= 0) & (node < rows)
        visible = (node < 0) | (among & tree.index_select(1, node.clamp(0, rows - 1).long()))
        mask = torch.zeros(rows, context, dtype=dtype, device=self._device)
        return mask.masked_fill(~visible, torch.finfo(dtype).min)


def _words(rows: int) -> int:
    """Words that one row's view of the tree takes."""
    return -(-rows // WORD)


def _pack(tree: DraftTree, length: int, rows: int, *, into: np.ndarray) -> None:
    """Length, tokens, depths and visibility as int32 words; the rows of padding are zeros."""
    n = len(tree)
    into[:] = 0
    into[0] = length
    into[1 : 1 + n] = tree.tokens
    into[1 + rows : 1 + rows + n] = tree.depths
    packed = np.packbits(tree.visible, axis=1, bitorder="little")  # [n, bytes]
    bits = into[1 + 2 * rows :].view(np.uint8).reshape(rows, -1)
    bits[:n, : packed.shape[1]] = packed
