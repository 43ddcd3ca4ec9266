"""Data as samples: rows of tokens with their labels, which a model reads in batches. A packed row
is a part of the documents of a set, end to end; other rows have whole examples.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from windlass.data.batch import Batch, positions_of
from windlass.data.order import permute, sample_indices
from windlass.recipe.settings import IGNORE_INDEX

if TYPE_CHECKING:
    from windlass.data.corpus import Stream
    from windlass.data.split import Part


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
        for row, i, count in zip(rows, indices.tolist(), counts.tolist(), strict=True):
            self._tokens.read_into(i * self.context, row[: count + 1])
        batch = Batch(rows[:, :-1].copy(), rows[:, 1:].copy())
        if self._starts is not None:  # number the documents, and label their last tokens
            documents = np.zeros_like(batch.labels)
            for at, first in enumerate((indices * self.context).tolist()):
                # A document that begins after the row gives the last token its label.
                a, b = np.searchsorted(self._starts, [first + 1, first + self.context + 1])
                begins = self._starts[a:b] - first
                batch.labels[at, begins - 1] = self._following
                documents[at, begins[begins < self.context]] = 1
            documents.cumsum(axis=1, out=documents)
            batch = batch._replace(positions=positions_of(documents), documents=documents)
        for at in np.flatnonzero(counts < self.context).tolist():  # the last row of a ragged set
            batch.tokens[at, counts[at] :], batch.labels[at, counts[at] :] = 0, IGNORE_INDEX
        return batch

    @cached_property
    def attended(self) -> float:
        """The mean length, over all tokens, of the part of a token's document in its row."""
        rows = np.arange(0, self._count * self.context, self.context)
        own = rows if self._starts is None else self._starts[self._starts < self.valid_tokens]
        edges = np.sort(np.concatenate([rows, own]), kind="stable")  # merges two sorted runs
        sizes = np.diff(edges, append=self.valid_tokens)
        return float((sizes.astype(np.float64) ** 2).sum() / self.valid_tokens)


class ExampleSamples:
    """One question or conversation a row, with masked padding: n tokens give n - 1 positions, which
    count if they are marked.

    An example over `context` + 1 loses the tokens before its last `tail`. It is left out if nothing
    can be learned from the rest (`reach`).

    - `sizes`: the positions of each row, int64 [samples];
    - `cut` and `cut_tokens`: examples longer than a row, and the tokens that these lose;
    - `left_out`: examples that nothing is learned from.
    """

    def __init__(self, tokens: Tokens, context: int, *, pad: int = 0):
        self._tokens, self.context, self.pad = tokens, context, pad
        edges, room = tokens.documents, context + 1
        whole, tails, reach = np.diff(edges), self._field("tail"), self._field("reach")
        first = np.where(whole > room, room - tails, whole)  # the tokens before the tail
        learns = (reach <= first) & (whole > 1) & (tails < room)
        self.left_out = int((~learns).sum())
        self._starts, self._whole, self._tails = edges[:-1][learns], whole[learns], tails[learns]
        self._marked = self._field("marked")[learns]
        self.sizes = np.minimum(self._whole - 1, context)
        lost = self._whole - room
        self.cut, self.cut_tokens = int((lost > 0).sum()), int(lost[lost > 0].sum())
        self.real_tokens = int(self.sizes.sum())
        shards = np.searchsorted(self._starts, tokens.shards)
        self.shard_samples: Sequence[int] = np.diff(shards).tolist()

    def __len__(self) -> int:
        return len(self.sizes)

    def length(self, sample: int) -> int:
        return int(self.sizes[sample])

    def _field(self, name: str) -> np.ndarray:
        """A field of the table for each document, int64 [documents]."""
        parts = self._tokens.parts
        fields = [p.corpus.table.field(name)[p.numbers].astype(np.int64) for p in parts]
        return np.concatenate([np.zeros(0, np.int64), *fields])

    @cached_property
    def valid_tokens(self) -> int:
        """The marked tokens; it reads the examples that are cut."""
        is_cut = self._whole > self.context + 1
        cut = sum(int(self.row(i)[1].sum()) for i in np.flatnonzero(is_cut).tolist())
        return int(self._marked[~is_cut].sum()) + cut

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
        start, whole = int(self._starts[sample]), int(self._whole[sample])
        size = self.length(sample)
        tail = int(self._tails[sample]) if whole > size + 1 else 0
        tokens, marks = np.empty(size + 1, np.int64), np.empty(size + 1, bool)
        for read, out in ((self._tokens.read_into, tokens), (self._tokens.marks_into, marks)):
            read(start, out[: len(out) - tail])
            read(start + whole - tail, out[len(out) - tail :])
        return tokens, marks

    def fill(self, sample: int, tokens: np.ndarray, labels: np.ndarray) -> None:
        """Write a sample into `tokens` and `labels`, int64 [size]."""
        row, marks = self.row(sample)
        tokens[:], labels[:] = row[:-1], np.where(marks[1:], row[1:], IGNORE_INDEX)

    def read(self, indices: np.ndarray) -> Batch[np.ndarray]:
        shape = len(indices), int(max(self.sizes[indices], default=1))
        tokens, labels = np.full(shape, self.pad), np.full(shape, IGNORE_INDEX)
        for at, sample in enumerate(indices.tolist()):
            size = self.sizes[sample]
            self.fill(sample, tokens[at, :size], labels[at, :size])
        return Batch(tokens, labels)


def best_fit(sizes: np.ndarray, context: int) -> tuple[np.ndarray, np.ndarray]:
    """The items (of `sizes` tokens) in order of rows, int64 [items], and where each row begins,
    int64 [rows + 1].

    Best-fit decreasing (arXiv 2404.10830): from the longest item to the shortest, each goes into
    the row with the least room that holds it. Items of equal length are interchangeable, so each
    pass here fills all rows of equal room. The rows are mixed, so that any of them are a fair
    sample.
    """
    mixed = permute(np.arange(len(sizes)), len(sizes), "windlass/packing/items")
    items = mixed[np.argsort(-sizes[mixed], kind="stable")]  # neighbours in a file may be alike
    row_of = np.empty(len(items), np.int64)
    rooms = _Rooms()
    rows = done = 0
    lengths, counts = np.unique(sizes, return_counts=True)
    for size, count in zip(lengths[::-1].tolist(), counts[::-1].tolist(), strict=True):
        end = done + count
        while done < end:
            if (found := rooms.take(size)) is not None:
                room, some = found
            else:
                room, first = context, rows
                rows += -(-(end - done) // (context // size))
                some = np.arange(first, rows)
            each = room // size
            needed = -(-(end - done) // each)
            rooms.put(room, some[needed:])
            some = some[:needed]
            placed = min(len(some) * each, end - done)
            row_of[done : done + placed] = np.repeat(some, each)[:placed]
            done += placed
            if missing := len(some) * each - placed:  # the last row has fewer of these items
                rooms.put(room - (each - missing) * size, some[-1:])
                some = some[:-1]
            rooms.put(room - each * size, some)
    row_of = permute(np.arange(rows), rows, "windlass/packing/rows")[row_of]
    order = items[np.argsort(row_of, kind="stable")]
    return order, np.append(0, np.cumsum(np.bincount(row_of, minlength=rows)))


class _Rooms:
    """Rows by their room: the tokens that still fit."""

    def __init__(self) -> None:
        self._rows: dict[int, list[np.ndarray]] = {}
        self._bits = 0  # a bit for each room, because the lowest bit above others is fast to find

    def put(self, room: int, rows: np.ndarray) -> None:
        if room and len(rows):
            self._rows.setdefault(room, []).append(rows)
            self._bits |= 1 << room

    def take(self, size: int) -> tuple[int, np.ndarray] | None:
        """The least room that holds `size`, and rows with it."""
        if not (above := self._bits >> size):
            return None
        room = size + (above & -above).bit_length() - 1
        rows = self._rows[room].pop()
        if not self._rows[room]:
            self._bits ^= 1 << room
        return room, rows


class BestFitSamples:
    """Rows of whole examples; `documents` of a batch numbers them, and the padding is one more."""

    document_mask = True

    def __init__(self, items: ExampleSamples, context: int):
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
