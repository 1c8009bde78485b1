"""DFlash as a `Drafter`: its own context cache, one block pass a round, the best K candidates of
every depth.

At each call the taps of the newly committed tokens become context features, whose keys and values
are appended once; the block [root, mask, ...] runs behind them as scratch, so the cache always ends
at the committed length.
"""

from __future__ import annotations

import copy

import torch

from graft.core.errors import InputError
from graft.core.interfaces import Backbone
from graft.core.kv_cache import KVCache
from graft.core.linear import can_pack, cast_parameters, pack_linears
from graft.core.types import Draft
from graft.drafters import dflash_checkpoint
from graft.drafters.dflash_config import DFlashConfig, default_target_layer_ids
from graft.drafters.dflash_net import DFlashNet


class DFlash:
    """A DFlash network bound to the target whose embedding, head and taps it uses."""

    def __init__(self, net: DFlashNet, target: Backbone, *, candidates: int, name: str) -> None:
        config = net.config
        check_fits(config, target, name)
        if candidates < 1:
            raise InputError(f"drafter.candidates must be at least 1, not {candidates}")
        self.name, self.config, self._target = name, config, target
        self.candidates = candidates
        cast_parameters(net, target.device, target.dtype)
        self.net = net
        if can_pack(net.fc.weight):
            self.net = copy.deepcopy(net)  # a packed network cannot be trained on or saved
            pack_linears(self.net)
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
        cache, device = self._cache, self._target.device
        new, end = len(taps), cache.length + len(taps) + self.config.block_size
        positions = torch.arange(cache.length, end, device=device)
        cache.reserve(len(positions))
        for layer, (keys, values) in enumerate(self.net.context(taps[None], positions[:new])):
            cache.write(layer, keys, values)
        cache.commit(range(new))

        self._block[0] = root
        slots = positions[new:]
        layers = range(self.config.num_layers)
        masks = [self.net.decoding_mask(layer, cache.length) for layer in layers]
        hidden = self.net(self._target.embed(self._block)[None], slots, cache.write, masks)[0, 1:]
        logits = self._target.unembed(hidden)
        return Draft.from_logits(root, logits, hidden, candidates=self.candidates)


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
    heads: int,
    kv_heads: int,
    intermediate_size: int,
    block_size: int,
    mask_token_id: int,
    taps: int = 5,
    candidates: int = 64,
    seed: int = 0,
) -> DFlash:
    """A random drafter of the target's width: it drafts noise, and decoding stays exact."""
    if target.hidden_size % (2 * heads) or heads % kv_heads:
        raise InputError(
            f"drafter.heads={heads}, drafter.kv_heads={kv_heads} does not divide the hidden size "
            f"{target.hidden_size} of {target.name} into heads of even width"
        )
    config = DFlashConfig(
        hidden_size=target.hidden_size,
        intermediate_size=intermediate_size,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=target.hidden_size // heads,
        vocab_size=target.vocab_size,
        block_size=block_size,
        mask_token_id=mask_token_id,
        target_layer_ids=default_target_layer_ids(target.num_layers, taps),
        num_target_layers=target.num_layers,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = DFlashNet(config).eval().requires_grad_(False)
    name = "untrained DFlash (random weights: it drafts noise, so MAT stays near 1)"
    return DFlash(net, target, candidates=candidates, name=name)
