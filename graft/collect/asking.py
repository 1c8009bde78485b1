"""Turns of conversations as requests, and what becomes of those that cannot be answered."""

from __future__ import annotations

import gc
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from graft.core.errors import is_out_of_memory
from graft.core.types import Request
from graft.data.prompts import Prompt
from graft.targets.hf import HFTarget

Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Collected:
    """One response and what was recorded of it."""

    prompt_id: str
    turn: int
    rows: list[dict[str, Any]]
    tokens: int  # of the response
    committed: Sequence[int]  # tokens of each round
    seconds: float  # in which the models worked on it alone; 0 where many are answered at once
    turns: int = 1  # that are thereby done


@dataclass(frozen=True, slots=True)
class Skipped:
    """A turn that was left out, and with it the rest of its conversation if it has no answer."""

    prompt_id: str
    turn: int
    reason: str
    turns: int  # that are thereby done


SAMPLING = ("max_new_tokens", "temperature", "top_p", "top_k")  # of a stage's config
ONE_TOKEN = "the response is one token: nothing is drafted"


class LeaveOut(Exception):  # noqa: N818 - nothing is wrong with the program
    """Why a turn cannot be collected."""


@dataclass(frozen=True)
class Asker:
    """Makes requests to one target; `sampling` holds the fields of `Request` in SAMPLING."""

    target: HFTarget
    sampling: Mapping[str, Any]
    max_prompt_tokens: int | None
    seed: int
    beyond: int  # tokens past the end of a response that must fit the context too

    def request(self, prompt: Prompt, turn: int, messages: Messages) -> Request:
        """The request for a turn, given the talk so far. Raises LeaveOut if it is too long."""
        tokens = self.target.encode_chat(messages)
        if self.max_prompt_tokens is not None and len(tokens) > self.max_prompt_tokens:
            raise LeaveOut(
                f"{len(tokens)} prompt tokens, max_prompt_tokens={self.max_prompt_tokens}"
            )
        request = Request(
            prompt=tokens,
            # Its own, whatever ran before it: a resumed run draws the same.
            seed=zlib.crc32(f"{self.seed} {prompt.key} {turn}".encode()),
            stop_tokens=self.target.stop_tokens,
            **self.sampling,
        )
        needed = len(tokens) + request.max_new_tokens + self.beyond
        if needed > self.target.max_context:
            raise LeaveOut(
                f"{len(tokens)} prompt tokens and max_new_tokens={request.max_new_tokens} outgrow "
                f"the target's context of {self.target.max_context}"
            )
        return request

    def answered(self, messages: Messages, response: Sequence[int]) -> Messages:
        """The conversation with the target's own answer."""
        return [*messages, {"role": "assistant", "content": self.target.decode(response)}]


@contextmanager
def leaving_out_of_memory() -> Iterator[None]:
    """Turn running out of memory into LeaveOut."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise LeaveOut(f"out of memory: {reason}") from None


def free_memory() -> None:
    """Give back what nothing refers to any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
