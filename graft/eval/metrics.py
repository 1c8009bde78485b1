"""What rows of results amount to, by method and set: the metrics of DESIGN section 2.

Every cell of a table is over the responses that all methods gave. The average stands over the sets,
each counting alike, as published tables have it. Speedup is the baseline's time per output token
over the method's, in the same run; intervals are 95 %, by resampling the prompts of every set, all
methods alike, so that ratios of methods are paired. A set of one prompt has none (NaN).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from graft.budgets.cost import CostTable
from graft.core.clock import PYTHON
from graft.core.errors import InputError
from graft.eval.benchmark import Row, decode_seconds, predicted_seconds_a_token, seconds_a_token
from graft.eval.bootstrap import interval, resampled_means
from graft.eval.fate import KINDS

PASSES = ("propose", "verify")  # the drafter's and the target's
PARTS = {  # of a round, by its stages (core/clock.py): a verb, or whatever verb's part
    "drafter's pass": ("propose",),
    "target's pass": ("verify",),
    "scoring": ("score",),
    "building": ("build",),
    "budget": ("allocate", "trim"),
    "masks and positions": ("masks",),
    "sampling": ("sample",),
    "acceptance": ("accept",),
    "cache": ("commit",),
    "Python between": (PYTHON,),
}
_PART = {stage: part for part, stages in PARTS.items() for stage in stages}
MEAN = "mean"  # over the sets


@dataclass(frozen=True, slots=True, eq=False)
class Cell:
    """One method on one set, or its mean over sets."""

    mat: float  # mean over rounds, then over responses
    pooled: float  # tokens / rounds
    tokens_per_second: float
    speedup: float  # over the baseline
    median: float  # of the responses' own speedups: what a busy neighbour moves least
    round_ms: float
    draft: float  # shares of decoding time: draft, verify, other; they sum to 1
    verify: float
    other: float
    parts: Mapping[str, float]  # ms a round of each of PARTS; 0 where nobody measured it
    nodes: float  # drafted, mean over rounds
    nodes_sd: float
    mismatch: float  # of the rounds that fail before the full depth
    loss: Mapping[str, float]  # of all rounds, the share of each fate; empty without drafts


@dataclass(frozen=True, slots=True, eq=False)
class Method:
    """One method on all sets."""

    name: str
    cells: Mapping[str, Cell]  # by set, and MEAN
    mat_samples: np.ndarray  # of the mean over sets, resampled: [R]
    speedup_samples: np.ndarray  # [R]
    parted: int  # responses that are not the baseline's
    responses: int
    gaps: list[float]  # of them, the logit gap at the first difference where it is known
    predicted: float | None  # seconds a token by a cost table, if it has all of these rounds
    pace: float  # seconds a token, mean over responses

    @property
    def mean(self) -> Cell:
        return self.cells[MEAN]

    @property
    def sets(self) -> list[str]:
        return [name for name in self.cells if name != MEAN]


def summarise(
    rows: Sequence[Row], *, baseline: str, cost: CostTable | None = None, seed: int = 0
) -> dict[str, Method]:
    """Every method over the (prompt, turn) that all of them have, in the order of their rows.

    Raises InputError where there is no such turn, or no baseline.
    """
    table, sources, prompts = aligned(rows)
    if baseline not in table:
        raise InputError(f"no row is of the baseline {baseline}; there are {', '.join(table)}")
    paces = np.array([[seconds_a_token(row) for row in mine] for mine in table.values()]).T
    mats = np.array([[mat_of(row) for row in mine] for mine in table.values()]).T
    base = list(table).index(baseline)
    both = np.concatenate([paces, mats], axis=1)
    speedups, means = [], []  # a set each: [R, M]
    for i, source in enumerate(dict.fromkeys(sources)):
        mine = sources == source
        found = resampled_means(both[mine], prompts[mine].tolist(), seed=[seed, i])
        if len(set(prompts[mine])) == 1:  # resampling it tells nothing
            found[:] = np.nan
        pace, mat = np.hsplit(found, 2)
        speedups.append(pace[:, [base]] / pace)
        means.append(mat)
    return {
        name: _method(
            name,
            mine,
            table[baseline],
            sources,
            speedup_samples=np.mean(speedups, axis=0)[:, i],
            mat_samples=np.mean(means, axis=0)[:, i],
            cost=cost,
        )
        for i, (name, mine) in enumerate(table.items())
    }


def aligned(rows: Sequence[Row]) -> tuple[dict[str, list[Row]], np.ndarray, np.ndarray]:
    """Rows by method, over the turns that all methods have; and the turns' sets and prompts."""
    by_method: dict[str, dict[tuple[str, int], Row]] = defaultdict(dict)
    for row in rows:
        if len(row["response"]) > 1:  # else nothing was decoded beyond the prefill
            by_method[row["method"]][row["prompt"], row["turn"]] = row
    keys = set.intersection(*map(set, by_method.values())) if by_method else set()
    if not keys:
        raise InputError("no response of more than one token has been decoded by every method")
    some = next(iter(by_method.values()))
    order = sorted(keys, key=lambda key: (some[key]["source"], key))
    table = {name: [found[key] for key in order] for name, found in by_method.items()}
    sources = np.array([some[key]["source"] for key in order])
    return table, sources, np.array([prompt for prompt, _ in order])


def parts_of(seconds: Mapping[str, float]) -> dict[str, float]:
    """Seconds of decoding by PARTS, which sum to them."""
    found = dict.fromkeys(PARTS, 0.0)
    for stage, took in seconds.items():
        verb, _, part = stage.partition("/")
        if verb != "prefill":
            found[_PART[part or verb]] += took
    return found


def mat_of(row: Row) -> float:
    """Tokens a round of one response."""
    return float(np.mean(row["committed"]))


def ratio(one: Method, other: Method) -> tuple[float, tuple[float, float]]:
    """How much faster one method is than another, mean over sets, and the interval.

    It is a tie where the interval holds 1.
    """
    return (
        one.mean.speedup / other.mean.speedup,
        interval(one.speedup_samples / other.speedup_samples),
    )


def _method(
    name: str,
    rows: Sequence[Row],
    base: Sequence[Row],
    sources: np.ndarray,
    *,
    cost: CostTable | None,
    **samples: np.ndarray,
) -> Method:
    cells = {}
    for source in dict.fromkeys(sources.tolist()):
        mine = np.flatnonzero(sources == source).tolist()
        cells[source] = _cell([rows[i] for i in mine], [base[i] for i in mine])
    cells[MEAN] = mean_of(list(cells.values()))
    unlike = [row for row, other in zip(rows, base, strict=True) if differs(row, other)]
    predicted = None
    if cost is not None and (rows is base or "paths" in rows[0]):
        with suppress(InputError):  # rounds that the table does not have
            predicted = float(np.mean([predicted_seconds_a_token(row, cost) for row in rows]))
    return Method(
        name=name,
        cells=cells,
        parted=len(unlike),
        responses=len(rows),
        gaps=[row["logit_gap"] for row in unlike if row.get("logit_gap") is not None],
        predicted=predicted,
        pace=float(np.mean([seconds_a_token(row) for row in rows])),
        **samples,
    )


def mean_of(cells: Sequence[Cell]) -> Cell:
    """Of every number, each cell counting alike."""
    means: dict[str, Any] = {}
    for f in fields(Cell):
        column = [getattr(cell, f.name) for cell in cells]
        if isinstance(column[0], Mapping):
            means[f.name] = {k: float(np.mean([one[k] for one in column])) for k in column[0]}
        else:
            means[f.name] = float(np.mean(column))
    return Cell(**means)


def differs(row: Row, other: Row) -> bool:
    """Whether two methods gave other tokens for the same turn."""
    return row["response"] != other["response"]


def _cell(rows: Sequence[Row], base: Sequence[Row]) -> Cell:
    paces = np.array([seconds_a_token(row) for row in rows])
    plain = np.array([seconds_a_token(row) for row in base])
    nodes = np.concatenate([row["nodes"] for row in rows])
    whole = sum(map(decode_seconds, rows))
    stages = dict.fromkeys(stage for row in rows for stage in row["seconds"])
    spent = {stage: sum(row["seconds"].get(stage, 0.0) for row in rows) for stage in stages}
    draft, verify = (spent.get(verb, 0.0) / whole for verb in PASSES)
    fates = [KINDS[fate] for row in rows for fate in row.get("fates", ())]
    failed = len(fates) - fates.count("cap")
    return Cell(
        mat=float(np.mean([mat_of(row) for row in rows])),
        pooled=sum(sum(row["committed"]) for row in rows) / len(nodes),
        tokens_per_second=1 / float(paces.mean()),
        speedup=float(plain.mean() / paces.mean()),
        median=float(np.median(plain / paces)),
        round_ms=1e3 * whole / len(nodes),
        draft=draft,
        verify=verify,
        other=1 - draft - verify,
        parts={part: 1e3 * took / len(nodes) for part, took in parts_of(spent).items()},
        nodes=float(nodes.mean()),
        nodes_sd=float(nodes.std()),
        mismatch=fates.count("mismatch") / failed if failed else 0.0,
        loss={kind: fates.count(kind) / len(fates) for kind in KINDS} if fates else {},
    )
