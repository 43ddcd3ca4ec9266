"""Which sample is seen when: a pure function of seed, epoch and place, in constant memory.

The global sequence of samples counts on over the epochs: sample number `n` is place `n % samples_per_epoch` of epoch
`n // samples_per_epoch`. Nothing here knows of ranks, micro-batches or workers, so none of them can change the order.
The hash is our own arithmetic on 64-bit integers, so that no release of a library can change the order either.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import overload

import numpy as np

Integers = np.ndarray
"""A numpy array of int64."""
ROUNDS = 6


class Permutation:
    """A random-looking bijection of 0 ... n-1 that holds no table.

    A balanced Feistel network permutes the next power of four; a value that falls outside 0 ... n-1 is sent through again
    until it falls inside (cycle walking; Black and Rogaway, CT-RSA 2002), which takes fewer than four passes on average.
    """

    def __init__(self, n: int, key: str):
        if n < 1:
            raise ValueError(f"a permutation needs at least one place, not {n}")
        self.n = n
        half = max(1, ((n - 1).bit_length() + 1) // 2)
        self._half, self._mask = np.uint64(half), np.uint64((1 << half) - 1)
        digest = hashlib.blake2b(key.encode(), digest_size=8 * ROUNDS).digest()
        self._keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)

    def _pass(self, x: np.ndarray) -> np.ndarray:
        left, right = x >> self._half, x & self._mask
        for key in self._keys:
            # The finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): every input bit reaches every output bit.
            y = right ^ key
            y = (y ^ (y >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            y = (y ^ (y >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            left, right = right, left ^ ((y ^ (y >> np.uint64(31))) & self._mask)
        return (left << self._half) | right

    def __call__(self, places: Integers) -> Integers:
        """The values at these places, each in 0 ... n-1."""
        x = self._pass(places.astype(np.uint64))
        while (outside := x >= np.uint64(self.n)).any():
            x[outside] = self._pass(x[outside])
        return x.astype(np.int64)


class Order:
    """The order of one epoch: `order[place]` is the number of the sample at that place, for an int or an array of them.

    Args:
        kind: `shuffled` (all samples, anew each epoch), `shards-shuffled` (shards as they lie in epoch 0, in a new order
            from epoch 1 on, the samples of a shard in order) or `sequential`.
        seed: The run's seed.
        epoch: Counted from 0.
        n: Samples in an epoch.
        shards: With `shards-shuffled`: the number of samples in each shard; they add up to `n`.
    """

    def __init__(self, kind: str, seed: int, epoch: int, n: int, shards: Sequence[int] | None = None):
        if n < 1:
            raise ValueError("there is no order of no samples")
        if kind not in ("shuffled", "shards-shuffled", "sequential"):
            raise ValueError(f"there is no order {kind!r}; there are shuffled, shards-shuffled and sequential")
        self.n = n
        self._permutation = Permutation(n, f"windlass/order/samples/{seed}/{epoch}") if kind == "shuffled" else None
        self._starts: np.ndarray | None = None
        if kind == "shards-shuffled":
            sizes = np.asarray([n] if shards is None else shards, dtype=np.int64)
            if int(sizes.sum()) != n or (sizes < 0).any():
                raise ValueError(f"the shards hold {int(sizes.sum()):,} samples, and the epoch has {n:,}")
            if epoch:
                # A shard without a sample would not move the order, only the arithmetic.
                occupied = np.flatnonzero(sizes)
                draw = Permutation(len(occupied), f"windlass/order/shards/{seed}/{epoch}")
                turn = occupied[draw(np.arange(len(occupied)))]
                self._starts = np.concatenate([[0], np.cumsum(sizes[turn])[:-1]])
                self._shift = (np.cumsum(sizes) - sizes)[turn] - self._starts

    def __len__(self) -> int:
        return self.n

    @overload
    def __getitem__(self, places: int) -> int: ...
    @overload
    def __getitem__(self, places: Integers) -> Integers: ...
    def __getitem__(self, places: int | Integers) -> int | Integers:
        array = np.atleast_1d(np.asarray(places, dtype=np.int64))
        if array.size and (int(array.min()) < 0 or int(array.max()) >= self.n):
            raise IndexError(f"an epoch has the places 0 to {self.n - 1}")
        if self._permutation is not None:
            samples = self._permutation(array)
        elif self._starts is not None:
            samples = array + self._shift[np.searchsorted(self._starts, array, side="right") - 1]
        else:
            samples = array.copy()
        return int(samples[0]) if np.ndim(places) == 0 else samples


def step_samples(step: int, global_batch: int, skipped: Sequence[tuple[int, int]] = ()) -> Integers:
    """The global sample numbers of the `step`-th step (counted from 0), leaving out the `skipped` ranges [start, stop)."""
    numbers = np.arange(step * global_batch, (step + 1) * global_batch, dtype=np.int64)
    reached = 0
    for begin, end in sorted(skipped):
        start, stop = max(begin, reached), max(end, reached)  # ranges may overlap
        numbers[numbers >= start] += stop - start
        reached = stop
    return numbers
