"""End-to-end decoding, method beside method on the same prompts: rows as they are measured, and
what is made of them.

Speed is time per output token, prompt prefill excluded, the first draft pass included; speedup is
plain decoding's over a method's on the same prompts of the same run (DESIGN section 2).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from graft.budgets.cost import CostTable
from graft.core.errors import InputError
from graft.core.types import Generation, Request
from graft.eval.bootstrap import interval, resampled_means

Row = Mapping[str, Any]
PASSES = ("propose", "verify")  # the drafter's and the target's; all else in a round is overhead


def measure(request: Request, decode: Callable[[Request], Generation]) -> dict[str, Any]:
    """Decode one request: what came, round by round, and where the time went."""
    result = decode(request)
    return {
        "prompt_tokens": len(request.prompt),
        "response": result.tokens,
        "stopped": result.stopped,
        "committed": result.committed,
        "nodes": result.nodes,
        "seconds": result.seconds,
    }


def decode_seconds(row: Row) -> float:
    """In the verbs, as `Generation.decode_seconds`."""
    return sum(row["seconds"].values()) - row["seconds"]["prefill"]


def seconds_a_token(row: Row) -> float:
    """Decoding time by output token; the first comes from the prefill, on neither side."""
    return decode_seconds(row) / max(len(row["response"]) - 1, 1)


def predicted_seconds_a_token(row: Row, cost: CostTable) -> float:
    """What a cost table says of the very rounds of a row."""
    before = np.cumsum([0, *row["committed"][:-1]])
    contexts, nodes = row["prompt_tokens"] + before, np.array(row["nodes"])
    if not nodes.any():
        return float(cost.ar_seconds(contexts).mean())
    return float(cost.seconds(nodes, contexts).sum() / max(len(row["response"]) - 1, 1))


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """A method over the responses that all methods gave. Intervals are 95 %, over prompts."""

    name: str
    responses: int
    mat: float  # mean over rounds, then over responses
    nodes: np.ndarray  # drafted, of all rounds
    pace: float  # seconds a token, mean over responses
    predicted: float | None  # the same by the cost table, if it has all of these rounds
    speedup: float  # over the baseline
    speedup_interval: tuple[float, float]
    median: float  # of the responses' own speedups: what a busy neighbour moves least
    by_source: dict[str, float]  # speedup, set by set
    overhead: float  # share of decoding time outside the two passes
    parted: int  # responses that are not the baseline's, token by token


def summarise(
    rows: Sequence[Row], *, baseline: str, cost: CostTable | None = None, seed: int = 0
) -> list[Measured]:
    """One summary a method, over the (prompt, turn) that every method has."""
    by_method: dict[str, dict[tuple[str, int], Row]] = defaultdict(dict)
    for row in rows:
        if len(row["response"]) > 1:  # else nothing was decoded beyond the prefill
            by_method[row["method"]][row["prompt"], row["turn"]] = row
    keys = sorted(set.intersection(*map(set, by_method.values()))) if by_method else []
    if not keys:
        raise InputError("no response of more than one token has been decoded by every method")
    table = {name: [found[key] for key in keys] for name, found in by_method.items()}
    paces = np.array([[seconds_a_token(row) for row in mine] for mine in table.values()]).T
    samples = resampled_means(paces, [prompt for prompt, _ in keys], seed=seed)
    base, sources = list(table).index(baseline), np.array([r["source"] for r in table[baseline]])
    found = []
    for i, (name, mine) in enumerate(table.items()):
        whole = sum(map(decode_seconds, mine))
        passes = sum(row["seconds"].get(verb, 0.0) for row in mine for verb in PASSES)
        predicted = None
        if cost is not None:
            with suppress(InputError):  # rounds that the table does not have
                predicted = float(np.mean([predicted_seconds_a_token(row, cost) for row in mine]))
        same = zip(mine, table[baseline], strict=True)
        found.append(
            Measured(
                name=name,
                responses=len(mine),
                mat=float(np.mean([np.mean(row["committed"]) for row in mine if row["committed"]])),
                nodes=np.concatenate([row["nodes"] for row in mine]),
                pace=float(paces[:, i].mean()),
                predicted=predicted,
                speedup=float(paces[:, base].mean() / paces[:, i].mean()),
                speedup_interval=interval(samples[:, base] / samples[:, i]),
                median=float(np.median(paces[:, base] / paces[:, i])),
                by_source={
                    str(s): float(paces[sources == s, base].mean() / paces[sources == s, i].mean())
                    for s in np.unique(sources)
                },
                overhead=1 - passes / whole,
                parted=sum(row["response"] != other["response"] for row, other in same),
            )
        )
    return found
