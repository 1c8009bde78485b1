"""Methods side by side on dense anchors, exactly and without a model: tokens a round, where rounds
end and why, and what that is worth on a machine.

A round that stops short of the full depth has one failing token, the target's own behind the path.
It is not among the K candidates of its depth, or it is but was given no node (budget), or it is a
node, only under another parent (mismatch). DESIGN section 2 has the definitions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from graft.budgets.cost import CostTable
from graft.data.anchors import AnchoredResponse, Anchors
from graft.data.rounds import Rounds
from graft.decode.replay import Replay, Walk
from graft.eval.bootstrap import interval, resampled_means
from graft.eval.fate import KINDS

RANKS = ((0, 0), (1, 1), (2, 3), (4, 7), (8, None))  # first and last of each bin


@dataclass(frozen=True, slots=True, eq=False)
class Replayed:
    """One response under one method; R rounds."""

    prompt_id: str
    source: str
    start: int  # tokens of the prompt
    tokens: int  # that decoding commits after the first, up to the response's end
    walk: Walk
    fates: np.ndarray  # [R], indices into KINDS
    taken: np.ndarray  # [D, K] accepted tokens by depth and rank among the drafter's candidates

    def seconds(self, cost: CostTable) -> float:
        """Of all rounds, under a cost table."""
        return float(cost.seconds(self.walk.nodes, self.start + self.walk.roots).sum())


def replay_all(
    responses: Iterable[AnchoredResponse], methods: Mapping[str, Replay]
) -> dict[str, list[Replayed]]:
    """Every method on every response."""
    found: dict[str, list[Replayed]] = {name: [] for name in methods}
    for response in responses:
        ranks = response.ranks()
        for name, method in methods.items():
            walk = method(
                response.drafts, response.response, response.beyond, start=len(response.prompt)
            )
            found[name].append(
                Replayed(
                    prompt_id=response.prompt_id,
                    source=response.source,
                    start=len(response.prompt),
                    tokens=len(response.response) - 1,
                    walk=walk,
                    fates=fates(walk, ranks, response.drafts.tokens.shape[2]),
                    taken=taken(walk, ranks, response.drafts.tokens.shape[2]),
                )
            )
    return found


def fates(walk: Walk, ranks: np.ndarray, candidates: int) -> np.ndarray:
    """Why each round ended, as indices into KINDS; `ranks` [A, D] of the text's own tokens."""
    depth = ranks.shape[1]
    failing = ranks[walk.roots, np.minimum(walk.accepted, depth - 1)]
    kinds = np.where(failing < candidates, KINDS.index("budget"), KINDS.index("not_drafted"))
    kinds[walk.elsewhere] = KINDS.index("mismatch")
    kinds[walk.accepted == depth] = KINDS.index("cap")
    return kinds


def taken(walk: Walk, ranks: np.ndarray, candidates: int) -> np.ndarray:
    """Accepted tokens by depth and rank [D, K]."""
    counts = np.zeros((ranks.shape[1], candidates + 1), np.int64)
    for depth in range(ranks.shape[1]):
        roots = walk.roots[walk.accepted > depth]
        np.add.at(counts[depth], ranks[roots, depth], 1)
    return counts[:, :candidates]


@dataclass
class Agreement:
    """How far replay is what really happened."""

    responses: int = 0  # that were recorded and have anchors
    parted: int = 0  # of them, whose text became another: near-ties flip in bf16
    rounds: int = 0  # recorded while the text was the same and all rounds before were as replayed
    same: int = 0  # of them, that accepted as many nodes as replay says


def agreement(anchors: Anchors, rounds: Rounds, method: Replay) -> Agreement:
    """Compare recorded rounds with the walk of the same method over the same responses."""
    recorded, found = rounds.responses(), Agreement()
    for response in anchors:
        rows = recorded.get((response.prompt_id, response.turn), range(0))
        if not rows:
            continue
        found.responses += 1
        text = np.append(response.response, response.beyond)
        walk = method(
            response.drafts, response.response, response.beyond, start=len(response.prompt)
        )
        for row, root, accepted in zip(rows, walk.roots, walk.accepted, strict=False):
            real = rounds[row]
            said = np.append(real.tree.tokens[real.path], real.bonus)
            expected = text[root : root + len(said)]  # shorter at the very end
            if (said[: len(expected)] != expected).any():
                found.parted += 1
                break
            found.rounds += 1
            if len(real.path) - 1 != accepted:
                break
            found.same += 1
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Summary:
    """A method over all responses. Intervals are 95 % bootstrap intervals over prompts."""

    name: str
    responses: int
    rounds: int
    mat: float  # mean over rounds, then over responses
    mat_interval: tuple[float, float]
    pooled: float  # tokens / rounds
    gain: float  # MAT over the baseline's - 1
    gain_interval: tuple[float, float]
    mat_by_source: dict[str, float]
    nodes: float  # drafted, mean over rounds
    mismatch: float  # of the rounds that fail before the full depth
    loss: dict[str, float]  # share of the rounds by fate; sums to 1
    acceptance: list[float]  # of the rounds that get to depth d - 1, those that get to d
    by_rank: list[float]  # of the accepted tokens, by bin of RANKS
    by_depth_and_rank: list[list[float]]  # [D][K] as `acceptance`, by the accepted token's rank
    tokens_per_second: float | None  # under the cost table: 1 / the mean time per output token, of
    # the responses that end within its contexts
    speedup: float | None  # AR's time per output token / this mean


def summarise(
    found: Mapping[str, Sequence[Replayed]],
    *,
    baselines: Mapping[str, str],
    cost: CostTable | None = None,
    seed: int = 0,
) -> list[Summary]:
    """One summary a method; `baselines` names the one that each method's gain is over."""
    names = list(found)
    prompts = [one.prompt_id for one in found[names[0]]]
    mats = np.array([[one.walk.mat for one in found[name]] for name in names]).T
    samples = resampled_means(mats, prompts, seed=seed)  # [resamples, methods]
    base = {name: names.index(baselines[name]) for name in names}
    return [
        _summary(
            name,
            found[name],
            samples=samples[:, i],
            base_samples=samples[:, base[name]],
            base=float(mats[:, base[name]].mean()),
            cost=cost,
        )
        for i, name in enumerate(names)
    ]


def _summary(
    name: str,
    mine: Sequence[Replayed],
    *,
    samples: np.ndarray,
    base_samples: np.ndarray,
    base: float,
    cost: CostTable | None,
) -> Summary:
    mats = np.array([one.walk.mat for one in mine])
    accepted = np.concatenate([one.walk.accepted for one in mine])
    nodes = np.concatenate([one.walk.nodes for one in mine])
    kinds = np.bincount(np.concatenate([one.fates for one in mine]), minlength=len(KINDS))
    failed = len(accepted) - kinds[KINDS.index("cap")]
    counts = np.sum([one.taken for one in mine], axis=0)  # [D, K]
    depth = len(counts)
    reached = np.array([(accepted >= d).sum() for d in range(depth + 1)])
    sources = sorted({one.source for one in mine})
    by_source = {
        source: float(
            np.mean([m for m, one in zip(mats, mine, strict=True) if one.source == source])
        )
        for source in sources
    }
    pace = ar = None
    if cost is not None:
        known = [one for one in mine if one.start + one.tokens < cost.contexts[-1]]
        if known:
            pace = float(np.mean([one.seconds(cost) / one.tokens for one in known]))
            steps = [cost.ar_seconds(one.start + np.arange(one.tokens)).mean() for one in known]
            ar = float(np.mean(steps))
    return Summary(
        name=name,
        responses=len(mine),
        rounds=len(accepted),
        mat=float(mats.mean()),
        mat_interval=interval(samples),
        pooled=float((accepted + 1).mean()),
        gain=float(mats.mean()) / base - 1,
        gain_interval=interval(samples / base_samples - 1),
        mat_by_source=by_source,
        nodes=float(nodes.mean()),
        mismatch=float(kinds[KINDS.index("mismatch")] / failed) if failed else 0.0,
        loss={fate: float(kinds[i] / len(accepted)) for i, fate in enumerate(KINDS)},
        acceptance=_shares(reached[1:], reached[:-1]),
        by_rank=[
            float(counts[:, low : None if high is None else high + 1].sum() / max(1, counts.sum()))
            for low, high in RANKS
        ],
        by_depth_and_rank=_shares(counts, reached[:-1, None]),
        tokens_per_second=None if pace is None else 1 / pace,
        speedup=None if ar is None or pace is None else ar / pace,
    )


def _shares(part: np.ndarray, whole: np.ndarray) -> list:
    return (part / np.maximum(whole, 1)).tolist()
