"""The files of a data directory, and samples from them, against a plain reference; every damaged,
foreign or mistaken shard refused by name before the first step.
"""

import itertools
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_fixtures import documents, jsonl, recipe_for
from helpers import refused
from windlass.data.open import open_data
from windlass.data.recipe_sources import SourceSpec
from windlass.data.samples import PackedSamples
from windlass.data.shards import MARK, Corpus, Index, Row, ShardWriter
from windlass.data.split import DocumentSet
from windlass.data.tokenizer import Description
from windlass.data.tokenizer_kinds import bpe_tokenizer, byte_tokenizer, char_tokenizer
from windlass.errors import UserError
from windlass.fileio import sha256_of
from windlass.model.build import build_model
from windlass.parallel.env import DistEnv


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk_and_few_open_files(monkeypatch):
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    monkeypatch.setattr("windlass.data.shards.OPEN_FILES", 3)


def new_index(shard_tokens, masked=False):
    about = Description(kind="byte", fingerprint="", vocab=2**16, eot=256)
    return Index(key={}, source={}, tokenizer=about, shard_tokens=shard_tokens, masked=masked)


def write(folder, rows, shard_tokens, masked=False):
    """The index of rows that are written with a resume after every full shard."""
    index = new_index(shard_tokens, masked)
    while not index.complete:
        with ShardWriter(folder, index) as writer:
            before = len(writer.index.shards)
            for row in rows:
                if row.item >= index.resume.item and len(writer.index.shards) == before:
                    writer.add(row)
            if len(writer.index.shards) == before:
                writer.finish(complete=True)
        index = Index.load(folder)
    return index


def corpus_of(folder, index):
    return Corpus(folder, index, SourceSpec("x", "x"), byte_tokenizer())


ROWS = st.lists(
    st.lists(st.integers(0, 30), min_size=1, max_size=4), min_size=1, max_size=10
)  # tokens of the rows of each document


@given(ROWS, st.integers(3, 40), st.booleans(), st.data())
def test_what_is_written_is_read(tmp_path_factory, sizes, shard_tokens, masked, data):
    """Documents of several rows, also empty ones, or with a mask several documents of an item, over
    several shards; resumed."""
    folder, at_once = tmp_path_factory.mktemp("x"), tmp_path_factory.mktemp("y")
    items = [(item, parts) for item, parts in enumerate(sizes)]
    if masked:
        items = [(item, [n]) for item, parts in items for n in parts]
    rows, ends, bits = list[Row](), [0], list[bool]()
    for document, (item, parts) in enumerate(items):
        parts[0] = max(1, parts[0])
        for n, size in enumerate(parts):
            last = n == len(parts) - 1
            row = Row(item, np.arange(len(bits), len(bits) + size), characters=n + 1, more=not last)
            row = row._replace(text=1000 + document if last else 0)
            marks = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
            bits += marks
            if masked:
                row = row._replace(marks=np.array(marks, bool), group=2000 + document)
            rows.append(row)
        ends.append(len(bits))
    index = write(folder, rows, shard_tokens, masked)
    assert index.tokens == len(bits)
    longest = max(len(row.tokens) for row in rows)
    assert all(0 <= s.tokens - shard_tokens < longest for s in index.shards[:-1])
    corpus = corpus_of(folder, index)
    tokens = [token + masked * bits[token] * MARK for token in range(len(bits))]
    assert corpus.read(0, len(bits)).tolist() == tokens
    assert corpus._file.cache_info().currsize <= 3
    start = data.draw(st.integers(0, len(bits)))
    stop = data.draw(st.integers(start, len(bits)))
    assert corpus.read(start, stop).tolist() == tokens[start:stop]
    if masked:
        assert corpus.field("group").tolist() == [2000 + i for i in range(len(items))]
    assert corpus.document_edges.tolist() == ends
    assert corpus.field("text").tolist() == [1000 + i for i in range(len(items))]
    assert corpus.characters.tolist() == [sum(range(1, len(parts) + 1)) for _, parts in items]
    names = [file for shard in index.shards for file in shard.files(index.row)]
    assert {path.name for path in folder.iterdir()} == {"index.json", *names}
    with ShardWriter(at_once, new_index(shard_tokens, masked)) as writer:
        for row in rows:
            writer.add(row)
        writer.finish(complete=True)
    assert all((folder / name).read_bytes() == (at_once / name).read_bytes() for name in names)


@pytest.mark.parametrize("more", [False, True])
def test_a_table_of_a_killed_preparation_has_only_whole_documents(tmp_path, more):
    """The last full shard may end with a row that ends a document, or with another."""
    with ShardWriter(tmp_path, new_index(12)) as writer:
        writer.add(Row(0, np.arange(8), text=5))
        writer.add(Row(1, np.arange(10), text=0 if more else 6, more=more))
    corpus = corpus_of(tmp_path, Index.load(tmp_path))
    assert corpus.document_edges.tolist() == ([0, 8] if more else [0, 8, 18])
    assert corpus.field("text").tolist() == ([5] if more else [5, 6])


PIECES = st.lists(st.integers(1, 30), min_size=1, max_size=12)


@given(PIECES, st.integers(3, 40), st.integers(1, 9), st.booleans(), st.data())
def test_packed_rows(tmp_path_factory, lengths, shard_tokens, context, ragged, data):
    """From any ranges of the source's tokens."""
    count, folder = iter(range(10**6)), tmp_path_factory.mktemp("x")
    rows = [Row(i, np.array([next(count) for _ in range(n)])) for i, n in enumerate(lengths)]
    index, total = write(folder, rows, shard_tokens), sum(lengths)
    cuts = sorted(data.draw(st.sets(st.integers(0, total), min_size=2, max_size=6)))
    ranges = list(zip(cuts[::2], cuts[1::2], strict=False))
    inside = [t for start, stop in ranges for t in range(start, stop)]
    corpus = corpus_of(folder, index)
    tokens = DocumentSet([corpus], [np.arange(len(ranges))], [np.array(ranges)])
    samples = PackedSamples(tokens, context, ragged=ragged)
    pairs = list(itertools.pairwise(inside))
    width = max(1, len(pairs)) if ragged and len(inside) <= context else context
    rows = [pairs[i : i + width] for i in range(0, len(pairs), width)]
    rows = [row for row in rows if ragged or len(row) == width]
    assert len(samples) == len(rows)
    assert samples.valid_tokens == sum(map(len, rows))
    found_tokens, found_labels, *_ = samples.read(np.arange(len(rows)))
    assert found_tokens.shape == found_labels.shape == (len(rows), width)
    for row, x, y in zip(rows, found_tokens.tolist(), found_labels.tolist(), strict=True):
        padding = width - len(row)
        assert x == [a for a, _ in row] + [0] * padding
        assert y == [b for _, b in row] + [-100] * padding
    firsts, ends = inside[: width * len(rows) : width], np.cumsum([s.tokens for s in index.shards])
    shard_of = np.searchsorted(ends, firsts, "right").tolist()
    wanted = [shard_of.count(shard) for shard in range(len(index.shards))]
    assert samples.shard_samples == wanted


@pytest.fixture
def prepared(tmp_path):
    """A recipe, its data and their directory."""
    recipe = recipe_for(jsonl(tmp_path / "x.jsonl", documents(30)), tmp_path / "data")
    data = open_data(recipe)
    return recipe, data, data.prepared.directories[0]


def test_a_damaged_shard_is_refused_by_name(prepared):
    recipe, _, directory = prepared
    path = directory / "shard-00002.bin"
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
    names = []
    monkeypatch.setattr(
        "windlass.data.prepare.sha256_of", lambda path: names.append(path.name) or sha256_of(path)
    )
    return names


def test_checksums_are_read_once_for_each_state_of_a_file(prepared, hashed):
    recipe, _, directory = prepared
    open_data(recipe)
    assert hashed == []  # what was just written was hashed on its way
    (directory / "verified.json").write_text("[1, 2")
    for _ in range(2):
        open_data(recipe)
    assert sorted(hashed) == sorted(path.name for path in directory.glob("shard-*"))
    os.utime(directory / "shard-00001.bin")
    open_data(recipe)
    assert hashed[-1] == "shard-00001.bin"


def open_on_two_ranks(recipe):
    exchanged, barrier = {}, threading.Barrier(2)

    def gather(rank, name, value):
        exchanged[name, rank] = value
        barrier.wait(20)
        return [exchanged[name, other] for other in range(2)]

    def one(rank):
        own = {"env": DistEnv(rank, 2, rank, 2), "all_gather_object": partial(gather, rank)}
        try:
            return open_data(recipe, SimpleNamespace(main=rank == 0, **own))
        except UserError as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(one, range(2)))


def test_ranks_of_host_divide_files_of_directory_that_cannot_be_written(
    prepared, hashed, monkeypatch
):
    recipe, data, directory = prepared
    (directory / "verified.json").unlink()
    monkeypatch.setattr("windlass.data.prepare._remember", lambda directory, states: None)
    assert [one.fingerprint for one in open_on_two_ranks(recipe)] == [data.fingerprint] * 2
    files = [path.name for path in directory.glob("shard-*")]
    assert len(files) > 4 and sorted(hashed) == sorted(files)
    path = directory / "shard-00001.bin"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    assert all("shard-00001.bin is damaged" in str(e) for e in open_on_two_ranks(recipe))


def test_a_wrong_tokenizer_is_refused(prepared, tmp_path):
    recipe, _, directory = prepared
    own = byte_tokenizer()
    char_tokenizer("abc", with_eot=True).save(directory)
    with refused("another tokenizer", "data.dir"):
        open_data(recipe)
    open_data(recipe, tokenizer=own)  # a run's own
    bpe_tokenizer(documents(20), 270).save(tmp_path / "mine")
    file = tmp_path / "mine" / "tokenizer" / "tokenizer.json"
    recipe = recipe_for(tmp_path / "x.jsonl", tmp_path / "other", tokenizer=f"hf:{file.parent}")
    first = open_data(recipe)
    bpe_tokenizer(documents(20, seed=4), 266).save(tmp_path / "mine")
    with refused("data.tokenizer", 'data.changed="prepare"'):
        open_data(recipe)
    assert open_data(recipe, tokenizer=first.tokenizer).fingerprint == first.fingerprint
    renewed = open_data(recipe.replace("data.changed=prepare"))
    file.unlink()  # what was saved beside the shards is enough
    assert open_data(recipe).fingerprint == renewed.fingerprint != first.fingerprint


def test_too_small_a_vocabulary_is_refused():
    with refused("model.vocab = 5", "write 30"):
        build_model(recipe_for("x", tokenizer="char").replace("model.vocab=5"), 30)


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
    sizes = [count for count in data.train.shard_samples if count]
    assert sum(sizes) == len(data.train) and len(sizes) == 2
    assert {p.name: p.stat().st_mtime_ns for p in tmp_path.iterdir() if p.is_file()} == before
    assert not list((tmp_path / "data").glob("*.bin"))


def opened(source, folder, **data):
    """The data of a source, and the ids (0: padding) in its training and validation rows."""
    data = open_data(recipe_for(source, folder / "data", **data))
    rows = [set(x.read(np.arange(len(x))).tokens.ravel().tolist()) for x in (data.train, data.val)]
    return data, *rows


def test_which_shards_validate(tmp_path):
    for i in range(4):
        nanogpt(tmp_path / f"{i}.bin", [i + 1] * 100)
    source = f"shards:{tmp_path}/?.bin"
    assert opened(source, tmp_path, val_shards=1)[2] <= {0, 1}
    share, *_ = opened(source, tmp_path, val_fraction=0.25)
    assert (share.train.tokens, share.val.tokens) == (300, 100)
    assert open_data(recipe_for(source, tmp_path / "data", val_fraction=0)).val is None
    with refused("data.val_shards = 99", "data.shard_tokens"):
        opened(source, tmp_path, val_shards=99)
    for names in (("train", "more", "valid", "test"), ("a_0", "a_1", "a_val_0", "dev")):
        folder = tmp_path / names[0]
        folder.mkdir()
        for number, name in enumerate(names, 1):
            nanogpt(folder / f"{name}.bin", [number] * 200)
        source = f"shards:{folder}/*.bin"
        data, train, _ = opened(source, folder)
        assert (data.train.tokens, data.val.tokens, train) == (400, 400, {1, 2})
        nanogpt(tmp_path / "copy.bin", [1] * 200)
        # A file with such a name never trains, also if the validation data is separate.
        data, train, val = opened(source, folder, eval_source=f"shards:{folder}/{names[2]}.bin")
        assert (data.train.tokens, data.val.tokens, train, val) == (400, 200, {1, 2}, {0, 3})
        data, train, val = opened(source, folder, eval_source=f"shards:{tmp_path}/copy.bin")
        assert (data.train.tokens, data.division.shared, train, val) == (200, 1, {2}, {0, 1})


def test_bad_or_changed_shards_of_others_are_refused_by_name(tmp_path):
    whole = {}
    for name, writer in WRITERS.items():
        writer(tmp_path / name, list(range(200)))
        whole[name] = (tmp_path / name).read_bytes()
    foreign = whole["nanogpt.bin"] + np.array([257, 5], np.uint16).tobytes()
    cases = [
        ("a.bin", whole["nanogpt.bin"][:-1], "truncated"),
        ("c.bin", whole["llmc.bin"][:-2], "200 tokens"),
        ("d.npy", whole["build.npy"][:-2], "526 bytes for 200 tokens"),
        ("f.txt", whole["nanogpt.bin"], "neither .npy nor .bin"),
        ("h.bin", foreign, "token id 257 at place 200"),
    ]
    pickle, square = np.array([{}], dtype=object), np.zeros((3, 3), np.uint16)
    for array, words in ((pickle, "holds object"), (square, "of shape")):
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
    with refused("nanogpt.bin has changed", 'data.changed="prepare"'):
        open_data(recipe)
    with refused("nanogpt.bin is damaged", "SHA-256"):
        open_data(recipe, resuming=True)
    first = open_data(recipe.replace("data.changed=prepare")).train.read(np.array([0])).tokens
    assert first[0, :3].tolist() == [1, 1, 2]


def test_shards_of_others_move_with_their_project(tmp_path, monkeypatch):
    """`data/` is a link to another disk."""
    project, recipe = tmp_path / "old", recipe_for("shards:tokens/*.bin", "data")
    for folder in (project / "tokens", tmp_path / "disk", tmp_path / "new"):
        folder.mkdir(parents=True)
    (project / "data").symlink_to(tmp_path / "disk")
    nanogpt(project / "tokens" / "x.bin", list(range(200)))
    monkeypatch.chdir(project)
    assert open_data(recipe).prepared.is_new
    project = project.rename(tmp_path / "new" / "place")
    monkeypatch.chdir(project)
    data = open_data(recipe)
    assert data.train.read(np.array([0])).tokens[0, :3].tolist() == [0, 1, 2]
    assert not data.prepared.is_new
    (project / "tokens" / "x.bin").unlink()
    with refused("the shard tokens/x.bin", "delete data"):
        open_data(recipe)


def tokens_and_row(recipe, sample=0):
    """The number of training tokens, and the tokens of a sample."""
    train = open_data(recipe.replace("data.val_fraction=0")).train
    return train.tokens, train.read(np.array([sample])).tokens[0].tolist()


def test_the_type_of_ids_in_files_that_do_not_name_it(tmp_path):
    """A vocabulary of more than 65,536 ids is in 32 bits; 32-bit ids are not read as 16-bit ones."""
    characters = (chr(c) for c in range(0x3400, 0x3400 + 72_048) if not 0xD800 <= c < 0xE000)
    char_tokenizer(characters, with_eot=True).save(tmp_path / "many")  # 70,000 ids
    ids = np.random.default_rng(0).integers(0, 257, 3000)
    ids.astype(np.uint32).tofile(tmp_path / "x.bin")
    recipe = recipe_for(f"shards:{tmp_path}/x.bin", tmp_path / "data")
    with refused("x.bin", "every second 16 bits are 0", 'data.shards_dtype="uint32"'):
        open_data(recipe)
    many = f"data.tokenizer=hf:{tmp_path / 'many' / 'tokenizer'}"
    for setting in ("data.shards_dtype=uint32", many):
        assert tokens_and_row(recipe.replace(setting)) == (3000, ids[:16].tolist())
    (tmp_path / "x.bin").write_bytes((tmp_path / "x.bin").read_bytes()[:-2])
    with refused("x.bin", "truncated"):
        open_data(recipe.replace(many, f"data.dir={tmp_path / 'other'}"))


@pytest.mark.parametrize(("code", "dtype"), [(8, np.uint16), (4, np.int32)])
def test_megatrons_index_names_the_type(tmp_path, code, dtype):
    ids = np.random.default_rng(1).integers(0, 257, 500)
    ids.astype(dtype).tofile(tmp_path / "x_text_document.bin")
    head = b"MMIDIDX\x00\x00" + (1).to_bytes(8, "little") + bytes([code])
    (tmp_path / "x_text_document.idx").write_bytes(head + bytes(99))
    recipe = recipe_for(f"shards:{tmp_path}/*.bin", tmp_path / "data")
    assert tokens_and_row(recipe, 3) == (500, ids[48:64].tolist())
    (tmp_path / "x_text_document.idx").write_bytes(head[:-1] + b"\x07" + bytes(99))
    with refused("x_text_document.idx", "Megatron"):
        open_data(recipe.replace(f"data.dir={tmp_path / 'other'}"))
