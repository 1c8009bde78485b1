"""A decoder's short passes in one call each (`native`), where its shape and machine allow.

What a row's result is depends on its own text alone, bit by bit: in bf16 too a verify pass then
says what plain decoding says. Queries are scaled and summed in fp32, and so is the residual stream,
so results are a little closer to fp32's than those of `decoder.Decoder` in bf16.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from graft.core.linear import FusedLinear
from graft.native import calls
from graft.targets.decoder import Block, Decoder, SwiGLU

log = logging.getLogger(__name__)


def network_of(decoder: Decoder, config: Any) -> calls.Network | None:
    """The decoder as the kernels run it, or None, and a line that says why."""
    if decoder.head.native is None:  # no compiler (which has said so), another device or dtype
        return None
    if reason := _refusal(decoder, config):
        log.warning("passes run through torch, which is slower: %s", reason)
        return None

    def rope(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = decoder.rope(torch.empty(1, 1, 1), positions[None])
        half = decoder.head_dim // 2
        return cos[0, :, :half], sin[0, :, :half]

    return calls.Network(
        [_layer(block) for block in decoder.blocks],
        heads=decoder.heads,
        kv_heads=decoder.kv_heads,
        head_dim=decoder.head_dim,
        eps=decoder.norm.eps,
        embedding=decoder.embedding.weight.detach(),
        final_norm=decoder.norm.weight,
        head=packed(decoder.head),
        rope=rope,
    )


def _refusal(decoder: Decoder, config: Any) -> str | None:
    """What the kernels do not do."""
    if not all(isinstance(block.feed_forward, SwiGLU) for block in decoder.blocks):
        return "the kernels know no mixture of experts"
    if config.hidden_act != "silu" or getattr(config, "mlp_bias", False):
        return "the kernels know SwiGLU without biases only"
    sizes = (config.hidden_size, config.intermediate_size, decoder.head_dim)
    if any(size % calls.BLOCK for size in sizes):
        return f"a width of {sizes} is no multiple of {calls.BLOCK}"
    return None


def _layer(block: Block) -> calls.Layer:
    norm, feed_forward = block.qk_norm, block.feed_forward
    assert isinstance(feed_forward, SwiGLU)
    return calls.Layer(
        attention_norm=block.attention_norm.weight,
        q_norm=None if norm is None else norm.queries,
        k_norm=None if norm is None else norm.keys,
        feed_forward_norm=block.feed_forward_norm.weight,
        qkv=packed(block.qkv),
        output=packed(block.output),
        gate_up=packed(feed_forward.gate_up),
        down=packed(feed_forward.down),
    )


def packed(linear: FusedLinear) -> calls.Packed:
    """Its weight in the kernels' layout."""
    assert linear.native is not None
    return linear.native
