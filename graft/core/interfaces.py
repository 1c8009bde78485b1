"""The four seams. `decode/loop.py` knows these and nothing else; what stands behind them is chosen
in conf/.

A new target family, drafter, tree builder or budget policy is one file that satisfies one of these
protocols and one yaml that names it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from graft.core.linear import FusedLinear
from graft.core.types import Draft, DraftTree, RoundState, Step


class Target(Protocol):
    """The LLM whose output must be reproduced. Holds the one cache that a response lives in."""

    device: torch.device
    max_context: int  # positions the model was made for

    def prefill(self, tokens: Sequence[int]) -> Step:
        """Start a response: forget the cache, run the prompt, keep its last position's logits."""
        ...

    def verify(self, tree: DraftTree) -> Step:
        """Run root and nodes in one pass. Leaves the context as it was until `commit`."""
        ...

    def commit(self, path: Sequence[int]) -> None:
        """Append the rows of these nodes of the last verified tree to the context."""
        ...


class BatchTarget(Protocol):
    """Many responses at once, one a slot. Occupied slots are 0 .. occupied - 1."""

    device: torch.device
    max_context: int
    size: int  # slots
    occupied: int

    def admit(self, prompt: Sequence[int]) -> Step:
        """Put a prompt into the next free slot; logits [1, V] after it."""
        ...

    def step(self, tokens: Sequence[int]) -> Step:
        """Append one token to every occupied slot; logits [occupied, V] after them."""
        ...

    def release(self, slot: int) -> None:
        """Free a slot; the last occupied one takes its number."""
        ...


class Backbone(Protocol):
    """What a drafter may borrow from its target, and the facts it must fit."""

    device: torch.device
    dtype: torch.dtype
    name: str
    hidden_size: int
    vocab_size: int  # embedding rows
    num_layers: int

    captures: bool  # its passes are captured as CUDA graphs, and so should a drafter's
    config: Any  # the target's, of transformers
    embedding: torch.Tensor  # [V, H]
    head: FusedLinear  # final hidden states [..., H] -> logits [..., V]

    def tap(self, layer_ids: Sequence[int]) -> None:
        """From now on `Step.taps` holds the outputs of these blocks (0-based), in this order."""
        ...

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Input embeddings: [...] int64 -> [..., H]."""
        ...

    def head_rows(self, tokens: torch.Tensor | None) -> torch.Tensor:
        """Weights [n, H] of the head for tokens [n], for None all: a drafter may draft fewer."""
        ...


class Drafter(Protocol):
    """Proposes D positions in one pass."""

    name: str
    fingerprint: str  # tells drafters apart whose drafts differ
    depth: int  # D
    candidates: int  # K

    def reset(self) -> None:
        """Forget the response."""
        ...

    def propose(self, root: int, taps: torch.Tensor) -> Draft:
        """Draft what follows `root`, given the taps [n, n_taps * H] of the n new tokens."""
        ...


class TreeBuilder(Protocol):
    """Turns a draft into a tree of at most `budget` drafted nodes, in admission order."""

    def build(self, draft: Draft, budget: int) -> DraftTree: ...


ANY_CONTEXT = 2**62  # of a policy that asks for no costs


class BudgetPolicy(Protocol):
    """Decides how many nodes a round is worth: before building, after it, or both."""

    max_context: int  # the longest context it knows the costs of

    def allocate(self, state: RoundState) -> int: ...

    def trim(self, tree: DraftTree, context_length: int) -> int: ...
