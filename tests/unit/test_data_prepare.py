"""Preparation: the right tokens, byte for byte the same however many workers and however often it
was interrupted.
"""

import contextlib
import errno
import json
import random
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_fixtures import documents, jsonl, recipe_for
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import refused
from windlass.data.describe import describe, lines, warnings
from windlass.data.locate import data_dir
from windlass.data.open import open_data
from windlass.data.prepare import find_prepared, prepare
from windlass.data.samples import split_stream
from windlass.data.shards import Stream
from windlass.data.tokenizer import load_tokenizer
from windlass.errors import RunFailed
from windlass.fileio import Files


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch):
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


def run(recipe):
    prepared = prepare(recipe)
    return prepared.directory, prepared.index


def split_tokens(directory, index, name):
    stream = split_stream(directory, index, index.splits[name])
    return stream.read(0, len(stream))


def lengths(recipe):
    """The tokens that a recipe's data have for training and for validation."""
    return [len(split_tokens(*run(recipe), name)) for name in ("train", "val")]


def files_of(directory: Path):
    # a kill after the index leaves the last one behind
    skipped = (".lock", "verified.json", "progress.json")
    return {
        p.name: p.read_bytes()
        for p in directory.rglob("*")
        if p.is_file() and p.name not in skipped
    }


def packed(texts, tokenizer):
    """The independent reference: each document after an end-of-text token."""
    return [i for t in texts if t for i in [tokenizer.eot, *tokenizer.encode(t).tolist()]]


def test_shakespeare_as_nanogpt_splits_and_counts_it(data_files, tmp_path):
    file = data_files / "tinyshakespeare" / "input.txt"
    recipe = recipe_for(file, tmp_path / "data", tokenizer="char", shard_tokens=300_000)
    directory, index = run(recipe)
    text = file.read_text(encoding="utf-8")
    numbers = {c: i for i, c in enumerate(sorted(set(text)))}
    train, val = split_tokens(directory, index, "train"), split_tokens(directory, index, "val")
    assert (len(train), len(val)) == (1_003_854, 111_540)
    assert np.array_equal(np.concatenate([train, val]), [numbers[c] for c in text])
    assert (index.tokenizer.vocab, index.tokenizer.eot) == (65, None)
    assert {s.dtype for s in index.shards} == {"uint16"}
    gpt2 = {"tokenizer": f"gpt2:{data_files / 'gpt2'}", "shard_tokens": 100_000}
    published = [301_966, 36_059]  # in nanoGPT's data/shakespeare
    assert lengths(recipe_for(file, tmp_path / "gpt2", **gpt2)) == published


def test_a_large_vocabulary_lies_in_32_bits_and_a_single_text_ends_at_its_limit(tmp_path):
    text = "".join(chr(c) for c in range(0x3400, 0x3400 + 75_000) if not 0xD800 <= c < 0xE000)
    (tmp_path / "x.txt").write_text(text, encoding="utf-8")
    recipe = recipe_for(tmp_path / "x.txt", tmp_path / "data", tokenizer="char", val_fraction=0)
    directory, index = run(recipe)
    assert index.tokenizer.vocab == len(text) > 65536
    assert {s.dtype for s in index.shards} == {"uint32"} and "val" not in index.splits
    assert split_tokens(directory, index, "train").tolist() == list(range(len(text)))
    (tmp_path / "y.txt").write_text("abcdefghij" * 1000)
    limited = recipe_for(tmp_path / "y.txt", tmp_path / "one", max_tokens=2500)
    assert lengths(limited) == [2500, 1000]


def test_documents_lie_end_to_end(tmp_path):
    texts = documents(60)
    source = jsonl(tmp_path / "x.jsonl", texts)
    directory, index = run(recipe_for(source, tmp_path / "data", val_fraction=0.25))
    tokenizer = load_tokenizer(recipe_for("x"), directory)
    tokens, stream = packed(texts, tokenizer), Stream(directory, index.streams["shard"])
    assert stream.read(0, len(stream)).tolist() == tokens
    starts = [i for i, token in enumerate(tokens) if token == tokenizer.eot]
    assert stream.starts().tolist() == starts
    assert [s.tokens for s in index.shards[:-1]] == [1024] * (len(index.shards) - 1)
    assert len(index.shards) > 3
    nonempty = [t for t in texts if t]
    held = round(len(nonempty) / 4)
    assert split_tokens(directory, index, "train").tolist() == packed(nonempty[:-held], tokenizer)
    assert split_tokens(directory, index, "val").tolist() == packed(nonempty[-held:], tokenizer)


@pytest.mark.parametrize("tokenizer", ["byte", "char", "bpe"])
def test_workers_change_no_byte(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr("windlass.data.documents.BATCH_CHARACTERS", 300)
    source = jsonl(tmp_path / "x.jsonl", documents(80))
    changes = {"tokenizer": tokenizer, "tokenizer_vocab": 270}
    for n in (1, 5):
        run(recipe_for(source, tmp_path / f"{n}", workers=n, **changes))
    assert files_of(tmp_path / "1") == files_of(tmp_path / "5")


class Killed(BaseException):
    """Stands for the end of the process."""


def killed_until_done(recipe, monkeypatch):
    """Prepare, dying before or after a rename, now an early one, now a later one; the index, and
    how often it died.
    """
    real, calls, die_at, after = Files.rename, 0, 0, False

    def deadly(files, source, target):
        nonlocal calls
        calls += 1
        if calls == die_at and not after:
            raise Killed
        real(files, source, target)
        if calls == die_at:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Files, "rename", deadly)
        for deaths in range(200):
            calls, die_at, after = 0, 1 + deaths % 5, deaths % 2 == 1
            with contextlib.suppress(Killed):
                return run(recipe)[1], deaths
    raise AssertionError("it never ends")


@pytest.mark.parametrize("tokenizer", ["byte", "char"])
@pytest.mark.parametrize("kind", ["documents", "single"])
def test_interrupted_anywhere_it_resumes_to_the_same_bytes(tmp_path, kind, tokenizer, monkeypatch):
    """Many documents, some over several shards, with a validation corpus; one text in many
    stretches over many shards.
    """
    texts = [*documents(20), "a very long one " * 300, *documents(20, seed=1)]
    if kind == "documents":
        source = jsonl(tmp_path / "x.jsonl", texts)
        held = jsonl(tmp_path / "v.jsonl", documents(12, 2))
        changes = {"tokenizer": tokenizer, "eval_source": str(held), "max_tokens": 9000}
    else:
        monkeypatch.setattr("windlass.data.tokenizer.STRETCH", 700)
        source, changes = tmp_path / "x.txt", {"tokenizer": tokenizer, "val_fraction": 0.2}
        source.write_text("".join(texts)[:12_000], encoding="utf-8")
    monkeypatch.setattr("windlass.data.documents.BATCH_CHARACTERS", 500)
    directory, whole = run(recipe_for(source, tmp_path / "whole", **changes))
    broken = recipe_for(source, tmp_path / "broken", **changes)
    index, deaths = killed_until_done(broken, monkeypatch)
    assert deaths > 8 and len(whole.shards) > 8
    assert files_of(tmp_path / "broken") == files_of(directory)
    assert index.fingerprint == whole.fingerprint
    if kind == "single":
        loaded = load_tokenizer(recipe_for("x", tokenizer=tokenizer), directory)
        text = "".join(texts)[:12_000]
        parts = [loaded.decode(split_tokens(directory, whole, name)) for name in ("train", "val")]
        assert parts == [text[:9600], text[9600:]]


@contextlib.contextmanager
def failing(file, error, monkeypatch):
    def about_to(self, name, path, output=None, data=None):
        if name == "rename" and path.name == file:
            raise error

    with monkeypatch.context() as patch:
        patch.setattr(Files, "about_to", about_to)
        yield


def test_what_was_committed_is_not_done_again(tmp_path, monkeypatch, capsys):
    recipe = recipe_for(jsonl(tmp_path / "x.jsonl", documents(60)), tmp_path / "data")
    full = OSError(errno.ENOSPC, "No space left on device")
    with (
        failing("shard-00002.bin", full, monkeypatch),
        pytest.raises(RunFailed, match="No space left"),
    ):
        prepare(recipe)
    first = (tmp_path / "data" / "shard-00000.bin").stat().st_mtime_ns
    run(recipe)
    assert "resuming after 2 committed shards, 2,048 tokens" in capsys.readouterr().err
    assert (tmp_path / "data" / "shard-00000.bin").stat().st_mtime_ns == first


def test_corpus_that_changed_or_shard_that_was_damaged_in_between_is_noticed(tmp_path, monkeypatch):
    source = jsonl(tmp_path / "x.jsonl", documents(60))
    for name in ("damaged", "other"):
        with failing("index.json", Killed(), monkeypatch), pytest.raises(Killed):
            prepare(recipe_for(source, tmp_path / name))
    path = tmp_path / "damaged" / "shard-00001.bin"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    with refused("shard-00001.bin is damaged"):
        open_data(recipe_for(source, tmp_path / "damaged"))
    jsonl(source, documents(6, seed=9))
    other, fresh = (run(recipe_for(source, tmp_path / name)) for name in ("other", "fresh"))
    assert other[1].fingerprint == fresh[1].fingerprint
    assert sorted(files_of(other[0])) == sorted(files_of(fresh[0]))


@given(st.integers(1, 6000), st.sampled_from([0.0, 0.1, 0.5]), st.integers(0, 2))
@settings(max_examples=25)
def test_max_tokens_stops_at_a_documents_end(tmp_path_factory, most, fraction, shards):
    folder, texts = tmp_path_factory.mktemp("x"), documents(60)
    source = jsonl(folder / "x.jsonl", texts)
    limits = {"max_tokens": most, "val_fraction": fraction, "val_shards": shards}
    recipe = recipe_for(source, folder / "data", **limits)
    directory, index = run(recipe)
    tokenizer = load_tokenizer(recipe, directory)
    sizes = np.cumsum([1 + len(tokenizer.encode(t)) for t in texts if t])
    total = sum(s.tokens for s in index.shards)
    held = shards * 1024
    share = 1 if shards else 1 - fraction
    assert total in sizes
    earlier = sizes[np.flatnonzero(sizes == total)[0] - 1] if total > sizes[0] else 0
    assert total == sizes[-1] or (total - held) * share >= most - 1e-9
    assert (earlier - held) * share < most


def test_a_file_has_no_splits_and_is_not_validated_on_its_training_text(tmp_path):
    """As where a preset that validates on a split of the Hub is given a file."""
    path = tmp_path / "text.txt"
    path.write_text("ab" * 500)
    recipe = recipe_for(path, tmp_path / "out", eval_split="validation", val_fraction=0.1)
    assert lengths(recipe) == [900, 100]


def test_a_validation_source_of_its_own(tmp_path):
    texts, held = documents(40), documents(40, seed=5)
    source, other = jsonl(tmp_path / "x.jsonl", texts), jsonl(tmp_path / "v.jsonl", held)
    directory, index = run(recipe_for(source, tmp_path / "data", eval_source=str(other)))
    tokenizer = load_tokenizer(recipe_for("x"), directory)
    assert split_tokens(directory, index, "train").tolist() == packed(texts, tokenizer)
    assert split_tokens(directory, index, "val").tolist() == packed(held, tokenizer)
    limits = {"eval_source": str(other), "max_documents": 20, "val_fraction": 0.25}
    _, few = run(recipe_for(source, tmp_path / "few", **limits))
    wanted = [sum(map(bool, texts[:20])), sum(map(bool, held[:5]))]
    assert [sum(s.documents for s in shards) for shards in few.streams.values()] == wanted


def test_too_little_text_and_directories_that_are_not_ours(tmp_path):
    source = jsonl(tmp_path / "x.jsonl", ["", ""])
    with refused("no text"):
        prepare(recipe_for(source, tmp_path / "data"))
    for directory in (tmp_path, source):  # a directory of something else, and a file
        with refused("data.dir"):
            prepare(recipe_for(source, directory))


def test_data_that_were_prepared_otherwise(tmp_path):
    source = jsonl(tmp_path / "x.jsonl", documents(20))
    assert find_prepared(recipe_for(source, tmp_path / "data")) is None
    assert not (tmp_path / "data").exists()
    run(recipe_for(source, tmp_path / "data"))
    changes = (
        "data.tokenizer: prepared with 'byte', the recipe says 'char'",
        "data.val_fraction: prepared with 0.1",
    )
    with refused("data.dir", *changes):
        prepare(recipe_for(source, tmp_path / "data", tokenizer="char", val_fraction=0.2))
    first = data_dir(recipe_for(source))
    reading = {"packing": "documents", "order": "sequential", "workers": 7, "context": 99}
    assert first == data_dir(recipe_for(source, **reading))
    assert first != data_dir(recipe_for(source, tokenizer="char")) and first.parent == Path("data")


def test_a_damaged_index(tmp_path):
    recipe = recipe_for(jsonl(tmp_path / "x.jsonl", documents(20)), tmp_path / "data")
    path = run(recipe)[0] / "index.json"
    whole = json.loads(path.read_text())
    changed = {**whole, "streams": {"shard": [{**whole["streams"]["shard"][0], "tokens": 9}]}}
    lacking = {key: value for key, value in whole.items() if key != "tokenizer"}
    for tree in ("{", {**whole, "format": 99}, changed, lacking):
        path.write_text(tree if isinstance(tree, str) else json.dumps(tree))
        with refused("index.json", "prepare the data again"):
            prepare(recipe)


# -- several sources, and the text that is held out


def table(data):
    """What was read of each source: documents, tokens, tokens trained on and held out."""
    return {
        Path(r["source"]).name: (r["documents"], r["tokens"], r["train"], r["val"])
        for r in describe(data)["sources"]
    }


def three_sources(folder):
    (folder / "novel.txt").write_text("call me something else. " * 400)
    jsonl(folder / "many.jsonl", [f"document number {n}, " * 4 for n in range(200)])
    jsonl(folder / "few.jsonl", [f"short {n}" * 10 for n in range(12)])
    return [str(folder / name) for name in ("novel.txt", "many.jsonl", "few.jsonl")]


def test_of_each_source_a_share_is_held_out_and_the_rest_trained_on(tmp_path):
    data = open_data(recipe_for(three_sources(tmp_path), tmp_path / "data", val_fraction=0.1))
    used = table(data)
    assert [used[name][0] for name in ("novel.txt", "many.jsonl", "few.jsonl")] == [1, 200, 12]
    for _, tokens, trained, held_out in used.values():
        assert trained + held_out == tokens and held_out / tokens == pytest.approx(0.1, abs=0.03)
    assert data.val.tokens == sum(row[3] for row in used.values())
    text = data.tokenizer.decode(data.val.stream.read(0, data.val.tokens))
    assert "something else" in text and "document number 199" in text and "short 11" in text
    trained = data.tokenizer.decode(data.train.stream.read(0, data.train.tokens))
    assert "document number 179," in trained
    assert "document number 180," not in trained
    assert "short 11" not in trained
    shown = lines(describe(data), 16)["sources"].split("\n")
    assert len(shown) == 4
    assert "held out" in shown[0]
    assert "many.jsonl" in shown[2]
    assert f"{used['many.jsonl'][2]:,}" in shown[2]


def test_max_tokens_takes_a_share_of_every_source_and_an_empty_one_is_a_warning(tmp_path):
    sources = three_sources(tmp_path)[1:]
    with_empty = [*sources, str(jsonl(tmp_path / "none.jsonl", ["", ""]))]
    data = open_data(recipe_for(with_empty, tmp_path / "data", max_tokens=5000))
    used, whole = table(data), [Path(source).stat().st_size for source in sources]
    for name, size in zip(("many.jsonl", "few.jsonl"), whole, strict=True):
        assert used[name][2] == pytest.approx(5000 * size / sum(whole), rel=0.25)
    assert used["none.jsonl"] == (0, 0, 0, 0)
    (warning,) = warnings(describe(data))
    assert "none.jsonl" in warning and "data.source" in warning
    data = open_data(recipe_for(sources, tmp_path / "two", max_tokens=5000))
    assert warnings(describe(data)) == []


@pytest.mark.parametrize("most", [0, 3000])
@pytest.mark.parametrize("count", [5, 150])
def test_the_validation_text_does_not_depend_on_the_tokenizer(tmp_path, most, count):
    """With `max_tokens` too, and where one document is divided; nothing of it is trained on."""
    sizes = [1 + n % 4 + 300 // count for n in range(count)]
    sentences = [
        [f"the cat {n}-{k} sat on the mat." for k in range(s)] for n, s in enumerate(sizes)
    ]
    source, found = jsonl(tmp_path / "x.jsonl", list(map(" ".join, sentences))), {}
    for name, more in {"byte": {}, "char": {}, "bpe": {"tokenizer_vocab": 300}}.items():
        recipe = recipe_for(source, tmp_path / name, tokenizer=name, max_tokens=most, **more)
        directory, index = run(recipe)
        tokenizer = load_tokenizer(recipe, directory)
        train, val = (
            tokenizer.decode(split_tokens(directory, index, split)) for split in ("train", "val")
        )
        found[name] = val, index.splits["val"].text
        assert not {*re.findall(r" \d+-\d+ ", val)} & {*re.findall(r" \d+-\d+ ", train)}
    assert len(set(found.values())) == 1 and found["byte"][0] and found["byte"][1]
    _, other = run(recipe_for(source, tmp_path / "other", max_tokens=most, val_fraction=0.3))
    assert other.splits["val"].text != found["byte"][1]


def test_a_validation_source_is_read_up_to_as_many_bytes_by_every_tokenizer(tmp_path):
    source = jsonl(tmp_path / "x.jsonl", documents(60))
    held = jsonl(tmp_path / "v.jsonl", documents(60, seed=4))
    single = tmp_path / "one.txt"
    single.write_text("a text that is validated on, " * 99)
    for other in (held, single):
        options = {"eval_source": str(other), "max_tokens": 4000, "tokenizer_vocab": 300}
        indices = [
            run(recipe_for(source, tmp_path / f"{other.stem}-{t}", tokenizer=t, **options))[1]
            for t in ("byte", "bpe")
        ]
        assert indices[0].splits["val"].text == indices[1].splits["val"].text != ""
        assert indices[0].splits["val"].tokens > indices[1].splits["val"].tokens


def test_several_sources_are_resumed_where_they_were_killed(tmp_path, monkeypatch):
    monkeypatch.setattr("windlass.data.documents.BATCH_CHARACTERS", 500)
    sources = three_sources(tmp_path)
    options = {"max_tokens": 9000, "tokenizer": "bpe", "tokenizer_vocab": 300}
    directory, whole = run(recipe_for(sources, tmp_path / "whole", **options))
    broken = recipe_for(sources, tmp_path / "broken", **options)
    index, deaths = killed_until_done(broken, monkeypatch)
    assert deaths > 3
    assert files_of(tmp_path / "broken") == files_of(directory)
    assert index.fingerprint == whole.fingerprint


PEAK = """
import re, sys
from pathlib import Path
from windlass.data.prepare import prepare
from windlass.recipe import Recipe
source, folder = sys.argv[1:]
prepare(Recipe.model_validate({"data": {"source": source, "dir": folder, "workers": 2}}))
print(re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1])
"""


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_the_peak_memory_does_not_grow_with_the_text(tmp_path, ending):
    """In children, by VmHWM: `ru_maxrss` would be at least the peak of this process before exec."""
    peaks = {}
    for megabytes in (8, 32):
        source, draw = tmp_path / f"{megabytes}.{ending}", random.Random(megabytes)
        texts = [draw.randbytes(2000).hex() for _ in range(250 * megabytes)]
        if ending == "jsonl":
            jsonl(source, texts)
        else:
            pq.write_table(pa.table({"text": texts}), source, row_group_size=500)
        words = [sys.executable, "-c", PEAK, str(source), str(tmp_path / f"{megabytes}")]
        child = subprocess.run(words, capture_output=True, text=True, check=True, timeout=100)
        peaks[megabytes] = int(child.stdout) / 1024
    assert peaks[32] < peaks[8] + 10 < 300, peaks
