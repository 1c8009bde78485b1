"""kernels.cpp from Python: its structs, packed weights, and a pass of a target or a drafter as one
call. Everything a struct points to is kept alive by the object that made it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import byref, c_int, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from graft.native import structs
from graft.native.build import library

ROWS = 128  # of one call; more go in several: what a layer leaves behind should stay in the cache
BLOCK = 16  # outputs that are computed together; all widths but the head's are multiples of it

# The table of RoPE's angles: positions [n] -> cos, sin [n, head_dim / 2] in fp32.
Rope = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class Packed:
    """The weight [out, in] of a linear layer in the kernels' layout, with its bias."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        weight = weight.detach().contiguous()
        outputs, inputs = weight.shape
        blocks = -(-outputs // BLOCK)
        self.dtype = weight.dtype
        self._bias = None if bias is None else bias.detach().float().contiguous()
        self._weight = torch.empty(blocks * BLOCK * inputs + 2048, dtype=weight.dtype)
        kernels().graft_pack(
            c_int(weight.dtype == torch.bfloat16),
            c_void_p(weight.data_ptr()),
            *(c_int64(outputs), c_int64(inputs)),
            c_void_p(self._weight.data_ptr()),
        )
        self.struct = structs.Linear(
            self._weight.data_ptr(), address_or_none(self._bias), outputs, inputs
        )

    @staticmethod
    def can_hold(weight: torch.Tensor) -> bool:
        """Whether the kernels are there and take this weight [out, in]."""
        return (
            weight.device.type == "cpu"
            and weight.dtype in (torch.float32, torch.bfloat16)
            and weight.shape[1] % BLOCK == 0
            and library() is not None
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]"""
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        y = flat.new_empty(len(flat), self.struct.outputs)
        kernels().graft_linear(
            c_int(self.dtype == torch.bfloat16),
            byref(self.struct),
            c_void_p(flat.data_ptr()),
            c_int64(len(flat)),
            c_void_p(y.data_ptr()),
            c_int(torch.get_num_threads()),
        )
        return y.view(*x.shape[:-1], -1)


@dataclass(frozen=True)
class Layer:
    """The weights of one block; norms over single heads only where the model has them."""

    attention_norm: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    feed_forward_norm: torch.Tensor
    qkv: Packed
    output: Packed
    gate_up: Packed
    down: Packed


@dataclass(frozen=True, eq=False)
class Rows:
    """New rows of one sequence: they lie behind the `length` committed ones of its cache."""

    cache: torch.Tensor  # [layers, 2, 1, kv_heads, capacity, head_dim]
    length: int
    visible: np.ndarray  # [n, n] bool: which of them each sees, itself included


class Network:
    """Blocks, embedding, final norm and head, and the two passes over them."""

    def __init__(
        self,
        layers: Sequence[Layer],
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        eps: float,
        embedding: torch.Tensor,
        final_norm: torch.Tensor,
        head: Packed,
        rope: Rope,
    ) -> None:
        self._rope, self.dtype, self.hidden_size = rope, embedding.dtype, embedding.shape[1]
        self._kept: list[Any] = [layers, embedding, head]
        records = (structs.Layer * len(layers))()
        for record, layer in zip(records, layers, strict=True):
            for name in ("attention_norm", "q_norm", "k_norm", "feed_forward_norm"):
                setattr(record, name, self._norm(getattr(layer, name)))
            for name in ("qkv", "output", "gate_up", "down"):
                setattr(record, name, getattr(layer, name).struct)
        self._model = structs.Model(
            self.dtype == torch.bfloat16,
            len(layers),
            self.hidden_size,
            *(heads, kv_heads, head_dim),
            layers[0].down.struct.inputs,
            eps,
            records,
            embedding.data_ptr(),
            self._norm(final_norm),
            head.struct,
        )
        self.outputs = head.struct.outputs
        self._angles = torch.empty(0), torch.empty(0)

    def _norm(self, weight: torch.Tensor | None) -> int | None:
        """Keep it in fp32; gives its address."""
        if weight is None:
            return None
        self._kept.append(weight.detach().float().contiguous())
        return self._kept[-1].data_ptr()

    def _reach(self, position: int) -> None:
        """Have the angles of positions up to this one."""
        if position >= len(self._angles[0]):
            cos, sin = self._rope(torch.arange(2 * position + 256))
            self._angles = cos.float().contiguous(), sin.float().contiguous()
            self._model.cos, self._model.sin = (part.data_ptr() for part in self._angles)

    def decode(
        self,
        tokens: np.ndarray,
        positions: np.ndarray,
        sequences: Sequence[Rows],
        *,
        tapped: Sequence[int],
        first: int = 0,
    ) -> tuple[torch.Tensor, np.ndarray, torch.Tensor]:
        """One pass over rows [n], those of each sequence together.

        Returns logits [n - first, V] of the rows from `first` on, the likeliest token of each, and
        the outputs of the tapped blocks, [n, n_taps * H].
        """
        n = len(tokens)
        logits = torch.empty(n - first, self.outputs, dtype=self.dtype)
        taps = torch.empty(n, len(tapped) * self.hidden_size, dtype=self.dtype)
        best, ids = np.empty(n - first, np.int64), np.array(tapped, np.int64)
        rows, alive = self._rows(tokens, positions, sequences)
        wanted = structs.Wanted(
            *(first, len(tapped), ids.ctypes.data),
            *(logits.data_ptr(), taps.data_ptr(), best.ctypes.data),
        )
        threads = c_int(torch.get_num_threads())
        kernels().graft_decode(byref(self._model), byref(rows), byref(wanted), threads)
        del alive
        return logits, best, taps

    def draft(
        self,
        tokens: np.ndarray,
        positions: np.ndarray,
        sequence: Rows,
        *,
        taps: torch.Tensor,
        fc: Packed,
        hidden_norm: torch.Tensor,
        candidates: int,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, torch.Tensor]:
        """Taps [n, n_taps * H] into the cache, the last n of its `length` rows, and a draft behind.

        Returns candidates and log-probabilities [D, K], cosines [D - 1] and states [D, H] for a
        block of tokens [D + 1], the root first; all empty where the block is.
        """
        D = max(0, len(tokens) - 1)
        found = np.empty((D, candidates), np.int64)
        log_probs = np.empty((D, candidates), np.float32)
        cosines = np.empty(max(0, D - 1), np.float32)
        hidden = torch.empty(D, self.hidden_size, dtype=self.dtype)
        taps, gain = taps.contiguous(), hidden_norm
        self._reach(sequence.length)
        rows, alive = self._rows(tokens, positions, [sequence])
        drafting = structs.Drafting(
            *(fc.struct, gain.data_ptr(), taps.data_ptr(), len(taps), candidates),
            *(hidden.data_ptr(), found.ctypes.data, log_probs.ctypes.data, cosines.ctypes.data),
        )
        threads = c_int(torch.get_num_threads())
        kernels().graft_draft(byref(self._model), byref(rows), byref(drafting), threads)
        del alive
        return found, log_probs, cosines, hidden

    def _rows(
        self, tokens: np.ndarray, positions: np.ndarray, sequences: Sequence[Rows]
    ) -> tuple[structs.Rows, Any]:
        """The struct, and what must live as long."""
        tokens, positions = np.ascontiguousarray(tokens), np.ascontiguousarray(positions)
        assert tokens.dtype == positions.dtype == np.int64
        if len(positions):
            self._reach(int(positions.max()))
        visible = [np.ascontiguousarray(rows.visible) for rows in sequences]
        slots = (structs.Slot * len(sequences))(
            *(
                structs.Slot(
                    rows.cache.data_ptr(),
                    rows.cache.shape[-2],
                    rows.length,
                    len(own),
                    address(own),
                )
                for rows, own in zip(sequences, visible, strict=True)
            )
        )
        struct = structs.Rows(len(tokens), len(slots), address(tokens), address(positions), slots)
        return struct, (tokens, positions, visible)


def move_rows(cache: torch.Tensor, to: int, rows: np.ndarray) -> None:
    """Move these (ascending) rows of a cache [..., capacity, head_dim] to places from `to` on."""
    capacity, width = cache.shape[-2:]
    kernels().graft_move_rows(
        c_void_p(cache.data_ptr()),
        c_int64(cache[..., 0, 0].numel()),
        *(c_int64(capacity), c_int64(width * cache.element_size()), c_int64(to)),
        *(c_void_p(address(rows)), c_int64(len(rows))),
    )


def address(array: np.ndarray) -> int:
    return array.ctypes.data


def address_or_none(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def kernels() -> ctypes.CDLL:
    found = library()
    assert found is not None, "ask `Packed.can_hold` first"
    return found
