"""Preparation: the right tokens, byte for byte the same however many workers and however often it
was interrupted or extended.
"""

import contextlib
import errno
import gzip
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

import tokenizer_fixtures
from data_fixtures import (
    conversations,
    documents,
    jsonl,
    recipe_for,
    reference_split,
    texts_of,
    write_source,
)
from helpers import refused
from windlass.data.chat import Template
from windlass.data.describe import describe, lines, warnings
from windlass.data.open import open_data
from windlass.data.prepare import find_prepared, prepare
from windlass.data.recipe_sources import SourceSpec, data_dirs
from windlass.data.shards import MARK, Corpus, Index
from windlass.errors import RunFailed, UserError
from windlass.fileio import Files


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch):
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


def run(recipe):
    """Directory and index of a recipe with one source."""
    (corpus,) = prepare(recipe).corpora
    return corpus.directory, corpus.index


def all_tokens(directory, index):
    return Corpus(directory, index, SourceSpec("x", "x"), None).read(0, index.tokens)


def files_of(directory: Path):
    """The contents of a data root; a kill after the index leaves no list of what is verified."""
    return {
        str(p.relative_to(directory)): p.read_bytes()
        for p in directory.rglob("*")
        if p.is_file() and p.name not in (".lock", "verified.json")
    }


def test_shakespeare_as_nanogpt_splits_and_counts_it(data_files, tmp_path):
    file = data_files / "tinyshakespeare" / "input.txt"
    if not file.is_file():
        pytest.skip("no tiny Shakespeare")
    data = open_data(recipe_for(file, tmp_path, tokenizer="char", shard_tokens=300_000))
    text = file.read_text(encoding="utf-8")
    (train,), (val,) = texts_of(data)
    assert (data.train.tokens, data.val.tokens) == (len(train), len(val)) == (1_003_854, 111_540)
    assert train + val == text
    assert (data.tokenizer.vocab, data.tokenizer.eot) == (65, None)
    gpt2 = {"tokenizer": f"gpt2:{data_files / 'gpt2'}", "shard_tokens": 100_000}
    data = open_data(recipe_for(file, tmp_path, **gpt2))
    # nanoGPT encodes the two parts, and so has 301,966 and 36,059 tokens
    assert (data.train.tokens, data.val.tokens) == (301_966, 36_059)


def test_a_large_vocabulary_lies_in_32_bits_and_a_single_text_ends_at_its_limit(tmp_path):
    text = "".join(chr(c) for c in range(0x3400, 0x3400 + 68_000) if not 0xD800 <= c < 0xE000)
    (tmp_path / "x.txt").write_text(text, encoding="utf-8")
    recipe = recipe_for(tmp_path / "x.txt", tmp_path / "data", tokenizer="char", val_fraction=0)
    directory, index = run(recipe)
    assert index.tokenizer.vocab == len(text) > 65536
    assert {s.dtype for s in index.shards} == {"<u4"} and open_data(recipe).val is None
    assert all_tokens(directory, index).tolist() == list(range(len(text)))
    (tmp_path / "y.txt").write_text("abcdefghij" * 1000)
    limited = open_data(recipe_for(tmp_path / "y.txt", tmp_path / "one", max_tokens=2500))
    assert (limited.train.tokens, limited.val.tokens) == (2500, 1000)


TEXTS = {
    "txt": documents(90),
    "jsonl": ["a very long one " * 300, *documents(60)],
    "parquet": documents(80),
    "csv": documents(60),
    "json": documents(60),
    "jsonl.gz": documents(60),
    "hf": documents(60),
    "chat": documents(120),
    "rewritten": documents(60),
    "squad": documents(150),
    "mix": documents(120),
}
# It writes a thought in the last turn alone, so each answer has a row of its own.
REWRITES = (
    "{% for m in messages %}<{{ m.role }}>{{ '<think></think>' if loop.last and "
    "m.role == 'assistant' }}{{ m.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def written(folder, kind, texts=None, **changes):
    """A function of a data root that gives the recipe of a source of a kind."""
    form = "chat" if kind == "rewritten" else kind
    how = write_source(folder, form, texts or TEXTS[kind]) | {"context": 400} | changes
    if kind == "rewritten":
        (folder / "layout.jinja").write_text(REWRITES)
        how |= {"context": 900, "chat_template": str(folder / "layout.jinja")}
    source = how.pop("source", "")
    return lambda root: recipe_for(source, root, **how)


@pytest.mark.parametrize("kind", ["txt", "jsonl", "parquet", "rewritten", "squad"])
def test_workers_change_no_byte(tmp_path, kind, monkeypatch):
    monkeypatch.setattr("windlass.data.encode.BATCH_CHARACTERS", 300)
    make = written(tmp_path / "s", kind, tokenizer="bpe", tokenizer_vocab=270)
    for n in (1, 2):
        prepare(make(tmp_path / f"{n}").replace(f"data.workers={n}"))
    assert files_of(tmp_path / "1") == files_of(tmp_path / "2")


class Killed(BaseException):
    """Stands for the end of the process."""


def killed_until_done(recipe, monkeypatch):
    """Prepare, dying before or after a rename, now an early one, now a later one; how often."""
    real, calls, die_at, after, draw = Files.rename, 0, 0, False, random.Random(3)

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
        for deaths in range(99):
            calls, die_at, after = 0, draw.randint(1, 17), draw.random() < 0.5
            with contextlib.suppress(Killed):
                prepare(recipe)
                return deaths
    raise AssertionError("it never ends")


@pytest.mark.parametrize(
    ("kind", "tokenizer"), [*((kind, "byte") for kind in TEXTS), ("txt", "bpe"), ("chat", "bpe")]
)
def test_interrupted_anywhere_it_resumes_to_the_same_bytes(tmp_path, kind, tokenizer, monkeypatch):
    """Documents over several shards; one text in many blocks and stretches over many shards."""
    monkeypatch.setattr("windlass.data.tokenizer.STRETCH", 700)
    monkeypatch.setattr("windlass.data.files.READ", 1500)
    monkeypatch.setattr("windlass.data.encode.BATCH_CHARACTERS", 500)
    how = {"tokenizer": tokenizer, "tokenizer_vocab": 300, "workers": 1, "val_fraction": 0.2}
    make = written(tmp_path / "s", kind, **how)
    whole = open_data(make(tmp_path / "whole"))
    deaths = killed_until_done(make(tmp_path / "broken"), monkeypatch)
    assert deaths > 4 and len(whole.prepared.corpora[0].index.shards) > 4
    assert files_of(tmp_path / "broken") == files_of(tmp_path / "whole")
    data = open_data(make(tmp_path / "broken"))
    assert data.fingerprint == whole.fingerprint
    if kind in ("txt", "jsonl", "parquet") and tokenizer == "byte":
        texts = ["\n".join(TEXTS[kind])] if kind == "txt" else TEXTS[kind]
        assert texts_of(data) == tuple(map(list, reference_split(texts, 0.2)))


@pytest.mark.parametrize("kind", ["jsonl", "txt", "chat", "squad"])
def test_extended_it_has_the_bytes_of_one_that_was_prepared_at_once(tmp_path, kind, monkeypatch):
    """And a limited recipe reads the same before, between and after; killed or not."""
    monkeypatch.setattr("windlass.data.encode.BATCH_CHARACTERS", 500)
    texts = documents(160 if kind == "chat" else 500, longest=20)
    make = written(tmp_path / "s", kind, texts, workers=1)
    whole = open_data(make(tmp_path / "whole"))
    limits = [0] if kind == "txt" else [3000, 9000, 12_000]
    first = None
    for limit in limits:
        small = make(tmp_path / "data").replace(f"data.max_tokens={limits[0]}")
        found = open_data(small)
        first = first or found.fingerprint
        assert found.fingerprint == first
        killed_until_done(make(tmp_path / "data").replace(f"data.max_tokens={limit}"), monkeypatch)
    sizes = [len(Index.load(*data_dirs(small)).shards)]
    killed_until_done(make(tmp_path / "data"), monkeypatch)
    assert kind == "txt" or sizes[0] < len(Index.load(*data_dirs(small)).shards)
    assert files_of(tmp_path / "data") == files_of(tmp_path / "whole")
    assert open_data(small).fingerprint == first
    assert open_data(make(tmp_path / "data")).fingerprint == whole.fingerprint


@pytest.mark.parametrize("kind", ["chat", "squad"])
def test_extended_validation_examples_are_those_of_a_limit_prepared_at_once(tmp_path, kind):
    """The example at the end of the last full shard comes again, and counts once for the limit."""
    how = write_source(tmp_path / "s", kind, ["x"] * 30) | {"workers": 1, "val_fraction": 0.5}
    held = write_source(tmp_path / "v", kind, ["x"] * 400)["source"]
    source = how.pop("source")
    for limit in (2000, 5000, 8000):
        extended, at_once = (
            recipe_for(source, tmp_path / root, eval_source=held, max_tokens=limit, **how)
            for root in ("data", str(limit))
        )
        prepare(extended)
        prepare(at_once)
        assert files_of(tmp_path / "data") == files_of(tmp_path / f"{limit}")
        assert find_prepared(extended) is not None


PREPARE = """
import json, re, sys
from pathlib import Path
from windlass.data.prepare import prepare
from windlass.recipe import Recipe
for data in json.loads(sys.argv[1]):
    prepare(Recipe.model_validate({"data": data}))
    print(re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1])
"""


def test_starts_during_extensions_find_whole_data(tmp_path):
    source = jsonl(tmp_path / "x.jsonl", documents(700, longest=60))
    small = recipe_for(source, tmp_path / "data", max_tokens=4000)
    first, starts = open_data(small).fingerprint, 0
    data = {"source": str(source), "dir": str(tmp_path / "data")}
    limits = [{**data, "max_tokens": limit} for limit in range(8000, 60_000, 9000)]
    with subprocess.Popen([sys.executable, "-c", PREPARE, json.dumps(limits)]) as process:
        while process.poll() is None:
            data = open_data(small)
            data.train.read(np.arange(len(data.train)))
            assert data.fingerprint == first
            starts += 1
    assert process.returncode == 0 and starts > 3
    assert open_data(small).prepared.corpora[0].index.tokens > 50_000


@contextlib.contextmanager
def failing(file, error, monkeypatch):
    def about_to(self, name, path, output=None, data=None):
        if name == "rename" and path.name == file:
            raise error

    with monkeypatch.context() as patch:
        patch.setattr(Files, "about_to", about_to)
        yield


def test_after_a_full_disk_what_was_committed_is_not_done_again(tmp_path, monkeypatch, capsys):
    recipe = recipe_for(jsonl(tmp_path / "x.jsonl", documents(200)), tmp_path / "data")
    (directory,) = data_dirs(recipe)
    full = OSError(errno.ENOSPC, "No space left on device")
    with failing("shard-00003.bin", full, monkeypatch), refused("No space left", error=RunFailed):
        prepare(recipe)
    assert not list(directory.glob(".*.new"))
    assert find_prepared(recipe) is find_prepared(recipe.replace("data.max_tokens=9000")) is None
    path = directory / "shard-00001.bin"
    content, written_at = path.read_bytes(), path.stat().st_mtime_ns
    path.write_bytes(content[:-1] + b"\xff")
    with refused("shard-00001.bin is damaged"):
        prepare(recipe)
    path.write_bytes(content)
    os.utime(path, ns=(written_at, written_at))
    for limit in (0, 900):
        assert find_prepared(recipe.replace(f"data.max_tokens={limit}")) is not None
    assert "going on after" in capsys.readouterr().err
    assert path.stat().st_mtime_ns == written_at


def test_a_file_has_no_splits_as_rank_0_notes(tmp_path, capsys, monkeypatch):
    """As if a preset that validates on a split of the Hub is given a file."""
    monkeypatch.setattr("windlass.data.prepare._verify", lambda *arguments: None)
    path = tmp_path / "text.txt"
    path.write_text("ab" * 500)
    recipe = recipe_for(path, tmp_path / "data", eval_split="validation", val_fraction=0.1)
    for main in (True, False):
        data = open_data(recipe, SimpleNamespace(main=main))
        assert ("data.eval_split" in capsys.readouterr().err) is main
        assert (data.train.tokens, data.val.tokens) == (900, 100)


# -- what is in a directory's name, and what is shared


def test_recipes_of_one_source_share_its_directory(tmp_path):
    source = jsonl(tmp_path / "x.jsonl", documents(150))
    other = jsonl(tmp_path / "v.jsonl", ["v"] * 9)
    root = tmp_path / "data"
    recipe = recipe_for(source, root)
    assert find_prepared(recipe) is None
    assert not root.exists()
    prepare(recipe)
    changes = ["val_fraction=0.3", "max_tokens=900", "order=sequential", "workers=3"]
    changes += ["shard_tokens=5000", "train_size=3", "val_shards=1"]
    for change in (*changes, f"eval_source={other}"):
        done = prepare(recipe.replace(f"data.{change}"))
        assert done.is_new == ("eval_source" in change)
        assert done.directories[0] == data_dirs(recipe)[0]
    mix = [{"name": "a", "source": str(source), "weight": 1}]
    mix.append({"name": "b", "source": str(other), "weight": 2})
    mixed = recipe_for("stdlib", root, mix=mix)
    done = prepare(mixed)
    assert not done.is_new and len(done.members) == 2
    assert {p.name for p in done.directories} == {p.name for p in root.iterdir() if p.is_dir()}
    for change in ("tokenizer=char", "text_key=other", "on_bad_item=skip"):
        assert data_dirs(recipe.replace(f"data.{change}")) != data_dirs(recipe)
    assert data_dirs(recipe_for("x.jsonl"))[0].parent == Path("data")


def test_validation_data_without_the_training_corpus(tmp_path):
    """As `eval RUN data.eval_source=FILE`, on another machine."""
    source = jsonl(tmp_path / "x.jsonl", documents(150))
    recipe = recipe_for(source, tmp_path / "data", tokenizer="bpe", tokenizer_vocab=300)
    run_data = open_data(recipe)
    source.unlink()
    held = jsonl(tmp_path / "v.jsonl", documents(30, seed=5))
    moved = recipe.replace(f"data.eval_source={held}", f"data.dir={tmp_path / 'new'}")
    how = {"tokenizer": run_data.tokenizer, "only_val": True}
    data = open_data(moved, **how)
    assert data.train is None and data.tokenizer is run_data.tokenizer
    assert texts_of(data)[1] == [t for t in documents(30, seed=5) if t]
    assert open_data(moved, **how).fingerprint == data.fingerprint
    # without other validation data the prepared corpus is read
    assert open_data(recipe, tokenizer=run_data.tokenizer, only_val=True).val is not None
    with refused("data.source", "x.jsonl"):
        open_data(recipe.replace(f"data.dir={tmp_path / 'new'}"))


def test_too_little_text_and_directories_that_cannot_be_written(tmp_path):
    none, good = jsonl(tmp_path / "x.jsonl", ["", ""]), jsonl(tmp_path / "y.jsonl", documents(150))
    for source, root, eval_source, words in (
        (none, "data", "", ("data.source", "no text")),
        (good, "data", none, ("data.eval_source", "nothing to read")),
        (none, "x.jsonl", "", ("data.dir",)),
    ):
        with refused(*words):
            open_data(recipe_for(source, tmp_path / root, eval_source=str(eval_source)))


def test_a_damaged_index(tmp_path):
    recipe = recipe_for(jsonl(tmp_path / "x.jsonl", documents(20)), tmp_path / "data")
    path = run(recipe)[0] / "index.json"
    whole = json.loads(path.read_text())
    lacking = {key: value for key, value in whole.items() if key != "tokenizer"}
    for tree in ("{", {**whole, "format": 99}, lacking):
        path.write_text(tree if isinstance(tree, str) else json.dumps(tree))
        with refused("index.json", f"delete {path.parent}"):
            prepare(recipe)


# -- items that cannot be read


@pytest.mark.parametrize("kind", ["text", "chat"])
def test_bad_items_are_counted_and_listed_after_kills_and_extensions(tmp_path, kind, monkeypatch):
    monkeypatch.setattr("windlass.data.encode.BATCH_CHARACTERS", 300)
    source = tmp_path / "x.jsonl"
    good = (
        jsonl(source, documents(220)) if kind == "text" else conversations(source, 220, longest=5)
    )
    lines = good.read_text().splitlines()
    bad, texts = range(3, 220, 11), list(lines)
    for number in bad:
        kinds = ["{broken", '{"other\\u2028\\n": 1}', '["a", "list"]', '{"text": 5}']
        texts[number] = kinds[number % 4]
    source.write_text("\n".join(texts) + "\n")
    how = {"format": kind, "workers": 1, "context": 300}
    with refused(f"{source}, line 4", 'data.on_bad_item="skip"'):
        prepare(recipe_for(source, tmp_path / "stop", **how))
    how["on_bad_item"] = "skip"
    recipe = recipe_for(source, tmp_path / "whole", **how)
    directory, index = run(recipe)
    listed = (directory / "left-out.txt").read_text().splitlines()
    places = [int(re.match(rf"{source}, line (\d+)", line)[1]) for line in listed]
    assert places == [n + 1 for n in bad] and index.left_out == len(bad)
    assert warnings(describe(open_data(recipe))) == [
        f"{len(bad)} items could not be read: see left-out.txt"
    ]
    clean = tmp_path / "clean.jsonl"
    clean.write_text("\n".join(line for n, line in enumerate(lines) if n not in bad) + "\n")
    same = run(recipe_for(clean, tmp_path / "clean", **how))
    assert np.array_equal(all_tokens(directory, index), all_tokens(*same))
    broken = recipe_for(source, tmp_path / "broken", **how)
    prepare(broken.replace("data.max_tokens=1000"))
    assert 0 < Index.load(*data_dirs(broken)).left_out < len(bad)
    assert killed_until_done(broken, monkeypatch) > 1
    assert files_of(tmp_path / "broken") == files_of(tmp_path / "whole")


def test_messages_name_the_source_of_a_mixture(tmp_path):
    text = jsonl(tmp_path / "x.jsonl", documents(9))
    mix = [{"name": "web", "source": str(tmp_path / "missing.jsonl")}]
    with refused("data.mix.web.source", "missing.jsonl"):
        prepare(recipe_for("stdlib", tmp_path / "data", mix=mix))
    mix = [{"name": "web", "source": str(text), "eval_source": str(text)}]
    with refused("data.mix", "nothing is left"):
        open_data(recipe_for("stdlib", tmp_path / "data", mix=mix))


# -- sources that change


def test_a_source_that_changed_stops_a_new_run_with_both_choices(tmp_path):
    source = jsonl(tmp_path / "x.jsonl", documents(200, longest=30))
    recipe = recipe_for(source, tmp_path / "data")
    before = open_data(recipe)
    texts = [*documents(200, longest=30), "and more"]
    jsonl(source, texts)
    choices = 'data.changed="keep"', 'data.changed="prepare"'
    with refused("x.jsonl has changed", *choices):
        open_data(recipe)
    for kept in (
        open_data(recipe, resuming=True),
        open_data(recipe.replace("data.changed=prepare"), resuming=True),
        open_data(recipe.replace("data.changed=keep")),
    ):
        assert kept.fingerprint == before.fingerprint and not kept.prepared.is_new
        (text,) = warnings(describe(kept))
        assert "x.jsonl has changed" in text and describe(kept)["changed"] == [text]
    limited = recipe_for(jsonl(tmp_path / "y.jsonl", texts), tmp_path / "data", max_tokens=3000)
    prepare(limited)
    jsonl(tmp_path / "y.jsonl", texts[::-1])
    with pytest.raises(UserError, match="has changed") as caught:  # it lacks tokens
        prepare(limited.replace("data.changed=keep", "data.max_tokens=0"))
    assert choices[1] in str(caught.value) and choices[0] not in str(caught.value)
    data = open_data(recipe.replace("data.changed=prepare"))
    assert texts_of(data) == tuple(map(list, reference_split(texts, 0.1)))
    assert open_data(recipe).prepared.changed == []  # from now on
    assert open_data(recipe).fingerprint == data.fingerprint != before.fingerprint
    source.unlink()  # what is prepared is enough
    assert open_data(recipe).prepared.changed == []


@pytest.mark.parametrize("tokenizer", ["char", "bpe"])
def test_a_learned_tokenizer_is_learned_again_from_a_changed_source(tmp_path, tokenizer):
    source, held = tmp_path / "x.txt", tmp_path / "v.txt"
    source.write_text("abc def " * 300)
    held.write_text("fed cba " * 30)
    how = {"tokenizer": tokenizer, "tokenizer_vocab": 262, "eval_source": str(held)}
    recipe = recipe_for(source, tmp_path / "data", **how)
    before = open_data(recipe)
    source.write_text("xyz def " * 300)
    with refused("x.txt has changed", 'data.changed="prepare"'):
        open_data(recipe)
    data = open_data(recipe.replace("data.changed=prepare"))
    assert data.tokenizer.fingerprint != before.tokenizer.fingerprint
    assert texts_of(data) == (["xyz def " * 300], ["fed cba " * 30])
    assert open_data(recipe).fingerprint == data.fingerprint
    # a directory that was deleted is not filled with the old tokenizer's tokens
    source.write_text("XYZ def " * 300)
    for path in data_dirs(recipe):
        for file in path.glob("*.*"):
            file.unlink()
    assert texts_of(open_data(recipe))[0] == ["XYZ def " * 300]


# -- several sources


def test_several_sources_give_equal_parts_at_most(tmp_path):
    novel = tmp_path / "novel.txt"
    novel.write_text("call me something else. " * 400)
    many = jsonl(tmp_path / "many.jsonl", [f"document number {n}, " * 4 for n in range(600)])
    few = jsonl(tmp_path / "few.jsonl", [f"short {n}" * 10 for n in range(12)])
    sources = [str(path) for path in (novel, many, few, jsonl(tmp_path / "none.jsonl", ["", ""]))]

    def used(limit):
        data = open_data(recipe_for(sources, tmp_path / "data", max_tokens=limit))
        (one,) = data.division.train
        return data, np.bincount(one._corpus, np.diff(one._edges)).tolist()

    data, tokens = used(20_000)
    assert tokens[:2] == [5000, 5000] and len(tokens) == 3
    assert tokens[2] == pytest.approx(0.9 * few.stat().st_size - 12 * 10, rel=0.05)  # all of it
    for limit in (8000, 40_000, 3000):
        assert 0.8 * limit / 4 < used(limit)[1][1] <= limit / 4
    assert used(20_000)[0].fingerprint == data.fingerprint


# -- processes and memory


def test_a_script_without_a_main_guard_prepares_conversations(tmp_path):
    source = conversations(tmp_path / "x.jsonl", 300)
    (tmp_path / "script.py").write_text(PREPARE)
    data = {"source": str(source), "dir": "data", "format": "chat", "workers": 2}
    words = [sys.executable, "script.py", json.dumps([data])]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and done.stdout.count("\n") == 1, done.stderr


def test_a_process_that_dies_fails_the_run(tmp_path, monkeypatch):
    source = conversations(tmp_path / "x.jsonl", 90)
    monkeypatch.setattr("windlass.data.encode.BATCH_ITEMS", 20)
    monkeypatch.setattr("windlass.data.encode.FOLDER", "no-such-folder")
    recipe = recipe_for(source, tmp_path / "data", format="chat", workers=2)
    with pytest.raises(RunFailed, match="ended with code 1"):
        prepare(recipe)
    monkeypatch.undo()
    prepare(recipe)


@pytest.mark.parametrize(
    "ending",
    ["parquet", "txt", "json", "jsonl"]
    + [pytest.param(ending, marks=pytest.mark.full) for ending in ("txt.gz", "csv")],
)
def test_the_peak_memory_does_not_grow_with_the_text(tmp_path, ending):
    """In a child, by VmHWM: `ru_maxrss` would be at least the peak of this process before exec."""
    data = []
    for megabytes in (6, 24):
        source, draw = tmp_path / f"{megabytes}.{ending}", random.Random(megabytes)
        texts = [draw.randbytes(2000).hex() for _ in range(250 * megabytes)]
        if ending == "parquet":
            pq.write_table(pa.table({"text": texts}), source)
        elif ending == "json":  # few large items
            items = [{"text": "".join(texts[i : i + 250])} for i in range(0, len(texts), 250)]
            source.write_text(json.dumps(items))
        elif ending == "jsonl":
            jsonl(source, texts)
        else:
            content = "\n".join(["text", *texts]).encode()
            source.write_bytes(gzip.compress(content, 1) if ending == "txt.gz" else content)
        data.append({"source": str(source), "dir": str(tmp_path), "workers": 2})
    words = [sys.executable, "-c", PREPARE, json.dumps(data)]
    child = subprocess.run(words, capture_output=True, text=True, check=True, timeout=100)
    small, large = (int(peak) / 1024 for peak in child.stdout.split())
    assert large < small + 25 < 300


# -- what plain texts and tables have


def test_special_tokens_in_documents_are_text_or_tokens(tmp_path, capfd):
    place = tokenizer_fixtures.save("llama3", tmp_path / "tok")
    texts = [f"<|begin_of_text|>say<|eot_id|> hello {i}<|end_of_text|>" for i in range(3)]
    texts.append("no special token")
    recipe = recipe_for(
        jsonl(tmp_path / "x.jsonl", texts), tmp_path / "data", tokenizer=f"hf:{place}"
    )
    plain = run(recipe)
    noted = capfd.readouterr().err
    assert "<|end_of_text|>" in noted and "data.special_tokens" in noted
    theirs = AutoTokenizer.from_pretrained(place)
    bos, eos = theirs.convert_tokens_to_ids(["<|begin_of_text|>", "<|end_of_text|>"])
    assert all_tokens(*plain).tolist().count(eos) == len(texts)  # one ends each document
    tokens = run(recipe.replace("data.special_tokens=true"))
    assert "data.special_tokens" not in capfd.readouterr().err and tokens[0] != plain[0]
    expected = [theirs(text, add_special_tokens=False)["input_ids"] for text in texts]
    expected[-1] = [bos, *expected[-1], eos]
    assert all_tokens(*tokens).tolist() == [token for ids in expected for token in ids]


def test_nulls_that_a_table_adds_are_not_in_tools_and_calls(tmp_path):
    keys, rows = {"f": "x", "g": "y"}, []
    tools = [{"name": name, "parameters": {key: {"type": "s"}}} for name, key in keys.items()]
    for name, key in keys.items():
        calls = [{"name": name, "arguments": {key: "1"}}]
        talk = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": calls}]
        rows.append({"messages": talk, "tools": tools})
    layout, places = tmp_path / "layout.jinja", [tmp_path / "x.jsonl", tmp_path / "x.parquet"]
    layout.write_text("{{ tools | tojson }}{% for m in messages %}{{ m | tojson }}{% endfor %}")
    places[0].write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "hf").mkdir()
    for path in (places[1], tmp_path / "hf" / "x.parquet"):
        pq.write_table(pa.Table.from_pylist(rows), path)
    how = {"format": "chat", "chat_template": str(layout), "val_fraction": 0}
    first, *others = (
        all_tokens(*run(recipe_for(source, tmp_path / "data", **how))).tolist()
        for source in (*places, f"hf:{tmp_path / 'hf'}")
    )
    assert others == [first, first]
    assert '"y": {"type"' in bytes(t % MARK for t in first if t % MARK < 256).decode()


def test_a_mixture_has_the_template_when_its_texts_are_prepared_first(tmp_path):
    place = tokenizer_fixtures.save("chatml", tmp_path / "tok")
    texts = jsonl(tmp_path / "t.jsonl", documents(120))
    talks = conversations(tmp_path / "c.jsonl", 120)
    how = {"tokenizer": f"hf:{place}", "on_bad_item": "skip"}
    parts = [{"name": "t", "source": str(texts)}, {"name": "c", "source": str(talks)}]
    parts[1]["format"] = "chat"
    mixed = recipe_for("", tmp_path / "data", **how, mix=parts, packing="best-fit", context=300)
    prepare(recipe_for(texts, tmp_path / "data", **how))
    prepared = prepare(mixed)
    assert prepared.template == Template.of_directory(place)
    assert prepared.corpora[1].index.template == f"the chat template of hf:{place}"
    prepare(recipe_for(talks, tmp_path / "alone", **how, format="chat"))
    (alone,) = (tmp_path / "alone").glob("c-*")
    assert files_of(prepared.corpora[1].directory) == files_of(alone)


def test_a_template_file_that_changed_is_noticed_and_may_go(tmp_path):
    make = written(tmp_path / "s", "rewritten")
    recipe, layout = make(tmp_path / "data"), tmp_path / "s" / "layout.jinja"
    before = open_data(recipe)
    shown = lines(describe(before), 900)
    documents = before.prepared.corpora[0].documents
    assert documents > 60 and " rows" in shown["training"]
    values = recipe.replace("data.chat_template_kwargs.loud=true")
    assert data_dirs(values) != data_dirs(recipe)
    layout.write_text("{{ 1 if loud }}" + REWRITES)
    with refused("data.chat_template", 'data.changed="keep"'):
        open_data(recipe)
    renewed = open_data(recipe.replace("data.changed=prepare"))
    assert renewed.template.source.startswith("{{ 1 if") and renewed.template != before.template
    assert open_data(values).template.source.startswith("{%- if loud is not defined")
    layout.unlink()
    assert open_data(recipe).fingerprint == renewed.fingerprint
