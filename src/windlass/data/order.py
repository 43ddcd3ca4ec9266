"""Sample order, as a pure function of seed, epoch and place, in constant memory. Sample number `n`
is place `n % samples_per_epoch` of epoch `n // samples_per_epoch`. The hash is our own
arithmetic on 64-bit integers, so that no release of a library changes it.
"""

from __future__ import annotations

from collections.abc import Sequence

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


def sample_indices(
    numbers: np.ndarray, n: int, kind: str, seed: int | str, shards: Sequence[int] | None = None
) -> np.ndarray:
    """The samples (from 0) that the global sample numbers have, int64 of the same shape.

    `kind` is `shuffled` (in each epoch again), `shards-shuffled` (shards in file order in epoch 0,
    then in a new order each epoch) or `sequential`; `n` and `shards` count the samples, in all and
    of each shard. The sources of a mixture have a `seed` each.
    """
    epochs, places = np.divmod(numbers, n)
    if kind == "sequential":
        return places
    indices = places.copy()
    for epoch in np.unique(epochs).tolist():
        here = epochs == epoch
        if kind == "shuffled":
            key = f"windlass/order/samples/{seed}/{epoch}"
            indices[here] = permute(places[here], n, key)
        elif epoch:
            sizes = np.asarray([n] if shards is None else shards, dtype=np.int64)
            if (total := int(sizes.sum())) != n:
                raise ValueError(f"the shards hold {total:,} samples, and the epoch has {n:,}")
            occupied = np.flatnonzero(sizes)  # a shard without a sample is not in the order
            count = len(occupied)
            key = f"windlass/order/shards/{seed}/{epoch}"
            turn = occupied[permute(np.arange(count), count, key)]
            starts = np.cumsum(sizes[turn]) - sizes[turn]
            shift = (np.cumsum(sizes) - sizes)[turn] - starts
            indices[here] += shift[np.searchsorted(starts, places[here], side="right") - 1]
    return indices
