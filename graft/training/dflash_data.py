"""Batches for training a drafter: texts of the target and random anchors in their responses.

A step's batch is a function of (seed, step, rank) alone. So a resumed run sees what an
uninterrupted one would have seen, and DDP's ranks split one global order.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import lightning as L
import numpy as np
import torch
from torch.utils.data import DataLoader

from graft.core.errors import InputError
from graft.data.responses import TokenizedResponse, read_responses
from graft.targets.hf import HFTarget
from graft.training.batches import StepBatches

PROBED = 8  # texts that the target rereads when files do not say who wrote them
LEAST_AGREEMENT = 0.6  # of their tokens it must choose itself; its own greedy text has 0.98


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and its answer, cut to the longest length trained on."""

    source: str
    tokens: torch.Tensor  # [L] int64
    start: int  # position of the first answer token


@dataclass(frozen=True, slots=True, eq=False)
class BlockBatch:
    """Texts and the positions of their anchors."""

    indices: list[int]  # of the texts, in the training set
    texts: list[torch.Tensor]  # [L_i] int64
    anchors: torch.Tensor  # [batch, A] int64, ascending
    seed: int = 0  # of what else is drawn for this batch


def make_texts(
    responses: Sequence[TokenizedResponse], *, max_length: int, vocab_size: int
) -> list[Text]:
    """Texts with at least two answer tokens, the least a block can learn from.

    Raises InputError for tokens that the target does not have, or if nothing is left.
    """
    texts = []
    for row in responses:
        tokens = torch.tensor([*row.prompt, *row.response])[:max_length]
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
            raise InputError(
                f"response {row.id} holds token {int(tokens.max())}, but the target's vocabulary "
                f"ends at {vocab_size - 1}: it was made with another tokenizer"
            )
        if len(tokens) - len(row.prompt) >= 2:
            texts.append(Text(row.source, tokens, len(row.prompt)))
    if not texts:
        raise InputError(
            f"none of the {len(responses)} responses has two answer tokens within "
            f"data.max_length={max_length}: nothing can be anchored"
        )
    return texts


def split(
    responses: Sequence[TokenizedResponse], held_out: int
) -> tuple[list[TokenizedResponse], list[TokenizedResponse]]:
    """Training and validation parts, by prompt id (a hash decides: no seed moves a prompt)."""
    order = sorted(responses, key=lambda row: hashlib.sha256(row.id.encode()).digest())
    if not 0 < held_out < len(order):
        raise InputError(
            f"data.held_out={held_out} leaves nothing to train on or nothing to validate on: "
            f"there are {len(order)} responses"
        )
    chosen = {row.id for row in order[:held_out]}
    return [row for row in order if row.id not in chosen], order[:held_out]


class BlockBatches(StepBatches[BlockBatch]):
    """Texts of shuffled epochs, which ranks deal among themselves, and anchors in them."""

    def __init__(
        self,
        texts: Sequence[Text],
        *,
        batch_size: int,
        anchors: int,
        steps: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if anchors < 1 or batch_size < 1:
            raise InputError("data.anchors and data.batch_size must be at least 1")
        super().__init__(steps)
        self._texts, self._batch_size, self._anchors = texts, batch_size, anchors
        self._seed, self._rank, self._world_size = seed, rank, world_size

    def batch(self, step: int) -> BlockBatch:
        """The batch of a step: the next texts of a shuffled epoch, anchors drawn afresh."""
        first = (step * self._world_size + self._rank) * self._batch_size
        indices = [self._index(place) for place in range(first, first + self._batch_size)]
        texts = [self._texts[index] for index in indices]
        rng = np.random.default_rng([self._seed, step, self._rank])
        anchors = [_draw_anchors(text, self._anchors, rng) for text in texts]
        return BlockBatch(
            indices,
            [text.tokens for text in texts],
            torch.from_numpy(np.stack(anchors)),
            seed=int(rng.integers(2**31)),
        )

    def _index(self, place: int) -> int:
        epoch, place = divmod(place, len(self._texts))
        order = np.random.default_rng([self._seed, epoch]).permutation(len(self._texts))
        return int(order[place])


def _draw_anchors(text: Text, count: int, rng: np.random.Generator) -> np.ndarray:
    """`count` positions that an answer token follows, ascending; short answers repeat some."""
    places = np.arange(text.start, len(text.tokens) - 1)
    return np.sort(rng.choice(places, count, replace=count > len(places)))


class ResponseData(L.LightningDataModule):
    """Responses of files and folders, some prompts held out for validation."""

    def __init__(
        self,
        target: HFTarget,
        *,
        responses: Sequence[str],
        held_out: int,
        max_length: int,
        batch_size: int,
        anchors: int,
        seed: int,
    ) -> None:
        super().__init__()
        rows, marked = read_responses([Path(path) for path in responses], target.fingerprint)
        if not 2 <= max_length <= target.max_context:
            raise InputError(
                f"data.max_length must lie in 2..{target.max_context}, the target's context, not "
                f"{max_length}"
            )
        self.digest = hashlib.sha256(repr([row.id for row in rows]).encode()).hexdigest()[:12]
        training, validation = split(rows, held_out)
        sizes = {"max_length": max_length, "vocab_size": target.vocab_size}
        self.training = make_texts(training, **sizes)
        self.validation = make_texts(validation, **sizes)
        self._batch = {"batch_size": batch_size, "anchors": anchors, "seed": seed}
        if not marked:
            check_written_by(target, self.training[:PROBED])

    def train_dataloader(self) -> BlockBatches:
        trainer = self.trainer
        assert trainer is not None
        steps = trainer.max_steps * trainer.accumulate_grad_batches
        ranks = {"rank": trainer.global_rank, "world_size": trainer.world_size}
        return BlockBatches(self.training, steps=steps, **self._batch, **ranks)

    def val_dataloader(self) -> DataLoader[Text]:
        assert self.trainer is not None
        mine = self.validation[self.trainer.global_rank :: self.trainer.world_size]
        if not mine:
            raise InputError(f"data.held_out={len(self.validation)} is less than one text a device")
        return DataLoader(mine, batch_size=None)  # type: ignore[arg-type]

    def describe(self) -> str:
        """What is trained and validated on, in a few words."""
        return (
            f"{len(self.training)} responses, {sum(self.answer_tokens().values())} answer tokens; "
            f"{len(self.validation)} held out"
        )

    def answer_tokens(self) -> dict[str, int]:
        """Answer tokens trained on, by source."""
        counts: Counter[str] = Counter()
        for text in self.training:
            counts[text.source] += len(text.tokens) - text.start
        return dict(sorted(counts.items()))


def check_written_by(target: HFTarget, texts: Sequence[Text]) -> None:
    """Refuse text that this target would not have written (InputError, with the share)."""
    right = total = 0
    for text, chosen in zip(texts, target.choices([t.tokens for t in texts]), strict=True):
        right += int((chosen.cpu()[text.start - 1 : -1] == text.tokens[text.start :]).sum())
        total += len(text.tokens) - text.start
    if right < LEAST_AGREEMENT * total:
        raise InputError(
            f"the responses do not read like {target.name}'s own: it would have chosen only "
            f"{right / total:.0%} of their tokens itself. A drafter learns its own target's text; "
            "scripts/respond.py makes it"
        )


def frequent_tokens(texts: Sequence[Text], count: int, always: Sequence[int]) -> torch.Tensor:
    """The `count` commonest tokens, ascending; a prompt's count half, as answers quote them."""
    largest = max(*always, *(int(text.tokens.max()) for text in texts), 0)
    counts = torch.zeros(largest + 1)
    for text in texts:
        counts += torch.bincount(text.tokens, minlength=len(counts)) / 2
        counts += torch.bincount(text.tokens[text.start :], minlength=len(counts)) / 2
    counts[list(always)] = torch.inf
    best = counts.topk(min(count, int((counts > 0).sum()))).indices
    return best.sort().values


def rows_of(draft_tokens: torch.Tensor | None, vocab_size: int) -> torch.Tensor:
    """[V]: the head row of each token, -1 for tokens that the drafter does not propose."""
    if draft_tokens is None:
        return torch.arange(vocab_size)
    rows = torch.full((vocab_size,), -1)
    rows[draft_tokens] = torch.arange(len(draft_tokens))
    return rows
