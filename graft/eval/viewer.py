"""Rounds of results, as the page's viewer takes them (graft/eval/page.py says what that is)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from graft.eval.fate import KINDS, Fate, sentence
from graft.eval.metrics import PASSES


def response_of(row: Mapping[str, Any], method: str, text: Callable[[int], str]) -> dict[str, Any]:
    """A row that kept its trees; `text` gives a token's text, and `method` is the name shown."""
    trees = row["trees"]
    rounds = [_round(row, i, text) for i in range(len(trees))]
    return {
        "prompt_id": row["prompt"],
        "turn": row["turn"],
        "source": row["source"],
        "method": method,
        "prompt": row["text"],
        "first": text(row["response"][0]),
        "rounds": rounds,
    }


def _round(row: Mapping[str, Any], i: int, text: Callable[[int], str]) -> dict[str, Any]:
    tree, kind = row["trees"][i], KINDS[row["fates"][i]]
    tokens, parents, seconds = tree["tokens"], tree["parents"], tree["seconds"]
    depths = [0] * len(tokens)
    for node in range(1, len(tokens)):
        depths[node] = depths[parents[node]] + 1
    D, K = tree["shape"]
    milliseconds = {verb: 1e3 * seconds[verb] for verb in PASSES}
    milliseconds["other"] = 1e3 * sum(seconds.values()) - sum(milliseconds.values())
    return {
        "nodes": [
            [text(token), parents[node], depths[node], tree["chances"][node - 1] if node else None]
            for node, token in enumerate(tokens)
        ],
        "path": tree["path"],
        "bonus": text(tree["bonus"]),
        "hung": tree["hung"],
        "fate": kind,
        "words": sentence(
            Fate(kind, tuple(tree["hung"]), tree["rank"]),
            tokens=tokens,
            parents=parents,
            path=tree["path"],
            bonus=tree["bonus"],
            shape=(D, K),
            text=text,
        ),
        "budget": row["budgets"][i],
        "conf": row["conf"][i],
        "context_length": tree["context_length"],
        "milliseconds": {part: round(ms, 2) for part, ms in milliseconds.items()},
    }
