"""The mixture: exact counts at every block, no sample of a source left out or repeated in an epoch,
the same sequence for every world, and prepared data that is held out for each source.
"""

import itertools
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_fixtures import conversations, documents, jsonl, recipe_for
from windlass.data.batch import Batch
from windlass.data.loader import Loader
from windlass.data.mixture import (
    BLOCK,
    MixedSamples,
    Mixture,
    Stage,
    block_counts,
    continue_stages,
    layout,
    stages_of,
)
from windlass.data.open import open_data, open_samples
from windlass.data.prepare import find_prepared
from windlass.errors import UserError
from windlass.recipe import Horizon, plan_batch


class Part:
    """A source whose sample i is the row [number, i]."""

    def __init__(self, number, n):
        self.number, self.n = number, n

    def __len__(self):
        return self.n

    def read(self, indices):
        tokens = np.stack([np.full_like(indices, self.number), indices], axis=1)
        return Batch(tokens, tokens)

    def length(self, index):
        return 2


def mixture(*stages, sizes=(700, 90, 40), seed=3, **options):
    samples = MixedSamples({f"s{i}": Part(i, n) for i, n in enumerate(sizes)})
    return Mixture(samples, stages, seed, **options)


weights = st.lists(
    st.one_of(st.floats(0, 1), st.sampled_from([1e-6, 1e-3, 1.0])), min_size=1, max_size=8
).filter(any)


@given(weights)
def test_counts_are_the_exact_shares_rounded_up_or_down(given_weights):
    exact = [Fraction(str(weight)) for weight in given_weights]
    done = np.zeros(len(exact), np.int64)
    for number, counts in enumerate(itertools.islice(block_counts(given_weights), 40), 1):
        assert min(counts) >= 0 and sum(counts) == BLOCK
        done += counts
        shares = [number * BLOCK * weight / sum(exact) for weight in exact]
        assert all(abs(int(n) - share) < 1 for n, share in zip(done, shares, strict=True))


def by_hand(stages, sizes, stop, seed=3):
    """The sequence one sample at a time, with a count of each source; it shares the counts and the
    shuffle of a block alone."""
    done, sequence = [0] * len(sizes), []
    for stage, end in zip(stages, [*(s.start for s in stages[1:]), stop], strict=True):
        for counts in block_counts(stage.weights):
            for source in layout(seed, len(sequence), counts)[0].tolist()[: end - len(sequence)]:
                sequence.append((source, done[source]))
                done[source] += 1
            if len(sequence) == end:
                break
    return sequence


@pytest.mark.parametrize(
    "stages",
    [
        [Stage(0, (0.7, 0.2, 0.1))],
        [Stage(0, (0.7, 0.2, 0.1)), Stage(5000, (0.1, 0.0, 0.9)), Stage(5001, (1, 1, 1))],
        [Stage(0, (0.0, 0.5, 0.5)), Stage(4096, (1, 1, 0))],
    ],
)
def test_the_sequence_is_that_of_counting_one_sample_at_a_time(stages):
    mixed, stop, sizes = mixture(*stages, kind="sequential"), 9000, (700, 90, 40)
    expected = by_hand(stages, sizes, stop)
    numbers = np.random.default_rng(0).permutation(stop)
    starts = mixed.samples.starts
    wanted = [starts[of] + own % sizes[of] for of, own in (expected[n] for n in numbers)]
    assert mixed.indices(numbers).tolist() == wanted
    of = np.array([source for source, _ in expected])
    for end in (0, 1, 2047, 2048, 5000, 5001, 7777, stop):
        assert mixed.counts(end).tolist() == np.bincount(of[:end], minlength=3).tolist()


def rows_of(mixed, stop):
    """The source of each of the first samples, and the sample in the source."""
    return mixed.samples.read(mixed.indices(np.arange(stop))).tokens.T


def test_each_source_has_its_epochs_in_its_own_order():
    sources, own = rows_of(mixture(Stage(0, (0.6, 0.3, 0.1))), 6000)
    for source, size in enumerate((700, 90, 40)):
        seen = own[sources == source]
        for begin in range(0, len(seen) - size, size):
            epoch = seen[begin : begin + size]
            assert sorted(epoch) == list(range(size)) and list(epoch) != sorted(epoch)


def test_a_branch_continues_every_source_where_it_was():
    old, new = [Stage(0, (0.7, 0.2, 0.1))], [Stage(0, (0.2, 0.2, 0.6))]
    assert continue_stages(old, old, 3000) == old
    assert continue_stages([], new, 0) == new
    branched = continue_stages(old, new, 3000)
    assert branched == [*old, Stage(3000, (0.2, 0.2, 0.6))]
    assert continue_stages(branched, new, 5000) == branched  # a resume of the branch
    before, after = (mixture(*stages, kind="sequential") for stages in (old, branched))
    assert (before.indices(np.arange(3000)) == after.indices(np.arange(3000))).all()
    sources, own = rows_of(after, 9000)
    for source, size in enumerate((700, 90, 40)):  # no sample is repeated and none is left out
        numbers = own[sources == source]
        assert (numbers == np.arange(len(numbers)) % size).all()
    counts = after.counts(3000 + 2 * BLOCK) - before.counts(3000)
    assert np.abs(counts - 2 * BLOCK * np.array([0.2, 0.2, 0.6])).max() < 1


def test_a_longer_run_moves_only_stages_to_come():
    data = recipe_of([("a", "x"), ("b", "y")], stages=[{"from": 0.5, "weights": {"a": 0}}]).data
    short, long = (stages_of(data, Horizon(steps, 10, 8)) for steps in (100, 200))
    assert [s.start for s in short] == [0, 400] and [s.start for s in long] == [0, 800]
    assert continue_stages(short, long, 320) == long
    moved = continue_stages(short, long, 600)
    assert [(s.start, s.weights) for s in moved] == [
        *((0, (1.0, 1.0)), (400, (0.0, 1.0)), (600, (1.0, 1.0)), (800, (0.0, 1.0)))
    ]


@pytest.mark.parametrize(("world", "micro"), [(1, 24), (1, 4), (2, 4), (4, 2)])
def test_every_world_and_micro_batch_reads_the_same_samples(world, micro):
    mixed = mixture(Stage(0, (0.7, 0.2, 0.1)), Stage(100, (0.1, 0.2, 0.7)))
    expected, found = mixed.indices(np.arange(10 * 24)).reshape(10, 24), np.full((10, 24), -1)
    for rank in range(world):
        plan = plan_batch(24, micro, world, 64)
        with Loader(mixed.samples, plan, rank, 3, mixture=mixed) as loader:
            for step, batch in zip(range(10), loader, strict=False):
                for part in batch.micro:
                    source, number = part.batch.tokens.numpy().T
                    here = slice(part.index * micro, (part.index + 1) * micro)
                    found[step, here] = mixed.samples.starts[source] + number
                    assert (part.batch.sources.numpy() == source).all()
    assert (found == expected).all()


def test_threads_may_share_a_mixture():
    shared, alone = (mixture(Stage(0, (0.5, 0.4, 0.1))) for _ in range(2))
    parts = [np.arange(begin, 40_000, 4) for begin in range(4)]
    with ThreadPoolExecutor(4) as pool:
        for found, part in zip(pool.map(shared.indices, parts), parts, strict=True):
            assert (found == alone.indices(part)).all()


def test_any_first_samples_of_a_spread_set_have_every_source():
    parts = {"a": Part(0, 100), "empty": Part(1, 0), "b": Part(2, 10), "c": Part(3, 1)}
    spread = MixedSamples(parts, spread=True)
    batch = spread.read(np.arange(len(spread)))
    assert len(spread) == 111 and (batch.tokens[:, 0] == batch.sources).all()
    assert np.unique(batch.tokens, axis=0).shape == (111, 2)
    assert sorted(batch.sources[:3]) == [0, 2, 3]
    assert np.bincount(batch.sources[:56]).tolist() == [50, 0, 5, 1]


# -- prepared


def recipe_of(sources, directory="", **data):
    mix = [{"name": name, "source": str(path), **dict(*more)} for name, path, *more in sources]
    return recipe_for("", directory, mix=mix, **data)


@pytest.fixture
def texts(tmp_path):
    paths = []
    for i, name in enumerate("abc"):  # no text is in two of them
        own = [f"{name} {number} {text}" for number, text in enumerate(documents(150, i))]
        paths.append(jsonl(tmp_path / f"{name}.jsonl", own))
    book = tmp_path / "book.txt"
    book.write_text("A book, and no documents. " * 400)
    return [*paths, book]


def test_the_fingerprint_covers_every_source_and_no_weight(texts, tmp_path):
    a, b, c, _ = texts

    def fingerprint(*sources, where="data"):
        return open_data(recipe_of(sources, tmp_path / where)).fingerprint

    one = fingerprint(("a", a), ("b", b))
    assert one != fingerprint(("a", a), ("b", c))
    assert one == fingerprint(("a", a), ("b", b), where="other")
    assert one != fingerprint(("a", a), ("b", b, {"val_fraction": 0.2}))
    # each source has one directory, whatever the mixture
    assert len([path for path in (tmp_path / "data").iterdir() if path.is_dir()]) == 3
    weights = recipe_of([("a", a, {"weight": 0.2}), ("b", b, {"weight": 3})], tmp_path / "data")
    assert open_samples(weights, find_prepared(weights)).fingerprint == one
    assert find_prepared(recipe_of([("a", a), ("b", a.parent)], tmp_path / "data")) is None


@pytest.mark.parametrize("packing", ["packed", "best-fit"])
def test_conversations_beside_text(texts, tmp_path, packing):
    """Each source as if alone, with settings of its own, and each row in a batch as in its source's."""
    talk = conversations(tmp_path / "talk.jsonl", 150)
    sources = [
        ("text", texts[0], {"max_tokens": 12000, "val_fraction": 0.2}),
        ("talk", talk, {"format": "chat"}),
        ("more", texts[1], {"eval_source": str(texts[2]), "weight": 0.1}),
        ("book", texts[3], {}),
    ]
    recipe = recipe_of(sources, tmp_path / "data", packing=packing)
    recipe = recipe.replace({"model.context": 64})
    data = open_data(recipe)
    assert data.template is not None
    for number, (name, path, own) in enumerate(sources):
        alone = {"data.mix": [], "data.source": str(path)}
        alone |= {f"data.{key}": value for key, value in own.items() if key != "weight"}
        alone |= {} if "format" in own else {"data.packing": "packed"}
        one = open_data(recipe.replace(alone))
        for mixed, single in ((data.train, one.train), (data.val, one.val)):
            assert mixed.names[number] == name
            numbers = np.arange(len(single))
            every = mixed.parts[number].read(numbers), single.read(numbers)
            assert all(np.array_equal(a, b) for a, b in zip(*every, strict=True) if a is not None)
    rows = np.random.default_rng(0).permutation(len(data.train))[:60]
    batch = data.train.read(rows)
    for at, row in enumerate(rows.tolist()):
        source = int(np.searchsorted(data.train.starts, row, side="right")) - 1
        own = data.train.parts[source].read(np.array([row - data.train.starts[source]]))
        size = own.tokens.shape[1]
        assert batch.sources[at] == source
        for ours, wanted in zip(batch[:4], own[:4], strict=True):
            if wanted is not None:
                assert (ours[at, :size] == wanted[0]).all()
        assert (batch.labels[at, size:] == -100).all()
        if batch.documents is not None:
            assert own.documents is not None or not batch.documents[at, :size].any()
            assert (batch.documents[at, size:] == batch.documents[at, size - 1]).all()
    mixed, plan = Mixture(data.train, [Stage(0, (1, 1, 1, 1))], 3), plan_batch(24, 6, 1, 16)
    with Loader(data.train, plan, 0, 3, mixture=mixed, length_buckets=True) as loader:
        batch = next(loader)
    read = mixed.indices(np.arange(24))
    assert batch.unpadded_tokens == sum(map(data.train.length, read.tolist()))
    assert (
        batch.valid_tokens == (data.train.read(read).labels != -100).sum() < batch.unpadded_tokens
    )


def test_shards_of_other_tools_beside_texts_and_conversations(texts, tmp_path):
    """In a mixture, where one source validates on a part of another's shard; in one list; and one
    kind as the validation data of the other."""
    ids = np.random.default_rng(0).integers(0, 256, (3, 2000)).astype("<u2")
    for name, row in zip(("train_0", "train_1", "val_0"), ids, strict=True):
        row.tofile(tmp_path / f"{name}.bin")
    tokens, talk = f"shards:{tmp_path}/*.bin", conversations(tmp_path / "talk.jsonl", 150)
    sources = [("old", tokens), ("more", f"shards:{tmp_path}/train_1.bin"), ("text", texts[0])]
    sources.append(("talk", talk, {"format": "chat"}))

    def opened(recipe):
        data = open_data(recipe.replace("model.context=256"))
        return data, data.train.tokens, data.val.tokens

    data, *_ = opened(recipe_of(sources, tmp_path / "data"))
    assert data.division.shared == 1 and len(data.train.parts) == len(data.val.parts) == 4
    assert [part.tokens for part in data.train.parts[:2]] == [2000, 1800]
    batch = data.train.read(np.arange(7))
    assert batch.tokens.ravel().tolist() == ids[0, : 7 * 256].tolist()
    assert set(data.train.read(np.arange(len(data.train))).documents.ravel().tolist()) > {0, 1}
    _, train, val = opened(recipe_for(texts[0], tmp_path / "data"))
    assert opened(recipe_for([tokens, str(texts[0])], tmp_path / "data"))[1:] == (
        4000 + train,
        2000 + val,
    )
    data, *counts = opened(recipe_for(tokens, tmp_path / "data", eval_source=str(texts[0])))
    assert counts == [4000, train + val]
    assert not data.train.document_mask and data.val.document_mask
    data, *counts = opened(recipe_for(texts[0], tmp_path / "data", eval_source=tokens))
    assert counts == [train + val, 6000]
    assert data.train.document_mask and not data.val.document_mask


def test_a_source_without_a_sample_is_named(texts, tmp_path):
    short = jsonl(tmp_path / "short.jsonl", ["few", "words"])
    with pytest.raises(UserError, match=r"\(train, short\): \d+ tokens are too few"):
        open_data(recipe_of([("a", texts[0]), ("short", short)], tmp_path / "data"))
