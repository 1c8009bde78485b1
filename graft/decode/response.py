"""When a response ends, who hears of its tokens, and which requests are refused before they start.
Shared by all loops.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

from graft.core.errors import InputError
from graft.core.interfaces import BatchTarget, BudgetPolicy, Target
from graft.core.types import Generation, Request

# New tokens as they are committed; at the end the whole response and what it took.
Rounds = Generator[list[int], None, Generation]


class Response:
    """The tokens so far; ends at the first stop token, which is kept, or at `max_new_tokens`."""

    def __init__(self, request: Request) -> None:
        self.tokens: list[int] = []
        self.stopped = False
        self._request = request

    @property
    def finished(self) -> bool:
        return self.stopped or len(self.tokens) >= self._request.max_new_tokens

    def extend(self, tokens: Sequence[int]) -> list[int]:
        """Append a round's tokens, dropping what lies past the end; gives those that were kept."""
        before = len(self.tokens)
        for token in tokens:
            if self.finished:
                break
            self.tokens.append(token)
            self.stopped = token in self._request.stop_tokens
        return self.tokens[before:]


def drain(rounds: Rounds, on_tokens: Callable[[list[int]], None] | None) -> Generation:
    """Run a response to its end; `on_tokens` gets new tokens as they are committed."""
    while True:
        try:
            tokens = next(rounds)
        except StopIteration as end:
            return end.value
        if on_tokens is not None:
            on_tokens(tokens)


def check_fits(
    request: Request,
    target: Target | BatchTarget,
    budget: BudgetPolicy | None = None,
    *,
    beyond: int = 0,
) -> None:
    """Refuse a request that would outgrow the target's context, or the costs that a policy knows.

    `beyond` tokens are wanted past the end of the response. Raises InputError, with the numbers.
    """
    needed = len(request.prompt) + request.max_new_tokens + beyond
    if needed > target.max_context:
        raise InputError(
            f"the prompt has {len(request.prompt)} tokens and max_new_tokens is "
            f"{request.max_new_tokens}: together {needed}, more than the target's context of "
            f"{target.max_context}; shorten one of them"
        )
    if budget is not None and needed > budget.max_context:
        raise InputError(
            f"the budget policy knows what rounds cost up to a context of {budget.max_context}, "
            f"and prompt and max_new_tokens need {needed}; measure longer ones: python "
            "scripts/fit.py contexts=[...]"
        )
