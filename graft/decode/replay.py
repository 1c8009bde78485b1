"""Decode a finished response again without the target: it is known what it will say.

With greedy verification, and with draws that are matched against the tree, the accepted path of any
tree is the longest one along the target's own continuation. So the rounds that decoding would take
follow from the response and a draft at every root (DESIGN 5.5): no model is needed, and any tree
builder and budget policy can be walked over the same text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numba
import numpy as np

from graft.core.errors import InputError
from graft.core.interfaces import BudgetPolicy, TreeBuilder
from graft.core.types import Drafts, DraftTree, Generation, RoundState

Tokens = Sequence[int] | np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class Walk:
    """The R rounds of one response, [R] each."""

    roots: np.ndarray  # int64, where in the response
    nodes: np.ndarray  # int64, drafted nodes
    accepted: np.ndarray  # int64, of them
    elsewhere: np.ndarray  # bool, the token behind the path is a node, under another parent

    @property
    def committed(self) -> np.ndarray:
        """Tokens of each round, bonus included."""
        return self.accepted + 1

    @property
    def mat(self) -> float:
        """Mean tokens committed per round (nan without rounds)."""
        return float(self.committed.mean()) if len(self.roots) else math.nan


class Trees:
    """The trees of a response's drafts. None is built twice: a smaller one is a prefix."""

    def __init__(self, builder: TreeBuilder, drafts: Drafts, *, least: int = 0) -> None:
        """Build for `least` nodes where fewer are asked for: more may be, later."""
        self._builder, self._drafts, self._least = builder, drafts, least
        self._kept: dict[int, tuple[int, DraftTree]] = {}

    def __call__(self, root: int, budget: int) -> DraftTree:
        """The tree of `budget` drafted nodes at a root."""
        built, tree = self._kept.get(root, (-1, None))
        if tree is None or built < budget:
            built = max(budget, self._least)
            tree = self._builder.build(self._drafts[root], built)
            self._kept[root] = built, tree
        return tree.prefix(budget)


@dataclass(frozen=True)
class Replay:
    """A way of decoding, without its models."""

    builder: TreeBuilder
    budget: BudgetPolicy

    @classmethod
    def of(cls, decode: partial[Generation]) -> Replay:
        """Of a method as conf/method has it: `loop.generate` with its builder and policy.

        Raises InputError for one that does not draft.
        """
        if "builder" not in decode.keywords:
            raise InputError("plain decoding has no rounds to replay; choose methods that draft")
        return cls(decode.keywords["builder"], decode.keywords["budget"])

    def __call__(
        self,
        drafts: Drafts,
        response: Tokens,
        beyond: Tokens = (),
        *,
        start: int = 0,
        trees: Trees | None = None,
    ) -> Walk:
        """Walk `response`, as `loop.generate` would for the same prompt of `start` tokens.

        Draft i has response token i as its root. `beyond` is what the target says after the
        response: with D - 1 tokens of it every round is that of real decoding; without them the
        last rounds, which look past the end, are left out. `trees` of the same builder and drafts
        save building them again.
        """
        text = np.array([*response, *beyond], np.int64)
        last = min(len(response) - 1, len(text) - drafts.depth)  # one past the last root
        rounds: list[tuple[int, int, int, bool]] = []
        accepted: list[int] = []
        root = 0
        while root < last:
            allocated = self.budget.allocate(RoundState(drafts[root], start + root, accepted))
            if trees is None:
                tree = self.builder.build(drafts[root], allocated)
            else:
                tree = trees(root, allocated)
            tree = tree.prefix(self.budget.trim(tree, start + root))
            along, elsewhere = _follow(tree.tokens, tree.parents, tree.depths, text[root + 1 :])
            rounds.append((root, len(tree) - 1, along, elsewhere))
            accepted.append(along)
            root += along + 1
        columns = zip(*rounds, strict=True) if rounds else ((),) * 4
        types = (np.int64, np.int64, np.int64, np.bool_)
        return Walk(*(np.array(c, t) for c, t in zip(columns, types, strict=True)))


NEVER = 2**31 - 1  # of a token that no node holds


def arrivals(tree: DraftTree, text: np.ndarray) -> np.ndarray:
    """The nodes that hold the first tokens of `text` one below the other, NEVER where none does.

    [len(text)]. Nodes are numbered in admission order: with a budget of B the first arrivals <= B
    would have been accepted.
    """
    return _arrivals(tree.tokens, tree.parents, text)


@numba.njit(cache=True)
def _arrivals(tokens, parents, text):
    found = np.full(len(text), NEVER, np.int64)
    at, along = 0, 0
    for node in range(1, len(tokens)):  # one sweep is enough: a parent precedes its children
        if along < len(text) and parents[node] == at and tokens[node] == text[along]:
            found[along] = node
            at = node
            along += 1
    return found


@numba.njit(cache=True)
def _follow(tokens, parents, depths, text):
    """Nodes accepted along `text`, and whether its next token hangs under another parent."""
    at, along = 0, 0
    for node in range(1, len(tokens)):  # one sweep is enough: a parent precedes its children
        if parents[node] == at and along < len(text) and tokens[node] == text[along]:
            at = node
            along += 1
    if along < len(text):
        for node in range(1, len(tokens)):
            if depths[node] == along + 1 and tokens[node] == text[along]:
                return along, True
    return along, False
