"""End-to-end decoding of one request, as a row of results.

    prompt_tokens   of the prompt
    response        tokens, the stop token included
    stopped         by a stop token rather than by max_new_tokens
    committed       tokens each round committed, bonus included; the last counts in full
    nodes           drafted nodes verified in each round
    seconds         in the response by stage (core/clock.py), and of the prefill

and of methods that draft, round by round:

    paths           accepted nodes of the tree, root left out
    fates           why it ended, as indices into graft/eval/fate.py's KINDS
    conf            mean probability of the drafter's best candidates
    budgets         what the policy allocated before building
    trees           the rounds themselves, where they are to be shown: see `shown`
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from graft.budgets.cost import CostTable
from graft.core import clock
from graft.core.types import Generation, Request, Round
from graft.eval.fate import KINDS, Fate, fate

Row = Mapping[str, Any]


def measure(
    request: Request, decode: Callable[..., Generation], *, drafts: bool, trees: bool
) -> dict[str, Any]:
    """Decode one request: what came, round by round, and where the time went.

    `drafts`: the method has rounds to look at; `trees`: keep them.
    """
    watch = Watch(trees)
    result = decode(request, on_round=watch) if drafts else decode(request)
    return {
        "prompt_tokens": len(request.prompt),
        "response": result.tokens,
        "stopped": result.stopped,
        "committed": result.committed,
        "nodes": result.nodes,
        "seconds": result.seconds,
        **(watch.columns if drafts else {}),
    }


class Watch:
    """The on-round hook, in the caller's time."""

    def __init__(self, trees: bool) -> None:
        self.columns: dict[str, list[Any]] = {"paths": [], "fates": [], "conf": [], "budgets": []}
        if trees:
            self.columns["trees"] = []

    def __call__(self, done: Round) -> None:
        columns = self.columns
        found = fate(done.tree, done.path, done.bonus, done.state.draft.tokens)
        columns["paths"].append(done.path[1:])
        columns["fates"].append(KINDS.index(found.kind))
        columns["conf"].append(round(done.state.conf, 4))
        columns["budgets"].append(done.budget)
        if "trees" in columns:
            columns["trees"].append(shown(done, found))


def shown(done: Round, found: Fate) -> dict[str, Any]:
    """A round as the report's viewer needs it: the tree, the path, the bonus, what became of it."""
    tree = done.tree
    return {
        "tokens": tree.tokens.tolist(),
        "parents": tree.parents.tolist(),
        "chances": [
            round(float(chance), 4) for chance in tree.chances
        ],  # after the parent, root left out
        "path": done.path,
        "bonus": done.bonus,
        "hung": list(found.nodes),
        "rank": found.rank,
        "shape": list(done.state.draft.tokens.shape),  # D, K
        "context_length": done.state.context_length,
        "seconds": done.seconds,
    }


def decode_seconds(row: Row) -> float:
    """As `Generation.decode_seconds`."""
    return clock.decode_seconds(row["seconds"])


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
