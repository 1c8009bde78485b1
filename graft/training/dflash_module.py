"""Train a DFlash drafter on its target's own text (arXiv 2602.06036, appendix A.1).

The target reads each text once, in the loop, and gives the taps; blocks at random anchors are
drafted behind their context; slot k is charged the cross-entropy of the token at anchor + k.
Embedding and head are the target's and stay as they are. Validation replays held-out answers and
reports what counts: tokens a round.
"""

from __future__ import annotations

import copy
import math
import time
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from graft.core.errors import InputError
from graft.core.linear import cast_parameters
from graft.core.runlog import write_atomically
from graft.core.types import Generation
from graft.decode.replay import Replay
from graft.drafters import dflash_checkpoint
from graft.drafters.anchors import drafts_along
from graft.drafters.blocks import context_of, draft_blocks
from graft.drafters.dflash import new_network
from graft.drafters.dflash_net import DFlashNet
from graft.targets.hf import HFTarget
from graft.training.dflash_data import BlockBatch, ResponseData, Text, frequent_tokens, rows_of
from graft.training.head_loss import head_loss
from graft.training.model_card import model_card
from graft.training.objective import decay_weights, default_gamma, dpace_weights
from graft.training.run import RunFacts, adamw
from graft.training.tap_cache import TapCache
from graft.training.warm_start import warm_start

LENGTHS = 256  # flex attention gets texts padded to a multiple of this


class DFlashModule(L.LightningModule):
    """The network as Lightning trains it; the target is no part of its state."""

    def __init__(
        self,
        net: DFlashNet,
        target: HFTarget,
        data: ResponseData | None = None,
        *,
        methods: Mapping[str, partial[Generation]],
        weighting: Literal["decay", "dpace"] = "decay",
        gamma: float | None = None,
        alpha: float = 0.5,
        tap_dropout: float = 0.0,
        lr: float = 6e-4,
        weight_decay: float = 0.01,
        warmup: float = 0.04,
        flex: bool = False,
        cache: TapCache | None = None,
    ) -> None:
        super().__init__()
        if weighting not in ("decay", "dpace"):
            raise InputError(f"model.weighting must be decay or dpace, not {weighting}")
        self.net, self._target, self._data = net, target, data
        self._replays = {name: Replay.of(method) for name, method in methods.items()}
        self._weighting, self._alpha, self._tap_dropout = weighting, alpha, tap_dropout
        self._lr, self._weight_decay, self._warmup = lr, weight_decay, warmup
        self._flex, self._cache = flex, cache
        self._stepped: float | None = None
        self._replayed: list[tuple[str, str, float]] = []  # method, source, tokens a round
        self._depth = net.config.block_size - 1
        decay = decay_weights(self._depth, gamma or default_gamma(net.config.block_size))
        self._decay = decay.to(target.device)
        self._head = target.head_rows(net.draft_tokens)
        self._rows = rows_of(net.draft_tokens, target.vocab_size).to(target.device)

    def transfer_batch_to_device(self, batch: Any, _device: torch.device, _loader: int) -> Any:
        return batch  # texts of many lengths: they go where they are needed

    def training_step(self, batch: BlockBatch, _index: int) -> torch.Tensor:
        losses, right, counts = self.block_losses(batch)
        weights = self._decay * counts
        if self._weighting == "dpace":
            weights = dpace_weights(losses, counts, self._alpha)
        loss = (losses * weights).sum() / weights.sum().clamp_min(1e-9)
        accuracy = right.sum((0, 1)) / counts.sum((0, 1)).clamp_min(1)
        self.log("train/loss", loss.detach(), prog_bar=True)
        self._log_speed(counts)
        self.log("train/accuracy_slot_1", accuracy[0], prog_bar=True)
        for slot in range(1, self._depth):
            self.log(f"train/accuracy_slot_{slot + 1}", accuracy[slot])
        return loss

    def _log_speed(self, counts: torch.Tensor) -> None:
        """Blocks and charged tokens a second since the last step, and the seconds in which the
        target read (on a GPU: in which it was told to).
        """
        now = time.perf_counter()
        if self._stepped is not None:
            seconds = now - self._stepped
            self.log("train/blocks_per_second", counts.shape[0] * counts.shape[1] / seconds)
            self.log("train/tokens_per_second", float(counts.sum()) / seconds)
            self.log("train/seconds_reading", self._seconds_reading)
        self._stepped = now

    def block_losses(self, batch: BlockBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Each slot's cross-entropy, whether it is right, and whether it counts, [batch, A, D].

        A slot counts where the text goes on that far and its token is one the drafter may propose.
        """
        device = self._target.device
        texts = [text.to(device) for text in batch.texts]
        anchors = batch.anchors.to(device)
        started = time.perf_counter()
        taps = self._read(batch.indices, texts)
        self._seconds_reading = time.perf_counter() - started
        # Texts shorter than the batch's longest are padded; no anchor's context reaches there.
        padded = self._drop_taps(pad_sequence(taps, batch_first=True), batch.seed)
        if self._flex:  # it is compiled for a length: let there be few
            padded = F.pad(padded, (0, 0, 0, -padded.shape[1] % LENGTHS))
        tokens = pad_sequence(texts, batch_first=True)
        hidden = draft_blocks(
            self.net,
            self._target.embed,
            context=context_of(self.net, padded),
            roots=tokens.gather(1, anchors),
            anchors=anchors,
            flex=self._flex,
        )[:, :, 1:]
        lengths = torch.tensor([len(text) for text in texts], device=device)[:, None, None]
        slots = anchors[..., None] + torch.arange(1, self._depth + 1, device=device)
        ahead = slots.clamp_max(tokens.shape[1] - 1).flatten(1)
        labels = self._rows[tokens.gather(1, ahead)].view(slots.shape)
        counts = (slots < lengths) & (labels >= 0)
        losses = hidden.new_zeros(slots.shape, dtype=torch.float32)
        right = torch.zeros_like(counts)
        charged = head_loss(hidden[counts], self._head, labels[counts])
        losses[counts] = charged.loss
        right[counts] = charged.right
        return losses, right, counts

    def _drop_taps(self, taps: torch.Tensor, seed: int) -> torch.Tensor:
        """Zero whole taps [batch, L, n_taps * H] of single tokens, so that none is relied on.

        Drawn from the batch's own seed: a resumed run must draw what an uninterrupted one did.
        """
        if not (self.training and self._tap_dropout):
            return taps
        count, rate = len(self.net.config.target_layer_ids), self._tap_dropout
        generator = torch.Generator(taps.device).manual_seed(seed)
        drawn = torch.rand(*taps.shape[:2], count, 1, generator=generator, device=taps.device)
        kept = (drawn >= rate).to(taps.dtype) / (1 - rate)
        return (taps.unflatten(-1, (count, -1)) * kept).flatten(-2)

    def _read(self, indices: list[int], texts: list[torch.Tensor]) -> list[torch.Tensor]:
        """Taps [L_i, n_taps * H] of the texts, from the cache where they are known."""
        self._target.tap(self.net.config.target_layer_ids)
        if self._cache is None:
            return self._target.read(texts)
        taps = [self._cache.get(index) for index in indices]
        if new := [place for place, known in enumerate(taps) if known is None]:
            for place, read in zip(new, self._target.read([texts[i] for i in new]), strict=True):
                self._cache.put(indices[place], read)
                taps[place] = read
        return [known.to(self._target.device) for known in taps if known is not None]

    def on_validation_end(self) -> None:
        self._stepped = None  # a validation is no part of a step

    @property
    def monitors(self) -> list[str]:
        """What a validation measures and training may be steered by."""
        return [f"mat/{name}" for name in self._replays]

    def check_replaceable(self, out: Path) -> None:
        """Raise InputError if `out` holds something other than a drafter."""
        dflash_checkpoint.check_replaceable(out)

    def write(self, out: Path, facts: RunFacts) -> None:
        """The network in bf16, and its card."""
        net = copy.deepcopy(self.net).cpu()
        cast_parameters(net, torch.device("cpu"), torch.bfloat16)
        dflash_checkpoint.save(net, out, {"README.md": self._card(out, facts)})

    def finish(self, out: Path, facts: RunFacts) -> None:
        """The card again, with the whole curve."""
        write_atomically(out / "README.md", self._card(out, facts))

    def trained(self, out: Path) -> None:
        """Nothing to draw."""

    def _card(self, out: Path, facts: RunFacts) -> str:
        assert self._data is not None, "built without data"
        texts, tokens = len(self._data.training), self._data.answer_tokens()
        return model_card(out.name, self.net, facts, texts=texts, answer_tokens=tokens)

    @torch.inference_mode()
    def validation_step(self, text: Text, _index: int) -> None:
        drafts = drafts_along(self.net, self._target, text.tokens, start=text.start)
        answer = text.tokens[text.start :].tolist()
        for name, replay in self._replays.items():
            walk = replay(drafts, answer)
            if len(walk.roots):
                self._replayed.append((name, text.source, walk.mat))

    def on_validation_epoch_end(self) -> None:
        rows, self._replayed = self._replayed, []
        if (
            dist.is_available() and dist.is_initialized()
        ):  # ranks have other texts and other sources
            parts: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(parts, rows)
            rows = [row for part in parts for row in part]
        mats = defaultdict(list)
        for name, source, mat in rows:
            mats[f"mat/{name}"].append(mat)
            mats[f"mat_{source}/{name}"].append(mat)
        for key, values in sorted(mats.items()):
            self.log(key, sum(values) / len(values), prog_bar=key in ("mat/chain", "mat/ddtree_16"))

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """By norm. Lightning's own refuses fused optimisers, though bf16 has nothing to unscale."""
        limit = gradient_clip_val or math.inf
        norm = torch.nn.utils.clip_grad_norm_(self.net.parameters(), limit)
        self.log("train/gradient_norm", norm)

    def configure_optimizers(self) -> Any:
        return adamw(
            self.net,
            steps=int(self.trainer.estimated_stepping_batches),
            lr=self._lr,
            weight_decay=self._weight_decay,
            warmup=self._warmup,
            betas=(0.9, 0.95),
            fused=True,
        )


def build(
    target: HFTarget,
    data: ResponseData,
    *,
    layers: int,
    block_size: int,
    mask_token_id: int | None,
    taps: int,
    draft_vocab: int | None,
    warm: bool,
    tap_cache: str | None,
    seed: int,
    **recipe: Any,
) -> DFlashModule:
    """A new drafter in the target's shape, ready to train on `data`.

    `draft_vocab` keeps that many of the commonest tokens (None all); `mask_token_id` None takes the
    embedding row behind the tokenizer's last; `warm` starts from the target's last layers;
    `tap_cache` is a folder for taps: 2 * n_taps * H bytes a token. Raises InputError.
    """
    if mask_token_id is None:
        mask_token_id = len(target.tokenizer)
        if mask_token_id >= target.vocab_size:
            raise InputError(
                f"{target.name} has no embedding row past its tokenizer; set model.mask_token_id "
                "to a token that its text never uses"
            )
    net = new_network(
        target,
        layers=layers,
        block_size=block_size,
        mask_token_id=mask_token_id,
        taps=taps,
        seed=seed,
    )
    if draft_vocab is not None:
        stops = sorted(target.stop_tokens)
        net.draft_tokens = frequent_tokens(data.training, draft_vocab, stops)
    if warm:
        warm_start(net, target.name, data.training[0].tokens)
    cache = None
    if tap_cache is not None:
        width = len(net.config.target_layer_ids) * target.hidden_size
        cache = TapCache(Path(tap_cache), [len(text.tokens) for text in data.training], width)
    if all(len(text.tokens) - text.start <= block_size for text in data.validation):
        raise InputError(
            f"no held-out answer is longer than a block of {block_size}: nothing can be validated; "
            "raise data.held_out, or max_new_tokens when the responses are made"
        )
    return DFlashModule(net.to(target.device), target, data, cache=cache, **recipe)
