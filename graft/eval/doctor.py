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
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from graft.budgets.fixed import Fixed
from graft.core.errors import InputError
from graft.decode.replay import Replay
from graft.drafters.anchors import drafts_along
from graft.drafters.blocks import context_of, draft_blocks
from graft.drafters.dflash import DFlash
from graft.drafters.dflash_config import rope_of
from graft.drafters.dflash_net import DFlashNet, rotary_embedding
from graft.targets.hf import HFTarget
from graft.trees.chain import Chain

TEXTS, ANCHORS = 32, 16  # asked at most, evenly spaced in each
TOGETHER = 8  # texts drafted at once
CLEARLY = 1.15  # a reading is another fault's if it accepts this much more
CLOSE = 0.5  # nats between the best two candidates, within which rounding decides
SAME = 0.05  # share of clear choices that may differ all the same
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
    margin: float = CLEARLY  # how many times the engine's reading it must accept to be believed


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
                    f"tap offset: it was trained on the outputs of the blocks one "
                    f"{'before' if offset < 0 else 'after'} those that target_layer_ids names",
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
    size = len(target.tokenizer)
    spare = {*range(8), *range(size - 2, size + 3), *target.tokenizer.all_special_ids}
    spare |= {config.mask_token_id + 1, config.mask_token_id - 1, target.vocab_size - 1}
    for token in sorted(spare - {config.mask_token_id}):
        if 0 <= token < target.vocab_size:
            found.append(
                Reading(
                    f"mask row: it was trained with mask token {token}",
                    f"set dflash_config.mask_token_id to {token}",
                    mask_token=token,
                )
            )
    for theta in sorted(
        {1e4, 1e5, 5e5, 1e6, 1e7, rope_of(target.config.to_dict(), target.name)[0]}
        - {config.rope_theta}
    ):
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


class Doctor:
    """Asks one network at the same anchors of the same texts under different readings."""

    def __init__(self, net: DFlashNet, target: HFTarget, texts: Sequence[Answered]) -> None:
        self._net, self._target = net, target
        depth = net.config.block_size - 1
        long_enough = [text for text in texts if len(text.tokens) - text.start > depth + 2]
        self._texts = long_enough[:TEXTS]
        if not self._texts:
            raise InputError(
                f"no answer is longer than the {depth + 2} tokens that a block and its neighbours "
                "need; raise max_new_tokens or take other prompts"
            )
        self._taps: dict[int, list[torch.Tensor]] = {}  # by tap offset
        self._head = target.head_rows(net.draft_tokens)

    @torch.inference_mode()
    def measure(self, reading: Reading) -> Finding:
        """Accuracy by slot and tokens accepted, at evenly spaced anchors."""
        net = _reread(self._net, reading)
        depth, device = net.config.block_size - 1, self._target.device
        slots = torch.arange(1, depth + 1, device=device) + reading.label_offset
        taps = self._taps_at(reading.tap_offset)
        hits: list[torch.Tensor] = []
        for some in range(0, len(self._texts), TOGETHER):
            texts = self._texts[some : some + TOGETHER]
            tokens = pad_sequence([text.tokens for text in texts], batch_first=True).to(device)
            # A label offset looks one position further than the block.
            lasts = [len(text.tokens) - depth - 2 for text in texts]
            spans = [(text.start, last) for text, last in zip(texts, lasts, strict=True)]
            anchors = torch.stack([torch.linspace(*span, ANCHORS).long() for span in spans])
            anchors = anchors.to(device)
            hidden = draft_blocks(
                net,
                self._target.embed,
                context=context_of(
                    net, pad_sequence(taps[some : some + TOGETHER], batch_first=True)
                ),
                roots=tokens.gather(1, anchors),
                anchors=anchors,
                seen=anchors + reading.sees_anchor,
            )[:, :, 1:]
            hidden = hidden.to(self._head.dtype).contiguous()  # or the head would be copied
            drafted = F.linear(hidden, self._head).argmax(-1)  # [texts, A, D]
            if net.draft_tokens is not None:
                drafted = net.draft_tokens.to(device)[drafted]
            ahead = (anchors[..., None] + slots).flatten(1)
            hits.append(drafted == tokens.gather(1, ahead).view(drafted.shape))
        right = torch.cat(hits).flatten(0, 1).float()  # [anchors, D]
        if reading.label_offset < 0:  # such a drafter's first slot repeats the root: no credit
            right = right[:, 1:]
        return Finding(reading, right.mean(0).tolist(), float(right.cumprod(-1).sum(-1).mean()))

    def _taps_at(self, offset: int) -> list[torch.Tensor]:
        if offset not in self._taps:
            layers = self._net.config.target_layer_ids
            self._target.tap([layer + offset for layer in layers])
            texts = [text.tokens for text in self._texts]
            self._taps[offset] = self._target.read(texts)
            self._target.tap(layers)
        return self._taps[offset]


@torch.inference_mode()
def cache_disagreement(drafter: DFlash, target: HFTarget, texts: Sequence[Answered]) -> float:
    """Share of clear choices that decoding, with its draft cache, makes otherwise than a pass
    without one: the cache keeps or loses what it should not. Close calls may fall to rounding.
    """
    differ = total = 0
    for text in texts:
        fresh = drafts_along(drafter.net, target, text.tokens, start=text.start, candidates=2)
        taps = target.read([text.tokens.to(target.device)])[0]
        drafter.reset()
        known = 0  # positions whose taps the drafter has
        walk = Replay(Chain(), Fixed(drafter.depth))(fresh, text.tokens[text.start :].tolist())
        for root in walk.roots:
            position = text.start + root
            draft = drafter.propose(int(text.tokens[position]), taps[known:position])
            known = position
            log_probs = fresh.log_probs[root]
            clear = log_probs[:, 0] - log_probs[:, 1] > CLOSE
            differ += int((clear & (draft.tokens[:, 0] != fresh.tokens[root, :, 0])).sum())
            total += int(clear.sum())
    return differ / max(1, total)


def diagnosis(own: Finding, others: Sequence[Finding], disagreement: float) -> str:
    """In words: healthy, or the one fault that explains the measurements best."""
    best = max(others, key=lambda finding: finding.accepted / finding.reading.margin)
    explains = best.accepted > max(best.reading.margin * own.accepted, HOPELESS)
    if own.accepted < HOPELESS and not explains:
        return (
            "it accepts next to nothing under any reading: untrained, trained for another target, "
            "or on text that this target does not write."
        )
    if disagreement > SAME:
        return (
            f"draft cache: decoding makes {disagreement:.0%} of its clear choices otherwise than a "
            "pass over the same text without a cache. The cache is not cropped to the committed "
            "length after every draft, or its rows lie at wrong positions."
        )
    if explains:
        return (
            f"{best.reading.fault}. Read so, {best.accepted:.2f} drafted tokens are accepted "
            f"instead of {own.accepted:.2f}. Cure: {best.reading.cure}."
        )
    return "healthy: no other reading of the checkpoint accepts clearly more."


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
    twin.rope = rotary_embedding(twin.config).to(net.norm.weight.device)
    return twin
