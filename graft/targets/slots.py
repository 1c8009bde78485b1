"""Many responses at once: one row of keys and values a slot, every slot at a length of its own.

For making data, where throughput counts and latency does not: a step decodes one token in each
occupied slot, so the weights are read once for all of them. Occupied slots are kept together at the
front; `release` moves the last one into the hole.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from graft.core.errors import InputError
from graft.core.types import Step
from graft.targets.hf import HFTarget

GROWTH = 64  # rows
GROUP = 16  # slots whose attention runs together


class Slots:
    """`size` slots over a target's decoder. Satisfies `BatchTarget`."""

    def __init__(self, target: HFTarget, size: int) -> None:
        if size < 1:
            raise InputError(f"slots must be at least 1, not {size}")
        self._target, self._decoder = target, target.decoder
        self.device, self.max_context = target.device, target.max_context
        self.size, self.occupied = size, 0
        self._lengths = torch.zeros(size, dtype=torch.int64, device=target.device)
        layers, kv_heads, d = target.num_layers, self._decoder.kv_heads, self._decoder.head_dim
        shape = (layers, 2, size, kv_heads, 0, d)
        self._buffer = torch.zeros(shape, dtype=target.dtype, device=target.device)

    @torch.inference_mode()
    def admit(self, prompt: Sequence[int]) -> Step:
        """Put a prompt into the next free slot; logits [1, V] of its first answer token."""
        step = self._target.prefill(prompt)
        rows = self._target.cache.rows()  # [layers, 2, 1, kv_heads, T, d]
        self._reserve(len(prompt))
        self._buffer[:, :, self.occupied, :, : len(prompt)] = rows[:, :, 0]
        self._lengths[self.occupied] = len(prompt)
        self.occupied += 1
        return step

    @torch.inference_mode()
    def step(self, tokens: Sequence[int]) -> Step:
        """Append one token to every occupied slot: tokens [m] -> logits [m, V]."""
        m, device = self.occupied, self._target.device
        assert len(tokens) == m, "one token a slot"
        lengths = self._lengths[:m]
        longest = int(lengths.max()) + 1
        self._reserve(longest)
        slots = torch.arange(m, device=device)
        hidden = torch.arange(longest, device=device) > lengths[:, None]  # [m, longest]
        mask = torch.zeros(m, 1, 1, longest, dtype=self._target.dtype, device=device)
        mask.masked_fill_(hidden[:, None, None], torch.finfo(mask.dtype).min)
        # A few slots at a time, so that one long text does not make all the others as long.
        groups = [
            (slice(first, first + GROUP), int(part.max()) + 1)
            for first, part in zip(range(0, m, GROUP), lengths.split(GROUP), strict=True)
        ]

        def attend(
            layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
        ) -> torch.Tensor:
            all_keys, all_values = self._buffer[layer, :, :m]
            all_keys[slots, :, lengths] = keys[0].transpose(0, 1)
            all_values[slots, :, lengths] = values[0].transpose(0, 1)
            _, heads, _, d = queries.shape
            folded = queries[0].transpose(0, 1).reshape(m, all_keys.shape[1], -1, d)
            parts = [
                F.scaled_dot_product_attention(
                    folded[some],
                    all_keys[some, :, :end],
                    all_values[some, :, :end],
                    attn_mask=mask[some, ..., :end],
                )
                for some, end in groups
            ]
            return torch.cat(parts).reshape(m, heads, d).transpose(0, 1)[None]

        ids = torch.tensor(tokens, device=device)
        final, taps = self._decoder.run(ids, lengths, attend)
        self._lengths[:m] += 1
        return Step(self._decoder.logits(final), taps)

    @torch.inference_mode()
    def release(self, slot: int) -> None:
        """Free a slot; the last occupied one takes its number."""
        last = self.occupied - 1
        if slot != last:
            length = int(self._lengths[last])
            self._buffer[:, :, slot, :, :length] = self._buffer[:, :, last, :, :length]
            self._lengths[slot] = length
        self.occupied = last

    def _reserve(self, rows: int) -> None:
        missing = rows - self._buffer.shape[4]
        if missing > 0:
            self._buffer = F.pad(self._buffer, (0, 0, 0, -(-missing // GROWTH) * GROWTH))
