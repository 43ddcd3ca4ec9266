"""Streamed training data: the same tokens as the whole prepared data from any place on, a bounded
disk, and one message for each failure.
"""

import contextlib
import gzip
import itertools
import shutil
import threading
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from data_fixtures import documents, jsonl, recipe_for

from helpers import wait_for
from windlass import hub
from windlass.data import stream
from windlass.data.disk import is_maker, read_places
from windlass.data.loader import Loader
from windlass.data.prepare import as_data, open_data, prepare
from windlass.data.samples import PackedSamples
from windlass.data.stream import Place, Source, describe_file
from windlass.errors import RunFailed, UserError
from windlass.parallel.dist import Ranks
from windlass.parallel.env import DistEnv
from windlass.recipe.units import plan_batch

FILES, GROUP = 3, 7


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    """So that a preparation does not read this small source many times ahead."""
    monkeypatch.setattr("windlass.data.documents.BATCH_CHARACTERS", 4096)


@pytest.fixture(scope="module")
def crawl(tmp_path_factory):
    """Three Parquet files of 40 documents, some empty, in row groups of 7, and a file without text."""
    folder = tmp_path_factory.mktemp("crawl")
    for number in range(FILES):
        texts = pa.table({"other": list(range(40)), "text": documents(40, seed=number)})
        pq.write_table(texts, folder / f"part-{number}.parquet", row_group_size=GROUP)
    empty = pa.table({"other": [1], "text": [""]})
    pq.write_table(empty, folder / "part-1b.parquet")
    return folder


def streamed(source, directory, **data):
    data = {"shard_tokens": 1024, "disk_tokens": 2048, "val_shards": 1, **data}
    return recipe_for(source, directory, **data)


def whole(source, directory, **data):
    """All tokens of the source after the first shard, prepared as usual."""
    train = open_data(recipe_for(source, directory, val_shards=1, **data)).train
    return train.stream.read(0, len(train.stream))


def source_of(recipe):
    return as_data(recipe, prepare(recipe)).train.source


def tokens_from(source, place, count):
    pieces, parts = source.tokens(place), [np.zeros(0, int)]
    while sum(map(len, parts)) < count:
        parts.append(next(pieces)[1].tokens)
    return np.concatenate(parts)[:count]


@pytest.mark.parametrize("kind", ["directory", "hf", "jsonl", "json.gz"])
def test_the_stream_is_the_whole_prepared_data_again_and_again(crawl, tmp_path, kind):
    place = crawl
    if kind == "jsonl":
        place = tmp_path / "texts"
        for number in range(FILES):
            jsonl(place / f"part-{number}.jsonl", documents(40, seed=number))
    if kind == "json.gz":  # as in C4
        (tmp_path / "texts").mkdir()
        place = tmp_path / "texts" / "*.gz"
        for number in range(FILES):
            raw = jsonl(tmp_path / "raw", documents(40, seed=number)).read_bytes()
            (tmp_path / "texts" / f"{number}.json.gz").write_bytes(gzip.compress(raw))
    name = f"hf:{place}" if kind == "hf" else place
    recipe = streamed(name, tmp_path / "streamed")
    data, expected = open_data(recipe), whole(name, tmp_path / "whole")
    twice = tokens_from(data.train.source, data.train.source.start, 2 * len(expected))
    assert np.array_equal(twice, np.concatenate([expected, expected]))
    held = open_data(recipe_for(name, tmp_path / "whole", val_shards=1))
    assert np.array_equal(data.val.stream.read(0, 1024), held.val.stream.read(0, 1024))
    assert data.index.splits["val"] == held.index.splits["val"]


def test_every_shard_begins_again_at_its_place(crawl, tmp_path):
    """Also across the end of the source, and with a document in several shards."""
    source = source_of(streamed(crawl, tmp_path / "data"))
    expected = whole(crawl, tmp_path / "whole")
    endless, size = np.concatenate([expected, expected, expected]), 100
    places, shards = [], source.shards(source.start, size)
    for number, (begin, after, tokens) in zip(
        range(2 * len(expected) // size), shards, strict=False
    ):
        assert np.array_equal(tokens, endless[number * size : (number + 1) * size + 1])
        places.append((begin, after))
    assert [after for _, after in places[:-1]] == [begin for begin, _ in places[1:]]
    assert places[-1][1].epoch == 1 and len({place.file for place, _ in places}) == FILES
    for number in range(0, len(places), len(places) // 5):
        tokens = next(source.shards(places[number][0], size))[2]
        assert np.array_equal(tokens, endless[number * size : (number + 1) * size + 1])


def test_only_the_needed_row_groups_are_read(crawl, tmp_path, monkeypatch):
    source, read = source_of(streamed(crawl, tmp_path / "data")), []

    class Counted(pq.ParquetFile):
        def iter_batches(self, *args, row_groups, **more):
            read.extend(row_groups)
            return super().iter_batches(*args, row_groups=row_groups, **more)

    monkeypatch.setattr(pq, "ParquetFile", Counted)
    # Batches of one document, so that none is read far ahead.
    monkeypatch.setattr("windlass.data.documents.BATCH_CHARACTERS", 1)
    begin, _, _ = next(source.shards(Place(0, 3, 3, 2, 5), 10))
    assert begin == Place(0, 3, 3, 2, 5) and set(read) <= {3, 4} and read[0] == 3


def test_a_network_that_fails_is_tried_again(crawl, monkeypatch):
    import fsspec

    memory = fsspec.filesystem("memory")
    files, failures = [], []
    for path in sorted(crawl.iterdir()):
        memory.pipe(f"/crawl/{path.name}", path.read_bytes())
        files.append(describe_file(f"memory://crawl/{path.name}"))
    local = Source([describe_file(str(path)) for path in sorted(crawl.iterdir())], "text")
    expected = list(local.one_pass())
    read, notes, every = pq.ParquetFile.iter_batches, [], 9

    def fail_at_times(*args, **more):
        for batch in read(*args, **more):
            failures.append(batch)
            if len(failures) % every == 0:
                raise ConnectionError("reset by peer")
            yield batch

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", fail_at_times)
    monkeypatch.setattr(stream, "RETRY_SECONDS", (0.0, 0.0))
    monkeypatch.setattr(stream, "ROWS", 2)
    source = Source(files, "text", notify=notes.append)
    assert list(source.one_pass()) == expected and len(notes) > 10
    assert "part-0.parquet broke off (ConnectionError: reset by peer); again in 0 s" in notes[0]
    notes, every = [], 1
    with pytest.raises(RunFailed, match=r"part-0.*broke off.*reset by peer.*start again"):
        list(source.one_pass())

    class GatedRepoError(OSError):
        pass

    def gated(*args):
        raise GatedRepoError("403")

    monkeypatch.setattr(stream, "open_file", gated)
    with pytest.raises(UserError, match="is gated: accept its licence"):
        next(source.documents(Place()))


def test_hub_files_are_pinned_to_a_commit(tmp_path, monkeypatch):
    """With a stand-in for the Hub, which tests cannot reach."""
    import datasets
    import huggingface_hub

    asked = []

    class HfApi:
        def dataset_info(self, name, revision):
            asked.append(revision)
            return SimpleNamespace(sha={None: "c2", "main": "c2"}.get(revision, revision))

    def builder(name, config, revision):
        urls = [f"hf://datasets/{name}@{revision}/{config}-{n}.parquet" for n in range(2)]
        return SimpleNamespace(config=SimpleNamespace(data_files={"train": urls}))

    monkeypatch.setattr(hub, "prepare", lambda: None)
    monkeypatch.setattr(huggingface_hub, "HfApi", HfApi)
    monkeypatch.setattr(datasets, "load_dataset_builder", builder)
    monkeypatch.setattr(stream, "describe_file", lambda path: path)
    data = streamed("hf:org/web:small", tmp_path).data
    urls = ["hf://datasets/org/web@c2/small-0.parquet", "hf://datasets/org/web@c2/small-1.parquet"]
    assert stream.list_files(data, "train") == (urls, "c2")
    assert stream.list_files(data, "train", "c1")[1] == "c1" and asked == [None, "c1"]
    with pytest.raises(UserError, match="no split 'test'; it has train"):
        stream.list_files(data, "test")


# -- shards on the disk


class Training:
    """A training that reads one sample after another, and measures the disk meanwhile."""

    def __init__(self, recipe, done=0, place=(), skipped=()):
        self.recipe, self.samples = recipe, as_data(recipe, prepare(recipe)).train
        self.done, self.skipped = done, skipped
        ranks = Ranks(DistEnv(), torch.device("cpu"))
        self.peak, self._stop = 0, threading.Event()
        self._thread = threading.Thread(target=self._measure, daemon=True)
        self.samples.follow(ranks, place, self.following)

    def following(self, sample):
        sample = max(sample, self.done)
        for start, stop in self.skipped:
            sample = stop if start <= sample < stop else sample
        return sample

    def _measure(self):
        while not self._stop.wait(0.0005):
            self.peak = max(self.peak, disk_tokens(self.samples.directory))

    def read(self, samples):
        """The rows of the next samples."""
        rows = []
        for _ in range(samples):
            rows.append(self.samples.read(np.array([self.following(self.done)])).tokens[0])
            self.done = self.following(self.done) + 1
        return np.stack(rows)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *error):
        self._stop.set()
        self._thread.join()
        self.samples.close()


def disk_tokens(directory):
    total = 0
    for path in [*directory.glob("*.bin"), *directory.glob(".*.new")]:
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size // 2
    return total


def rows_of(crawl, directory, first, stop):
    """The rows that packing all tokens gives, in an endless repetition."""
    tokens = np.tile(whole(crawl, directory), 4)
    return np.stack([tokens[16 * i : 16 * (i + 1)] for i in range(first, stop)])


def test_samples_are_read_with_a_bounded_disk(crawl, tmp_path):
    recipe = streamed(crawl, tmp_path / "data", disk_tokens=3000)
    with Training(recipe) as training:
        count = len(whole(crawl, tmp_path / "whole")) // 16 + 100
        assert np.array_equal(training.read(count), rows_of(crawl, tmp_path / "whole", 0, count))
        assert training.samples.place(count)[:2] == [count // 63, 1]  # in the second pass
        wait_for(lambda: disk_tokens(training.samples.directory) > 1024)
    assert 1024 < training.peak <= 2048
    training.samples.remove()


@pytest.mark.parametrize("mask", ["auto", False])
def test_a_batch_may_span_two_shards(crawl, tmp_path, mask):
    """With labels, positions and documents as of the whole prepared data."""
    usual = open_data(recipe_for(crawl, tmp_path / "whole", val_shards=1, document_mask=mask)).train
    with Training(streamed(crawl, tmp_path / "data", document_mask=mask)) as training:
        for indices in (np.array([64, 3, 62, 63, 0]), np.arange(126)):
            batch, expected = training.samples.read(indices), usual.read(indices)
            assert (batch.documents is None) == (mask is False)
            for own, other in zip(batch, expected, strict=True):
                assert np.array_equal(own, other)
    held_out = open_data(streamed(crawl, tmp_path / "data", document_mask=mask)).val
    assert held_out is not None
    assert (held_out.read(np.arange(4)).documents is None) == (mask is False)


def test_ranks_divide_the_shuffled_samples_of_each_shard(crawl, tmp_path):
    """The sequence is that of one rank, and each shard is a permutation of its own samples."""
    expected, sequences = rows_of(crawl, tmp_path / "whole", 0, 126), []
    for world in (1, 2):
        seen = {}
        for rank in range(world):
            with Training(streamed(crawl, tmp_path / "data")) as training:
                plan = plan_batch(14, 7, world, 16)
                with Loader(training.samples, plan, rank, seed=1, prefetch=0) as loader:
                    for batch in itertools.islice(loader, 9):
                        training.done += 14
                        for micro in batch.micro:
                            seen[batch.step, micro.k] = micro.batch.tokens.numpy()
                assert batch.place[0] == 2
        sequences.append(np.concatenate([seen[key] for key in sorted(seen)]))
    assert np.array_equal(*sequences)
    for shard in (slice(0, 63), slice(63, 126)):
        rows = sequences[0][shard].tolist()
        assert rows != expected[shard].tolist() and sorted(rows) == sorted(expected[shard].tolist())


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_resume_makes_only_the_shards_from_its_place_on(crawl, tmp_path, elsewhere):
    with Training(streamed(crawl, tmp_path / "data")) as training:
        training.read(200)
        place = training.samples.place(200)
        wait_for(lambda: training.samples.path(4).exists())
        shard = training.samples.path(3).stat()
    directory = tmp_path / ("other" if elsewhere else "data")
    recipe = streamed(crawl, directory)
    with Training(recipe, done=200, place=place) as resumed:
        assert np.array_equal(resumed.read(20), rows_of(crawl, tmp_path / "whole", 200, 220))
        made = min(read_places(resumed.samples.directory, resumed.samples.size))
        assert made == 3 if elsewhere else resumed.samples.path(3).stat().st_ino == shard.st_ino
        assert np.array_equal(resumed.read(100), rows_of(crawl, tmp_path / "whole", 220, 320))


def test_a_torn_shard_is_made_again(crawl, tmp_path):
    recipe = streamed(crawl, tmp_path / "data")
    with Training(recipe) as training:
        training.read(1)
        wait_for(lambda: training.samples.path(1).exists())
    directory = training.samples.directory
    (directory / "shard-00000.bin").write_bytes(b"torn")
    (directory / ".shard-00002.bin.new").write_bytes(b"a killed process")
    with (directory / "shards.jsonl").open("a") as table:
        table.write('{"shard": 7, "beg')
    with Training(recipe) as training:
        assert np.array_equal(training.read(130), rows_of(crawl, tmp_path / "whole", 0, 130))
    assert not list(directory.glob(".*.new"))


def test_left_out_samples_need_no_shard(crawl, tmp_path):
    """A rewind leaves samples out, perhaps several shards of them."""
    with Training(streamed(crawl, tmp_path / "data"), skipped=[(40, 300), (300, 400)]) as training:
        rows, expected = training.read(50), rows_of(crawl, tmp_path / "whole", 0, 410)
        assert np.array_equal(rows, np.concatenate([expected[:40], expected[400:410]]))


def test_prepare_makes_the_first_shards(crawl, tmp_path):
    recipe = streamed(crawl, tmp_path / "data")
    samples = as_data(recipe, prepare(recipe)).train
    made = []
    samples.prefill(made.append)
    assert made == [1, 2]
    assert disk_tokens(samples.directory) == 2 * (samples.size + 1) <= 2048
    inode = samples.path(1).stat().st_ino
    with Training(recipe) as training:
        assert np.array_equal(training.read(70), rows_of(crawl, tmp_path / "whole", 0, 70))
        assert training.samples.path(1).stat().st_ino == inode


@pytest.mark.parametrize(("local_rank", "sees", "makes"), [(0, 0, 1), (1, 0, 0), (0, 1, 0)])
def test_a_host_with_its_own_disk_makes_its_own_shards(tmp_path, local_rank, sees, makes):
    """With a stand-in for the ranks of a second host."""
    (tmp_path / ".seen").touch()
    mark = str(tmp_path / (".seen" if sees else "of-another-disk"))
    ranks = SimpleNamespace(
        main=False,
        env=SimpleNamespace(local_rank=local_rank),
        broadcast_object=lambda name, value: mark,
        all_gather_object=lambda name, value: [value],
    )
    assert is_maker(ranks, tmp_path) == bool(makes)


# -- failures


def test_a_full_disk_ends_the_training(crawl, tmp_path, monkeypatch):
    def full(*args, **more):
        raise OSError(28, "No space left on device")

    prepare(streamed(crawl, tmp_path / "data"))
    monkeypatch.setattr("windlass.data.disk.Files.replace", full)
    message = "No space left on device; lower data.disk_tokens"
    with Training(streamed(crawl, tmp_path / "data")) as training:
        with pytest.raises(RunFailed, match=message):
            training.read(1)
        # another rank, which makes no shards
        other = as_data(training.recipe, prepare(training.recipe)).train
        with pytest.raises(RunFailed, match=message):
            other.read(np.array([0]))


def test_a_changed_file_ends_the_training(crawl, tmp_path):
    texts = jsonl(tmp_path / "texts" / "a.jsonl", documents(40))
    recipe = streamed(texts.parent, tmp_path / "data")
    prepare(recipe)
    jsonl(texts, documents(39))
    with Training(recipe) as training, pytest.raises(UserError, match="has changed since the run"):
        training.read(1)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"text_key": "body"}, "has no column 'body'; it has 'other', 'text': set data.text_key"),
        ({"val_shards": 500}, "the source has only .* tokens, and 512,000 are held out"),
        ({"source": "{}/nothing"}, "there is no file"),
    ],
)
def test_a_source_that_cannot_be_used(crawl, tmp_path, data, message):
    source = data.pop("source", "{}").format(crawl)
    with pytest.raises(UserError, match=message):
        prepare(streamed(source, tmp_path / "data", **data))


def test_other_files_are_not_streamed(tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("a text")
    with pytest.raises(UserError, match=r"files of \.txt; only Parquet and JSON lines"):
        prepare(streamed(tmp_path / "texts", tmp_path / "data"))


def test_another_source_has_another_fingerprint(crawl, tmp_path):
    def fingerprint(source, name, **data):
        return prepare(streamed(source, tmp_path / name, **data)).index.fingerprint

    copy = tmp_path / "copy"
    shutil.copytree(crawl, copy)
    first = fingerprint(crawl, "first")
    assert (
        fingerprint(copy, "second")
        == first
        != fingerprint(crawl, "third", shard_tokens=1025, disk_tokens=3000)
    )
    (copy / "part-2.parquet").unlink()
    assert fingerprint(copy, "fourth") != first


def test_separate_validation_data(crawl, tmp_path):
    jsonl(tmp_path / "held.jsonl", documents(5))
    own = {"val_shards": 0, "eval_source": str(tmp_path / "held.jsonl")}
    recipe = streamed(crawl, tmp_path / "data", **own)
    data = open_data(recipe)
    usual = open_data(recipe_for(crawl, tmp_path / "whole", **own))
    assert data.index.splits["val"] == usual.index.splits["val"]
    for name in ("train", "test"):
        (tmp_path / "splits").mkdir(exist_ok=True)
        part = 0 if name == "train" else 1
        shutil.copy(crawl / f"part-{part}.parquet", tmp_path / "splits" / f"{name}.parquet")
    own = {"val_shards": 0, "eval_split": "test"}
    data = open_data(streamed(f"hf:{tmp_path / 'splits'}", tmp_path / "split-data", **own))
    assert data.index.splits["val"].documents == sum(map(bool, documents(40, seed=1)))
    assert len(data.train.source.files) == 1
    assert isinstance(data.val, PackedSamples)


def test_bpe_is_learned_from_the_first_documents(crawl, tmp_path):
    recipe = streamed(crawl, tmp_path / "data", tokenizer="bpe", tokenizer_vocab=300)
    assert open_data(recipe).tokenizer.vocab in (299, 300)
