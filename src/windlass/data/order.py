"""Which sample is seen when: a pure function of seed, epoch and place, in constant memory. Sample
number `n` is place `n % samples_per_epoch` of epoch `n // samples_per_epoch`. The hash is our own
arithmetic on 64-bit integers, so that no release of a library changes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from windlass.seeds import seed_bytes

ROUNDS = 6


def splitmix(x: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), uint64 [n]."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permute(places: np.ndarray, n: int, key: str) -> np.ndarray:
    """The values at `places` (int64) of a random-looking bijection of 0 ... n-1, without a table.

    A balanced Feistel network permutes the next power of four; a value outside 0 ... n-1 is sent
    through again until it is inside (cycle walking; Black and Rogaway, CT-RSA 2002), which takes
    fewer than four passes on average.
    """
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    keys = np.frombuffer(seed_bytes(key, 8 * ROUNDS), dtype="<u8").astype(np.uint64)

    def feistel(x: np.ndarray) -> np.ndarray:
        left, right = x >> shift, x & mask
        for round_key in keys:
            left, right = right, left ^ (splitmix(right ^ round_key) & mask)
        return (left << shift) | right

    x = feistel(places.astype(np.uint64))
    while (outside := x >= np.uint64(n)).any():
        x[outside] = feistel(x[outside])
    return x.astype(np.int64)


class Order:
    """The order of one epoch (from 0): `order[place]` is the sample's number, or an array of them.

    `kind` is `shuffled` (in each epoch again), `shards-shuffled` (shards in file order in epoch 0,
    then in a new order each epoch) or `sequential`; `n` and `shards` count the samples, in all and
    of each shard. The sources of a mixture have a `seed` each.
    """

    def __init__(
        self, kind: str, seed: int | str, epoch: int, n: int, shards: Sequence[int] | None = None
    ):
        self.n, self._starts = n, np.zeros(0, np.int64)
        self._key = f"windlass/order/samples/{seed}/{epoch}" if kind == "shuffled" else ""
        if kind == "shards-shuffled" and epoch:
            sizes = np.asarray([n] if shards is None else shards, dtype=np.int64)
            if (held := int(sizes.sum())) != n:
                raise ValueError(f"the shards hold {held:,} samples, and the epoch has {n:,}")
            occupied = np.flatnonzero(sizes)  # a shard without a sample is not in the order
            count, key = len(occupied), f"windlass/order/shards/{seed}/{epoch}"
            turn = occupied[permute(np.arange(count), count, key)]
            self._starts = np.cumsum(sizes[turn]) - sizes[turn]
            self._shift = (np.cumsum(sizes) - sizes)[turn] - self._starts

    def __getitem__(self, places: Any) -> Any:
        array = np.atleast_1d(np.asarray(places, dtype=np.int64))
        if array.size and (int(array.min()) < 0 or int(array.max()) >= self.n):
            raise IndexError(f"an epoch has the places 0 to {self.n - 1}")
        if self._key:
            array = permute(array, self.n, self._key)
        elif len(self._starts):
            array = array + self._shift[np.searchsorted(self._starts, array, side="right") - 1]
        return array if np.ndim(places) else int(array[0])


def sample_indices(
    numbers: np.ndarray, n: int, kind: str, seed: int | str, shards: Sequence[int] | None = None
) -> np.ndarray:
    """The samples (from 0) that the global sample numbers have, int64 of the same shape."""
    epochs, places = np.divmod(numbers, n)
    indices = np.empty_like(places)
    for epoch in sorted(set(epochs.ravel().tolist())):
        here = epochs == epoch
        indices[here] = Order(kind, seed, epoch, n, shards)[places[here]]
    return indices
