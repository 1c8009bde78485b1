"""The target's forward pass: the pre-norm decoder of Llama and its kin, over rows of tokens.

    x += O(attention(rope(norm(Q x)), rope(norm(K x)), V x));   x += feed_forward(norm(x))

transformers loads the weights and stays the reference (tests compare logits in fp32), but a
decoding pass on a CPU is bound by the number of calls, and its module tree makes about 6,800 of
them for 30 layers. Here Q, K and V are one product, gate and up another, the cache is written in
place, and grouped queries are folded into the query axis instead of repeating keys: about 1.7x
faster per pass than transformers, 1.3x of which is prepacked weights (`core/linear.py`). On a CPU
the short passes of decoding take one call for all of it (`compiled.py`), on a GPU they are captured
(`captured.py`); this is their reference, and what reads long texts.

Which rows see which is the caller's: `attend` gets a layer's queries, keys and values. One sequence
over a cache, many over slots (`slots.py`) and whole texts without a cache share everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from graft.core.kv_cache import KVCache
from graft.core.linear import FusedLinear
from graft.targets.family import Family, Fuse

# (layer, queries [1, heads, n, d], keys and values [1, kv_heads, n, d]) -> [1, heads, n, d]
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class SwiGLU:
    """down(act(gate x) * up x), gate and up in one product."""

    def __init__(self, mlp: Any, fuse: Fuse) -> None:
        self.gate_up, self.down = fuse([mlp.gate_proj, mlp.up_proj]), fuse([mlp.down_proj])
        self._act = mlp.act_fn

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(self._act(gate) * up)


class RMSNorm:
    """x / rms(x) * weight over the last axis, in fp32 inside (torch's fused op)."""

    def __init__(self, module: Any) -> None:
        self.weight, self.eps = module.weight.detach(), module.variance_epsilon

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class QKNorm:
    """RMSNorm over every head of queries and keys [1, heads + kv_heads, n, head_dim], in one go."""

    def __init__(self, attention: Any) -> None:
        queries, keys = attention.q_norm.weight.detach(), attention.k_norm.weight.detach()
        self.queries, self.keys = queries, keys
        heads = attention.q_proj.out_features // len(queries)
        kv_heads = attention.k_proj.out_features // len(keys)
        rows = torch.stack([queries] * heads + [keys] * kv_heads)
        self._weight, self._eps = rows[:, None], attention.q_norm.variance_epsilon

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], eps=self._eps) * self._weight


class Decoder:
    """Embedding, blocks, final norm and head of a transformers causal LM, which it takes apart.

    `native` lets linear layers use our kernels where they are (`core/linear.py`).
    """

    def __init__(self, model: Any, family: Family, *, native: bool) -> None:
        config, body = model.config, model.model
        fuse = partial(FusedLinear, native=native)
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.embedding, self.rope = body.embed_tokens, body.rotary_emb
        self.norm, self.head = RMSNorm(body.norm), fuse([model.lm_head])
        self.head_weight = model.lm_head.weight.detach()  # plain, beside the packed one
        self.blocks = []
        for layer in body.layers:
            self.blocks.append(Block(layer, family, fuse))
            layer.self_attn = layer.mlp = None  # the fused copy is the only one kept
        self.tapped: list[int] = []

    @property
    def num_layers(self) -> int:
        return len(self.blocks)

    def new_cache(self) -> KVCache:
        """An empty cache of this model's shape, dtype and device."""
        weight = self.embedding.weight
        return KVCache(
            layers=self.num_layers,
            heads=self.kv_heads,
            head_dim=self.head_dim,
            dtype=weight.dtype,
            device=weight.device,
        )

    def run(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        *,
        blocks: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One pass over tokens [n] at positions [n] through the first `blocks` blocks, or all.

        Returns the last block's output [n, H] and the taps [n, n_taps * H].
        """
        n, heads, kv_heads = len(tokens), self.heads, self.kv_heads
        x = self.embedding(tokens)[None]  # [1, n, H]
        cos, sin = self.rope(x, positions[None])  # [1, n, head_dim] each
        half = self.head_dim // 2
        cos, sin = cos[:, None], torch.cat((-sin[..., :half], sin[..., half:]), -1)[:, None]
        taps: dict[int, torch.Tensor] = {}
        for index, block in enumerate(self.blocks[:blocks]):
            qkv = block.qkv(block.attention_norm(x)).view(1, n, -1, self.head_dim).transpose(1, 2)
            rotated, values = qkv.split((heads + kv_heads, kv_heads), 1)
            if block.qk_norm is not None:
                rotated = block.qk_norm(rotated)
            rotated = rotated * cos + rotated.roll(half, -1) * sin
            queries, keys = rotated.split((heads, kv_heads), 1)
            attended = attend(index, queries, keys, values)
            x = x + block.output(attended.transpose(1, 2).reshape(1, n, -1))
            x = x + block.feed_forward(block.feed_forward_norm(x))
            if index in self.tapped:
                taps[index] = x[0]
        chosen = [taps[index] for index in self.tapped]
        return x[0], torch.cat(chosen, -1) if chosen else x.new_empty(n, 0)

    def cached(self, cache: KVCache, mask: torch.Tensor | None) -> Attend:
        """Attention of one sequence, whose new rows go behind the cache's committed ones.

        `mask` [n, T + n] is additive; None is causal.
        """
        if mask is not None:  # rows repeat as the queries are folded in `_grouped_attention`
            mask = mask.repeat(self.heads // self.kv_heads, 1)

        def attend(
            layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
        ) -> torch.Tensor:
            return _grouped_attention(queries, *cache.write(layer, keys, values), mask)

        return attend

    def placed(self, buffer: torch.Tensor, places: torch.Tensor, mask: torch.Tensor) -> Attend:
        """The same in static shapes: new rows go to rows `places` [n] of a cache's buffer.

        `mask` [n, L] is additive and says which of its first L rows they see.
        """
        context, mask = mask.shape[1], mask.repeat(self.heads // self.kv_heads, 1)

        def attend(
            layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
        ) -> torch.Tensor:
            all_keys, all_values = buffer[layer]
            all_keys.index_copy_(2, places, keys)
            all_values.index_copy_(2, places, values)
            seen = all_keys[:, :, :context], all_values[:, :, :context]
            return _grouped_attention(queries, *seen, mask)

        return attend

    def side_by_side(self, lengths: Sequence[int]) -> Attend:
        """Causal attention inside each of several texts that lie behind one another."""
        sizes = list(lengths)

        def attend(
            layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
        ) -> torch.Tensor:
            parts = zip(*(x.split(sizes, 2) for x in (queries, keys, values)), strict=True)
            return torch.cat([_grouped_attention(q, k, v, None) for q, k, v in parts], 2)

        return attend

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Final norm and head: last block's output [n, H] -> [n, V]."""
        return self.head(self.norm(hidden))


class Block:
    """The weights of one block, fused."""

    def __init__(self, layer: Any, family: Family, fuse: Fuse) -> None:
        attention = layer.self_attn
        self.attention_norm = RMSNorm(layer.input_layernorm)
        self.qkv = fuse([attention.q_proj, attention.k_proj, attention.v_proj])
        self.qk_norm = QKNorm(attention) if family.qk_norm else None
        self.output = fuse([attention.o_proj])
        self.feed_forward_norm = RMSNorm(layer.post_attention_layernorm)
        self.feed_forward = family.feed_forward(layer.mlp, fuse)


def _grouped_attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Queries [1, heads, n, d] over keys, values [1, kv_heads, L, d]; mask [group * n, L] or None.

    One row, or rows with a mask of their own, fold the group into the query axis: the kernel then
    reads each key once for all its queries. Causal rows cannot fold; they use the kernels that know
    causality.
    """
    _, heads, n, d = queries.shape
    kv_heads, length = keys.shape[1:3]
    if mask is not None or n == 1:
        folded = queries.reshape(1, kv_heads, -1, d)
        attended = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask)
        return attended.view(1, heads, n, d)
    causal = {"is_causal": True} if n == length else {"attn_mask": causal_lower_right(n, length)}
    return F.scaled_dot_product_attention(queries, keys, values, enable_gqa=True, **causal)
