"""Tokens as text while they arrive."""

from __future__ import annotations

from collections.abc import Callable, Sequence

UNKNOWN = "\N{REPLACEMENT CHARACTER}"  # how tokenizers write bytes that are no character
LONG, KEPT = 64, 16  # tokens: decoding all of them again and again would take quadratic time


class Detokenizer:
    """Text piece by piece, holding back characters whose bytes are not complete yet.

    The pieces and the rest, joined, are the text of all tokens.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._tokens: list[int] = []  # the last ones, some of them as context
        self._given = 0  # characters of theirs that were handed out

    def add(self, tokens: Sequence[int]) -> str:
        """What the text grows by; empty where these tokens complete no character."""
        self._tokens += tokens
        text = self._decode(self._tokens)
        complete = text.rstrip(UNKNOWN)
        piece, self._given = complete[self._given :], len(complete)
        if len(self._tokens) > LONG and complete == text:
            self._tokens = self._tokens[-KEPT:]
            self._given = len(self._decode(self._tokens))
        return piece

    def rest(self) -> str:
        """What was held back, at the end."""
        return self._decode(self._tokens)[self._given :]
