"""Data as samples: rows of tokens with their labels, which a model reads in batches.

A packed row is a part of the documents of a set, end to end. `documents.py` has the rows of whole
documents. All read the prepared tokens through `Tokens`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from windlass.data.corpus import Stream
from windlass.data.order import permute
from windlass.data.split import Part
from windlass.recipe.settings import IGNORE_INDEX

A = TypeVar("A")  # np.ndarray when read, Tensor for the model


class Batch(NamedTuple, Generic[A]):
    """Rows of one pass, each field int64 [B, T]; a row that is one text needs no `positions` and
    `documents`."""

    tokens: A
    labels: A  # the token that follows, or IGNORE_INDEX (-100) if it does not count in the loss
    positions: A | None = None  # each token's place in its document, from 0
    documents: A | None = None  # the number of each token's document within its row, ascending
    sources: A | None = None  # [B], the number of each row's source in a mixture

    def map(self, convert: Callable[[A], Any]) -> Batch[Any]:
        return Batch(*(None if field is None else convert(field) for field in self))

    def to(self, device: Any) -> Batch[Any]:
        """The same batch on a device, except `documents`: the host decides by them."""
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
    """A training or validation set; the user's class can be one.

    It may also have `length(i)` (tokens of sample `i`, for length buckets), `shard_samples` (of
    each shard, for `data.order = "shards-shuffled"`) and `valid_tokens` (unmasked labels).
    """

    def __len__(self) -> int: ...

    def read(self, indices: np.ndarray) -> Batch[np.ndarray]:
        """The rows of samples (int64 [n]). T is the longest of these samples, or a fixed length.

        A user's own class may return a pair of tokens and labels.
        """


class Tokens:
    """The tokens of a set's parts as one row."""

    def __init__(self, parts: Sequence[Part]):
        self.parts = list(parts)
        ranges = np.concatenate([np.zeros((0, 2), np.int64), *(part.ranges for part in parts)])
        self._starts = ranges[:, 0]  # in the tokens of a source
        self._edges = np.append(0, np.cumsum(ranges[:, 1] - ranges[:, 0]))  # in the row
        self._part_of = np.repeat(np.arange(len(parts)), [len(part.ranges) for part in parts])

    def __len__(self) -> int:
        return int(self._edges[-1])

    @property
    def documents(self) -> np.ndarray:
        """The first token of each document, and the end of the row, int64 [documents + 1]."""
        before = np.cumsum([0, *(part.tokens for part in self.parts)])
        own = [part.edges[:-1] + edge for part, edge in zip(self.parts, before, strict=False)]
        return np.concatenate([*own, [len(self)]]).astype(np.int64)

    @property
    def shards(self) -> np.ndarray:
        """Where each shard of the sources begins in the row, and its end, int64 [shards + 1]."""
        places, before = [np.zeros(0)], 0
        for part in filter(lambda part: part.tokens, self.parts):
            sizes = np.diff(part.ranges).ravel()
            ends = before + np.cumsum(sizes)
            rows, before = np.stack([ends - sizes, ends], axis=1), ends[-1]
            edges = part.corpus.stream.edges[:-1]
            places.append(np.interp(edges, part.ranges.ravel(), rows.ravel()))
        return np.append(np.concatenate(places), len(self)).astype(np.int64)

    def read_into(self, start: int, out: np.ndarray) -> None:
        """Copy the tokens from `start` on into `out` [n]."""
        for stream, place, here in self._pieces(start, len(out)):
            stream.read_into(place, out[here])

    def marks_into(self, start: int, out: np.ndarray) -> None:
        """Copy into `out` (bool [n]) whether the tokens from `start` on count in the loss."""
        for stream, place, here in self._pieces(start, len(out)):
            out[here] = stream.marks(place, place + here.stop - here.start)

    def _pieces(self, start: int, count: int) -> Iterator[tuple[Stream, int, slice]]:
        """The stretches of a source in `count` tokens of the row: their first token, and place."""
        at, done = bisect_right(self._edges, start) - 1, 0
        while done < count:
            inside = start + done - int(self._edges[at])
            end = min(count, done + int(self._edges[at + 1] - self._edges[at]) - inside)
            stream = self.parts[self._part_of[at]].corpus.stream
            yield stream, int(self._starts[at]) + inside, slice(done, end)
            done, at = end, at + 1


class PackedSamples:
    """Documents end to end in rows of `context` tokens; a row starts with the last label before it.

    With `ragged` the last tokens make a shorter row with masked padding, so that a validation set
    counts its last token. With `apart` batches number the documents of a row. The part of a
    document in a row is then a document of its own, and the label of a document's last token is
    `following`, the token that begins the next document.
    """

    def __init__(
        self,
        tokens: Tokens,
        context: int,
        *,
        ragged: bool = False,
        apart: bool = False,
        following: int = 0,
    ):
        self._tokens, self.context, self._following = tokens, context, following
        self._starts = tokens.documents[:-1] if apart else None
        self.document_mask = apart
        self.tokens = len(tokens)  # including the tokens after the last row
        self.valid_tokens = max(0, len(tokens) - 1)
        if not ragged:
            self.valid_tokens -= self.valid_tokens % context
        elif len(tokens) <= context:  # a set of less than one row
            self.context = max(1, self.valid_tokens)
        self._count: int = -(-self.valid_tokens // self.context)
        starts = np.minimum(-(-tokens.shards // context), self._count)
        self.shard_samples: Sequence[int] = np.diff(starts).tolist()

    def __len__(self) -> int:
        return self._count

    def length(self, index: int) -> int:
        return min(self.context, self.valid_tokens - index * self.context)

    def read(self, indices: np.ndarray) -> Batch[np.ndarray]:
        rows = np.zeros((len(indices), self.context + 1), dtype=np.int64)
        counts = np.minimum(self.context, self.valid_tokens - indices * self.context)
        if (counts < 1).any():
            raise IndexError(f"sample {indices.max()} of {len(self)}")
        for row, i, count in zip(rows, indices.tolist(), counts.tolist(), strict=True):
            self._tokens.read_into(i * self.context, row[: count + 1])
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
            labels[at, begins - 1] = self._following
            documents[at, begins[begins < self.context]] = 1
        documents.cumsum(axis=1, out=documents)
        return [positions_of(documents), documents]


class Subset:
    """`count` random samples of a set; the choice is a pure function of the seed."""

    def __init__(self, samples: Samples, count: int, seed: int):
        self.samples, n = samples, len(samples)
        self._indices = permute(np.arange(min(count, n)), n, f"windlass/evaluation/train/{seed}")

    def __len__(self) -> int:
        return len(self._indices)

    def read(self, indices: np.ndarray) -> Batch[np.ndarray]:
        return self.samples.read(self._indices[indices])


def real_tokens(samples: Samples) -> int | None:
    """Tokens that a model reads in an epoch, without padding; None if unknown."""
    if hasattr(samples, "real_tokens"):  # `valid_tokens` may read every cut example
        return samples.real_tokens
    return getattr(samples, "valid_tokens", None)
