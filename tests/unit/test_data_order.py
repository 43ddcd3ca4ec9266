"""The order of the samples: a bijection in every epoch that never changes."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.data.order import sample_indices

SIZES = st.integers(1, 3000)
SEEDS = st.integers(0, 2**63 - 1)
EPOCHS = st.integers(0, 50)


def whole(kind, seed, epoch, n, shards=None):
    """The samples of an epoch, in order."""
    return sample_indices(epoch * n + np.arange(n), n, kind, seed, shards)


@given(SIZES, SEEDS, EPOCHS)
def test_an_epoch_has_every_sample_once_and_epochs_and_seeds_differ(n, seed, epoch):
    found = whole("shuffled", seed, epoch, n)
    assert found.dtype == np.int64
    assert np.array_equal(np.sort(found), np.arange(n))
    for other in (whole("shuffled", seed, epoch + 1, n), whole("shuffled", seed ^ 1, epoch, n)):
        assert n < 50 or np.mean(other != found) > 0.8


@given(st.lists(st.integers(0, 40), min_size=1, max_size=30).filter(any), SEEDS, EPOCHS)
def test_shards_are_shuffled_whole(shards, seed, epoch):
    n = sum(shards)
    found = whole("shards-shuffled", seed, epoch, n, shards)
    assert np.array_equal(np.sort(found), np.arange(n))
    edges = np.cumsum([0, *shards])
    blocks = [list(range(a, b)) for a, b in pairwise(edges) if b > a]
    rest = found.tolist()
    while rest:  # what comes next is always a whole shard, in order
        block = next(b for b in blocks if b[0] == rest[0])
        assert rest[: len(block)] == block
        rest = rest[len(block) :]
    if epoch == 0:
        assert np.array_equal(found, np.arange(n))
    elif len(blocks) > 10:  # past the first epoch in another order each
        later = whole("shards-shuffled", seed, epoch + 1, n, shards)
        assert not np.array_equal(found, later)


def test_golden_values():
    """A run that is resumed must see the same samples."""
    assert whole("shuffled", 1337, 0, 10).tolist() == [0, 4, 2, 3, 5, 6, 8, 7, 1, 9]
    far, n = np.array([0, 1, 2, 10**12]), 10**12 + 7
    golden = [471284411133, 639317816320, 605518888166, 553716825541]
    assert sample_indices(41 * n + far, n, "shuffled", 2**62 + 11).tolist() == golden
    assert whole("sequential", 1, 9, 10).tolist() == list(range(10))
    shards = whole("shards-shuffled", 1337, 3, 10, [2, 3, 0, 4, 1])
    assert shards.tolist() == [0, 1, 5, 6, 7, 8, 2, 3, 4, 9]


@pytest.mark.parametrize("n", [2, 3, 5, 16])
def test_every_sample_comes_at_every_place_equally_often(n):
    """Chi-squared over 500 seeds; the bound is six standard deviations."""
    trials = 500
    counts = np.zeros((n, n))
    for seed in range(trials):
        counts[np.arange(n), whole("shuffled", seed, 0, n)] += 1
    chi = ((counts - trials / n) ** 2 / (trials / n)).sum()
    freedom = (n - 1) ** 2
    assert chi < freedom + 6 * np.sqrt(2 * freedom) + 12
