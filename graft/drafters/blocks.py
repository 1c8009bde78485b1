"""Many blocks over one text in a single pass: how a drafter is trained, and how it is asked at
every position of a finished text.

Decoding runs one block behind a cache. Here the text is given, so the context features are made
once and every anchor's block attends to those strictly before it:

    a slot sees     context position j  iff  j < anchor     (the anchor's taps come a pass later)
                    another slot        iff  same block     (both ways, unless the layer is causal)

Two kernels compute the same. A masked SDPA over context and all blocks would spend most of its work
on blocks that see nothing of each other, so on a CPU the two parts are separate products under one
softmax (2.2x faster, forward and backward, at 48 anchors). On a GPU flex attention skips what is
hidden.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from graft.drafters.dflash_config import DFlashConfig
from graft.drafters.dflash_net import Attend, DFlashNet

Pairs = list[tuple[torch.Tensor, torch.Tensor]]
_compiled_flex = torch.compile(flex_attention)


def context_of(net: DFlashNet, taps: torch.Tensor) -> Pairs:
    """Keys and values of every layer at every position of texts: taps [batch, L, n_taps * H]."""
    positions = torch.arange(taps.shape[1], device=taps.device)[None]
    return net.context(taps.to(net.fc.weight.dtype), positions)


def draft_blocks(
    net: DFlashNet,
    embed: Callable[[torch.Tensor], torch.Tensor],
    *,
    context: Pairs,
    roots: torch.Tensor,
    anchors: torch.Tensor,
    seen: torch.Tensor | None = None,
    flex: bool = False,
) -> torch.Tensor:
    """Final hidden states [batch, A, D + 1, H] of one block an anchor.

    `context` of the texts, `anchors` [batch, A] the positions of the roots (ascending, for the sake
    of flex attention's sparsity), `roots` [batch, A] the tokens there.
    `seen` [batch, A] is how many context positions a block sees, the anchor if not given. The
    network may be in another dtype than the target: it is while it trains.
    """
    size = net.config.block_size
    slots = torch.arange(size, device=anchors.device)
    positions = (anchors[..., None] + slots).flatten(1)  # [batch, A * size]
    tokens = torch.full_like(positions, net.config.mask_token_id).view(*roots.shape, size)
    tokens[..., 0] = roots
    kernel = _flex if flex else _split
    blocks = embed(tokens.flatten(1)).to(net.fc.weight.dtype)
    ends = anchors if seen is None else seen
    hidden = net(blocks, positions, kernel(net.config, context, ends))
    return hidden.view(*roots.shape, size, hidden.shape[-1])


def visible(
    config: DFlashConfig,
    layer: int,
    *,
    anchor: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    length: int,
) -> torch.Tensor:
    """Whether a slot sees a key, all three index tensors broadcast.

    `query` counts the slots of all blocks, `key` the `length` context positions and then the slots;
    `anchor` is the position of the query's root.
    """
    size, window = config.block_size, config.window(layer)
    own = key - length  # as a slot; negative in the context
    ahead = torch.where(own < 0, key - anchor - query % size, own - query)
    sees = torch.where(own < 0, key < anchor, own // size == query // size)
    if config.causal(layer):
        sees = sees & (ahead <= 0)
    if window is not None:
        sees = sees & (ahead.abs() < window)
    return sees


def _split(config: DFlashConfig, context: Pairs, anchors: torch.Tensor) -> Attend:
    """Scores of the context and of the own block side by side, one softmax, two products."""
    (batch, count), size = anchors.shape, config.block_size
    length, m = context[0][0].shape[2], count * size
    query = torch.arange(m, device=anchors.device)
    anchor = anchors[:, query // size]  # [batch, m]
    group = config.num_heads // config.num_kv_heads
    dtype = context[0][0].dtype

    def masks(layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Additive: over the context [batch, 1, m, L], over the own block [size, size]."""
        key = torch.arange(length + size, device=anchors.device)
        sees = visible(
            config,
            layer,
            anchor=anchor[..., None],
            query=query[:, None] % size,
            key=key,
            length=length,
        )
        hidden = torch.zeros(sees.shape, dtype=dtype, device=anchors.device)
        hidden.masked_fill_(~sees, torch.finfo(dtype).min)
        return hidden[:, None, :, :length], hidden[0, :size, length:]

    by_layer = _per_kind(config, masks)

    def attend(
        layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        (over_context, over_block), (past_keys, past_values) = by_layer[layer], context[layer]
        heads, d = config.num_kv_heads, config.head_dim
        queries = (queries * d**-0.5).reshape(batch, heads, group * m, d)
        past = (queries @ past_keys.transpose(2, 3)).view(batch, heads * group, m, length)
        own = _by_block(queries.view(batch, heads, group, m, d), size)
        own = own @ _by_block(keys[:, :, None], size).transpose(-1, -2)  # one block against itself
        own = own.view(-1, group, size, size) + over_block
        own = _by_query(own.view(batch, heads, count, group, size, size))
        probs = torch.cat((past + over_context, own.reshape(batch, -1, m, size)), -1).softmax(-1)
        past, own = probs.split((length, size), -1)
        from_context = past.reshape(batch, heads, group * m, length) @ past_values
        own = _by_block(own.view(batch, heads, group, m, size), size)
        from_block = own @ _by_block(values[:, :, None], size)
        from_block = _by_query(from_block.view(batch, heads, count, group, size, d))
        return from_context.view(batch, -1, m, d) + from_block.reshape(batch, -1, m, d)

    return attend


def _by_block(x: torch.Tensor, size: int) -> torch.Tensor:
    """[batch, heads, group, A * size, d] -> [batch * heads * A, group * size, d]."""
    x = x.unflatten(3, (-1, size)).transpose(2, 3)
    return x.reshape(-1, x.shape[3] * size, x.shape[-1])


def _by_query(x: torch.Tensor) -> torch.Tensor:
    """[batch, heads, A, group, size, d] -> [batch, heads, group, A * size, d]."""
    return x.transpose(2, 3).flatten(3, 4)


def _flex(config: DFlashConfig, context: Pairs, anchors: torch.Tensor) -> Attend:
    length, m = context[0][0].shape[2], anchors.shape[1] * config.block_size

    def block_mask(layer: int):
        def sees(batch, _head, query, key):
            anchor = anchors[batch, query // config.block_size]
            return visible(config, layer, anchor=anchor, query=query, key=key, length=length)

        return create_block_mask(sees, len(anchors), None, m, length + m, device=anchors.device)

    masks = _per_kind(config, block_mask)
    attention = _compiled_flex if anchors.device.type == "cuda" else flex_attention

    def attend(
        layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        keys, values = _behind(context[layer], keys, values)
        return attention(queries, keys, values, block_mask=masks[layer], enable_gqa=True)

    return attend


def _behind(
    context: tuple[torch.Tensor, torch.Tensor], keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.cat((context[0], keys), 2), torch.cat((context[1], values), 2)


def _per_kind(config: DFlashConfig, make: Callable) -> list:
    """One mask a layer, made once for all layers of a kind."""
    kinds = [(config.window(i), config.causal(i)) for i in range(config.num_layers)]
    made = {kind: make(kinds.index(kind)) for kind in dict.fromkeys(kinds)}
    return [made[kind] for kind in kinds]
