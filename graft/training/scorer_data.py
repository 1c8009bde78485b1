"""Edges to train a scorer on, from dense anchors, from recorded rounds, or both.

Anchors give the fan behind every true parent that a tree could hold: one whose ancestors are all
among the candidates. Rounds give the fan behind every node that was really verified, on the
accepted path or off it. A step's batch is a function of (seed, step, rank) alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from torch.utils.data import DataLoader

from graft.core.errors import InputError
from graft.core.types import Draft
from graft.data.anchors import AnchoredResponse, Anchors
from graft.data.collected import MODELS, difference
from graft.data.rounds import RecordedRound, Rounds
from graft.scorer.edges import Edges
from graft.targets.hf import HFTarget
from graft.training.batches import StepBatches


@dataclass(frozen=True, slots=True, eq=False)
class Fans:
    """n fans under one parent each, and what the target made of them, in small types."""

    depths: torch.Tensor  # [n] int8, of the children
    parents: torch.Tensor  # [n] int32
    grandparents: torch.Tensor  # [n] int32
    parent_ranks: torch.Tensor  # [n] int16
    grand_ranks: torch.Tensor  # [n] int16
    candidates: torch.Tensor  # [n, K] int32
    log_probs: torch.Tensor  # [n, K] float32
    hidden: torch.Tensor  # [n, H] int8, H = 0 if they were not kept
    hidden_scale: torch.Tensor  # [n] float32
    target_logits: torch.Tensor  # [n, K] float32
    target_log_norm: torch.Tensor  # [n] float32
    taken: torch.Tensor  # [n] int16, rank of the target's choice, K if it is no candidate
    wrong: torch.Tensor  # [n] int32, another candidate for parent, -1 at depth 1

    def __len__(self) -> int:
        return len(self.depths)

    def __getitem__(self, index: torch.Tensor) -> Fans:
        return Fans(*(getattr(self, field.name)[index] for field in fields(self)))

    @classmethod
    def concatenate(cls, parts: list[Fans]) -> Fans:
        """One behind the other. Empties `parts`: their memory goes column by column."""
        columns = [[getattr(part, field.name) for part in parts] for field in fields(cls)]
        parts.clear()
        columns.reverse()
        return cls(*(torch.cat(columns.pop()) for _ in fields(cls)))

    def edges(self, device: torch.device) -> Edges:
        """As a scorer takes them, P = 1."""
        hidden = self.hidden.to(device).float() * self.hidden_scale.to(device)[:, None]
        return Edges(
            depths=self.depths.to(device).long(),
            parents=self.parents.to(device).long()[:, None],
            grandparents=self.grandparents.to(device).long()[:, None],
            parent_ranks=self.parent_ranks.to(device).long()[:, None],
            grand_ranks=self.grand_ranks.to(device).long()[:, None],
            candidates=self.candidates.to(device).long(),
            log_probs=self.log_probs.to(device),
            hidden=hidden,
        )


def fans_of_anchors(response: AnchoredResponse, rng: np.random.Generator) -> Fans:
    """Behind every true parent that is reachable through candidates."""
    drafts, ranks = response.drafts, response.ranks()  # [A, D]
    A, D, K = drafts.tokens.shape
    text = np.append(response.response, response.beyond)
    reachable = np.ones((A, D), bool)
    reachable[:, 1:] = (ranks[:, :-1] < K).cumprod(1).astype(bool)
    a, d = np.nonzero(reachable)  # d is 0-based
    above = np.maximum(d - 1, 0)
    parent_ranks = np.where(d > 0, ranks[a, above], 0)
    other = (parent_ranks + rng.integers(1, max(2, K), len(a))) % K  # never the true one, if K > 1
    states, scale = _quantised(drafts.hidden[a, d])
    return Fans(
        depths=torch.from_numpy((d + 1).astype(np.int8)),
        parents=_ints(text[a + d]),
        grandparents=_ints(text[a + above]),
        parent_ranks=_shorts(parent_ranks),
        grand_ranks=_shorts(np.where(d > 1, ranks[a, np.maximum(d - 2, 0)], 0)),
        candidates=_ints(drafts.tokens[a, d]),
        log_probs=torch.from_numpy(drafts.log_probs[a, d]),
        hidden=states,
        hidden_scale=scale,
        target_logits=torch.from_numpy(response.target_logits[a, d]),
        target_log_norm=torch.from_numpy(response.target_log_norm[a + d]),
        taken=_shorts(ranks[a, d]),
        wrong=_ints(np.where(d > 0, drafts.tokens[a, above, other], -1)),
    )


def fans_of_round(round: RecordedRound, rng: np.random.Generator) -> Fans:
    """Behind every node of the verified tree that has a depth below it."""
    tree, tokens = round.tree, round.draft.tokens
    D, K = tokens.shape
    (nodes,) = np.nonzero(tree.depths < D)
    d = tree.depths[nodes]
    own = np.array([_rank(round.draft, tree.depths[n], tree.tokens[n]) for n in range(len(tree))])
    parents = np.maximum(tree.parents[nodes], 0)
    choice = tokens[d] == round.target_argmax[nodes][:, None]
    other = (own[nodes] + rng.integers(1, max(2, K), len(nodes))) % K
    n = len(nodes)
    return Fans(
        depths=torch.from_numpy((d + 1).astype(np.int8)),
        parents=_ints(tree.tokens[nodes]),
        grandparents=_ints(tree.tokens[parents]),
        parent_ranks=_shorts(own[nodes]),
        grand_ranks=_shorts(np.where(d > 0, own[parents], 0)),
        candidates=_ints(tokens[d]),
        log_probs=torch.from_numpy(round.draft.log_probs[d].copy()),
        hidden=torch.empty(n, 0, dtype=torch.int8),
        hidden_scale=torch.empty(n).fill_(1),
        target_logits=torch.from_numpy(round.target_logits[nodes]),
        target_log_norm=torch.from_numpy(round.target_log_norm[nodes]),
        taken=_shorts(np.where(choice.any(-1), choice.argmax(-1), K)),
        wrong=_ints(np.where(d > 0, tokens[np.maximum(d - 1, 0), other], -1)),
    )


class EdgeBatches(StepBatches[Fans]):
    """Fans drawn at random, anew for every step."""

    def __init__(self, fans: Fans, *, batch_size: int, steps: int, seed: int, rank: int) -> None:
        super().__init__(steps)
        self._fans, self._batch_size, self._seed, self._rank = fans, batch_size, seed, rank

    def batch(self, step: int) -> Fans:
        rng = np.random.default_rng([self._seed, step, self._rank])
        return self._fans[torch.from_numpy(rng.integers(0, len(self._fans), self._batch_size))]


class EdgeData(L.LightningDataModule):
    """Collections of one target and drafter, some prompts held out for validation.

    `use` names what is trained on: anchors, rounds or both; validation replays anchors. With
    `development` the prompts of these sets are kept for validation, and none of them is trained on.
    Raises InputError.
    """

    def __init__(
        self,
        target: HFTarget,
        *,
        collected: str | Sequence[str],
        use: Sequence[str],
        held_out: int,
        development: Sequence[str],
        batch_size: int,
        seed: int,
    ) -> None:
        super().__init__()
        folders = [Path(f) for f in ([collected] if isinstance(collected, str) else collected)]
        if not use or set(use) - {"anchors", "rounds"}:
            raise InputError(f"data.use={list(use)}: choose from anchors and rounds")
        if batch_size < 1:
            raise InputError(f"data.batch_size must be at least 1, not {batch_size}")
        anchors = Anchors(folders)
        self.made_by, self._batch_size, self._seed = anchors.made_by, batch_size, seed
        if (theirs := self.made_by["target"]["fingerprint"]) != target.fingerprint:
            raise InputError(
                f"{folders[0]} was collected with another target ({theirs}, not "
                f"{target.fingerprint}); scripts/collect.py collects with this one"
            )
        sources = anchors.sources()
        held = _held_out(sources, held_out, development)
        rng = np.random.default_rng(seed)
        self.validation: list[AnchoredResponse] = []
        parts: list[Fans] = []
        for response in anchors:
            if response.prompt_id in held:
                self.validation.append(response)
            elif response.source not in development and "anchors" in use:
                parts.append(fans_of_anchors(response, rng))
        if "rounds" in use:
            rounds = Rounds(folders)
            if apart := difference(rounds.made_by, self.made_by, MODELS):
                raise InputError(
                    f"the rounds in {folders[0]} have another {apart} than the anchors"
                )
            for round in rounds:
                if round.prompt_id not in held and round.source not in development:
                    parts.append(fans_of_round(round, rng))
        if not parts:
            raise InputError("data.held_out and data.development leave nothing to train on")
        if len({part.hidden.shape[1] for part in parts}) > 1:
            parts = [_without_states(part) for part in parts]
        self.training = Fans.concatenate(parts)
        if (self.training.taken == self.training.taken[0]).all():
            raise InputError("every fan has the same outcome: nothing can be learned from them")
        self.validation_fans = Fans.concatenate(
            [fans_of_anchors(response, rng) for response in self.validation]
        )
        self.prompts = sorted(
            p for p, s in sources.items() if p not in held and s not in development
        )
        digest = hashlib.sha256(repr((sorted(sources), len(self.training))).encode())
        self.digest = digest.hexdigest()[:12]

    def describe(self) -> str:
        """What is trained and validated on, in a few words."""
        edges = self.training.candidates.numel()
        return (
            f"{len(self.training)} fans, {edges} edges; {len(self.validation)} responses held out"
        )

    def train_dataloader(self) -> EdgeBatches:
        trainer = self.trainer
        assert trainer is not None
        return EdgeBatches(
            self.training,
            batch_size=self._batch_size,
            steps=trainer.max_steps * trainer.accumulate_grad_batches,
            seed=self._seed,
            rank=trainer.global_rank,
        )

    def val_dataloader(self) -> DataLoader[AnchoredResponse]:
        assert self.trainer is not None
        mine = self.validation[self.trainer.global_rank :: self.trainer.world_size]
        if not mine:
            raise InputError(
                f"data.held_out: {len(self.validation)} responses are less than one a device"
            )
        return DataLoader(mine, batch_size=None)  # type: ignore[arg-type]


def _held_out(sources: Mapping[str, str], count: int, development: Sequence[str]) -> set[str]:
    """Prompts to validate on: `count`, as many of each set as there are (a hash chooses).

    `sources` has the set of every prompt.
    """
    by_source: dict[str, list[str]] = {}
    for prompt, source in sources.items():
        by_source.setdefault(source, []).append(prompt)
    chosen_from = {s: p for s, p in by_source.items() if not development or s in development}
    if missing := set(development) - set(by_source):
        raise InputError(
            f"data.development names {', '.join(sorted(missing))}; there are "
            f"{', '.join(sorted(by_source))}"
        )
    queues = [
        sorted(prompts, key=lambda p: hashlib.sha256(p.encode()).digest())
        for _, prompts in sorted(chosen_from.items())
    ]
    order = [q[i] for i in range(max(map(len, queues))) for q in queues if i < len(q)]
    if not 0 < count < len(sources):
        raise InputError(
            f"data.held_out={count} leaves nothing to train on or nothing to validate on: there "
            f"are {len(sources)} prompts"
        )
    return set(order[:count])


def _rank(draft: Draft, depth: int, token: int) -> int:
    if depth == 0:
        return 0
    found = np.flatnonzero(draft.tokens[depth - 1] == token)
    return int(found[0]) if len(found) else 0


def _without_states(fans: Fans) -> Fans:
    """Rounds have no states, so where both are used none has."""
    values: dict[str, Any] = {field.name: getattr(fans, field.name) for field in fields(fans)}
    values["hidden"] = fans.hidden[:, :0]
    return Fans(**values)


def _quantised(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """States [n, H] as int8 and the scale of each."""
    if states.shape[1] == 0:
        return states.to(torch.int8), torch.ones(len(states))
    scale = states.abs().amax(-1).clamp_min(1e-12) / 127
    return (states / scale[:, None]).round().to(torch.int8), scale


def _ints(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(x.astype(np.int32))


def _shorts(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(x.astype(np.int16))
