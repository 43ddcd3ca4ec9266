"""Generated tokens as text that appears while it is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from windlass.data.tokenizer import Tokenizer

UNFINISHED = "\ufffd"
SEEN = 16
"""Tokens of a prompt that are decoded together with the first that follow it."""


def text_after(tokenizer: Tokenizer, prompt: Sequence[int], made: Sequence[int]) -> str:
    """The text of tokens that follow a prompt, as it stands after the prompt's."""
    seen = list(prompt[-SEEN:])
    return tokenizer.decode([*seen, *made])[len(tokenizer.decode(seen)) :]


class Decoder:
    """Turns tokens into text one at a time; a character whose bytes are spread over tokens comes when it is whole.

    `after` are the tokens before the first, which are not shown: some tokenizers leave out the space before a text.
    """

    def __init__(self, tokenizer: Tokenizer, after: Sequence[int] = ()):
        self._tokenizer = tokenizer
        self._ids = list(after[-SEEN:])
        # Tokens already shown; and where the stretch began that is decoded together with new ones.
        self._done, self._before = len(self._ids), 0

    def add(self, token: int) -> str:
        """The text that is certain now and was not before."""
        self._ids.append(token)
        text = self._new()
        if text.endswith(UNFINISHED):
            return ""
        self._before, self._done = self._done, len(self._ids)
        return text

    def rest(self) -> str:
        """What is left at the end, certain or not."""
        text = self._new()
        self._before = self._done = len(self._ids)
        return text

    def _new(self) -> str:
        known = self._tokenizer.decode(self._ids[self._before : self._done])
        return self._tokenizer.decode(self._ids[self._before :])[len(known) :]


class InOrder:
    """Writes several texts that are made at once, one after the other: the first as it comes, the next when it is done.

    A call takes (index, token), and (index, None) at a text's end: what `generate` gives its `on_token`. All follow the
    tokens `after`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        count: int,
        write: Callable[[str], None],
        begin: Callable[[int], None],
        after: Sequence[int] = (),
    ):
        self._decoders = [Decoder(tokenizer, after) for _ in range(count)]
        self._waiting: list[list[str]] = [[] for _ in range(count)]
        self._ended = [False] * count
        self._write, self._begin, self._current = write, begin, -1
        self._next()

    def __call__(self, index: int, token: int | None) -> None:
        """Take a token of a text, or its end."""
        decoder = self._decoders[index]
        text = decoder.rest() if token is None else decoder.add(token)
        self._ended[index] |= token is None
        if index == self._current:
            self._write(text)
        else:
            self._waiting[index].append(text)
        while self._current < len(self._ended) and self._ended[self._current]:
            self._next()

    def _next(self) -> None:
        self._current += 1
        if self._current < len(self._ended):
            self._begin(self._current)
            self._write("".join(self._waiting[self._current]))
