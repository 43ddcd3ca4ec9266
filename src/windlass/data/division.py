"""What is read of each source, and what is held out of it for validation.

The choice rests on the text alone: every tokenizer gets the same validation text. Only `val_shards` counts tokens.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

import numpy as np

from windlass.data.shards import EVAL, MAIN, Range, Shard, Split, Stream
from windlass.data.sources import Corpus, open_corpora
from windlass.errors import UserError
from windlass.recipe import DataSettings

FEW_DOCUMENTS = 100  # fewer than these are split by their text


@dataclass
class Limit:
    """When enough of a source is read. Validation documents are held out of its first `text` bytes, whatever the tokenizer makes
    of them; the other documents are read until there are `tokens`. 0: all."""

    tokens: Fraction = Fraction(0)  # for training
    share: Fraction = Fraction(0)  # held out
    text: Fraction = Fraction(0)
    read: int = 0  # bytes so far, by `text_size`
    first: int = 0  # tokens of the first `text` bytes, once they are read

    def add(self, size: int, tokens: int) -> bool:
        """Count a document of so many bytes, of which there are now so many `tokens`; whether that is enough."""
        self.read += size
        if 0 < self.text <= self.read and not self.first:
            self.first = tokens
        return self.first > 0 and tokens >= self.tokens + self.share * self.first


@dataclass
class Part:
    """A source on its way into shards."""

    stem: str  # the first part of its files' names
    corpus: Corpus
    limit: Limit
    most: int = 0  # tokens of a single text, which has no document's end to stop at
    held: int | None = None  # of few documents: how many are held out; None: by their share
    rest: int = -1  # number of the document that is the rest of the one before it


def text_size(text: str) -> int:
    """The bytes of a document's text and one for its end-of-text token, as the byte tokenizer has tokens; 0 if it is empty."""
    return len(text.encode("utf-8", "replace")) + 1 if text else 0


def stem_of(stream: str, number: int) -> str:
    """The name of the stream of a source, counted from 0."""
    return f"{stream}.{number}" if number else stream


def parts_of(data: DataSettings, notify: Callable[[str], None]) -> list[Part]:
    """What is to be written: each source of the training corpus, and of a validation corpus of its own.

    `max_tokens` takes the same share of each source, by its size.
    """
    share, most = Fraction(str(data.val_fraction)), Fraction(data.max_tokens)
    main = open_corpora(data, data.sources, sha256=data.sha256, split=data.split, notify=notify)
    for corpus in main:
        corpus.limit = data.max_documents or None
    own_split = data.eval_split and data.sources[0].startswith("hf:")  # files have no splits
    if separate := data.eval_sources or (data.sources if own_split else []):
        held = open_corpora(data, separate, split=data.eval_split or data.split, notify=notify)
        for corpus in held:
            corpus.limit = (
                max(1, int(data.max_documents * share)) if data.max_documents and share else None
            )
        text = Fraction(max(1, int(most * share)) if most and share else 0)
        if held[0].single_text and text:
            held[0] = _cut_document(held[0], 0, int(text), with_rest=False)
        limits = [Limit(text=text * part) for part in _shares(held)]
        return [
            *_limited(main, most, Fraction(0), 0),
            *(
                Part(stem_of(EVAL, i), *pair)
                for i, pair in enumerate(zip(held, limits, strict=True))
            ),
        ]
    if main[0].single_text and share and not data.val_shards:
        text_corpus = main[0]

        def half(
            first: bool,
        ) -> Corpus:  # nanoGPT's split: between two characters, each half encoded for itself
            def read(start: int) -> Iterator[tuple[str, float]]:
                text = next(text_corpus.documents())
                cut = int(len(text) * (1 - share))
                yield from [(text[:cut] if first else text[cut:], 0.0)][start:]

            return Corpus(text_corpus.name, read, text_corpus.description, single_text=True)

        return [Part(MAIN, half(True), Limit(), int(most)), Part(EVAL, half(False), Limit())]
    if data.val_shards or not share:
        return _limited(main, most, Fraction(0), data.val_shards * data.shard_tokens)
    return [_held_out(part) for part in _limited(main, most, share, 0)]


def _shares(corpora: list[Corpus]) -> list[Fraction]:
    """The share of each source in all of them, by size; equal shares if a size is not known."""
    sizes = [corpus.size for corpus in corpora]
    return [Fraction(size, sum(sizes)) if all(sizes) else Fraction(1, len(sizes)) for size in sizes]


def _limited(corpora: list[Corpus], most: Fraction, share: Fraction, more: int) -> list[Part]:
    """The training sources with their limits: of `most` training tokens, `share` of the text held out, and `more` of each."""
    parts = list[Part]()
    for number, (corpus, own) in enumerate(zip(corpora, _shares(corpora), strict=True)):
        tokens = most and most * own + more
        limit = Limit(tokens, share, tokens / (1 - share))
        parts.append(Part(stem_of(MAIN, number), corpus, limit, most=int(tokens)))
    return parts


def _held_out(part: Part) -> Part:
    """The part, with what is held out if its documents are few: they are divided by their text, between two documents if that is
    near, else inside one, which becomes two."""
    pairs, share, seen = (
        list[tuple[int, int]](),
        part.limit.share,
        replace(part.limit, tokens=Fraction(0)),
    )
    for number, text in enumerate(part.corpus.documents()):
        pairs += [(number, text_size(text))] if text else []
        if len(pairs) >= FEW_DOCUMENTS:
            return part
        if seen.add(text_size(text), 1):
            break
    starts = [0, *itertools.accumulate(size for _, size in pairs)]
    count, end = len(pairs), starts[-1]
    if not count:
        return part
    wanted = end - max(1, int(end * share))
    near = (end - wanted) / 4
    held = min(count - 1, max(1, round(count * share)))
    part = replace(
        part, limit=replace(part.limit, text=Fraction(end))
    )  # all of these documents are read, also if cut
    if held and abs(starts[count - held] - wanted) <= near:
        return replace(part, held=held)
    cut = min(starts[1:-1], key=lambda start: abs(start - wanted), default=0)
    if cut and abs(cut - wanted) <= near:
        return replace(part, held=count - starts.index(cut))
    place = max(i for i in range(count) if starts[i] <= wanted)
    corpus = _cut_document(part.corpus, pairs[place][0], max(1, wanted - starts[place] - 1))
    return replace(part, corpus=corpus, held=count - place, rest=pairs[place][0] + 1)


def _cut_document(corpus: Corpus, number: int, size: int, with_rest: bool = True) -> Corpus:
    """A corpus in which document `number` is two: its first `size` bytes, and the rest; or the first alone."""

    def read(start: int) -> Iterator[tuple[str, float]]:
        first = start - (start > number)
        for place, (text, share) in enumerate(corpus.read(first), first):
            if place != number:
                yield text, share
                continue
            characters = len(text.encode("utf-8", "replace")[:size].decode("utf-8", "ignore"))
            if start <= number:
                yield text[:characters], share
            if with_rest:
                yield text[characters:], share

    return replace(corpus, read=read, limit=corpus.limit and corpus.limit + 1)


def splits_of(
    data: DataSettings,
    directory: Path,
    streams: dict[str, list[Shard]],
    parts: dict[str, Part],
    notify: Callable[[str], None],
) -> dict[str, Split]:
    """Which tokens are for training and which for validation.

    A stream of its own is for validation as a whole; else of each source its first `val_shards` shards, or the last
    `val_fraction` of the documents that its limit counts. The tokenizer does not enter into the choice of the latter.
    """
    train, val, documents, held_out, texts = list[Range](), list[Range](), 0, 0, list[np.ndarray]()
    for stem, shards in streams.items():
        stream = Stream(directory, shards)
        table, end = stream.documents(), len(stream)
        starts = [*table["start"].tolist(), end]
        documents += len(table)
        first, last = 0, 0  # documents
        if stem.startswith(EVAL):
            start, stop, last = 0, end, len(table)
        elif data.val_shards:
            if data.val_shards >= len(shards):
                raise UserError(
                    f"data.val_shards = {data.val_shards} of {len(shards)}: lower it or data.shard_tokens"
                )
            start, stop, last = (
                0,
                int(stream.edges[data.val_shards]),
                sum(s.documents for s in shards[: data.val_shards]),
            )
        elif EVAL in streams or not data.val_fraction or not end:
            start = stop = end
        elif len(table):
            first, last = _last_documents(data, parts[stem], table, notify)
            start, stop = starts[first], starts[last]
        else:  # documents are not known
            start, stop = end - max(1, int(end * Fraction(str(data.val_fraction)))), end
        ranges = [(0, start), (stop, end)] if not stem.startswith(EVAL) else []
        train += [Range(stream=stem, start=a, stop=b) for a, b in ranges if a < b]
        val += [Range(stream=stem, start=start, stop=stop)] if start < stop else []
        held_out += last - first
        texts += [table["text"][first:last]]
    tokens = sum(part.stop - part.start for part in train)
    if data.max_tokens and tokens > 1.5 * data.max_tokens:
        asked = f"data.max_tokens = {data.max_tokens:,} were asked for"
        notify(
            f"{tokens:,} training tokens, {asked}: it stops at a document's end, and they are long"
        )
    splits = {"train": Split(ranges=train, documents=documents - held_out)}
    if val:
        text = hashlib.sha256(np.concatenate(texts).tobytes()).hexdigest()[:16] if held_out else ""
        splits["val"] = Split(ranges=val, documents=held_out, text=text)
    return splits


def _last_documents(
    data: DataSettings, part: Part, table: np.ndarray, notify: Callable[[str], None]
) -> tuple[int, int]:
    """The documents of a source that are held out: from the one to before the other of its table."""
    read = np.cumsum(table["size"].astype(np.int64))
    last = len(table)
    if part.limit.text:
        last = min(last, int(np.searchsorted(read, int(-(-part.limit.text // 1)))) + 1)
    share = part.limit.share
    held = part.held if part.held is not None else min(last - 1, max(1, round(last * share)))
    held_share = Fraction(
        int(read[last - 1] - (read[last - held - 1] if held < last else 0)), int(read[last - 1])
    )
    if not share / 2 < held_share < share * 3 / 2:
        notify(
            f"{part.corpus.name}: {float(held_share):.1%} of the text are held out, data.val_fraction = {data.val_fraction} "
            "was asked for: documents differ in length and are not cut; data.eval_source names a validation set of your own"
        )
    return last - held, last
