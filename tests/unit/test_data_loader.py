"""The order of the samples: a bijection in every epoch that never changes. The loader: the same
samples for every world and micro-batch; it waits for nobody, hides no error, and ends.
"""

import threading
import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers import wait_for
from windlass.data.loader import Loader, eval_batches
from windlass.data.order import sample_indices
from windlass.recipe import plan_batch

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


# -- the loader

T = 4


class Numbers:
    """Sample i is the row [i, i, i, i]; every third label is masked."""

    def __init__(self, n, shards=None):
        self.n, self.shard_samples, self.reads = n, shards, 0

    def __len__(self):
        return self.n

    def read(self, indices):
        self.reads += 1
        tokens = np.repeat(indices[:, None], T, axis=1)
        labels = np.where(np.arange(T) % 3 == 0, -100, tokens)
        return tokens, labels


class Unequal(Numbers):
    """Sample i has 1 + i % 7 tokens."""

    def length(self, i):
        return 1 + i % 7

    def read(self, indices):
        lengths = 1 + indices[:, None] % 7
        inside = np.arange(lengths.max()) < lengths
        return np.where(inside, indices[:, None], 0), np.where(inside, indices[:, None], -100)


def run(samples, steps, *, global_batch=12, micro=0, world=1, **options):
    plan = plan_batch(global_batch, micro, world, 512)
    found = [dict[int, list[int]]() for _ in range(steps)]
    for rank in range(world):
        with Loader(samples, plan, rank, 5, **options) as loader:
            for at, batch in zip(range(steps), loader, strict=False):
                assert batch.step == options.get("first_step", 0) + at + 1
                unmasked = [int((m.batch.labels != -100).sum()) for m in batch.micro]
                assert batch.valid_tokens == sum(unmasked)
                assert batch.unpadded_tokens == batch.valid_tokens  # no prompt is masked in these
                dealt = {m.index: m.batch.tokens[:, 0].tolist() for m in batch.micro}
                assert not set(found[at]) & set(dealt)
                found[at] |= dealt
    return [[i for k in sorted(step) for i in step[k]] for step in found]


def flat(lists):
    return [item for part in lists for item in part]


@given(
    st.sampled_from([1, 2, 3, 4, 6, 12]),
    st.sampled_from([1, 0]),
    st.integers(1, 40),
    st.sampled_from(["shuffled", "shards-shuffled", "sequential"]),
    st.sampled_from([0, 7]),
)
def test_the_sequence_is_global_and_a_resume_is_the_rest(world, micro, n, kind, first):
    shards = [n // 3, n - n // 3 - n // 4, n // 4]
    found = run(Numbers(n, shards), 5, micro=micro, world=world, kind=kind, first_step=first)
    numbers = 12 * first + np.arange(60)
    assert flat(found) == sample_indices(numbers, n, kind, 5, shards).tolist()


@given(st.sampled_from([1, 2, 4]), st.integers(0, 3))
def test_length_buckets_regroup_inside_one_global_batch(world, first):
    samples, options = Unequal(100), {"global_batch": 24, "micro": 3, "first_step": first}
    plain = run(samples, 3, world=world, **options)
    bucketed = run(samples, 3, world=world, length_buckets=True, **options)
    assert bucketed != plain
    for a, b in zip(plain, bucketed, strict=True):
        assert sorted(a) == sorted(b)
        assert [samples.length(i) for i in b] == sorted(samples.length(i) for i in b)
    assert bucketed == run(samples, 3, world=1, length_buckets=True, **options)


@pytest.mark.parametrize("error", [OSError("the disk is gone"), KeyboardInterrupt(), SystemExit(3)])
def test_errors_reach_the_loop(error):
    class Broken(Numbers):
        def read(self, indices):
            if self.reads == 2:
                raise error
            return super().read(indices)

    with Loader(Broken(10), plan_batch(2, 2, 1, 512), 0, 5) as loader:
        assert [next(loader).step, next(loader).step] == [1, 2]
        for _ in range(2):
            with pytest.raises(type(error)) as caught:
                next(loader)
            assert caught.value is error


def alive():
    return [t for t in threading.enumerate() if t.name == "windlass-loader"]


class Gated(Numbers):
    """Waits in every read until the gate is opened."""

    def __init__(self, n):
        super().__init__(n)
        self.gate, self.reading = threading.Event(), threading.Event()

    def read(self, indices):
        self.reading.set()
        assert self.gate.wait(30)
        return super().read(indices)


def test_it_reads_two_steps_ahead_and_ends_when_it_is_closed():
    source = Gated(100)
    loader = Loader(source, plan_batch(4, 4, 1, 512), 0, 5)
    source.reading.wait()
    assert loader.poll() is None and loader.poll(0.01) is None
    source.gate.set()
    wait_for(lambda: source.reads >= 2)
    time.sleep(0.1)
    assert source.reads == 2 and loader.poll() is not None
    wait_for(lambda: source.reads == 3)
    for _ in range(2):
        loader.close()
    assert not alive()
    with pytest.raises(ValueError, match="closed"):
        next(loader)


def test_close_abandons_a_slow_source():
    source = Gated(16)
    loader = Loader(source, plan_batch(8, 2, 1, 512), 0, 5)
    source.reading.wait()
    loader.close()
    assert alive()
    source.gate.set()
    wait_for(lambda: not alive())
    assert source.reads == 1


@given(
    st.integers(0, 40),
    st.sampled_from([1, 2, 3, 4, 7]),
    st.sampled_from([1, 2, 5]),
    st.integers(0, 10),
    st.integers(10, 45),
)
def test_evaluation_counts_every_sample_once_in_equally_many_batches(n, world, micro, first, stop):
    first, stop = min(first, n), min(stop, n)
    batches = [list(eval_batches(Numbers(n), r, world, micro, first, stop)) for r in range(world)]
    assert len({len(b) for b in batches}) == 1
    wanted = range(first, stop)
    everyone = flat(batches)
    assert all(batch.tokens.shape == batch.labels.shape == (micro, T) for batch in everyone)
    seen = [i for b in everyone for i in b.tokens[(b.labels != -100).any(dim=1)][:, 0].tolist()]
    assert sorted(seen) == list(wanted)
    assert len(everyone) < len(wanted) / micro + world
