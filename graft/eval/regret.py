"""What a budget policy is worth on a machine, by exact replay under its cost table.

Judged against two things that could be had: the best fixed budget, found by a sweep over all of
them on the same responses, and the expected optimum, an upper bound on what any policy can do that
knows the odds of every node, and of those of the places ahead, but not what will come,

    V(i) = min over n of  C(n) + sum_k P(k nodes accepted | n) V(i + 1 + k)

over places i of a response. And against one that could not: hindsight, the same recursion with what
really came instead of its odds. That is luck, not headroom: it beats any policy by far.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numba
import numpy as np

from graft.budgets.cost import CostTable
from graft.budgets.fixed import Fixed
from graft.budgets.reach import Reach
from graft.core.interfaces import BudgetPolicy, TreeBuilder
from graft.data.anchors import AnchoredResponse
from graft.decode.replay import Replay, Trees, Walk, arrivals

Name = TypeVar("Name", str, int)


@dataclass(frozen=True, slots=True, eq=False)
class Laid:
    """A response of A roots with a tree of the largest size S measured at each; D depths."""

    response: AnchoredResponse
    trees: Trees
    odds: np.ndarray  # [A, S, D] that at least k nodes are accepted, by size
    truth: np.ndarray  # [A, S, D] whether they were

    @property
    def tokens(self) -> int:
        """That decoding commits after the first."""
        return len(self.response.response) - 1


def lay(
    responses: Iterable[AnchoredResponse], builder: TreeBuilder, reach: Reach, nodes: np.ndarray
) -> list[Laid]:
    """Build all trees of all responses, once, for the sizes `nodes`."""
    return [_laid(one, builder, reach, nodes) for one in responses]


def _laid(one: AnchoredResponse, builder: TreeBuilder, reach: Reach, nodes: np.ndarray) -> Laid:
    trees = Trees(builder, one.drafts, least=int(nodes[-1]))
    text, depth = np.append(one.response, one.beyond), one.drafts.depth
    roots = range(len(one.response) - 1)
    odds = np.zeros((len(roots), len(nodes), depth))
    truth = np.zeros_like(odds)
    for root in roots:
        tree = trees(root, int(nodes[-1]))
        by_depth = np.zeros((len(tree), depth))
        by_depth[np.arange(1, len(tree)), tree.depths[1:] - 1] = reach(tree)
        odds[root] = np.minimum(np.cumsum(by_depth, 0)[np.minimum(nodes, len(tree) - 1)], 1)
        came = arrivals(tree, text[root + 1 : root + 1 + depth])
        truth[root] = came <= nodes[:, None]
    return Laid(one, trees, np.minimum.accumulate(odds, axis=2), truth)


def walks(
    laid: Sequence[Laid], builder: TreeBuilder, policies: Mapping[Name, BudgetPolicy]
) -> dict[Name, list[Walk]]:
    """Every policy through every response."""
    return {
        name: [
            Replay(builder, policy)(
                one.response.drafts,
                one.response.response,
                one.response.beyond,
                start=len(one.response.prompt),
                trees=one.trees,
            )
            for one in laid
        ]
        for name, policy in policies.items()
    }


def seconds_a_token(laid: Sequence[Laid], walked: Sequence[Walk], cost: CostTable) -> np.ndarray:
    """Of each response [L], under the cost table."""
    return np.array(
        [
            cost.seconds(walk.nodes, len(one.response.prompt) + walk.roots).sum() / one.tokens
            for one, walk in zip(laid, walked, strict=True)
        ]
    )


def ar_seconds_a_token(laid: Sequence[Laid], cost: CostTable) -> np.ndarray:
    """Of plain decoding, [L]."""
    return np.array(
        [cost.ar_seconds(len(one.response.prompt) + np.arange(one.tokens)).mean() for one in laid]
    )


@dataclass(frozen=True)
class Bounds:
    """Seconds a token, means over responses."""

    fixed: float  # of the best fixed size, expected under the calibrated odds
    optimum: float  # of the expected optimum, under the same
    hindsight: float  # with what really came: luck


def bounds(laid: Sequence[Laid], cost: CostTable, nodes: np.ndarray) -> Bounds:
    """What could be had at best: see above."""
    columns = np.searchsorted(cost.nodes, nodes)
    fixed, optimum, hindsight = [], [], []
    for one in laid:
        contexts = len(one.response.prompt) + np.arange(one.tokens)
        costs = np.array([cost.curve(context)[columns] for context in contexts.tolist()])  # [A, S]
        every = [_expected(one.odds[:, s : s + 1], costs[:, s : s + 1]) for s in range(len(nodes))]
        fixed.append(np.array(every) / one.tokens)
        optimum.append(_expected(one.odds, costs) / one.tokens)
        hindsight.append(_expected(one.truth, costs) / one.tokens)
    return Bounds(
        fixed=float(np.mean(fixed, axis=0).min()),
        optimum=float(np.mean(optimum)),
        hindsight=float(np.mean(hindsight)),
    )


@numba.njit(cache=True)
def _expected(odds, costs):
    """Expected seconds from the first root on, the best size [A, S] taken at each."""
    A, S, D = odds.shape
    ahead = np.zeros(A + D + 1)  # nothing is left to do past the end
    for i in range(A - 1, -1, -1):
        best = np.inf
        for s in range(S):
            value, before = costs[i, s], 1.0
            for k in range(D + 1):
                beyond = odds[i, s, k] if k < D else 0.0
                value += (before - beyond) * ahead[i + 1 + k]
                before = beyond
            best = min(best, value)
        ahead[i] = best
    return ahead[0]


def flat(speeds: Mapping[int, float], loss: float = 0.01) -> tuple[int, int]:
    """The smallest and the largest size around the fastest that lose less than `loss`."""
    sizes, most = sorted(speeds), max(speeds.values())
    good = [speeds[n] >= (1 - loss) * most for n in sizes]
    low = high = max(range(len(sizes)), key=lambda i: speeds[sizes[i]])
    while low > 0 and good[low - 1]:
        low -= 1
    while high < len(sizes) - 1 and good[high + 1]:
        high += 1
    return sizes[low], sizes[high]


@dataclass(frozen=True, slots=True, eq=False)
class Judged:
    """One policy over all responses."""

    nodes: np.ndarray  # of all rounds
    mat: float
    pace: np.ndarray  # [L] seconds a token


@dataclass(frozen=True, slots=True, eq=False)
class Regret:
    """All policies under one cost table, and what they are held against."""

    policies: dict[str, Judged]
    fixed: dict[int, float]  # mean seconds a token of every fixed size
    ar: float
    bounds: Bounds

    @property
    def best(self) -> int:
        """The best fixed size of the sweep."""
        return min(self.fixed, key=lambda nodes: self.fixed[nodes])

    def gain(self, name: str) -> float:
        """Tokens/s of a policy over those of the best fixed size, - 1."""
        return self.fixed[self.best] / float(self.policies[name].pace.mean()) - 1


def regret(
    laid: Sequence[Laid],
    builder: TreeBuilder,
    policies: Mapping[str, BudgetPolicy],
    *,
    fixed: Mapping[int, Sequence[Walk]],
    cost: CostTable,
) -> Regret:
    """Walk and price. `fixed` holds the sweep's walks, which no cost changes."""
    walked = walks(laid, builder, policies)
    return Regret(
        policies={
            name: Judged(
                nodes=np.concatenate([walk.nodes for walk in found]),
                mat=float(np.mean([walk.mat for walk in found])),
                pace=seconds_a_token(laid, found, cost),
            )
            for name, found in walked.items()
        },
        fixed={n: float(seconds_a_token(laid, w, cost).mean()) for n, w in fixed.items()},
        ar=float(ar_seconds_a_token(laid, cost).mean()),
        bounds=bounds(laid, cost, np.array(sorted(fixed))),
    )


def swept(laid: Sequence[Laid], builder: TreeBuilder, nodes: np.ndarray) -> dict[int, list[Walk]]:
    """The walks of every fixed size."""
    return walks(laid, builder, {n: Fixed(n) for n in nodes.tolist()})
