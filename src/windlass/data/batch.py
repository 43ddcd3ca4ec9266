"""A batch of samples, and the protocol of a training or validation set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from windlass.data.order import permute

A = TypeVar("A")  # np.ndarray when read, Tensor for the model


class Batch(NamedTuple, Generic[A]):
    """Rows of one pass, int64 [B, T]. `positions` and `documents` are None if each row is one
    text."""

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
    """Whether rows of a set have several documents, each of which attends to itself alone."""
    return bool(getattr(samples, "document_mask", False))


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


class Subset:
    """`count` random samples of a set; the choice is a pure function of the seed."""

    def __init__(self, samples: Samples, count: int, seed: int):
        self.samples, n = samples, len(samples)
        self._indices = permute(np.arange(min(count, n)), n, f"windlass/evaluation/train/{seed}")

    def __len__(self) -> int:
        return len(self._indices)

    def read(self, indices: np.ndarray) -> Batch[np.ndarray]:
        return self.samples.read(self._indices[indices])


def unpadded_tokens(samples: Samples) -> int | None:
    """Tokens that a model reads in an epoch, without padding; None if unknown."""
    if hasattr(samples, "unpadded_tokens"):  # `valid_tokens` may read every cut example
        return samples.unpadded_tokens
    return getattr(samples, "valid_tokens", None)
