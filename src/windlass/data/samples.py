"""Data as samples: rows of tokens with their labels, which a model reads in batches."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from windlass.data.order import permute, sample_indices
from windlass.data.shards import Index, Split, Stream, cut_shards
from windlass.errors import UserError
from windlass.recipe.settings import IGNORE_INDEX
from windlass.seeds import seed_bytes

A = TypeVar("A")  # np.ndarray where samples are read, Tensor where a model computes


class Batch(NamedTuple, Generic[A]):
    """Rows of one pass, each field int64 [B, T]; a row that is one text needs no `positions` and
    `documents`."""

    tokens: A
    labels: A  # the token that follows, or IGNORE_INDEX (-100) if it does not count in the loss
    positions: A | None = None  # each token's place in its document, from 0
    documents: A | None = None  # the number of each token's document within its row, ascending
    sources: A | None = None  # [B], the number of each row's source in a mixture

    def map(self, convert: Callable[[A], Any]) -> Batch[Any]:
        """The same batch with every field that it has converted."""
        return Batch(*(None if field is None else convert(field) for field in self))

    def to(self, device: Any) -> Batch[Any]:
        """The same batch of tensors on a device, except `documents`.

        The host reads these, because they decide what it launches.
        """
        moved = self.map(lambda field: field.to(device, non_blocking=True))  # type: ignore[attr-defined]
        return moved._replace(documents=self.documents)


def positions_of(documents: np.ndarray) -> np.ndarray:
    """Each token's place in its document, from 0; both int64 [B, T]."""
    places = np.broadcast_to(np.arange(documents.shape[1]), documents.shape)
    starts = np.diff(documents, axis=1, prepend=-1) != 0
    positions: np.ndarray = places - np.maximum.accumulate(np.where(starts, places, 0), axis=1)
    return positions


def masks_documents(samples: object) -> bool:
    """Whether rows of a set have several documents, of which each attends to itself alone."""
    return bool(getattr(samples, "document_mask", False))


def documents_per_row(samples: object) -> float:
    """The documents of a row, in the mean, if attention keeps them apart; 0: it does not."""
    return getattr(samples, "documents_per_row", 0.0) if masks_documents(samples) else 0.0


class Samples(Protocol):
    """A training or validation set; a user's own class can be one.

    It may also have `length(i)` (tokens of sample `i`, for length buckets), `shard_samples` (of
    each shard, for `data.order = "shards-shuffled"`) and `valid_tokens` (unmasked labels). Endless
    samples have a `window` (the samples that are shuffled together) and no length.
    """

    def __len__(self) -> int: ...

    def read(self, indices: np.ndarray) -> Batch[np.ndarray]:
        """The rows of samples (int64 [n]). T is the longest of these samples, or a fixed length.

        A user's own class may return a pair of tokens and labels.
        """


def split_stream(directory: Path, index: Index, split: Split) -> Stream:
    """The tokens of a split as one row."""
    parts = [cut_shards(index.streams[part.stream], part.start, part.stop) for part in split.ranges]
    return Stream(directory, [shard for part in parts for shard in part])


def split_documents(directory: Path, index: Index, split: Split) -> np.ndarray:
    """The start of each document or range in a split's row, int64 [documents]."""
    starts, before = [np.zeros(0, dtype=np.int64)], 0
    for part in split.ranges:
        own = Stream(directory, index.streams[part.stream]).starts()
        own = np.union1d([part.start], own[(own >= part.start) & (own < part.stop)])
        starts.append(own - part.start + before)
        before += part.stop - part.start
    return np.concatenate(starts)


class PackedSamples:
    """Documents end to end in rows of `context` tokens; a row starts with the last label before it.

    With `ragged` the last tokens make a shorter row with masked padding, so that a validation set
    counts its last token. With `starts` (of the documents, int64 [documents]) batches number the
    documents of a row. The part of a document in a row is then a document of its own, and the label
    of a document's last token is `eot`, which is the next document's first token.
    """

    def __init__(
        self,
        stream: Stream,
        context: int,
        *,
        ragged: bool = False,
        starts: np.ndarray | None = None,
        eot: int = 0,
    ):
        self.stream, self.context, self._starts, self._eot = stream, context, starts, eot
        self.document_mask = starts is not None
        self.tokens = len(stream)  # including the tokens after the last row
        self.valid_tokens = max(0, len(stream) - 1)
        if not ragged:
            self.valid_tokens -= self.valid_tokens % context
        self._count: int = -(-self.valid_tokens // context)
        starts = np.minimum(-(-stream.edges // context), self._count)
        self.shard_samples: Sequence[int] = np.diff(starts).tolist()

    def __len__(self) -> int:
        return self._count

    def read(self, indices: np.ndarray) -> Batch[np.ndarray]:
        rows = np.zeros((len(indices), self.context + 1), dtype=np.int64)
        counts = np.minimum(self.context, self.valid_tokens - indices * self.context)
        if (counts < 1).any():
            raise IndexError(f"sample {indices.max()} of {len(self)}")
        for row, i, count in zip(rows, indices.tolist(), counts.tolist(), strict=True):
            self.stream.read_into(i * self.context, row[: count + 1])
        tokens, labels = rows[:, :-1].copy(), rows[:, 1:].copy()
        last = [] if self._starts is None else self._number(indices, labels)
        for at in np.flatnonzero(counts < self.context):  # the last row of a ragged set
            tokens[at, counts[at] :], labels[at, counts[at] :] = 0, IGNORE_INDEX
        return Batch(tokens, labels, *last)

    @property
    def documents_per_row(self) -> float:
        """The documents or parts of documents of a row, in the mean."""
        return 1 + (0 if self._starts is None else len(self._starts)) / max(1, self._count)

    @cached_property
    def attended(self) -> float:
        """The mean length, over all tokens, of the part of a token's document in its row."""
        rows = np.arange(0, self._count * self.context, self.context)
        own = rows if self._starts is None else self._starts[self._starts < self.valid_tokens]
        edges = np.sort(np.concatenate([rows, own]), kind="stable")  # merges two sorted runs
        sizes = np.diff(edges, append=self.valid_tokens)
        return float((sizes.astype(np.float64) ** 2).sum() / self.valid_tokens)

    def _number(self, indices: np.ndarray, labels: np.ndarray) -> list[np.ndarray]:
        """Positions and documents of the tokens of rows; writes the labels of documents' ends."""
        assert self._starts is not None
        documents = np.zeros_like(labels)
        for at, first in enumerate((indices * self.context).tolist()):
            # A document that begins after the row gives the last token its label.
            a, b = np.searchsorted(self._starts, [first + 1, first + self.context + 1])
            begins = self._starts[a:b] - first
            labels[at, begins - 1] = self._eot
            documents[at, begins[begins < self.context]] = 1
        documents.cumsum(axis=1, out=documents)
        return [positions_of(documents), documents]


class DocumentSamples:
    """One document a row, from its end-of-text token on, cut at `context`, with masked padding.

    With `split` a longer document makes several samples, and no token is lost.
    """

    pad = 0

    def __init__(
        self, stream: Stream, starts: np.ndarray, context: int, eot: int, *, split: bool = False
    ):
        self.stream, self.context, self._eot = stream, context, eot
        whole = np.append(starts[1:], len(stream))[: len(starts)] - starts
        self.documents, rest = len(starts), whole
        self.lengths = length_percentiles(whole, context) if len(starts) else {}
        if split:
            pieces = -(-whole // context)
            first = np.repeat(np.cumsum(pieces) - pieces, pieces)
            begin = context * (np.arange(len(first)) - first)  # of a piece in its document
            starts, rest = np.repeat(starts, pieces) + begin, np.repeat(whole, pieces) - begin
            self.lengths |= {"cut": 0, "cut_tokens": 0}
        self._starts, self._rest = (
            starts,
            rest,
        )  # tokens from a sample's start to its document's end
        self.sizes = np.minimum(rest, context)
        self.shard_samples: Sequence[int] = np.diff(np.searchsorted(starts, stream.edges)).tolist()
        self.valid_tokens = int(self.sizes.sum())

    def __len__(self) -> int:
        return len(self._starts)

    def length(self, i: int) -> int:
        return int(self.sizes[i])

    def fill(self, index: int, tokens: np.ndarray, labels: np.ndarray) -> None:
        """Write a sample into `tokens` and `labels`, int64 [size]."""
        # The label of a document's last token is the end-of-text token of the next document.
        document = np.full(len(tokens) + 1, self._eot, dtype=np.int64)
        self.stream.read_into(int(self._starts[index]), document[: int(self._rest[index])])
        tokens[:], labels[:] = document[:-1], document[1:]

    def read(self, indices: np.ndarray) -> Batch[np.ndarray]:
        tokens = np.zeros((len(indices), self.context), dtype=np.int64)
        labels = np.full((len(indices), self.context), IGNORE_INDEX, dtype=np.int64)
        for at, i in enumerate(indices.tolist()):
            self.fill(i, tokens[at, : self.sizes[i]], labels[at, : self.sizes[i]])
        return Batch(tokens, labels)


class DatasetSamples:
    """A map-style `torch.utils.data.Dataset` whose items are integer token tensors [T + 1]."""

    def __init__(self, dataset: Any, context: int):
        self.dataset, self.context = dataset, context

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, indices: np.ndarray) -> Batch[np.ndarray]:
        rows = np.stack([self.item(index) for index in indices.tolist()])
        return Batch(rows[:, :-1], rows[:, 1:])

    def item(self, index: int) -> np.ndarray:
        """Item `index`, int64 [T + 1]; UserError if it has another shape or type."""
        item = self.dataset[index]
        # numpy would read the items of any other object, such as a dataset, perhaps without end.
        is_row = hasattr(item, "__array__") or isinstance(item, list | tuple)
        item = np.asarray(item if is_row else None)
        if item.dtype.kind not in "iu" or item.shape != (self.context + 1,):
            raise UserError(
                f"data: item {index} of the dataset is {item.dtype} {list(item.shape)}; "
                f"it must hold integers [{self.context + 1}], model.context + 1 tokens"
            )
        return item.astype(np.int64)


class Subset:
    """`count` random samples of a set; the choice is a pure function of the seed."""

    def __init__(self, samples: Samples, count: int, seed: int):
        self.samples, n = samples, len(samples)
        self._indices = permute(np.arange(min(count, n)), n, f"windlass/evaluation/train/{seed}")

    def __len__(self) -> int:
        return len(self._indices)

    def read(self, indices: np.ndarray) -> Batch[np.ndarray]:
        return self.samples.read(self._indices[indices])


def epoch_samples(samples: Samples) -> int:
    """The samples of an epoch; 0 if unknown, for a streamed source."""
    return 0 if hasattr(samples, "window") else len(samples)


def real_tokens(samples: Samples) -> int | None:
    """Tokens that a model reads in an epoch, without padding; None if unknown."""
    unmasked = getattr(samples, "valid_tokens", None)
    return getattr(samples, "real_tokens", unmasked)


class Row(NamedTuple):
    """One question or conversation."""

    tokens: Sequence[int]
    marks: Sequence[bool]  # whether the token counts in the loss
    whole: int  # its tokens before the cut at the context


def length_percentiles(whole: Sequence[int] | np.ndarray, used: int) -> dict[str, Any]:
    """Percentiles of the lengths of whole items, and how many exceed the `used` tokens."""
    sizes = np.asarray(whole, dtype=np.int64)
    over = sizes[sizes > used] - used
    places = np.percentile(sizes, [50, 90, 99, 100], method="inverted_cdf").tolist()
    shown = dict(zip(("50", "90", "99", "max"), map(int, places), strict=True))
    return {"lengths": shown, "cut": len(over), "cut_tokens": int(over.sum())}


class Rows:
    """Questions or conversations as tokens and marks (whether a token counts in the loss).

    A row of n tokens gives n - 1 positions, padded with `pad`. A label is the next token, or -100
    without its mark.
    """

    def __init__(self, rows: Iterable[Row | tuple[Sequence[int], Sequence[bool]]], pad: int):
        pairs = [row[:2] for row in rows]
        self._ends = np.cumsum([0, *(len(tokens) for tokens, _ in pairs)], dtype=np.int64)
        ids = [np.asarray(tokens, np.int32) for tokens, _ in pairs]
        marks = [np.asarray(counted, bool) for _, counted in pairs]
        self._tokens = np.concatenate([np.zeros(0, np.int32), *ids])
        self._marks = np.concatenate([np.zeros(0, bool), *marks])
        self._marks[self._ends[:-1]] = False  # a row's first token cannot be predicted
        self.pad, self.valid_tokens = pad, int(self._marks.sum())

    def save(self, path: Path) -> None:
        with path.open("wb") as file:
            pad = np.int64(self.pad)
            np.savez(file, tokens=self._tokens, marks=self._marks, ends=self._ends, pad=pad)

    @staticmethod
    def load(path: Path) -> Rows:
        """Rows from `save`; OSError, ValueError, KeyError or BadZipFile if the file is damaged."""
        with np.load(path, allow_pickle=False) as saved:
            rows = Rows((), int(saved["pad"]))
            rows._tokens, rows._marks, rows._ends = saved["tokens"], saved["marks"], saved["ends"]
        rows.valid_tokens = int(rows._marks.sum())
        return rows

    def __len__(self) -> int:
        return len(self._ends) - 1

    @cached_property
    def sizes(self) -> np.ndarray:
        """The positions of each row, int64 [rows]."""
        sizes: np.ndarray = np.diff(self._ends) - 1
        return sizes

    def length(self, index: int) -> int:
        return int(self.sizes[index])

    def row(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """A row's tokens, int32 [n], and whether each counts in the loss, bool [n]."""
        place = slice(self._ends[index], self._ends[index + 1])
        return self._tokens[place], self._marks[place]

    def fill(self, index: int, tokens: np.ndarray, labels: np.ndarray) -> None:
        """Write a row into `tokens` and `labels`, int64 [n - 1]."""
        row, marks = self.row(index)
        tokens[:], labels[:] = row[:-1], np.where(marks[1:], row[1:], IGNORE_INDEX)

    @property
    def real_tokens(self) -> int:
        """Positions in an epoch, without padding."""
        return len(self._tokens) - len(self)

    def mean_width(
        self, batch: int, micro_batch: int, order: str, seed: int, length_buckets: bool
    ) -> float:
        """Positions of a row in its micro-batch, padding included: the mean over an epoch.

        `batch`: the samples of a step, which `length_buckets` sorts by length.
        """
        steps = max(1, len(self) // batch)
        sizes = self.sizes[sample_indices(np.arange(steps * batch), len(self), order, seed)]
        sizes = sizes.reshape(steps, batch)
        sizes = np.sort(sizes) if length_buckets else sizes
        return float(sizes.reshape(-1, micro_batch).max(axis=1).mean())

    @property
    def fingerprint(self) -> str:
        """SHA-256 of tokens, marks and ends: equal for equal rows in equal order."""
        parts = (self._tokens.astype("<i4"), self._marks.astype("u1"), self._ends.astype("<i8"))
        return hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()

    def read(self, indices: np.ndarray) -> Batch[np.ndarray]:
        width = max((self.length(int(i)) for i in indices), default=1)
        tokens = np.full((len(indices), width), self.pad, dtype=np.int64)
        labels = np.full((len(indices), width), IGNORE_INDEX, dtype=np.int64)
        for at, i in enumerate(indices.tolist()):
            self.fill(i, tokens[at, : self.sizes[i]], labels[at, : self.sizes[i]])
        return Batch(tokens, labels)


def choose_places(keys: Iterable[str], size: int, seed: int, purpose: str) -> list[int]:
    """The places of `size` keys (0: all), in order; a function of seed, purpose and keys."""
    draws = [seed_bytes(f"windlass/choose/{purpose}/{seed}/{key}", 16) for key in keys]
    return sorted(sorted(range(len(draws)), key=draws.__getitem__)[: size or len(draws)])
