"""Best-fit packing: rows of whole documents, questions or conversations."""

from __future__ import annotations

import numpy as np

from windlass.data.order import permute
from windlass.data.samples import Batch, DocumentSamples, positions_of
from windlass.recipe.settings import IGNORE_INDEX


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
    """Rows of `context` tokens, each with whole items from the longest to the shortest.

    `documents` of a batch numbers the items of a row; the padding at its end is one more.
    """

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
        """The numbers of a row's items."""
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
