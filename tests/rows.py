"""Questions or conversations in memory, as a set of samples."""

from collections.abc import Iterable, Sequence

import numpy as np

from windlass.data.batch import Batch
from windlass.recipe.settings import IGNORE_INDEX


class Rows:
    """Items of tokens, and marks (whether a token counts in the loss).

    An item of n tokens gives n - 1 positions, padded with `pad`.
    """

    def __init__(self, items: Iterable[tuple[Sequence[int], Sequence[bool]]], pad: int):
        self._items = [(np.asarray(tokens, np.int64), np.array(marks)) for tokens, marks in items]
        self.pad = pad
        self.sizes = np.array([len(tokens) - 1 for tokens, _ in self._items], np.int64)
        self.unpadded_tokens = int(self.sizes.sum())
        self.valid_tokens = sum(int(marks[1:].sum()) for _, marks in self._items)

    def __len__(self) -> int:
        return len(self._items)

    def length(self, index: int) -> int:
        return int(self.sizes[index])

    def read(self, indices: np.ndarray) -> Batch[np.ndarray]:
        shape = len(indices), int(max(self.sizes[indices], default=1))
        tokens, labels = np.full(shape, self.pad), np.full(shape, IGNORE_INDEX)
        for at, index in enumerate(indices.tolist()):
            item, marks = self._items[index]
            tokens[at, : len(item) - 1] = item[:-1]
            labels[at, : len(item) - 1] = np.where(marks[1:], item[1:], IGNORE_INDEX)
        return Batch(tokens, labels)
