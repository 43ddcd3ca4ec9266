"""What a model reads in one pass: rows of tokens, and what belongs to each token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

A = TypeVar("A")  # np.ndarray where samples are read, Tensor where a model computes


class Batch(NamedTuple, Generic[A]):
    """Rows of one pass, each field int64 [B, T]; a row that is one text needs no `positions` and
    `documents`."""

    tokens: A
    labels: A  # the token that follows; IGNORE_INDEX if it does not count in the loss
    positions: A | None = None  # each token's place in its document, from 0
    documents: A | None = None  # the number of each token's document within its row, from 0

    def map(self, convert: Callable[[A], Any]) -> Batch[Any]:
        """The same batch with every field that it has converted."""
        return Batch(*(None if field is None else convert(field) for field in self))
