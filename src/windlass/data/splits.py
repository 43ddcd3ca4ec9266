"""What is for training and what for validation, and how much of a corpus is enough."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from windlass.data.corpus import Corpus
from windlass.data.shards import EVAL, MAIN, Shard, Split, Stream
from windlass.errors import UserError
from windlass.recipe import DataSettings


@dataclass
class Part:
    """One stream of documents on its way into shards."""

    stem: str
    corpus: Corpus
    enough: Callable[[int], bool]
    """Whether so many tokens are enough."""
    cut: int = 0
    """With a single text: keep so many tokens; 0: all."""


def budget(data: DataSettings, *, held_out: bool) -> Callable[[int], bool]:
    """Whether so many tokens hold enough for `data.max_tokens` of training, beside what is held out of them."""
    if not data.max_tokens:
        return lambda tokens: False
    if held_out and data.val_shards:
        return lambda tokens: tokens - data.val_shards * data.shard_tokens >= data.max_tokens
    share = 1 - Fraction(str(data.val_fraction)) if held_out else Fraction(1)
    return lambda tokens: tokens * share >= data.max_tokens


def cut(corpus: Corpus, tokens: int, besides: int = 0) -> int:
    """Where a single text ends, which has no document's end to stop at; 0: nowhere."""
    return tokens + besides if corpus.single_text and tokens else 0


def halves(main: Corpus, data: DataSettings) -> list[Part]:
    """A single text as two, for training and for validation, cut between two characters (nanoGPT's split)."""

    def half(first: bool) -> Corpus:
        def read(start: int, _: Corpus) -> Iterator[str]:
            if start == 0:
                text = next(main.documents())
                cut = int(len(text) * (1 - Fraction(str(data.val_fraction))))
                yield text[:cut] if first else text[cut:]

        return Corpus(main.name, read, main.description, single_text=True)

    return [
        Part(MAIN, half(True), lambda tokens: False, data.max_tokens),
        Part(EVAL, half(False), lambda tokens: False),
    ]


def make_splits(data: DataSettings, directory: Path, streams: dict[str, list[Shard]]) -> dict[str, Split]:
    """Which tokens are for training and which for validation.

    A stream of its own is for validation as a whole; else the first `val_shards` shards, or the last `val_fraction` of the
    documents (of the tokens, where documents are not known).
    """
    main = streams[MAIN]
    tokens, documents = sum(s.tokens for s in main), sum(s.documents for s in main)
    if EVAL in streams:
        held = streams[EVAL]
        return {
            "train": Split(MAIN, 0, tokens, 0, documents),
            "val": Split(EVAL, 0, sum(s.tokens for s in held), 0, sum(s.documents for s in held)),
        }
    if data.val_shards:
        if data.val_shards >= len(main):
            raise UserError(
                f"data.val_shards = {data.val_shards}, and the data have {len(main)} shards: none is left for training; "
                "hold out fewer, or make data.shard_tokens smaller"
            )
        token = sum(s.tokens for s in main[: data.val_shards])
        document = sum(s.documents for s in main[: data.val_shards])
        return {"train": Split(MAIN, token, tokens, document, documents), "val": Split(MAIN, 0, token, 0, document)}
    share = Fraction(str(data.val_fraction))
    if not share:
        return {"train": Split(MAIN, 0, tokens, 0, documents)}
    if not documents:
        token = tokens - max(1, int(tokens * share))
        return {"train": Split(MAIN, 0, token, 0, 0), "val": Split(MAIN, token, tokens, 0, 0)}
    if documents < 2:
        raise UserError(
            "data.val_fraction: the corpus is one document, of which none can be held out; give data.eval_source, or "
            "data.val_fraction = 0"
        )
    document = documents - min(documents - 1, max(1, round(documents * share)))
    token = int(Stream(directory, main).document_starts()[document])
    return {
        "train": Split(MAIN, 0, token, 0, document),
        "val": Split(MAIN, token, tokens, document, documents),
    }
