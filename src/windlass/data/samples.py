"""Data as samples: rows of tokens with their labels, which a model reads in batches. A packed row
is a part of the documents of a set, end to end; other rows have whole examples.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from windlass.data.batch import Batch, positions_of
from windlass.data.order import permute, sample_indices
from windlass.data.shards import MARK
from windlass.recipe.settings import IGNORE_INDEX

if TYPE_CHECKING:
    from windlass.data.split import DocumentSet


class PackedSamples:
    """Documents end to end in rows of `context` tokens; a row starts with the last label before it.

    With `ragged` the last tokens make a shorter row with masked padding, so that a validation set
    counts its last token. With `following`, the token that begins a document, batches number the
    documents of a row. The part of a document in a row is then a document of its own, and the label
    of a document's last token is `following`.
    """

    def __init__(
        self,
        tokens: DocumentSet,
        context: int,
        *,
        ragged: bool = False,
        following: int | None = None,
    ):
        self._tokens, self.context, self._following = tokens, context, following or 0
        self.document_mask = following is not None
        self._starts = tokens.edges[:-1] if self.document_mask else None
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
            first = i * self.context
            row[: count + 1] = self._tokens.read(first, first + count + 1)
        batch = Batch(rows[:, :-1].copy(), rows[:, 1:].copy())
        if self._starts is not None:
            # the number of each token's document in the set, and of the token after the row's last
            places = indices[:, None] * self.context + np.arange(self.context + 1)
            numbers = np.searchsorted(self._starts, places, side="right")
            batch.labels[numbers[:, :-1] != numbers[:, 1:]] = self._following
            documents = numbers[:, :-1] - numbers[:, :1]
            batch = batch._replace(positions=positions_of(documents), documents=documents)
        for last in np.flatnonzero(counts < self.context).tolist():  # the last row of a ragged set
            batch.tokens[last, counts[last] :], batch.labels[last, counts[last] :] = 0, IGNORE_INDEX
        return batch

    @cached_property
    def attended(self) -> float:
        """The mean length, over all tokens, of the part of a token's document in its row."""
        assert self._starts is not None
        rows = np.arange(0, self._count * self.context, self.context)
        starts = self._starts[self._starts < self.valid_tokens]
        edges = np.sort(np.concatenate([rows, starts]), kind="stable")  # merges two sorted runs
        sizes = np.diff(edges, append=self.valid_tokens)
        return float((sizes.astype(np.float64) ** 2).sum() / self.valid_tokens)


class ExampleSamples:
    """Questions or conversations, one a row with masked padding, or `packed`: as many as best-fit
    packing puts into a row. In a packed batch `documents` numbers them, and the padding is one more.

    An example of n tokens has n - 1 positions, which count if they are marked. An example of more
    than `context` + 1 tokens loses those before its last `tail`, and is left out if nothing can be
    learned from the rest (`reach`).

    - `sizes`: the positions of each example, int64 [examples];
    - `cut` and `cut_tokens`: examples longer than a row, and the tokens that these lose;
    - `left_out`: examples that nothing is learned from.
    """

    def __init__(self, tokens: DocumentSet, context: int, *, pad: int = 0, packed: bool = False):
        self._tokens, self.context, self.pad, self.document_mask = tokens, context, pad, packed
        edges, room = tokens.edges, context + 1
        whole, tails, reach = np.diff(edges), tokens.field("tail"), tokens.field("reach")
        first = np.where(whole > room, room - tails, whole)  # the tokens before the tail
        learns = (reach <= first) & (whole > 1) & (tails < room)
        self.left_out = int((~learns).sum())
        self._starts, self._whole = edges[:-1][learns], whole[learns]
        self._tails = np.where(self._whole > room, tails[learns], 0)
        self._marked = tokens.field("marked")[learns]
        self.sizes = np.minimum(self._whole - 1, context)
        lost = self._whole - room
        self.cut, self.cut_tokens = int((lost > 0).sum()), int(lost[lost > 0].sum())
        self.unpadded_tokens = int(self.sizes.sum())
        # the examples in the order of rows, and where each row begins among them
        self._order, self._edges = np.arange(len(self.sizes)), np.arange(len(self.sizes) + 1)
        if packed:
            self._order, self._edges = best_fit(self.sizes, context)
        self._used = np.add.reduceat(self.sizes[self._order], self._edges[:-1])
        shards = np.searchsorted(self._starts, tokens.shards)
        self.shard_samples: Sequence[int] = np.diff(shards).tolist()  # without packing

    def __len__(self) -> int:
        return len(self._used)

    def length(self, index: int) -> int:
        return int(self._used[index])

    @cached_property
    def valid_tokens(self) -> int:
        """The marked tokens; it reads the examples that are cut."""
        is_cut = self._whole > self.context + 1
        cut = sum(int(self.example(i)[1].sum()) for i in np.flatnonzero(is_cut).tolist())
        return int(self._marked[~is_cut].sum()) + cut

    @property
    def attended(self) -> float:
        """The mean length, over all tokens, of a token's example."""
        return float((self.sizes.astype(np.float64) ** 2).sum() / self.unpadded_tokens)

    def mean_width(
        self, batch: int, micro_batch: int, order: str, seed: int, length_buckets: bool
    ) -> float:
        """The mean over an epoch of a row's positions in its micro-batch, padding included."""
        if self.document_mask:
            return self.context
        steps = max(1, len(self) // batch)
        sizes = self.sizes[sample_indices(np.arange(steps * batch), len(self), order, seed)]
        sizes = sizes.reshape(steps, batch)
        sizes = np.sort(sizes) if length_buckets else sizes
        return float(sizes.reshape(-1, micro_batch).max(axis=1).mean())

    def example(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of an example (int64), and whether each counts in the loss."""
        start, tail = int(self._starts[number]), int(self._tails[number])
        end = start + int(self._whole[number])
        head = start + int(self.sizes[number]) + 1 - tail
        read = self._tokens.read
        row = np.concatenate([read(start, head), read(end - tail, end)])
        return row % MARK, row >= MARK

    def examples_of(self, index: int) -> list[int]:
        """The examples of a row."""
        return list(self._order[self._edges[index] : self._edges[index + 1]].tolist())

    def read(self, indices: np.ndarray) -> Batch[np.ndarray]:
        packed = self.document_mask
        width = self.context if packed else int(max(self._used[indices], default=1))
        shape = len(indices), width
        tokens, labels = np.full(shape, self.pad), np.full(shape, IGNORE_INDEX)
        documents = np.zeros(shape, dtype=np.int64)
        for at, index in enumerate(indices.tolist()):
            start = 0
            for number, example in enumerate(self.examples_of(index), 1):
                row, marks = self.example(example)
                end = start + len(row) - 1
                tokens[at, start:end] = row[:-1]
                labels[at, start:end] = np.where(marks[1:], row[1:], IGNORE_INDEX)
                documents[at, end:] = number
                start = end
        if not packed:
            return Batch(tokens, labels)
        return Batch(tokens, labels, positions_of(documents), documents)


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
    # rows by their room, the tokens that still fit; and the rooms that have rows, ascending
    rows_with, rooms = defaultdict[int, list[np.ndarray]](list), list[int]()

    def offer(room: int, rows: np.ndarray) -> None:
        if room and len(rows):
            if not rows_with[room]:
                bisect.insort(rooms, room)
            rows_with[room].append(rows)

    rows = done = 0
    lengths, counts = np.unique(sizes, return_counts=True)
    for size, count in zip(lengths[::-1].tolist(), counts[::-1].tolist(), strict=True):
        end = done + count
        while done < end:
            least = bisect.bisect_left(rooms, size)
            if least < len(rooms):
                room = rooms[least]
                chosen = rows_with[room].pop()
                if not rows_with[room]:
                    del rooms[least]
            else:  # new rows
                room, first = context, rows
                rows += -(-(end - done) // (context // size))
                chosen = np.arange(first, rows)
            each = room // size
            needed = -(-(end - done) // each)
            offer(room, chosen[needed:])
            chosen = chosen[:needed]
            placed = min(len(chosen) * each, end - done)
            row_of[done : done + placed] = np.repeat(chosen, each)[:placed]
            done += placed
            if missing := len(chosen) * each - placed:  # the last row has fewer of these items
                offer(room - (each - missing) * size, chosen[-1:])
                chosen = chosen[:-1]
            offer(room - each * size, chosen)
    row_of = permute(np.arange(rows), rows, "windlass/packing/rows")[row_of]
    order = items[np.argsort(row_of, kind="stable")]
    return order, np.append(0, np.cumsum(np.bincount(row_of, minlength=rows)))
