"""DFlash's pass as a static-shape program (`core/graphs.py`), a captured CUDA graph on a GPU: new
taps to context features, block, head, candidates and cosines, and one copy of them to the host.

New taps are padded to a block of rows. The block lies over what pads them in the cache, so nothing
of it is left. More taps than that, a prompt's, become features first, through torch.
`dflash_net.DFlashNet` is the reference.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
import torch.nn.functional as F

from graft.core.graphs import Graphs, Inputs, context_bucket
from graft.core.interfaces import Backbone
from graft.core.kv_cache import KVCache
from graft.core.linear import FusedLinear
from graft.core.types import Draft, ranked
from graft.drafters.dflash_net import DFlashNet


class CapturedDFlash:
    """The network bound to a target, and the head it drafts with."""

    def __init__(
        self,
        net: DFlashNet,
        target: Backbone,
        head: FusedLinear,
        *,
        compile: bool = False,
    ) -> None:
        self._net, self._target, self._head = net, target, head
        config, device = net.config, target.device
        self._size = config.block_size
        self._graphs = Graphs(device, compile=compile)
        self._inputs = Inputs(3, device)  # root, new taps, committed rows
        shape = self._size, len(config.target_layer_ids) * config.hidden_size
        self._taps = torch.zeros(shape, dtype=target.dtype, device=device)
        self._masked = torch.full((self._size - 1,), config.mask_token_id, device=device)
        tokens = net.draft_tokens
        self._vocabulary = None if tokens is None else tokens.to(device)

    def draft(self, root: int, taps: torch.Tensor, cache: KVCache, candidates: int) -> Draft:
        """Taps [n, n_taps * H] of new tokens into the cache, and a draft of what follows `root`."""
        if len(taps) > self._size:
            read_context(self._net, taps, cache)
            taps = taps[:0]
        new, size = len(taps), self._size
        context = context_bucket(cache.length + new + size)
        cache.reserve(context - cache.length)
        self._graphs.over(cache.buffer)
        self._taps[:new] = taps
        self._inputs.words[:] = root, new, cache.length
        self._inputs.send()
        packed, hidden = self._graphs.run(
            (context, candidates), partial(self._program, cache.buffer, context, candidates)
        )
        cache.commit(range(new))
        hidden = hidden.clone()  # the next pass writes where it lay
        depth, words = size - 1, np.array(packed.cpu())
        tokens, log_probs, cosines = np.split(words, [depth * candidates, 2 * depth * candidates])
        return Draft(
            root,
            tokens.astype(np.int64).reshape(depth, -1),
            log_probs.view(np.float32).reshape(depth, -1),
            cosines.view(np.float32),
            hidden,
        )

    def _program(
        self, buffer: torch.Tensor, context: int, candidates: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Candidates, log-probs and cosines as int32 words, and the states [D, H]."""
        root, new, length = self._inputs.tensor.long().split(1)
        places = torch.arange(self._size, device=buffer.device) + length
        features = self._net.context(self._taps[None], places[None])
        for layer, (keys, values) in enumerate(features):
            buffer[layer, 0].index_copy_(2, places, keys)
            buffer[layer, 1].index_copy_(2, places, values)

        places = places + new
        masks = self._masks(places, context, buffer.dtype)

        def attend(
            layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
        ) -> torch.Tensor:
            all_keys, all_values = buffer[layer]
            all_keys.index_copy_(2, places, keys)
            all_values.index_copy_(2, places, values)
            seen = all_keys[:, :, :context], all_values[:, :, :context]
            mask = masks[self._kind(layer)]
            return F.scaled_dot_product_attention(queries, *seen, attn_mask=mask, enable_gqa=True)

        block = self._target.embed(torch.cat((root, self._masked)))
        hidden = self._net(block[None], places[None], attend)[0, 1:]
        tokens, *rest = ranked(
            self._head(hidden), hidden, candidates=candidates, vocabulary=self._vocabulary
        )
        parts = tokens.int(), *(part.view(torch.int32) for part in rest)
        return torch.cat([part.flatten() for part in parts]), hidden

    def _kind(self, layer: int) -> tuple[bool, int | None]:
        """What a layer's mask depends on."""
        return self._net.config.causal(layer), self._net.config.window(layer)

    def _masks(
        self, places: torch.Tensor, context: int, dtype: torch.dtype
    ) -> dict[tuple[bool, int | None], torch.Tensor]:
        """Additive masks [b, context] of a block at rows `places` [b], by kind of layer."""
        ahead = torch.arange(context, device=places.device) - places[:, None]
        behind = torch.arange(context, device=places.device) > places[-1]  # the block: nothing yet
        masks = {}
        for causal, window in {self._kind(i) for i in range(self._net.config.num_layers)}:
            hidden = behind | (ahead > 0) if causal else behind.expand_as(ahead)
            if window is not None:
                hidden = hidden | (ahead.abs() >= window)
            mask = torch.zeros(ahead.shape, dtype=dtype, device=places.device)
            masks[causal, window] = mask.masked_fill(hidden, torch.finfo(dtype).min)
        return masks


@torch.inference_mode()
def read_context(net: DFlashNet, taps: torch.Tensor, cache: KVCache) -> None:
    """Commit the context features of taps [n, n_taps * H]."""
    n = len(taps)
    positions = torch.arange(cache.length, cache.length + n, device=taps.device)
    cache.reserve(n)
    for layer, (keys, values) in enumerate(net.context(taps[None], positions[None])):
        cache.write(layer, keys, values)
    cache.commit(range(n))
