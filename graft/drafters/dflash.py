"""DFlash as a `Drafter`: its own context cache, one block pass a round, the best K candidates of
every depth.

At each call the taps of the newly committed tokens become context features, whose keys and values
are appended once; the block [root, mask, ...] runs behind them as scratch, so the cache always ends
at the committed length.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

from graft.core.errors import InputError
from graft.core.fingerprint import fingerprint
from graft.core.interfaces import Backbone
from graft.core.kv_cache import KVCache
from graft.core.linear import FusedLinear, can_pack, cast_parameters, pack_linears
from graft.core.types import Draft, Drafts
from graft.drafters import dflash_checkpoint
from graft.drafters.captured import CapturedDFlash
from graft.drafters.compiled import CompiledDFlash, compiled
from graft.drafters.dflash_config import DFlashConfig, for_target
from graft.drafters.dflash_net import DFlashNet


class DFlash:
    """A DFlash network bound to the target whose embedding, head and taps it uses."""

    def __init__(self, net: DFlashNet, target: Backbone, *, candidates: int, name: str) -> None:
        config = net.config
        check_fits(config, target, name)
        if candidates < 1:
            raise InputError(f"drafter.candidates must be at least 1, not {candidates}")
        self.name, self.config, self._target = name, config, target
        choices = target.vocab_size if net.draft_tokens is None else len(net.draft_tokens)
        self.depth, self.candidates = config.block_size - 1, min(candidates, choices)
        vocabulary = "" if net.draft_tokens is None else str(net.draft_tokens.tolist())
        self.fingerprint = fingerprint(net, f"{config} {vocabulary}")
        cast_parameters(net, target.device, target.dtype)
        self.head, self._vocabulary = target.head, None
        if net.draft_tokens is not None:
            self._vocabulary = net.draft_tokens.to(target.device)
            self.head = head_over(target.head_rows(net.draft_tokens), target)
        self._compiled: CompiledDFlash | CapturedDFlash | None = compiled(net, target, self.head)
        if target.captures:
            self._compiled = CapturedDFlash(net, target, self.head)
        self.net = net
        if can_pack(net.fc.weight):
            self.net = copy.deepcopy(net)  # a packed network cannot be trained on or saved
            pack_linears(self.net, native=self.head.native is not None)
        target.tap(config.target_layer_ids)
        block = [config.mask_token_id] * config.block_size
        self._block = torch.tensor(block, device=target.device)
        self._cache = KVCache(
            layers=config.num_layers,
            heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=target.dtype,
            device=target.device,
        )

    def reset(self) -> None:
        self._cache.reset()
        self._target.tap(self.config.target_layer_ids)  # another drafter may have tapped since

    @torch.inference_mode()
    def propose(self, root: int, taps: torch.Tensor) -> Draft:
        """Draft D positions after `root`, given the taps [n, n_taps * H] of n new tokens."""
        if self._compiled is not None:
            return self._compiled.draft(root, taps, self._cache, self.candidates)
        cache, device = self._cache, self._target.device
        new, end = len(taps), cache.length + len(taps) + self.config.block_size
        positions = torch.arange(cache.length, end, device=device)
        cache.reserve(len(positions))
        for layer, (keys, values) in enumerate(self.net.context(taps[None], positions[None, :new])):
            cache.write(layer, keys, values)
        cache.commit(range(new))

        self._block[0] = root
        block = self._target.embed(self._block)[None]
        hidden = self.net(block, positions[None, new:], self._attend)[:, 1:]
        return Drafts.from_logits(
            [root],
            self.head(hidden),
            hidden,
            candidates=self.candidates,
            vocabulary=self._vocabulary,
        )[0]

    def _attend(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        mask = self.net.decoding_mask(layer, self._cache.length)
        keys, values = self._cache.write(layer, keys, values)
        return F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, enable_gqa=True
        )


def head_over(rows: torch.Tensor, target: Backbone) -> FusedLinear:
    """A head of these rows [n, H], packed as the target's is."""
    with torch.device("meta"):
        linear = nn.Linear(rows.shape[1], rows.shape[0], bias=False)
    linear.weight = nn.Parameter(rows, requires_grad=False)
    return FusedLinear([linear], native=target.head.native is not None)


def check_fits(config: DFlashConfig, target: Backbone, name: str) -> None:
    """Refuse a drafter made for another target (InputError, with both numbers)."""
    facts = [
        ("hidden size", config.hidden_size, target.hidden_size),
        ("vocabulary", config.vocab_size, target.vocab_size),
        ("layer count", config.num_target_layers, target.num_layers),
    ]
    for what, drafter_has, target_has in facts:
        if drafter_has != target_has:
            raise InputError(
                f"{name} was made for a target with {what} {drafter_has}; "
                f"{target.name} has {target_has}"
            )
    if not 0 <= config.mask_token_id < target.vocab_size:
        raise InputError(
            f"{name} masks with token {config.mask_token_id}, but {target.name} embeds only "
            f"{target.vocab_size} tokens"
        )
    if config.block_size < 2:
        raise InputError(
            f"{name} has block_size {config.block_size}; a block is the root and at least one slot"
        )


def load(checkpoint: str, target: Backbone, *, candidates: int = 64) -> DFlash:
    """A published or locally trained drafter: a folder or a hub id."""
    net = dflash_checkpoint.load(checkpoint)
    return DFlash(net, target, candidates=candidates, name=f"drafter {checkpoint}")


def untrained(
    target: Backbone,
    *,
    layers: int,
    block_size: int,
    mask_token_id: int,
    taps: int = 5,
    candidates: int = 64,
    seed: int = 0,
) -> DFlash:
    """A random drafter in the target's shape: it drafts noise, and decoding stays exact."""
    net = new_network(
        target,
        layers=layers,
        block_size=block_size,
        mask_token_id=mask_token_id,
        taps=taps,
        seed=seed,
    )
    name = "untrained DFlash (random weights: it drafts noise, so MAT stays near 1)"
    return DFlash(net.eval().requires_grad_(False), target, candidates=candidates, name=name)


def new_network(
    target: Backbone, *, layers: int, block_size: int, mask_token_id: int, taps: int, seed: int
) -> DFlashNet:
    """A random network in the target's shape, in fp32. Raises InputError if it cannot fit."""
    config = for_target(
        target.config, layers=layers, block_size=block_size, mask_token_id=mask_token_id, taps=taps
    )
    check_fits(config, target, "the new drafter")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return DFlashNet(config)
