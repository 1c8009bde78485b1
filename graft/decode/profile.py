"""Measure what rounds cost on the real execution path: the decode loop itself, at dealt budgets.

Every repetition decodes a little from a text of every context length, once plainly and once with
a budget of each size in a shuffled order, and keeps the times of the loop's own stages. So sizes,
contexts and plain decoding are interleaved, and a busy neighbour slows all of them alike. What it
does to a whole repetition is divided out before medians are taken (one sweep of Tukey's median
polish): the medians of two halves of a run then agree two to three times as well on a shared
machine. What is made of them is in budgets/cost.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from graft.core.errors import InputError
from graft.core.interfaces import ANY_CONTEXT, Drafter, Target, TreeBuilder
from graft.core.types import DraftTree, Request, Round, RoundState
from graft.decode import autoregressive, loop

PLAIN = 8  # steps of plain decoding a repetition


def profile(
    *,
    target: Target,
    drafter: Drafter,
    builder: TreeBuilder,
    text: Sequence[int],
    contexts: Sequence[int],
    sizes: Sequence[int],
    repeats: int,
    seed: int = 0,
    on_repeat: Callable[[], None] = lambda: None,
) -> dict[str, np.ndarray]:
    """Median seconds by context length and drafted nodes, as the arrays of a `CostTable`.

    `text` is real text of at least the longest context: what a mixture of experts reads depends on
    it. A context is where the dealt rounds begin; they move on by a few tokens each. A size that
    the builder cannot fill is that of the tree it built. Raises InputError.
    """
    room = (len(sizes) + 2) * (drafter.depth + 1)  # tokens that the dealt rounds may add
    longest = target.max_context - room
    if max(contexts) > longest:
        raise InputError(
            f"contexts={list(contexts)}: the target's context of {target.max_context} leaves "
            f"{longest} tokens once rounds are added"
        )
    if max(contexts) > len(text):
        raise InputError(f"contexts={list(contexts)}: the text has {len(text)} tokens only")
    order = random.Random(seed)
    rounds: dict[int, list[dict[int, dict[str, float]]]] = {context: [] for context in contexts}
    steps: dict[int, list[float]] = {context: [] for context in contexts}
    for repeat in range(-1, repeats):  # the first is a warm-up
        for context in contexts:
            request = Request(text[:context], room)
            plain = autoregressive.generate(Request(text[:context], PLAIN + 1), target=target)
            deck = order.sample(list(sizes), len(sizes))
            dealt = _dealt(request, deck, target=target, drafter=drafter, builder=builder)
            if repeat >= 0:
                steps[context].append(plain.decode_seconds / PLAIN)
                rounds[context].append(dealt)
        on_repeat()
    return _medians(rounds, steps)


class _Dealer:
    """Deals the budgets of a deck, then ends the response."""

    max_context = ANY_CONTEXT

    def __init__(self, deck: Sequence[int]) -> None:
        self._deck = list(deck)

    def allocate(self, state: RoundState) -> int:
        if not self._deck:
            raise _DealtError
        return self._deck.pop()

    def trim(self, tree: DraftTree, context_length: int) -> int:
        return len(tree) - 1


class _DealtError(Exception):
    """All budgets are dealt."""


def _dealt(request: Request, deck: Sequence[int], **parts: Any) -> dict[int, dict[str, float]]:
    """Seconds by stage of one round a budget, by drafted nodes.

    One round comes before them and is dropped: the drafter reads the whole prompt in it.
    """
    rounds: list[Round] = []
    dealer = _Dealer([*deck, deck[0]])
    with suppress(_DealtError):
        loop.generate(request, **parts, budget=dealer, on_round=rounds.append)
    return {len(one.tree) - 1: one.seconds for one in rounds[1:]}


def _medians(
    rounds: Mapping[int, Sequence[Mapping[int, Mapping[str, float]]]],
    steps: Mapping[int, Sequence[float]],
) -> dict[str, np.ndarray]:
    """Of rounds by context, repetition, nodes and stage."""
    contexts = sorted(rounds)
    nodes = sorted(set.intersection(*(set(dealt) for c in contexts for dealt in rounds[c])))

    found: dict[str, list[Any]] = {key: [] for key in ("ar", "draft", "verify", "host", "spread")}
    for context in contexts:
        parts = np.array([[split(dealt[n]) for n in nodes] for dealt in rounds[context]])
        whole = parts.sum(-1)  # [repeats, S]
        pace = np.median(whole / np.median(whole, axis=0), axis=1)  # of each repetition
        draft, verify, host = np.moveaxis(parts / pace[:, None, None], -1, 0)
        low, middle, high = np.quantile(whole / pace[:, None], [0.25, 0.5, 0.75], axis=0)
        found["ar"].append(np.median(np.array(steps[context]) / pace))
        found["draft"].append(np.median(draft))
        found["verify"].append(np.median(verify, axis=0))
        found["host"].append(np.median(host, axis=0))
        found["spread"].append((high - low) / middle)
    arrays = {name: np.array(rows) for name, rows in found.items()}
    return {"contexts": np.array(contexts), "nodes": np.array(nodes), **arrays}


def split(seconds: Mapping[str, float]) -> tuple[float, float, float]:
    """A round by stage: the drafter's pass, the target's, and all else."""
    draft, verify = seconds["propose"], seconds["verify"]
    return draft, verify, sum(seconds.values()) - draft - verify
