"""DFlash's pass in one call (`native`): context features, block, head and candidates. For a CPU and
for layers that see everything; `dflash_net.DFlashNet` is the reference.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch
from torch import nn

from graft.core.interfaces import Backbone
from graft.core.kv_cache import KVCache
from graft.core.linear import FusedLinear
from graft.core.types import Draft
from graft.drafters.dflash_net import DFlashNet
from graft.native import calls
from graft.native.calls import Packed

log = logging.getLogger(__name__)
NOTHING = np.empty(0, np.int64)


class CompiledDFlash:
    """The network as the kernels run it, with the head it drafts with."""

    def __init__(self, net: DFlashNet, target: Backbone, head: Packed) -> None:
        config = net.config

        def rope(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            cos, sin = net.rope(torch.empty(1, 1, 1), positions[None])
            half = config.head_dim // 2
            return cos[0, :, :half], sin[0, :, :half]

        self._network = calls.Network(
            [_layer(layer) for layer in net.layers],
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            eps=config.rms_norm_eps,
            embedding=target.embedding,
            final_norm=net.norm.weight,
            head=head,
            rope=rope,
        )
        self._fc, self._hidden_norm = _packed(net.fc), net.hidden_norm.weight.detach().float()
        self._block = np.full(config.block_size, config.mask_token_id)
        self._visible = np.ones((config.block_size,) * 2, bool)
        self._vocabulary = None if net.draft_tokens is None else net.draft_tokens.numpy()

    def draft(self, root: int, taps: torch.Tensor, cache: KVCache, candidates: int) -> Draft:
        """Taps [n, n_taps * H] of new tokens into the cache, and a draft of what follows `root`."""
        size = len(self._block)
        cache.reserve(len(taps) + size)
        *firsts, last = taps.split(calls.ROWS)
        for part in firsts:
            self._run(NOTHING, part, cache, self._visible[:0, :0], candidates)
        self._block[0] = root
        tokens, log_probs, cosines, hidden = self._run(
            self._block, last, cache, self._visible, candidates
        )
        if self._vocabulary is not None:
            tokens = self._vocabulary[tokens]
        return Draft(root, tokens, log_probs, cosines, hidden)

    def _run(
        self,
        block: np.ndarray,
        taps: torch.Tensor,
        cache: KVCache,
        visible: np.ndarray,
        candidates: int,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, torch.Tensor]:
        cache.commit(range(len(taps)))
        return self._network.draft(
            block,
            np.arange(cache.length, cache.length + len(block)),
            calls.Rows(cache.buffer, cache.length, visible),
            taps=taps,
            fc=self._fc,
            hidden_norm=self._hidden_norm,
            candidates=candidates,
        )


def compiled(net: DFlashNet, target: Backbone, head: FusedLinear) -> CompiledDFlash | None:
    """The drafter as the kernels run it; None, with a line that says why, where they cannot."""
    config = net.config
    if head.native is None:  # the target's passes are not compiled either
        return None
    widths = (config.hidden_size, config.intermediate_size, config.head_dim)
    reason = None
    if any(config.causal(i) or config.window(i) is not None for i in range(config.num_layers)):
        reason = "the kernels know no causal or sliding blocks"
    elif config.hidden_act != "silu":
        reason = "the kernels know SwiGLU only"
    elif any(width % calls.BLOCK for width in widths):
        reason = f"a width of {widths} is no multiple of {calls.BLOCK}"
    if reason is None:
        return CompiledDFlash(net, target, head.native)
    log.warning("the drafter's passes run through torch, which is slower: %s", reason)
    return None


def _layer(layer: Any) -> calls.Layer:
    attention, mlp = layer.self_attn, layer.mlp
    return calls.Layer(
        attention_norm=layer.input_layernorm.weight,
        q_norm=attention.q_norm.weight,
        k_norm=attention.k_norm.weight,
        feed_forward_norm=layer.post_attention_layernorm.weight,
        qkv=_packed(attention.q_proj, attention.k_proj, attention.v_proj),
        output=_packed(attention.o_proj),
        gate_up=_packed(mlp.gate_proj, mlp.up_proj),
        down=_packed(mlp.down_proj),
    )


def _packed(*linears: nn.Linear) -> Packed:
    biases: list[torch.Tensor] = [one.bias for one in linears if one.bias is not None]
    weights: list[torch.Tensor] = [one.weight for one in linears]
    return Packed(torch.cat(weights), torch.cat(biases) if biases else None)
