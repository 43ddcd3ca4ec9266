"""Hold-out of text: how much of each source is read, and which of its documents are for validation.

The choice depends on the text alone, so every tokenizer gets the same validation text. Only
`val_shards` counts tokens.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from windlass.data.shards import EVAL, MAIN, Range, Shard, Split, Stream
from windlass.data.sources import Corpus, Notify, open_corpora
from windlass.errors import UserError
from windlass.recipe import DataSettings

FEW_DOCUMENTS = 100  # fewer documents are divided by the length of their texts
NONE = Fraction(0)


@dataclass
class Limit:
    """The part of a source to read; 0 means no limit.

    Validation documents are held out of the first `text` bytes; the others are read until they have
    `tokens` tokens.
    """

    tokens: Fraction = NONE  # for training
    held_out: Fraction = NONE  # fraction of the text
    text: Fraction = NONE  # bytes, by `text_size`
    bytes_read: int = 0
    text_tokens: int = 0  # tokens of the first `text` bytes, once these are read

    def add(self, size: int, tokens: int) -> bool:
        """Count a document; `tokens` includes all so far. Returns whether that is enough."""
        self.bytes_read += size
        if 0 < self.text <= self.bytes_read and not self.text_tokens:
            self.text_tokens = tokens
        return self.text_tokens > 0 and tokens >= self.tokens + self.held_out * self.text_tokens


@dataclass
class TextSource:
    """A source of text, and how much of it is read and held out."""

    stream: str  # the name of its shards' stream
    corpus: Corpus
    limit: Limit = field(default_factory=Limit)
    held_documents: int | None = None  # for validation, if documents are few; None: by the limit
    rest: int = -1  # number of the document that continues the one before it

    @property
    def origin(self) -> dict[str, Any]:
        """The source for the index."""
        kind = {"single_text": self.corpus.single_text, "divided": self.rest >= 0}
        return {"name": self.corpus.name, **kind, **self.corpus.description}


def text_size(text: str) -> int:
    """Bytes of a document and one for its end-of-text token, as in byte tokens; 0 if empty."""
    return len(text.encode("utf-8", "replace")) + 1 if text else 0


def stream_name(kind: str, number: int) -> str:
    """The stream of a source (counted from 0); `kind` is MAIN or EVAL."""
    return f"{kind}.{number}" if number else kind


def source_number(stream: str) -> int:
    """The reverse of `stream_name`: the number of a stream's source."""
    return int(stream.partition(".")[2] or 0)


def text_sources(data: DataSettings, notify: Notify) -> list[TextSource]:
    """The sources of `data.source` or `data.mix`, and of separate validation sets."""
    if data.mix:  # each source is limited and held out as if it were the only one
        return [
            replace(source, stream=stream_name(source.stream, number))
            for number in range(len(data.mix))
            for source in text_sources(data.part(number), notify)
        ]
    held_out, tokens = Fraction(str(data.val_fraction)), Fraction(data.max_tokens)
    train = open_corpora(data, data.sources, data.split, notify, data.sha256)
    for corpus in train:
        corpus.limit = data.max_documents or None
    own_split = data.eval_split and data.sources[0].startswith("hf:")  # files have no splits
    if separate := data.eval_sources or (data.sources if own_split else []):
        val = open_corpora(data, separate, data.eval_split or data.split, notify)
        if data.max_documents and held_out:
            for corpus in val:
                corpus.limit = max(1, int(data.max_documents * held_out))
        text = Fraction(max(1, int(tokens * held_out)) if tokens and held_out else 0)
        if val[0].single_text and text:
            val[0] = _cut_document(val[0], 0, int(text), with_rest=False)
        return _limited(train, tokens) + [
            TextSource(stream_name(EVAL, i), corpus, Limit(text=text * weight))
            for i, (corpus, weight) in enumerate(zip(val, _weights(val), strict=True))
        ]
    if data.val_shards or not held_out:
        return _limited(train, tokens, extra=data.val_shards * data.shard_tokens)
    if train[0].single_text:
        # nanoGPT's split: between two characters, and each part is encoded by itself
        first, rest = (_part_of_text(train[0], 1 - held_out, first) for first in (True, False))
        return [TextSource(MAIN, first, Limit(tokens)), TextSource(EVAL, rest)]
    return [_divide_few(source) for source in _limited(train, tokens, held_out)]


def _weights(corpora: list[Corpus]) -> list[Fraction]:
    """The fraction of each corpus in all of them, by size; equal fractions if a size is unknown."""
    sizes = [corpus.size for corpus in corpora]
    return [Fraction(size, sum(sizes)) if all(sizes) else Fraction(1, len(sizes)) for size in sizes]


def _limited(
    corpora: list[Corpus], max_tokens: Fraction, held_out: Fraction = NONE, extra: int = 0
) -> list[TextSource]:
    """Sources of `max_tokens` together, plus the `held_out` text and `extra` tokens each."""
    sources = list[TextSource]()
    for number, (corpus, weight) in enumerate(zip(corpora, _weights(corpora), strict=True)):
        tokens = max_tokens and max_tokens * weight + extra
        limit = Limit(tokens, held_out, tokens / (1 - held_out))
        sources.append(TextSource(stream_name(MAIN, number), corpus, limit))
    return sources


def _part_of_text(corpus: Corpus, fraction: Fraction, first: bool) -> Corpus:
    """The first `fraction` of a single text, by characters, or the rest of it."""

    def read(start: int) -> Iterator[tuple[str, float]]:
        if start == 0:
            text = next(corpus.documents())
            cut = int(len(text) * fraction)
            text = text[:cut] if first else text[cut:]  # frees the whole text
            yield text, 0.0

    return Corpus(corpus.name, read, corpus.description, single_text=True)


def _divide_few(source: TextSource) -> TextSource:
    """Fix the hold-out of a source with few documents: between two if that is near, else in one."""
    sizes, limit = list[tuple[int, int]](), replace(source.limit, tokens=NONE)
    for number, text in enumerate(source.corpus.documents()):
        sizes += [(number, text_size(text))] if text else []
        if len(sizes) >= FEW_DOCUMENTS:
            return source
        if limit.add(text_size(text), 1):
            break
    if not sizes:
        return source
    starts = [0, *itertools.accumulate(size for _, size in sizes)]
    count, end, held_out = len(sizes), starts[-1], source.limit.held_out
    wanted = end - max(1, int(end * held_out))
    near = (end - wanted) / 4
    held = min(count - 1, max(1, round(count * held_out)))
    # All of these documents are read, also if one is cut.
    source = replace(source, limit=replace(source.limit, text=Fraction(end)))
    if held and abs(starts[count - held] - wanted) <= near:
        return replace(source, held_documents=held)
    cut = min(starts[1:-1], key=lambda start: abs(start - wanted), default=0)
    if cut and abs(cut - wanted) <= near:
        return replace(source, held_documents=count - starts.index(cut))
    place = max(i for i in range(count) if starts[i] <= wanted)
    number = sizes[place][0]
    corpus = _cut_document(source.corpus, number, max(1, wanted - starts[place] - 1))
    return replace(source, corpus=corpus, held_documents=count - place, rest=number + 1)


def _cut_document(corpus: Corpus, number: int, size: int, with_rest: bool = True) -> Corpus:
    """A corpus with document `number` cut after `size` bytes, and perhaps the rest as the next."""

    def read(start: int) -> Iterator[tuple[str, float]]:
        first = start - (start > number)
        for place, (text, fraction) in enumerate(corpus.read(first), first):
            if place != number:
                yield text, fraction
                continue
            characters = len(text.encode("utf-8", "replace")[:size].decode("utf-8", "ignore"))
            if start <= number:
                yield text[:characters], fraction
            if with_rest:
                yield text[characters:], fraction

    return replace(corpus, read=read, limit=corpus.limit and corpus.limit + 1)


# -- after the shards are written


def divide(
    settings: DataSettings,
    directory: Path,
    streams: dict[str, list[Shard]],
    sources: dict[str, TextSource],
    notify: Notify,
) -> dict[str, Split]:
    """The ranges of tokens for training and for validation.

    A separate validation stream is held out whole. Else Windlass holds out the first `val_shards`
    shards of each source, or the last `val_fraction` of the documents that its limit counts.
    """
    train, val, documents, held_documents = list[Range](), list[Range](), 0, 0
    texts = list[np.ndarray]()  # hashes of the held-out documents
    for name, shards in streams.items():
        number = source_number(name) if settings.mix else 0
        data, stream = settings.part(number), Stream(directory, shards)
        count, end = sum(shard.documents for shard in shards), len(stream)
        documents += count
        first = last = 0  # held-out documents
        if name.startswith(EVAL):
            start, stop, last = 0, end, count
        elif data.val_shards:
            if data.val_shards >= len(shards):
                problem = f"data.val_shards = {data.val_shards} of {len(shards)}"
                raise UserError(f"{problem}: lower it or data.shard_tokens")
            start, stop = 0, int(stream.edges[data.val_shards])
            last = sum(shard.documents for shard in shards[: data.val_shards])
        elif stream_name(EVAL, number) in streams or not data.val_fraction or not end:
            start = stop = end
        elif count:
            sizes = stream.column("size").view(np.int64)
            first, last = _last_documents(data, sources[name], sizes, notify)
            start, stop = np.append(stream.starts(), end)[[first, last]].tolist()
        else:  # shards of another tool
            start, stop = end - max(1, int(end * Fraction(str(data.val_fraction)))), end
        if not name.startswith(EVAL):
            parts = [(0, start), (stop, end)]
            train += [Range(stream=name, start=a, stop=b) for a, b in parts if a < b]
        val += [Range(stream=name, start=start, stop=stop)] if start < stop else []
        held_documents += last - first
        texts += [stream.column("text")[first:last]]
    splits = {"train": Split(ranges=train, documents=documents - held_documents)}
    tokens, data = splits["train"].tokens, settings
    if data.max_tokens and not data.mix and tokens > 1.5 * data.max_tokens:
        notify(
            f"{tokens:,} training tokens, more than data.max_tokens = {data.max_tokens:,}: "
            "documents are long, and the last one is kept whole"
        )
    if val:
        text = ""
        if held_documents:
            text = hashlib.sha256(np.concatenate(texts).tobytes()).hexdigest()[:16]
        splits["val"] = Split(ranges=val, documents=held_documents, text=text)
    return splits


def _last_documents(
    data: DataSettings, source: TextSource, sizes: np.ndarray, notify: Notify
) -> tuple[int, int]:
    """The held-out documents of a source: the first, and the one after the last."""
    ends, last, limit = np.cumsum(sizes), len(sizes), source.limit
    if limit.text:
        last = min(last, int(np.searchsorted(ends, math.ceil(limit.text))) + 1)
    held = source.held_documents
    if held is None:
        held = min(last - 1, max(1, round(last * limit.held_out)))
    before = int(ends[last - held - 1]) if held < last else 0
    actual = Fraction(int(ends[last - 1]) - before, int(ends[last - 1]))
    if not limit.held_out / 2 < actual < limit.held_out * 3 / 2:
        notify(
            f"{source.corpus.name}: {float(actual):.1%} of the text is held out, "
            f"not data.val_fraction = {data.val_fraction}: documents differ in length "
            "and are not cut; data.eval_source names a separate validation set"
        )
    return last - held, last
