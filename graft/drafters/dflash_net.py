"""The DFlash network (arXiv 2602.06036), with the published state-dict names: 11 tensors a layer
and 3 beside.

    context features  F = hidden_norm(fc(taps))    made once, shared by all layers
    in every layer    Q = x Wq;  K = [F Wk ; x Wk];  V = [F Wv ; x Wv]

F is read as keys and values only, through the same Wk and Wv, and skips input_layernorm.

x is the block [root, mask, ..., mask], embedded by the target. Slot k predicts position root + k.
Attention is not causal inside the block (sliding layers are), positions are absolute. There is no
embedding and no head: both are the target's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Qwen3Config
from transformers.activations import ACT2FN
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from graft.drafters.dflash_config import DFlashConfig

# (layer, queries [batch, heads, m, d], keys and values [batch, kv_heads, m, d] of the blocks)
# -> [batch, heads, m, d]; it adds the context's keys and values and decides what sees what
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class DFlashNet(nn.Module):
    """fc, hidden_norm, layers, norm: the same for many blocks in training and one in decoding."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.config = config
        self.draft_tokens: torch.Tensor | None = None  # [n] what it may propose; None: everything
        self.fc = nn.Linear(
            len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False
        )
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rope = rotary_embedding(config)

    def context(
        self, taps: torch.Tensor, positions: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys, values [batch, kv_heads, n, head_dim] by layer, of taps [batch, n, n_taps * H].

        The context's positions [1, n] are the same in every sequence.
        """
        features = self.hidden_norm(self.fc(taps))
        rope = self.rope(features, positions)
        return [cast(_Layer, layer).self_attn.keys_values(features, rope) for layer in self.layers]

    def forward(
        self, blocks: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """Final hidden states [batch, m, H] of embedded blocks [batch, m, H] at [batch, m]."""
        rope = self.rope(blocks, positions)
        for index, layer in enumerate(self.layers):
            blocks = layer(blocks, rope, lambda q, k, v, i=index: attend(i, q, k, v))
        return self.norm(blocks)

    def decoding_mask(self, layer: int, context: int) -> torch.Tensor | None:
        """Additive mask [b, context + b] of the block behind `context` features, or None."""
        window, causal = self.config.window(layer), self.config.causal(layer)
        length = context + self.config.block_size
        if not causal and (window is None or length <= window):
            return None
        weight = self.fc.weight
        keys = torch.arange(length, device=weight.device)
        ahead = keys - keys[context:, None]  # how far a key lies ahead of a query
        hidden = ahead > 0 if causal else torch.zeros_like(ahead, dtype=torch.bool)
        if window is not None:
            hidden = hidden | (ahead.abs() >= window)
        mask = torch.zeros(ahead.shape, dtype=weight.dtype, device=weight.device)
        return mask.masked_fill_(hidden, torch.finfo(weight.dtype).min)


class RMSNorm(nn.RMSNorm):
    """torch's, with the gain in the input's dtype: under autocast its fused kernel needs that."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class _Layer(nn.Module):
    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.self_attn = _Attention(config)
        self.mlp = _MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x, rope, attend):
        x = x + self.self_attn(self.input_layernorm(x), rope, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class _MLP(nn.Module):
    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act = ACT2FN[config.hidden_act]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class _Attention(nn.Module):
    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        H, d, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.head_dim = d
        self.q_proj = nn.Linear(H, config.num_heads * d, bias=bias)
        self.k_proj = nn.Linear(H, config.num_kv_heads * d, bias=bias)
        self.v_proj = nn.Linear(H, config.num_kv_heads * d, bias=bias)
        self.o_proj = nn.Linear(config.num_heads * d, H, bias=bias)
        self.q_norm = RMSNorm(d, config.rms_norm_eps)
        self.k_norm = RMSNorm(d, config.rms_norm_eps)

    def keys_values(self, x, rope):
        keys = _rotate(self.k_norm(self._split(self.k_proj(x))).transpose(1, 2), rope)
        return keys, self._split(self.v_proj(x)).transpose(1, 2)

    def forward(self, x, rope, attend):
        queries = _rotate(self.q_norm(self._split(self.q_proj(x))).transpose(1, 2), rope)
        attended = attend(queries, *self.keys_values(x, rope))
        return self.o_proj(attended.transpose(1, 2).flatten(2))

    def _split(self, x):
        return x.unflatten(-1, (-1, self.head_dim))


def _rotate(x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Apply RoPE to [batch, heads, n, head_dim] (halves rotated, as in Llama)."""
    cos, sin = (part[:, None] for part in rope)
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin


def rotary_embedding(config: DFlashConfig) -> nn.Module:
    """transformers' own table of angles: (x, positions [1, n]) -> cos, sin [1, n, head_dim]."""
    old_spelling: dict[str, Any] = {  # which both major versions of transformers read
        "rope_theta": config.rope_theta,
        "rope_scaling": dict(config.rope_scaling) if config.rope_scaling else None,
    }
    return Qwen3RotaryEmbedding(
        Qwen3Config(
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            **old_spelling,
        )
    )
