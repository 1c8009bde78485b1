"""Decode a finished greedy response again without the target: it is known what it will say.

At T = 0 the accepted path of any tree is the longest one along the target's own continuation, so
the rounds that decoding would take follow from the response and a draft at every root (DESIGN 5.5).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from graft.core.interfaces import TreeBuilder
from graft.core.tree import accept
from graft.core.types import Draft


@dataclass(frozen=True)
class Replay:
    """A tree builder at a fixed budget."""

    builder: TreeBuilder
    budget: int

    def __call__(self, response: Sequence[int], draft_at: Callable[[int], Draft]) -> list[int]:
        """Tokens each round commits, bonus included.

        `draft_at(i)` is the draft whose root is response token i. Rounds whose deepest position
        would lie past the end are left out: what the target would say there is unknown.
        """
        rounds: list[int] = []
        root = 0
        while root + 1 < len(response):
            draft = draft_at(root)
            if root + len(draft.tokens) >= len(response):
                break
            tree = self.builder.build(draft, self.budget)
            # No node carries -1: the walk ends with the response.
            after = np.append(response[root + 1 :], -1)[tree.depths]  # [N] what follows each node
            path, _ = accept(tree, after.tolist().__getitem__)
            rounds.append(len(path))
            root += len(path)
        return rounds
