"""Prepared data as samples: rows of tokens with the labels that belong to them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from windlass.data import verify
from windlass.data.chat import Template
from windlass.data.corpus import has_changed
from windlass.data.items import open_items
from windlass.data.prepare import data_dir, prepare, ready
from windlass.data.progress import Progress, console
from windlass.data.shards import Index, Stream
from windlass.data.tokenizer import FOLDER, Tokenizer
from windlass.data.vocabulary import load_tokenizer, tokenizer_files
from windlass.errors import UserError
from windlass.recipe import Recipe
from windlass.recipe.settings import IGNORE_INDEX


@runtime_checkable
class Samples(Protocol):
    """What a training or validation set is to the loader; a user's own class may be one.

    A set may also have `length(i) -> int` (tokens of sample `i`, for length buckets), `shard_samples` (samples in each
    shard, for `data.order = "shards-shuffled"`), `valid_tokens` (labels that count in an epoch) and `sample_tokens()`
    (their mean a sample).
    """

    def __len__(self) -> int:
        """Samples in an epoch."""

    def read(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and labels, both int64 [n, T], of samples (int64 [n]); `labels[:, t]` is the token after
        `tokens[:, t]`, or -100 where it does not count. T is the longest of the samples asked for, or a fixed length."""


class PackedSamples:
    """Documents end to end, cut into rows of `context` tokens; row `i + 1` starts with the last label of row `i`.

    With `ragged` the tokens that do not fill a last row make a shorter one, its padding masked: a validation set is then
    counted to its last token.
    """

    def __init__(self, stream: Stream, start: int, stop: int, context: int, *, ragged: bool = False):
        self.stream, self.start, self.context = stream, start, context
        self.tokens = stop - start
        """Tokens, those too that a last row would have left over."""
        self.valid_tokens = max(0, stop - start - 1)
        """Labels that count in an epoch."""
        if not ragged:
            self.valid_tokens -= self.valid_tokens % context
        self._count = -(-self.valid_tokens // context)
        starts = -(-np.clip(stream.edges - start, 0, None) // context)
        self.shard_samples: Sequence[int] = np.diff(np.minimum(starts, self._count)).tolist()
        """Rows that start in each shard."""

    def __len__(self) -> int:
        return self._count

    def sample_tokens(self) -> float:
        """Mean number of labels that count in a sample."""
        return self.valid_tokens / max(1, self._count)

    def read(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and labels of rows, both int64 [n, context]."""
        rows = np.zeros((len(indices), self.context + 1), dtype=np.int64)
        short = []
        for row, i in zip(rows, indices.tolist(), strict=True):
            if not 0 <= i < self._count:
                raise IndexError(f"sample {i} of {self._count}")
            count = min(self.context, self.valid_tokens - i * self.context)
            self.stream.read_into(self.start + i * self.context, row[: count + 1])
            short.append(count)
        tokens, labels = rows[:, :-1].copy(), rows[:, 1:].copy()
        for at, count in enumerate(short):
            if count < self.context:
                tokens[at, count:] = 0
                labels[at, count:] = IGNORE_INDEX
        return tokens, labels


class DocumentSamples:
    """One document a row, from its end-of-text token on, cut at `context`; the padding masked."""

    def __init__(self, stream: Stream, documents: tuple[int, int], context: int, eot: int):
        starts = stream.document_starts()
        ends = np.append(starts[1:], len(stream))
        first, last = documents
        self.stream, self.context, self._eot = stream, context, eot
        self._starts, self._sizes = starts[first:last], (ends - starts)[first:last]
        self.shard_samples: Sequence[int] = np.diff(np.searchsorted(self._starts, stream.edges)).tolist()
        """Documents that start in each shard."""

    def __len__(self) -> int:
        return len(self._starts)

    def length(self, i: int) -> int:
        """Labels that count in sample `i`."""
        return min(int(self._sizes[i]), self.context)

    @cached_property
    def valid_tokens(self) -> int:
        """Labels that count in an epoch."""
        return int(np.minimum(self._sizes, self.context).sum())

    def sample_tokens(self) -> float:
        """Mean number of labels that count in a sample."""
        return self.valid_tokens / max(1, len(self))

    def read(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and labels of documents, both int64 [n, context]; the last label of a whole document ends the text."""
        tokens = np.zeros((len(indices), self.context), dtype=np.int64)
        labels = np.full((len(indices), self.context), IGNORE_INDEX, dtype=np.int64)
        for at, i in enumerate(indices.tolist()):
            count, whole = self.length(i), int(self._sizes[i])
            found = np.full(count + 1, self._eot, dtype=np.int64)
            self.stream.read_into(int(self._starts[i]), found[: min(count + 1, whole)])
            tokens[at, :count], labels[at, :count] = found[:-1], found[1:]
        return tokens, labels


@dataclass(frozen=True)
class Data:
    """The data of a recipe, checked and open."""

    train: Samples
    val: Samples | None
    tokenizer: Tokenizer
    """A user's own data may have None: then no text is generated."""
    fingerprint: str
    """Equal for equal tokens, split and tokenizer, wherever they lie."""
    vocab: int
    """Token ids of the tokenizer."""
    directory: Path | None = None
    """Where the prepared data lie."""
    template: Template | None = None
    """With `data.format = "chat"`: how a conversation is written down."""

    def save_tokenizer(self, directory: Path) -> None:
        """Write what turns text into tokens and back into `directory/tokenizer`: a run can then be sampled by itself."""
        if hasattr(self.tokenizer, "save"):  # a user's own may have no file
            self.tokenizer.save(directory)
            if self.template is not None:
                self.template.save(directory / FOLDER)


def open_data(recipe: Recipe, *, prepare_if_missing: bool = True, progress: Progress | None = None) -> Data:
    """The data of a recipe, prepared if need be, every file checked before the first step.

    Args:
        recipe: Its `data` section, `model.context` and `model.vocab` are what counts.
        prepare_if_missing: Prepare what is not there; else a UserError.
        progress: Shows how far it is; None: on stderr, where it takes longer than a moment.

    Raises:
        UserError: A shard is missing, truncated, changed, or has ids past the vocabulary; the data were prepared with
            another tokenizer or other settings; there are too few tokens for one sample.
    """
    if recipe.data.format != "text":
        items = open_items(recipe, prepare_if_missing=prepare_if_missing, progress=progress)
        vocab = items.tokenizer.vocab
        return Data(items.train, items.val, items.tokenizer, items.fingerprint, vocab, items.directory, items.template)
    directory = data_dir(recipe)
    index = ready(recipe, directory)
    if index is None:
        if not prepare_if_missing:
            raise UserError(f"there are no prepared data in {directory}: run `windlass prepare` first")
        prepare(recipe, progress)
        index = ready(recipe, directory)
        assert index is not None
    shown = progress or console()
    try:
        tokenizer = _checked(recipe, directory, index, shown)
    finally:
        shown.close()
    train, val = samples_of(recipe, directory, index, tokenizer)
    return Data(train, val, tokenizer, index.fingerprint, tokenizer.vocab, directory)


def describe(recipe: Recipe, data: Data) -> dict[str, str]:
    """What there is, by name, for a reader."""
    found = {"directory": str(data.directory or "none: read at each start")}
    for name, samples in (("training", data.train), ("validation", data.val)):
        if samples is None:
            found[name] = "none"
            continue
        tokens = getattr(samples, "tokens", getattr(samples, "valid_tokens", None))
        counted = "" if tokens is None else f"{tokens:,} tokens, "
        found[name] = f"{counted}{len(samples):,} samples of up to {recipe.model.context:,}"
    found["tokenizer"] = f"{recipe.data.tokenizer}, {data.vocab:,} ids"
    found["fingerprint"] = data.fingerprint
    return found


def _checked(recipe: Recipe, directory: Path, index: Index, shown: Progress) -> Tokenizer:
    tokenizer = load_tokenizer(recipe, directory)
    if tokenizer.fingerprint != index.tokenizer["fingerprint"]:
        raise UserError(
            f"wrong tokenizer: {directory} was prepared with another {index.tokenizer['name']} than the one that lies "
            f"beside it; delete {directory} and run `windlass prepare` again"
        )
    for file, sha256 in tokenizer_files(recipe.data.tokenizer).items():
        if index.tokenizer["files"].get(file, sha256) != sha256:
            raise UserError(
                f"wrong tokenizer: {file} has changed since the data in {directory} were prepared with it; put the old "
                "file back, or give another data.dir"
            )
    if os.environ.get("RANK", "0") == "0":  # once is enough
        for description in index.source.values():
            if has_changed(description["name"], description):
                shown.note(
                    f"{description['name']} has changed since it was prepared, and what was prepared is used; delete "
                    f"{directory} to prepare it anew"
                )
                break
    rows = recipe.model.vocab
    if recipe.model.kind == "gpt" and rows and tokenizer.vocab > rows:
        raise UserError(
            f"model.vocab = {rows:,} is smaller than the vocabulary of the tokenizer {recipe.data.tokenizer}, "
            f"{tokenizer.vocab:,}; write that, or more, or 0"
        )
    verify.check_sizes(directory, index)
    verify.check_range(directory, index, tokenizer.vocab)
    verify.check_sums(directory, index, shown)
    return tokenizer


def samples_of(recipe: Recipe, directory: Path, index: Index, tokenizer: Tokenizer) -> tuple[Samples, Samples | None]:
    """The training and the validation set of prepared data, as `data.packing` and `model.context` cut them."""
    context = recipe.model.context
    found: dict[str, Samples] = {}
    for name, split in index.splits.items():
        stream = Stream(directory, index.streams[split.stream])
        if recipe.data.packing == "documents":
            if index.source.get(split.stream, {}).get("single_text") or not stream.documents or tokenizer.eot is None:
                raise UserError(
                    'data.packing = "documents" needs a corpus of many documents; this one is a stream of tokens: write '
                    '"packed"'
                )
            samples: Samples = DocumentSamples(
                stream, (split.first_document, split.last_document), context, tokenizer.eot
            )
        else:
            samples = PackedSamples(stream, split.start, split.stop, context, ragged=name == "val")
        if not len(samples):
            what = "training" if name == "train" else "validation"
            raise UserError(
                f"the {what} data in {directory} have {split.stop - split.start:,} tokens, too few for one sample of "
                f"model.context + 1 = {context + 1:,}"
            )
        found[name] = samples
    return found["train"], found.get("val")
