"""What became of the token that ended a round: why was it not accepted as well?

The bonus is the target's own token behind the path, so it is the one that a longer path would have
needed at depth a + 1, a accepted. One of four things kept it out of the path, and over the rounds
of a collection their shares are the loss split of DESIGN 2:

    not_drafted   it is not among the K candidates of that depth
    budget        it is, but no node carries it there: the tree was too small
    mismatch      a node carries it there, under another parent than the path's end
    cap           there is no such depth: the path reached depth D
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from graft.core.types import DraftTree
from graft.data.rounds import RecordedRound

Kind = Literal["not_drafted", "budget", "mismatch", "cap"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class Fate:
    """Of one failing token."""

    kind: Kind
    nodes: tuple[int, ...] = ()  # that carry it at its depth, in admission order
    rank: int | None = None  # among the candidates of its depth, 0 the best


def fate(tree: DraftTree, path: Sequence[int], bonus: int, candidates: np.ndarray) -> Fate:
    """Of the bonus behind a path (root first), given the candidates [D, K] of the draft."""
    depth = len(path)  # the root is in the path, so this is a + 1
    if depth > len(candidates):
        return Fate("cap")
    nodes = np.flatnonzero((tree.depths == depth) & (tree.tokens == bonus)).tolist()
    ranks = np.flatnonzero(candidates[depth - 1] == bonus).tolist()
    kind: Kind = "mismatch" if nodes else "budget" if ranks else "not_drafted"
    return Fate(kind, tuple(nodes), ranks[0] if ranks else None)


def fate_of(round: RecordedRound) -> Fate:
    """Of a recorded round's bonus."""
    return fate(round.tree, round.path, round.bonus, round.draft.tokens)


def visible(text: str) -> str:
    r"""With what does not print escaped, as \n for a line feed."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def in_words(round: RecordedRound, text: Callable[[int], str]) -> str:
    """One sentence on a recorded round's fate; `text` gives a token's text."""
    D, K = round.draft.tokens.shape
    tree = round.tree
    return sentence(
        fate_of(round),
        tokens=tree.tokens.tolist(),
        parents=tree.parents.tolist(),
        path=round.path,
        bonus=round.bonus,
        shape=(D, K),
        text=text,
    )


def sentence(
    found: Fate,
    *,
    tokens: Sequence[int],
    parents: Sequence[int],
    path: Sequence[int],
    bonus: int,
    shape: tuple[int, int],
    text: Callable[[int], str],
) -> str:
    """What became of the bonus, given the tree, the path (root first) and (D, K)."""

    def quoted(token: int) -> str:
        return f'"{visible(text(token))}"'

    behind = quoted(tokens[path[-1]])
    depth, (D, K) = len(path), shape
    wanted = f"the target wanted {quoted(bonus)} after {behind}"
    if found.kind == "cap":
        return f"{wanted}: the path had reached depth {D}, the last one drafted (cap)"
    if found.kind == "not_drafted":
        return f"{wanted}: it was not among the {K} candidates of depth {depth} (not drafted)"
    if found.kind == "budget":
        assert found.rank is not None
        rank = f"candidate {found.rank + 1} of {K} at depth {depth}"
        return f"{wanted}: it was {rank}, but no node there (budget)"
    above = dict.fromkeys(quoted(tokens[parents[node]]) for node in found.nodes)
    under = " and ".join(f"another {name}" if name == behind else name for name in above)
    return f"{wanted}: it was drafted, but under {under} (mismatch)"
