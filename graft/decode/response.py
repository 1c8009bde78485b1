"""When a response ends, and which requests are refused before they start. Shared by all loops."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from graft.core.errors import InputError
from graft.core.interfaces import BatchTarget, BudgetPolicy, Target
from graft.core.types import Request


class Response:
    """The tokens so far; ends at the first stop token, which is kept, or at `max_new_tokens`."""

    def __init__(self, request: Request, on_tokens: Callable[[list[int]], None] | None) -> None:
        self.tokens: list[int] = []
        self.stopped = False
        self._request, self._on_tokens = request, on_tokens

    @property
    def finished(self) -> bool:
        return self.stopped or len(self.tokens) >= self._request.max_new_tokens

    def extend(self, tokens: Sequence[int]) -> None:
        """Append a round's tokens, dropping what lies past the end."""
        before = len(self.tokens)
        for token in tokens:
            if self.finished:
                break
            self.tokens.append(token)
            self.stopped = token in self._request.stop_tokens
        if self._on_tokens is not None:
            self._on_tokens(self.tokens[before:])


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
