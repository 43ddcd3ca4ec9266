"""Samples against a plain reference; every damaged, foreign or mistaken shard refused by name
before the first step.
"""

import itertools
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from data_fixtures import documents, jsonl, recipe_for
from hypothesis import given
from hypothesis import strategies as st

from helpers import refused
from windlass.data import shards
from windlass.data.describe import describe, warnings
from windlass.data.open import open_data
from windlass.data.samples import DocumentSamples, PackedSamples, split_documents, split_stream
from windlass.data.shards import Index, Range, ShardWriter, Split, Stream, cut_shards
from windlass.data.tokenizer import Description, char_tokenizer, train_bpe
from windlass.errors import UserError
from windlass.parallel.env import DistEnv


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk_and_few_open_files(monkeypatch):
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    monkeypatch.setattr("windlass.data.shards.OPEN_FILES", 3)


def stream_of(folder, pieces, shard_tokens):
    writer = ShardWriter(folder, "shard", "uint16", shard_tokens)
    for number, piece in enumerate(pieces):
        writer.add(np.array(piece, dtype=np.int64), number)
    return Stream(folder, writer.finish()), [t for piece in pieces for t in piece]


PIECES = st.lists(st.integers(1, 30), min_size=1, max_size=12)


@given(PIECES, st.integers(3, 40), st.integers(1, 9), st.booleans(), st.data())
def test_packed_rows(tmp_path_factory, lengths, shard_tokens, context, ragged, data):
    count = iter(range(10**6))
    pieces = [[next(count) for _ in range(n)] for n in lengths]
    stream, tokens = stream_of(tmp_path_factory.mktemp("x"), pieces, shard_tokens)
    assert stream.read(0, len(tokens)).tolist() == tokens and len(stream._open) <= 3
    start = data.draw(st.integers(0, len(tokens)))
    stop = data.draw(st.integers(start, len(tokens)))
    part = Stream(stream._directory, cut_shards(stream.shards, start, stop))
    samples = PackedSamples(part, context, ragged=ragged)
    inside = tokens[start:stop]
    pairs = list(itertools.pairwise(inside))
    rows = [pairs[i : i + context] for i in range(0, len(pairs), context)]
    rows = [row for row in rows if ragged or len(row) == context]
    assert len(samples) == len(rows)
    assert samples.valid_tokens == sum(map(len, rows))
    with pytest.raises(IndexError):
        samples.read(np.array([len(rows)]))
    found_tokens, found_labels, *_ = samples.read(np.arange(len(rows)))
    assert found_tokens.shape == found_labels.shape == (len(rows), context)
    for row, x, y in zip(rows, found_tokens.tolist(), found_labels.tolist(), strict=True):
        padding = context - len(row)
        assert x == [a for a, _ in row] + [0] * padding
        assert y == [b for _, b in row] + [-100] * padding
    shard_of_row = np.searchsorted(part.edges, context * np.arange(len(rows)), side="right") - 1
    assert samples.shard_samples == np.bincount(shard_of_row, minlength=len(part.shards)).tolist()


@given(PIECES, st.integers(3, 40), st.integers(1, 35))
def test_one_document_a_row(tmp_path_factory, lengths, shard_tokens, context):
    eot, count = 60_000, iter(range(10**6))
    pieces = [[eot] + [next(count) for _ in range(n)] for n in lengths]
    folder = tmp_path_factory.mktemp("x")
    stream, _ = stream_of(folder, pieces, shard_tokens)
    first = len(pieces) // 3
    start = sum(map(len, pieces[:first]))
    split = Split(ranges=[Range(stream="shard", start=start, stop=len(stream))])
    tokenizer = Description(kind="byte", fingerprint="", vocab=257, eot=256)
    streams = {"shard": stream.shards}
    index = Index(settings={}, source={}, tokenizer=tokenizer, streams=streams)
    part, starts = split_stream(folder, index, split), split_documents(folder, index, split)
    samples = DocumentSamples(part, starts, context, eot)
    assert len(samples) == sum(samples.shard_samples) == len(pieces) - first
    tokens, labels, *_ = samples.read(np.arange(len(samples)))
    for i, piece in enumerate(pieces[first:]):
        length, whole = min(len(piece), context), [*piece, eot]
        assert samples.length(i) == length
        assert tokens[i].tolist() == whole[:length] + [0] * (context - length)
        assert labels[i].tolist() == whole[1 : length + 1] + [-100] * (context - length)
    assert samples.valid_tokens == (labels != -100).sum()


@pytest.fixture
def prepared(tmp_path):
    source = jsonl(tmp_path / "x.jsonl", documents(30))
    recipe = recipe_for(source, tmp_path / "data")
    return recipe, open_data(recipe)


def test_a_damaged_shard_is_refused_by_name(prepared):
    recipe, data = prepared
    path = data.directory / "shard-00002.bin"
    raw = path.read_bytes()
    path.unlink()
    for content in (None, raw[:-2], raw + b"\0\0", raw[:-1] + bytes([raw[-1] ^ 1])):
        if content is not None:
            path.write_bytes(content)
        with refused(str(path), "prepare the data again"):
            open_data(recipe)


@pytest.fixture
def hashed(monkeypatch):
    """The names of the files that are hashed."""
    names, real = [], shards.sha256_of
    monkeypatch.setattr(shards, "sha256_of", lambda path: names.append(path.name) or real(path))
    return names


def test_checksums_are_read_once_for_each_state_of_a_file(prepared, hashed):
    recipe, data = prepared
    open_data(recipe)
    assert hashed == []  # what was just written was hashed on its way
    (data.directory / "verified.json").write_text("[1, 2")
    for _ in range(2):
        open_data(recipe)
    files = [(shard.file, shard.table_file) for shard in Index.load(data.directory).shards]
    assert sorted(hashed) == sorted(itertools.chain(*files))
    os.utime(data.directory / "shard-00001.bin")
    open_data(recipe)
    assert hashed[-1] == "shard-00001.bin"


class Pair:
    def __init__(self, rank, exchanged, barrier):
        self.rank, self.world, self.env = rank, 2, DistEnv(rank, 2, rank, 2)
        self.exchanged, self.barrier = exchanged, barrier

    def all_gather_object(self, name, value):
        self.exchanged[name, self.rank] = value
        self.barrier.wait(20)
        return [self.exchanged[name, rank] for rank in range(2)]


def open_on_two_ranks(recipe):
    exchanged, barrier = {}, threading.Barrier(2)

    def one(rank):
        try:
            return open_data(recipe, Pair(rank, exchanged, barrier))
        except UserError as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(one, range(2)))


def test_ranks_of_host_divide_files_of_directory_that_cannot_be_written(
    prepared, hashed, monkeypatch
):
    recipe, data = prepared
    (data.directory / "verified.json").unlink()
    monkeypatch.setattr(shards, "remember", lambda directory, states: None)
    assert [one.fingerprint for one in open_on_two_ranks(recipe)] == [data.fingerprint] * 2
    files = [path.name for path in data.directory.glob("shard-*")]
    assert len(files) > 4 and sorted(hashed) == sorted(files)
    path = data.directory / "shard-00001.bin"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    assert all("shard-00001.bin is damaged" in str(e) for e in open_on_two_ranks(recipe))


def test_rows_of_documents_are_opened_without_reading_a_shard(prepared, monkeypatch):
    recipe, _ = prepared
    opened, real = [], np.fromfile
    monkeypatch.setattr(np, "fromfile", lambda path, t: opened.append(path.suffix) or real(path, t))
    monkeypatch.setattr("windlass.data.shards.os.pread", None)
    rows = open_data(recipe.replace("data.packing=documents"))
    assert len(rows.train) > 10 and set(opened) == {".documents"}


def test_a_wrong_tokenizer_is_refused(prepared, tmp_path):
    recipe, data = prepared
    char_tokenizer("abc", with_eot=True).save(data.directory)
    with refused("wrong tokenizer"):
        open_data(recipe)
    train_bpe(documents(20), 270).save(tmp_path / "mine")
    file = tmp_path / "mine" / "tokenizer" / "tokenizer.json"
    recipe = recipe_for(tmp_path / "x.jsonl", tmp_path / "other", tokenizer=f"hf:{file.parent}")
    first = open_data(recipe)
    train_bpe(documents(20, seed=4), 266).save(tmp_path / "mine")
    with refused("tokenizer_files", str(file), "data.dir"):
        open_data(recipe)
    file.unlink()
    # what was saved beside the shards is enough
    assert open_data(recipe).fingerprint == first.fingerprint


def test_a_source_that_changed_is_noted(prepared, tmp_path, monkeypatch):
    recipe, data = prepared
    jsonl(tmp_path / "x.jsonl", documents(30, seed=8))
    stale = open_data(recipe)
    assert stale.fingerprint == data.fingerprint
    facts = describe(stale)  # of the ledger
    assert warnings(facts) == facts["changed"] and len(facts["changed"]) == 1
    assert "x.jsonl has changed since it was prepared" in facts["changed"][0]
    monkeypatch.setenv("RANK", "1")  # rank 0 says it for all
    assert "changed" not in describe(open_data(recipe))
    monkeypatch.delenv("RANK")
    (tmp_path / "x.jsonl").unlink()
    assert "changed" not in describe(open_data(recipe))


def test_too_small_a_vocabulary_and_too_few_tokens_are_refused(tmp_path):
    source = jsonl(tmp_path / "x.jsonl", documents(30))
    recipe = recipe_for(source, tmp_path / "data", tokenizer="char")
    with refused("model.vocab = 5", "write that"):
        open_data(recipe.replace("model.vocab=5"))
    source = jsonl(tmp_path / "short.jsonl", ["short", "texts", "only"])
    with refused("16 tokens", "33"):
        open_data(recipe_for(source, tmp_path / "short", context=32))


def test_documents_as_rows(tmp_path):
    texts = [t for t in documents(150) if t]
    source = jsonl(tmp_path / "x.jsonl", texts)
    data = open_data(recipe_for(source, tmp_path / "data", packing="documents", context=32))
    assert len(data.train) + len(data.val) == len(texts)
    third = data.tokenizer.decode(data.train.read(np.array([2])).tokens[0])
    assert third.startswith("<|endoftext|>" + texts[2][:10])
    (tmp_path / "one.txt").write_text("one text " * 99)
    with refused("data.packing", '"packed"'):
        open_data(recipe_for(tmp_path / "one.txt", tmp_path / "one", packing="documents"))


# -- shards that others wrote


def nanogpt(path, tokens):
    np.array(tokens, dtype=np.uint16).tofile(path)


def llmc(path, tokens, version=1):
    header = np.zeros(256, dtype=np.int32)
    header[:3] = 20240520, version, len(tokens)
    path.write_bytes(header.tobytes() + np.array(tokens, dtype=np.uint16).tobytes())


WRITERS = {
    "nanogpt.bin": nanogpt,
    "build.npy": lambda path, tokens: np.save(path, np.array(tokens, dtype=np.uint16)),
    "llmc.bin": llmc,
}


@pytest.mark.parametrize("kind", WRITERS)
def test_shards_of_others_are_read_as_they_are(tmp_path, kind):
    ending = kind.rpartition(".")[2]
    draw = np.random.default_rng(0)
    parts = [draw.integers(0, 256, n).tolist() for n in (300, 200, 77)]
    for name, part in zip(("train_000000", "train_000001", "val_000000"), parts, strict=True):
        WRITERS[kind](tmp_path / f"x_{name}.{ending}", part)
    before = {p.name: p.stat().st_mtime_ns for p in tmp_path.iterdir()}
    source = f"shards:{tmp_path}/*.{ending}"
    data = open_data(recipe_for(source, tmp_path / "data", order="shards-shuffled"))
    train, val = parts[0] + parts[1], parts[2]
    x, y, *_ = data.train.read(np.arange(len(data.train)))
    assert x.reshape(-1).tolist() == train[: x.size]
    assert y.reshape(-1).tolist() == train[1 : x.size + 1]
    assert data.val.valid_tokens == len(val) - 1
    assert data.val.read(np.array([0]))[0][0].tolist() == val[:16]
    assert sum(data.train.shard_samples) == len(data.train) and len(data.train.shard_samples) == 2
    assert {p.name: p.stat().st_mtime_ns for p in tmp_path.iterdir() if p.is_file()} == before
    assert not list((tmp_path / "data").glob("*.bin"))


def test_which_shards_validate(tmp_path):
    for i in range(4):
        nanogpt(tmp_path / f"{i}.bin", [i] * 100)
    source = f"shards:{tmp_path}/?.bin"
    held = open_data(recipe_for(source, tmp_path / "a", val_shards=1)).val
    assert set(held.read(np.arange(len(held)))[0].reshape(-1).tolist()) <= {0}
    share = open_data(recipe_for(source, tmp_path / "b", val_fraction=0.25))
    assert (share.train.tokens, share.val.tokens) == (300, 100)
    corpus, other = f"shards:{tmp_path}/[012].bin", f"shards:{tmp_path}/3.bin"
    named = open_data(recipe_for(corpus, tmp_path / "c", eval_source=other))
    assert (named.train.tokens, named.val.tokens) == (300, 100)
    assert open_data(recipe_for(source, tmp_path / "d", val_fraction=0)).val is None
    with refused("data.val_shards = 99", "data.shard_tokens"):
        open_data(recipe_for(source, tmp_path / "e", val_shards=99))


def test_bad_or_changed_shards_of_others_are_refused_by_name(tmp_path):
    whole = {}
    for name, writer in WRITERS.items():
        writer(tmp_path / name, list(range(200)))
        whole[name] = (tmp_path / name).read_bytes()
    foreign = whole["nanogpt.bin"] + np.array([257, 5], np.uint16).tobytes()
    cases = [
        ("a.bin", whole["nanogpt.bin"][:-1], "truncated"),
        ("c.bin", whole["llmc.bin"][:-2], "200 tokens"),
        ("d.npy", whole["build.npy"][:-2], "not a whole .npy file"),
        ("f.txt", whole["nanogpt.bin"], "neither .npy nor .bin"),
        ("h.bin", foreign, "token id 257 at place 200"),
    ]
    # a pickle, which could run code, is not opened
    for array, words in (
        (np.zeros(9, np.float32), "holds float32"),
        (np.array([{}], dtype=object), "not a whole .npy file"),
        (np.zeros((3, 3), np.uint16), "of shape"),
    ):
        np.save(tmp_path / "y.npy", array)
        cases.append(("j.npy", (tmp_path / "y.npy").read_bytes(), words))
    for number, (name, content, words) in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / name).write_bytes(content)
        with refused(name, words):
            open_data(recipe_for(f"shards:{folder}/*", tmp_path / "data" / folder.name))
    recipe = recipe_for(f"shards:{tmp_path}/nanogpt.bin", tmp_path / "data" / "changed")
    open_data(recipe)
    nanogpt(tmp_path / "nanogpt.bin", [1, *range(1, 200)])
    with refused("nanogpt.bin is damaged", "SHA-256"):
        open_data(recipe)
