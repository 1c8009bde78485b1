"""Rounds as the fits of scripts/fit.py want them: what a tree held, and when the target's own
tokens came in its admission order. From recorded rounds, each seen up to its own budget; or from
dense anchors, where a tree can be built for the largest budget at every round of a walk.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from graft.budgets.observed import Observed
from graft.core.interfaces import TreeBuilder
from graft.core.types import DraftTree, RoundState
from graft.data.anchors import AnchoredResponse
from graft.data.rounds import RecordedRound
from graft.decode.replay import NEVER, Replay, Trees, arrivals


@dataclass(frozen=True, eq=False)
class Watched:
    """R rounds; nodes are padded to the largest tree, N drafted ones."""

    observed: Observed
    prompts: np.ndarray  # [R] str, the prompt of each round
    parents: np.ndarray  # [R, N] int16, numbers of nodes, 0 the root; 0 in the padding
    depths: np.ndarray  # [R, N] int8; 0 in the padding
    log_scores: np.ndarray  # [R, N] float32, of paths

    def __len__(self) -> int:
        return len(self.observed)

    def __getitem__(self, rows: np.ndarray) -> Watched:
        return Watched(
            self.observed[rows],
            self.prompts[rows],
            self.parents[rows],
            self.depths[rows],
            self.log_scores[rows],
        )

    @property
    def hits(self) -> np.ndarray:
        """Which nodes are the target's own tokens behind its own tokens: [R, N]."""
        came = np.where(
            self.observed.arrivals <= self.observed.seen[:, None], self.observed.arrivals, 0
        )
        found = np.zeros((len(self), self.parents.shape[1] + 1), bool)
        np.put_along_axis(found, came, True, axis=1)
        return found[:, 1:]

    def edges(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Log scores, depths and outcomes of the edges below reached nodes: [E] each."""
        hits = self.hits
        reached = np.concatenate([np.ones((len(self), 1), bool), hits], 1)
        scores = np.concatenate([np.zeros((len(self), 1), np.float32), self.log_scores], 1)
        below = np.take_along_axis(reached, self.parents.astype(np.int64), 1) & (self.depths > 0)
        step = self.log_scores - np.take_along_axis(scores, self.parents.astype(np.int64), 1)
        return step[below].astype(np.float64), self.depths[below].astype(np.int64), hits[below]


def text_of(rows: Iterable[AnchoredResponse | RecordedRound], length: int) -> list[int]:
    """What the target said, in the order collected, from the beginning again where it ends."""
    text: list[int] = []
    again = itertools.cycle(rows)
    while len(text) < length:
        one = next(again)
        said = one.tree.tokens[one.path] if isinstance(one, RecordedRound) else one.response
        text += said.tolist()
    return text


def watch_rounds(rounds: Iterable[RecordedRound]) -> Watched:
    """Recorded rounds, with the state that was recorded."""

    def facts() -> Iterator[tuple[Any, ...]]:
        for one in rounds:
            depth = len(one.draft.tokens)
            came = np.full(depth, NEVER, np.int64)
            came[: len(one.path) - 1] = one.path[1:]
            state = (one.conf, one.degen, one.hist)
            yield one.prompt_id, (one.prompt_id, one.turn), state, one.tree, one.budget, came

    return _watched(facts())


def watch_anchors(
    responses: Iterable[AnchoredResponse],
    builder: TreeBuilder,
    *,
    pace: Replay,
    largest: int,
    window: int,
) -> Watched:
    """The rounds that `pace` would take through the responses, with trees of `largest` nodes."""

    def facts() -> Iterator[tuple[Any, ...]]:
        for one in responses:
            trees = Trees(builder, one.drafts, least=largest)
            text, depth = np.append(one.response, one.beyond), one.drafts.depth
            start = len(one.prompt)
            walk = pace(one.drafts, one.response, one.beyond, start=start, trees=trees)
            accepted = walk.accepted.tolist()
            for i, root in enumerate(walk.roots):
                state = RoundState(one.drafts[root], start + root, accepted[:i])
                tree = trees(root, largest)
                came = arrivals(tree, text[root + 1 : root + 1 + depth])
                seen = (state.conf, state.degen, state.hist(window))
                yield one.prompt_id, (one.prompt_id, one.turn), seen, tree, largest, came

    return _watched(facts())


def _watched(
    facts: Iterable[tuple[str, Any, tuple[float, ...], DraftTree, int, np.ndarray]],
) -> Watched:
    """Of prompt, response, state, tree, the budget it was built for, and arrivals.

    A tree smaller than its budget has all nodes that there are: nothing is hidden beyond them.
    """
    order: dict[Any, int] = {}
    prompts, owners, states, seen, came = [], [], [], [], []
    nodes: dict[str, list[np.ndarray]] = {"parents": [], "depths": [], "log_scores": []}
    for prompt, key, state, tree, budget, arrived in facts:
        # Packed at once: a tree's mask is N x N.
        prompts.append(prompt)
        owners.append(order.setdefault(key, len(order)))
        states.append(state)
        seen.append(budget)
        came.append(arrived)
        nodes["parents"].append(tree.parents[1:].astype(np.int16))
        nodes["depths"].append(tree.depths[1:].astype(np.int8))
        nodes["log_scores"].append(tree.log_scores[1:].astype(np.float32))

    def padded(rows: list[np.ndarray]) -> np.ndarray:
        out = np.zeros((len(rows), max(map(len, rows))), rows[0].dtype)
        for row, values in enumerate(rows):
            out[row, : len(values)] = values
        return out

    observed = Observed(
        arrivals=np.stack(came),
        seen=np.array(seen),
        states=np.array(states),
        responses=np.array(owners),
    )
    return Watched(observed, np.array(prompts), **{k: padded(rows) for k, rows in nodes.items()})
