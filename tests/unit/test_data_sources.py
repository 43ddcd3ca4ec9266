"""Sources: which files one has and leaves out, what determines it, and what shows a change."""

import hashlib
import http.server
import json
import os
import threading

import pytest

from helpers import refused
from source_helpers import TALK, TEXTS, opened, parquet, read, records, spec_of
from windlass import hub
from windlass.data.files import expand
from windlass.data.sources import changes, describe_source, download
from windlass.errors import RunFailed, UserError


def test_files_that_a_directory_leaves_out_are_named(tmp_path):
    (tmp_path / ".git").mkdir()
    for name in "a.txt README.md b.md notes .git/config.txt .hidden.txt ._a.txt".split():
        (tmp_path / name).write_text("text " * 9)
    (tmp_path / "items.json").write_text('[{"text": "b"}]')
    (tmp_path / "tree.json").write_text('{"a": {"text": "b"}}')
    notes = []
    opened(tmp_path, notes)
    (note,) = notes
    read_files, left_out = note.split("not read: ")
    assert "1 .json (items.json)" in read_files and "1 .txt (a.txt)" in read_files
    for part in ("1 .json (tree.json)", "2 .md (README.md)", "1 without ending (notes)"):
        assert part in left_out
    for name in ("a.txt", "items.json"):
        (tmp_path / name).unlink()
    with refused("not read: ", "2 .md (README.md)"):
        read(tmp_path)
    assert len(read(f"{tmp_path}/**/*.md")) == 2


def test_a_directory_is_read_without_windlasss_own_and_each_real_file_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = ["runs/r/recipe.toml", "runs/r/metrics.jsonl", "runs/r/samples.txt"]
    own += ["studies/s/study.json", "studies/s/recipe.toml", "studies/s/note.txt"]
    own += ["data/in-1/index.json", "data/in-1/tokenizer/merges.txt", "data/in-1/left-out.txt"]
    more = ["data/3.txt", "data/.downloads/6.txt", "index.json", ".venv/4.txt"]
    for name in [*own, *more, "a/1.txt", "a/b/2.txt"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    elsewhere = tmp_path.parent / f"{tmp_path.name}-other"
    elsewhere.mkdir()
    (elsewhere / "5.txt").write_text("5")
    os.symlink(elsewhere, "linked")
    os.symlink("..", "a/loop")
    os.symlink("a/1.txt", "again.txt")
    os.symlink("nowhere", "broken.txt")
    texts = ["a/1.txt", "a/b/2.txt", "data/3.txt", "5"]
    assert sorted(read(".")) == sorted(texts)
    assert sorted(read("**/*.txt")) == sorted(texts) and read("a/**") == ["a/1.txt", "a/b/2.txt"]
    assert read("data/in-1/*.txt") == ["data/in-1/left-out.txt"]  # which the recipe names
    assert expand("**/b/*") == ["a/b/2.txt"] and expand(f"{tmp_path}/a/**/2.txt") == [
        f"{tmp_path}/a/b/2.txt"
    ]
    (elsewhere / "val.txt").write_text("v")
    os.symlink(elsewhere / "val.txt", elsewhere / "val-link.txt")
    assert len(read(f"{elsewhere}/*.txt")) == 2


def test_names_that_are_not_utf_8_or_too_long(tmp_path):
    name = os.fsencode(tmp_path) + b"/caf\xe9.txt"
    with open(name, "wb") as file:
        file.write(b"text")
    source, again = opened(tmp_path), opened(tmp_path)
    (item,) = source.items()
    assert item.value == "text" and item.place.endswith("caf\\xe9.txt")
    assert json.dumps(source.description, ensure_ascii=False).encode()
    assert not changes(source.description, again.description)
    for pattern in ("x" * 300, "x" * 300 + "*"):
        with refused("data.source", "no file matches"):
            read(pattern)


def test_there_is_no_such_source(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "x.bin").write_bytes(b"12")
    for source, word in [
        (f"{tmp_path}/*.csv", "*.csv"),
        (f"{tmp_path}/empty", ".txt, .jsonl, .ndjson, .parquet"),
        (f"{tmp_path}/x.bin", "shards:"),
        ("shakespeare", "hf:NAME"),
    ]:
        with refused("data.source", word):
            read(source)


def test_a_changed_source_is_described_in_words(tmp_path):
    folder, names = tmp_path / "texts", ("a.txt", "b/a.txt", "c.txt")
    (folder / "b").mkdir(parents=True)
    for name in names:
        (folder / name).write_text(name)
    then = opened(folder).description
    assert not changes(then, describe_source(spec_of(folder)))
    moved = folder.rename(tmp_path / "moved")
    assert not describe_source(spec_of(folder))
    assert not changes(then, describe_source(spec_of(moved)))
    (moved / "b/a.txt").write_text("other")
    assert "b/a.txt has changed" in changes(then, describe_source(spec_of(moved)))
    (moved / "a.txt").unlink()
    assert "a.txt has changed" in changes(then, describe_source(spec_of(moved)))
    for name in (*names, "0.txt"):
        (moved / name).write_text(name)
    assert "0.txt has changed" in changes(then, describe_source(spec_of(moved)))
    large = {"files": [{"file": "x/a.txt", "bytes": 5, "changed_ns": 1}]}
    later = {"files": [{"file": "y/a.txt", "bytes": 5, "changed_ns": 2}]}
    assert "a.txt has changed" in changes(large, later)
    assert changes({"commit": "abc"}, {"commit": "def"}) == "its commit is def, and was abc"
    assert not describe_source(spec_of("https://host/a.txt"))


def test_the_standard_library():
    source = opened("stdlib")
    items = list(source.items())
    assert len(items) == source.description["modules"] > 200
    assert sum(len(item.value) for item in items) > 5_000_000 and items[-1].fraction == 1.0
    assert list(source.items(len(items) - 3)) == items[-3:]
    assert not changes(source.description, describe_source(source.spec))


CONTENT = b"some text\n" * 1000


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(404 if "missing" in self.path else 200)
        self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        self.wfile.write(CONTENT)

    def log_message(self, *args):
        pass


@pytest.fixture
def web():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_download_is_made_once_and_checked(web, tmp_path):
    good, notes = hashlib.sha256(CONTENT).hexdigest(), []

    def fetch(times):
        url = f"{web}/{'a' * 300}/{'b' * 230}/input.txt?x=1"
        source = opened(url, notes, sha256=good, downloads=tmp_path / "downloads")
        assert source.single_text and next(source.items()).value == CONTENT.decode()
        assert len(notes) == times  # one for each download

    fetch(1)
    fetch(1)
    (target,) = (tmp_path / "downloads").iterdir()
    target.write_bytes(b"damaged")
    fetch(2)
    assert download(f"{web}/{'b' * 300}.txt", good, tmp_path, notes.append).suffix == ".txt"


def test_downloads_that_fail(web, tmp_path):
    good = hashlib.sha256(CONTENT).hexdigest()
    for url, sha256, words in [
        (f"{web}/input.txt", "0" * 64, [good, "data.sha256"]),
        (f"{web}/missing.txt", good, ["404"]),
        ("http://127.0.0.1:9/input.txt", good, ["path of a file"]),
    ]:
        with refused(*words):
            download(url, sha256, tmp_path, [].append)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("streaming", [False, True])
def test_datasets(streaming, tmp_path):
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    for place in ("files", "splits", "talks", "bad"):
        (tmp_path / place).mkdir()
    parquet(tmp_path / "files" / "train.parquet", TEXTS)
    parquet(tmp_path / "splits" / "train.parquet", TEXTS)
    parquet(tmp_path / "splits" / "validation.parquet", TEXTS[:3])
    talks = [{**TALK, "id": i} for i in range(5)]
    datasets.Dataset.from_list(talks).to_parquet(tmp_path / "talks" / "train.parquet")
    for place in ("splits", "files"):
        for start in (0, 5):
            assert read(f"hf:{tmp_path / place}", start, streaming=streaming) == TEXTS[start:]
    source = f"hf:{tmp_path / 'splits'}"
    held_out = opened(source, split="validation", streaming=streaming)
    items = list(held_out.items())
    assert [item.value for item in items] == TEXTS[:3]
    assert items[-1].fraction == (0.0 if streaming else 1.0)
    assert held_out.description["rows"] == (0 if streaming else 3)
    assert not changes(held_out.description, describe_source(held_out.spec))
    assert records(f"hf:{tmp_path / 'talks'}", format="chat", streaming=streaming) == talks
    with refused("'test'", "train", "validation"):
        opened(source, split="test", streaming=streaming)
    with refused("'content'", "data.text_key"):
        read(f"hf:{tmp_path / 'files'}", text_key="content", streaming=streaming)
    (tmp_path / "bad" / "x.jsonl").write_text("{oops")
    for source in ("hf:nobody/nothing-of-the-kind", f"hf:{tmp_path / 'bad'}"):
        with pytest.raises((UserError, RunFailed), match="hf:"):
            read(source, streaming=streaming)


def test_a_data_set_of_the_hub_is_read_at_the_commit_on_record(monkeypatch):
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    commit, calls = "0123456789" * 4, []

    class Api:
        def dataset_info(self, name, revision=None):
            return type("Info", (), {"sha": {None: commit, "v1": "a" * 40}[revision]})

    def load(name, config, **how):
        calls.append((name, config, how["revision"]))
        return datasets.Dataset.from_dict({"text": TEXTS})

    monkeypatch.setattr(hub, "prepare", lambda: None)
    monkeypatch.setattr(hub, "offline", lambda: False)
    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    monkeypatch.setattr(datasets, "load_dataset", load)
    source = opened("hf:org/name:en")
    assert source.description == {"split": "train", "rows": len(TEXTS), "commit": commit}
    assert opened("hf:org/name", revision="v1").description["commit"] == "a" * 40
    assert calls == [("org/name", "en", commit), ("org/name", None, "a" * 40)]
    monkeypatch.setattr(hub, "offline", lambda: True)
    assert opened("hf:org/name", revision="b" * 40).description["commit"] == "b" * 40
    assert "commit" not in opened("hf:org/name", revision="v1").description

    def squad(name, config, **how):
        answers = [{"text": ["b", "c"], "answer_start": [2, 4]}]
        own = {"id": ["1"], "question": ["who?"], "context": ["a b c"], "title": ["T"]}
        return datasets.Dataset.from_dict({**own, "answers": answers})

    monkeypatch.setattr(datasets, "load_dataset", squad)
    (record,) = records("squad", format="squad", split="validation")
    assert record["answers"][1] == {"text": "c", "answer_start": 4} and record["title"] == "T"
