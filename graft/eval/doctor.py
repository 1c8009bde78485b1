"""Why does this drafter accept so little? Measure it under every classic mistake.

A checkpoint that was trained, converted or loaded under another convention than the engine's still
runs; it only drafts badly. Each hypothesis below is one such convention. The drafter is asked at
the same anchors of the target's own text under each of them; if one reads the checkpoint clearly
better than the engine does, that is the fault.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from graft.decode.replay import Replay
from graft.drafters.anchors import drafts_along
from graft.drafters.blocks import draft_blocks
from graft.drafters.dflash import DFlash
from graft.drafters.dflash_net import DFlashNet, rotary_embedding
from graft.targets.hf import HFTarget
from graft.trees.chain import Chain

ANCHORS = 24  # asked a text
CLEARLY = 1.15  # a reading is another fault's if it accepts this much more
HOPELESS = 0.15  # drafted tokens an anchor below which nothing was learned that fits


@dataclass(frozen=True)
class Reading:
    """One way to read a checkpoint; the defaults are the engine's."""

    fault: str = ""
    cure: str = ""
    tap_offset: int = 0  # blocks
    label_offset: int = 0  # positions
    sees_anchor: bool = False
    mask_token: int | None = None
    rope_theta: float | None = None
    rope_scaling_off: bool = False


@dataclass(frozen=True)
class Finding:
    """What a reading measures."""

    reading: Reading
    accuracy: list[float]  # by slot
    accepted: float  # drafted tokens right in a row, mean over anchors


@dataclass(frozen=True)
class Answered:
    """A text of the target: prompt and its own answer."""

    tokens: torch.Tensor  # [L]
    start: int  # of the answer


def readings(net: DFlashNet, target: HFTarget) -> list[Reading]:
    """The engine's own reading first, then every hypothesis that differs for this pair."""
    config = net.config
    found = [Reading()]
    last = target.num_layers - 1
    for offset in (1, -1):
        if all(0 <= layer + offset <= last for layer in config.target_layer_ids):
            found.append(
                Reading(
                    f"tap offset: it was trained on block {'outputs' if offset < 0 else 'inputs'} "
                    f"{abs(offset)} {'before' if offset < 0 else 'after'} those that "
                    "target_layer_ids names",
                    f"add {offset:+d} to dflash_config.target_layer_ids (ids are 0-based block "
                    "outputs here, transformers' hidden_states[id + 1])",
                    tap_offset=offset,
                )
            )
    for offset in (1, -1):
        found.append(
            Reading(
                f"shifted labels: slot k predicts position root + k {offset:+d}",
                "train with labels tokens[anchor + k] for slot k, or convert: this engine reads "
                "slot k as position root + k",
                label_offset=offset,
            )
        )
    found.append(
        Reading(
            "anchor in context: it was trained to see the taps of the anchor itself",
            "mask the context strictly before the anchor in training: decoding has no taps of "
            "the root yet",
            sees_anchor=True,
        )
    )
    others = {*range(8), config.mask_token_id + 1, config.mask_token_id - 1}
    others |= {len(target.tokenizer), len(target.tokenizer) - 1, target.vocab_size - 1}
    others |= set(target.tokenizer.all_special_ids)
    for token in sorted(others - {config.mask_token_id}):
        if 0 <= token < target.vocab_size:
            found.append(
                Reading(
                    f"mask row: it was trained with mask token {token}",
                    f"set dflash_config.mask_token_id to {token}",
                    mask_token=token,
                )
            )
    for theta in sorted({1e4, 1e5, 5e5, 1e6, 1e7, _theta(target)} - {config.rope_theta}):
        found.append(
            Reading(
                f"RoPE: its angles have base {theta:g}, not {config.rope_theta:g}",
                f"set rope_theta to {theta:g} (and in rope_parameters, if that is there)",
                rope_theta=theta,
            )
        )
    if config.rope_scaling:
        found.append(
            Reading(
                "RoPE: it was trained without scaling", "drop rope_scaling", rope_scaling_off=True
            )
        )
    return found


@torch.inference_mode()
def measure(
    net: DFlashNet,
    target: HFTarget,
    texts: Sequence[Answered],
    reading: Reading,
) -> Finding:
    """Accuracy by slot and tokens accepted, at evenly spaced anchors of the texts."""
    net = _reread(net, reading)
    config = net.config
    head = target.head_rows(net.draft_tokens)
    tokens_of = net.draft_tokens if net.draft_tokens is not None else torch.arange(len(head))
    tokens_of = tokens_of.to(target.device)
    depth = config.block_size - 1
    right: list[torch.Tensor] = []
    target.tap([layer + reading.tap_offset for layer in config.target_layer_ids])
    for text in texts:
        tokens = text.tokens.to(target.device)
        room = len(tokens) - depth - 1 - text.start
        if room < 1:
            continue
        anchors = torch.linspace(text.start, len(tokens) - depth - 2, min(ANCHORS, room)).long()
        anchors = anchors.to(target.device)
        taps = target.read([tokens])[1][0]
        hidden = draft_blocks(
            net,
            target.embed,
            taps=taps[None],
            roots=tokens[anchors][None],
            anchors=anchors[None],
            seen=(anchors + reading.sees_anchor)[None],
        )[0, :, 1:]
        drafted = tokens_of[(hidden.to(head.dtype) @ head.T).argmax(-1)]  # [A, D]
        slots = torch.arange(1, depth + 1, device=target.device) + reading.label_offset
        right.append(drafted == tokens[anchors[:, None] + slots])
    target.tap(config.target_layer_ids)
    hits = torch.cat(right).float()
    if reading.label_offset < 0:  # its first slot repeats the root, which is given: no credit
        hits = hits[:, 1:]
    accepted = float(hits.cumprod(-1).sum(-1).mean())
    return Finding(reading, hits.mean(0).tolist(), accepted)


@torch.inference_mode()
def cache_disagreement(drafter: DFlash, target: HFTarget, texts: Sequence[Answered]) -> float:
    """Share of positions that decoding drafts otherwise than a pass without a draft cache.

    More than rounding means that the cache keeps what it should not, or loses what it should keep.
    """
    differ = total = 0
    for text in texts:
        answer = text.tokens[text.start :].tolist()
        fresh = drafts_along(drafter.net, target, text.tokens, start=text.start, candidates=1)
        drafter.reset()
        taps = target.read([text.tokens.to(target.device)])[1][0]
        done = 0  # positions whose taps the drafter has

        def along(root: int, *, text: Answered = text, taps: torch.Tensor = taps, fresh=fresh):
            nonlocal done, differ, total
            position = text.start + root
            draft = drafter.propose(int(text.tokens[position]), taps[done:position])
            done = position
            differ += int((draft.tokens[:, 0] != fresh[root].tokens[:, 0]).sum())
            total += len(draft.tokens)
            return fresh[root]

        Replay(Chain(), drafter.config.block_size - 1)(answer, along)
    return differ / max(1, total)


def _reread(net: DFlashNet, reading: Reading) -> DFlashNet:
    """The network under another configuration; weights are shared, the original is left alone."""
    changes: dict = {}
    if reading.mask_token is not None:
        changes["mask_token_id"] = reading.mask_token
    if reading.rope_theta is not None:
        changes["rope_theta"] = reading.rope_theta
    if reading.rope_scaling_off:
        changes["rope_scaling"] = None
    if not changes:
        return net
    twin = copy.copy(net)
    twin._modules = dict(net._modules)
    twin.config = dataclasses.replace(net.config, **changes)
    twin._rope = rotary_embedding(twin.config).to(net.norm.weight.device)
    return twin


def _theta(target: HFTarget) -> float:
    rope = getattr(target.config, "rope_parameters", None) or {}
    return float(rope.get("rope_theta") or getattr(target.config, "rope_theta", None) or 1e4)
