"""Samples of whole documents or examples: one a row, or several in a row by best-fit packing."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from windlass.data.order import permute, sample_indices
from windlass.data.samples import Batch, Tokens, positions_of
from windlass.recipe.settings import IGNORE_INDEX


class DocumentSamples:
    """One document a row, with masked padding: `TextSamples` or `ExampleSamples`.

    Attributes:
        sizes: The positions of each row, int64 [samples].
        documents: The number of documents, also of documents that give no sample.
        lengths: Statistics of the whole documents (`length_statistics`).
        pad: The token of the padding.
        left_out: The examples from which nothing can be learned.
    """

    pad = left_out = 0

    def __init__(
        self, tokens: Tokens, starts: np.ndarray, sizes: np.ndarray, lengths: dict[str, Any]
    ):
        """`starts`: the first token of each sample."""
        self._tokens, self._starts = tokens, starts
        self.sizes, self.lengths, self.documents = sizes, lengths, len(tokens.documents) - 1
        self.real_tokens = int(sizes.sum())
        shards = np.searchsorted(starts, tokens.shards)
        self.shard_samples: Sequence[int] = np.diff(shards).tolist()

    def __len__(self) -> int:
        return len(self.sizes)

    def length(self, sample: int) -> int:
        return int(self.sizes[sample])

    @property
    def valid_tokens(self) -> int:
        return self.real_tokens

    def width(self, samples: np.ndarray) -> int:
        """The positions of a batch with these samples."""
        raise NotImplementedError

    def fill(self, sample: int, tokens: np.ndarray, labels: np.ndarray) -> None:
        """Write a sample into `tokens` and `labels`, int64 [size]."""
        raise NotImplementedError

    def read(self, indices: np.ndarray) -> Batch[np.ndarray]:
        shape = len(indices), self.width(indices)
        tokens, labels = np.full(shape, self.pad), np.full(shape, IGNORE_INDEX)
        for at, sample in enumerate(indices.tolist()):
            size = self.sizes[sample]
            self.fill(sample, tokens[at, :size], labels[at, :size])
        return Batch(tokens, labels)


class TextSamples(DocumentSamples):
    """Documents of text: n tokens give n positions.

    The label of a document's last token is `following`, the token that begins the next document. A
    document over `context` loses its end; with `split` it makes several samples instead.
    """

    def __init__(self, tokens: Tokens, context: int, *, following: int, split: bool = False):
        edges = tokens.documents
        starts, rest = edges[:-1], np.diff(edges)  # `rest`: tokens up to the document's end
        lengths = length_statistics(rest, context)
        if split:
            pieces = -(-rest // context)
            first = np.repeat(np.cumsum(pieces) - pieces, pieces)
            begin = context * (np.arange(len(first)) - first)  # of a piece in its document
            starts, rest = np.repeat(starts, pieces) + begin, np.repeat(rest, pieces) - begin
            lengths |= {"cut": 0, "cut_tokens": 0}
        super().__init__(tokens, starts, np.minimum(rest, context), lengths)
        self.context, self._rest, self._following = context, rest, following

    def width(self, samples: np.ndarray) -> int:
        return self.context

    def fill(self, sample: int, tokens: np.ndarray, labels: np.ndarray) -> None:
        row = np.full(len(tokens) + 1, self._following, dtype=np.int64)
        self._tokens.read_into(int(self._starts[sample]), row[: int(self._rest[sample])])
        tokens[:], labels[:] = row[:-1], row[1:]


class ExampleSamples(DocumentSamples):
    """Questions or conversations: n tokens give n - 1 positions, which count if they are marked.

    An example over `context` + 1 loses the tokens before its last `tail`. It is left out if nothing
    can be learned from the rest (`reach`).
    """

    def __init__(self, tokens: Tokens, context: int, *, pad: int = 0):
        self._tokens, self.context, self.pad = tokens, context, pad
        edges, room = tokens.documents, context + 1
        whole, tails, reach = np.diff(edges), self._field("tail"), self._field("reach")
        first = np.where(whole > room, room - tails, whole)  # the tokens before the tail
        learns = (reach <= first) & (whole > 1) & (tails < room)
        self.left_out = int((~learns).sum())
        self._whole, self._tails = whole[learns], tails[learns]
        self._marked = self._field("marked")[learns]
        sizes, lengths = np.minimum(self._whole - 1, context), length_statistics(self._whole, room)
        super().__init__(tokens, edges[:-1][learns], sizes, lengths)

    def _field(self, name: str) -> np.ndarray:
        """A field of the table for each document, int64 [documents]."""
        parts = self._tokens.parts
        fields = [p.corpus.stream.table.field(name)[p.numbers].astype(np.int64) for p in parts]
        return np.concatenate([np.zeros(0, np.int64), *fields])

    @cached_property
    def valid_tokens(self) -> int:
        """As for texts, but marked; it reads the examples that are cut."""
        is_cut = self._whole > self.context + 1
        cut = sum(int(self.row(i)[1].sum()) for i in np.flatnonzero(is_cut).tolist())
        return int(self._marked[~is_cut].sum()) + cut

    def width(self, samples: np.ndarray) -> int:
        return int(max(self.sizes[samples], default=1))

    def mean_width(
        self, batch: int, micro_batch: int, order: str, seed: int, length_buckets: bool
    ) -> float:
        """The mean over an epoch of a row's positions in its micro-batch, padding included."""
        steps = max(1, len(self) // batch)
        sizes = self.sizes[sample_indices(np.arange(steps * batch), len(self), order, seed)]
        sizes = sizes.reshape(steps, batch)
        sizes = np.sort(sizes) if length_buckets else sizes
        return float(sizes.reshape(-1, micro_batch).max(axis=1).mean())

    def row(self, sample: int) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of an example (int64), and whether each counts in the loss."""
        start, whole, size = (
            int(self._starts[sample]),
            int(self._whole[sample]),
            self.length(sample),
        )
        tail = int(self._tails[sample]) if whole > size + 1 else 0
        tokens, marks = np.empty(size + 1, np.int64), np.empty(size + 1, bool)
        for read, out in ((self._tokens.read_into, tokens), (self._tokens.marks_into, marks)):
            read(start, out[: len(out) - tail])
            read(start + whole - tail, out[len(out) - tail :])
        return tokens, marks

    def fill(self, sample: int, tokens: np.ndarray, labels: np.ndarray) -> None:
        row, marks = self.row(sample)
        tokens[:], labels[:] = row[:-1], np.where(marks[1:], row[1:], IGNORE_INDEX)


def length_statistics(sizes: np.ndarray, used: int) -> dict[str, Any]:
    """Percentiles of lengths, the items over `used` tokens, and how many tokens these lose."""
    if not len(sizes):
        return {}
    over = sizes[sizes > used] - used
    places = np.percentile(sizes, [50, 90, 99, 100], method="inverted_cdf").tolist()
    percentiles = dict(zip(("50", "90", "99", "max"), map(int, places), strict=True))
    return {"lengths": percentiles, "cut": len(over), "cut_tokens": int(over.sum())}


# -- best-fit packing


def best_fit(sizes: np.ndarray, context: int) -> tuple[np.ndarray, np.ndarray]:
    """The items in order of rows, int64 [items], and where each row begins, int64 [rows + 1].

    Best-fit decreasing (arXiv 2404.10830): from the longest item to the shortest, each item goes
    into the row with the least room that holds it. Items of equal length are interchangeable, so
    each pass here fills all rows of equal room: no more passes than the items have different
    lengths, times a small number. The rows are mixed, so that any of them are a fair sample.

    Args:
        sizes: tokens of each item, int64 [items], from 1 to `context`.
    """
    mixed = permute(np.arange(len(sizes)), len(sizes), "windlass/packing/items")
    items = mixed[np.argsort(-sizes[mixed], kind="stable")]  # neighbours in a file may be alike
    row_of = np.empty(len(items), np.int64)
    by_room: dict[int, list[np.ndarray]] = {}  # rows, by the tokens that still fit
    rooms = 0  # the keys of `by_room` as bits, because the lowest bit above others is fast to find
    rows = done = 0

    def put(room: int, some: np.ndarray) -> int:
        if room and len(some):
            by_room.setdefault(room, []).append(some)
            return rooms | 1 << room
        return rooms

    lengths, counts = np.unique(sizes, return_counts=True)
    for size, count in zip(lengths[::-1].tolist(), counts[::-1].tolist(), strict=True):
        end = done + count
        while done < end:
            if above := rooms >> size:
                room = size + (above & -above).bit_length() - 1
                some = by_room[room].pop()
                rooms ^= 0 if by_room[room] else 1 << room
            else:
                room, first = context, rows
                rows += -(-(end - done) // (context // size))
                some = np.arange(first, rows)
            each = room // size
            needed = -(-(end - done) // each)
            rooms = put(room, some[needed:])
            some = some[:needed]
            placed = min(len(some) * each, end - done)
            row_of[done : done + placed] = np.repeat(some, each)[:placed]
            done += placed
            if missing := len(some) * each - placed:  # the last row has fewer of these items
                rooms = put(room - (each - missing) * size, some[-1:])
                some = some[:-1]
            rooms = put(room - each * size, some)
    row_of = permute(np.arange(rows), rows, "windlass/packing/rows")[row_of]
    order = items[np.argsort(row_of, kind="stable")]
    return order, np.append(0, np.cumsum(np.bincount(row_of, minlength=rows)))


class BestFitSamples:
    """Rows of whole items; `documents` of a batch numbers them, and the padding is one more."""

    document_mask = True

    def __init__(self, items: DocumentSamples, context: int):
        self.items, self.context = items, context
        self.real_tokens = items.real_tokens
        self._order, self._edges = best_fit(items.sizes, context)
        self._used = np.add.reduceat(items.sizes[self._order], self._edges[:-1])

    def __len__(self) -> int:
        return len(self._used)

    @property
    def valid_tokens(self) -> int:
        return self.items.valid_tokens

    def length(self, index: int) -> int:
        return int(self._used[index])

    @property
    def attended(self) -> float:
        return float((self.items.sizes.astype(np.float64) ** 2).sum() / self.real_tokens)

    @property
    def documents_per_row(self) -> float:
        return len(self._order) / max(1, len(self))

    def items_of(self, index: int) -> list[int]:
        return list(self._order[self._edges[index] : self._edges[index + 1]].tolist())

    def read(self, indices: np.ndarray) -> Batch[np.ndarray]:
        shape = len(indices), self.context
        tokens, labels = np.full(shape, self.items.pad), np.full(shape, IGNORE_INDEX)
        documents = np.zeros(shape, dtype=np.int64)
        for at, index in enumerate(indices.tolist()):
            start = 0
            for number, item in enumerate(self.items_of(index)):
                place = slice(start, start + int(self.items.sizes[item]))
                self.items.fill(item, tokens[at, place], labels[at, place])
                documents[at, place.stop :] = number + 1
                start = place.stop
        return Batch(tokens, labels, positions_of(documents), documents)
