"""Sources: which files one has and leaves out, what shows a change, and the items in each kind of file."""

import bz2
import gzip
import hashlib
import http.server
import json
import lzma
import os
import threading

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from helpers import refused
from source_helpers import (
    TALK,
    TEXTS,
    lines,
    opened,
    parquet,
    read,
    records,
    spec_of,
    write_all,
    zst,
)
from windlass import hub
from windlass.data.chat import Template
from windlass.data.encode import Encoder
from windlass.data.files import expand
from windlass.data.items import example_of, hash64, text_of
from windlass.data.sources import changes, describe_source, download
from windlass.data.tokenizer_kinds import byte_tokenizer
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


@pytest.mark.parametrize(
    ("source", "word"),
    [("*.csv", "*.csv"), ("empty", ".parquet"), ("x.bin", "shards:"), ("x", "hf:NAME")],
)
def test_there_is_no_such_source(source, word, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "x.bin").write_bytes(b"12")
    with refused("data.source", word):
        read(tmp_path / source)


def test_a_changed_source_is_described_in_words(tmp_path):
    folder, names = tmp_path / "texts", ("0.txt", "a.txt", "b/a.txt")
    (folder / "b").mkdir(parents=True)
    for name in names[1:]:
        (folder / name).write_text(name)
    then = opened(folder).description
    moved = folder.rename(tmp_path / "moved")
    assert not describe_source(spec_of(folder))
    assert not changes(then, describe_source(spec_of(moved)))
    for name in names[::-1]:  # another text, one less, one more; the message names the first
        (moved / name).unlink() if name == "a.txt" else (moved / name).write_text("other")
        assert f"{name} has changed" in changes(then, describe_source(spec_of(moved)))
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

    monkeypatch.setattr(hub, "detect_offline", lambda: None)
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
    found = opened("squad", format="squad", split="validation")
    (question,) = (example_of(item, found.spec) for item in found.items())
    assert question.answers == ("b", "c") and question.group == hash64("T")


def test_every_form_gives_the_same_documents_from_any_place_on(tmp_path):
    for source in write_all(tmp_path):
        for start in (0, 1, 5, 9, 11, 22, 23, 24):
            assert read(source, start) == TEXTS[start:], (source, start)
        fractions = [item.fraction for item in opened(source).items()]
        assert fractions == sorted(fractions) and 0 <= fractions[0] <= fractions[-1] <= 1
    (tmp_path / "one.txt").write_bytes(b"\xef\xbb\xbfa\r\nb")
    source = opened(tmp_path / "one.txt")
    assert source.single_text and [item.value for item in source.items()] == ["a\r\nb"]


def test_a_separator_divides_a_text_file_and_a_note_names_it(tmp_path):
    mark = "<|endoftext|>"
    long = "a line of a long story\n" * 80_000
    stories = ["one\n\n two", long.strip("\n"), "three", "four"]
    path = tmp_path / "stories.txt"
    path.write_text(f"\n{mark}\n".join(["", *stories[:3], "", stories[3], "\n"]))
    whole, divided = opened(path), opened(path, separator=mark)
    assert whole.single_text and not divided.single_text
    encoders = (Encoder(found.spec, byte_tokenizer(), Template()) for found in (whole, divided))
    [note], none = ([*encoder.remarks([*whole.items()])] for encoder in encoders)
    assert f'data.separator="{mark}"' in note and str(path) in note and not none
    for start in range(5):
        assert read(path, start, separator=mark) == stories[start:]
    path.write_text("a\nb\n\nc\r\n")
    assert read(path, separator="\n") == ["a", "b", "c"]
    path.write_text("a--b -")
    assert read(path, separator="--") == ["a", "b -"]
    # a mark at each place near the edge of the pieces that are read
    for count in range((1 << 18) - 15, (1 << 18) + 3):
        path.write_text("x" * count + mark + "y")
        assert read(path, separator=mark) == ["x" * count, "y"]
        path.write_text(f"{'x' * (count - 5)}{'#' * 9}\n--\n\n--\ny")
        texts = [f"{'x' * (count - 5)}{'#' * 9}", "y"]
        assert read(path, separator="\n--\n") == texts


def test_what_is_wrong_is_said_with_name_and_place(tmp_path):
    raw, table = lines(TEXTS), parquet(tmp_path / "whole.parquet", TEXTS)
    other_key = b'{"text": "a"}\n{"content": "b"}\n'
    cases = [
        ("a.txt", b"abc\xff\xfe", ["0xff", "UTF-8"]),
        ("aa.txt", "\u00e9".encode() * 400_001 + b"\xc3", ["0xc3", "UTF-8"]),
        ("b.jsonl", raw[:60] + b"\n{oops\n", ["line 2"]),
        ("talk.jsonl", b'{"messages": []}\n', ["'messages'", 'data.format="chat"']),
        ("c.jsonl", other_key, ["line 2", "'text'", "'content'", "data.text_key"]),
        ("d.jsonl", b'{"text": 3}\n', ["line 1", "'text'", "int"]),
        ("e.jsonl", b'["text"]\n', ["line 1", "list"]),
        ("f.jsonl", b'{"text": "\xff"}\n', ["line 1", "0xff"]),
        ("g.jsonl.gz", gzip.compress(raw)[:-20], ["damaged"]),
        ("h.txt.xz", lzma.compress(b"abc")[:-9], ["damaged"]),
        ("i.txt.bz2", bz2.compress(b"abc")[:-9], ["damaged"]),
        ("j.txt.zst", zst(b"abc" * 99, 1)[:-9], ["damaged"]),
        ("k.parquet", table[:-30], ["damaged"]),
        ("m.txt.gz", gzip.compress(b"abc")[:-9] + b"\0" * 9, ["damaged"]),
        ("n.jsonl", b'{"text": ' + b"[" * 200_000 + b"\n", ["line 1", "JSON"]),
        ("o.json", b'[{"text": "a"}, {"text": "b"}', ["item 3", "JSON"]),
        ("p.json", b'[{"text": "a"}, {"te', ["item 2", "JSON"]),
        ("q.json", b'[{"text": "a"}, 12]', ["item 2", "int"]),
        ("qq.json", b"[{oops}" + b" " * 400_000 + b"]", ["item 1", "JSON"]),
        ("r.csv", b"id,text\n1,a\n2,b,c\n", ["line 3", "2 fields"]),
        ("s.csv", b'id,text\n1,"a" b\n', ["line 2", "quotation mark"]),
        ("t.csv", b"id,content\n1,a\n", ["'text'", "'content'", "data.text_key"]),
        ("u.csv", b"1," + b"a text " * 99 + b"\n", ["'1', 'a text a", "a t: set data.text_key"]),
        ("v.txt", "a".encode("utf-16"), ["0xff", "utf-16"]),
    ]
    for name, content, words in cases:
        (tmp_path / name).write_bytes(content)
        with refused(name, *words):
            read(str(tmp_path / name))
    parquet(tmp_path / "x.parquet", ["a", None, "b"], key="content")
    assert read(str(tmp_path / "x.parquet"), text_key="content") == ["a", "", "b"]
    for key, words in (
        ("text", ["'text'", "'id', 'content'", "data.text_key"]),
        ("id", ["'id'", "int"]),
    ):
        with refused(*words):
            read(str(tmp_path / "x.parquet"), text_key=key)


def test_a_bad_item_takes_the_place_of_one_document_and_the_rest_is_read(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"good\n" * 200_000 + b"\xff")
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "b"}\n{oops\n{"text": "c"}\n')
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(lines(["d"] * 9))[:-9])
    (tmp_path / "d.csv").write_bytes(b'text\ne\n"f" g\nh\n')
    (tmp_path / "e.parquet").write_bytes(b"PAR1")
    (tmp_path / "f.txt").write_bytes(b"last")
    found, places = opened(tmp_path, on_bad_item="skip"), []

    def document(item):
        try:
            return text_of(item, found.spec)
        except UserError as error:
            places.append(str(error))
            return None

    texts = [document(item) for item in found.items()]
    rest = [text for text in texts if text != "d"]
    assert rest == [None, "b", None, "c", None, "e", None, "h", None, "last"]
    names = ("a.txt", "b.jsonl, line 2", "c.jsonl.gz", "d.csv, line 3", "e.parquet")
    assert all(name in place for name, place in zip(names, places, strict=True))
    for start in range(len(texts) + 1):
        assert [document(item) for item in found.items(start)] == texts[start:]


def test_a_key_may_be_nested(tmp_path):
    nested = [{"doc": {"text": text, "id": 1}, "n": 2} for text in TEXTS]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(item) + "\n" for item in nested))
    (tmp_path / "b.json").write_text(json.dumps(nested))
    (tmp_path / "c.jsonl").write_text("".join(json.dumps({"doc.text": t}) + "\n" for t in TEXTS))
    pq.write_table(pa.Table.from_pylist(nested), tmp_path / "d.parquet", row_group_size=4)
    for name in ("a.jsonl", "b.json", "c.jsonl", "d.parquet"):
        assert read(tmp_path / name, 3, text_key="doc.text") == TEXTS[3:], name
    with refused("a.jsonl, line 1", "'doc.title'", "'doc', 'n'"):
        read(tmp_path / "a.jsonl", text_key="doc.title")


def test_conversations_from_every_form_of_file(tmp_path):
    talks = [{**TALK, "id": i} for i in range(7)]
    (tmp_path / "a.jsonl").write_text("\ufeff" + "".join(json.dumps(t) + "\n" for t in talks))
    (tmp_path / "b.json").write_text(json.dumps(talks, indent=2))
    pq.write_table(pa.Table.from_pylist(talks), tmp_path / "c.parquet", row_group_size=2)
    (tmp_path / "pairs.csv").write_text('prompt,completion\n"a, b",c\n')
    for name in ("a.jsonl", "b.json", "c.parquet"):
        assert records(tmp_path / name, format="chat") == talks
    assert records(tmp_path / "pairs.csv", format="chat") == [{"prompt": "a, b", "completion": "c"}]
    (tmp_path / "config.json").write_text('{"a": 1}')
    notes = []
    assert len(list(opened(tmp_path, notes, format="chat").items())) == 22
    assert "not read: 1 .json (config.json)" in notes[0]


def test_an_array_is_read_in_pieces(tmp_path):
    items = [
        {"text": f'"{i}" [{{\\' + "\u00e9\n" * (i % 3000), "n": [i, -1.5e9, None]}
        for i in range(400)
    ]
    items.append({"text": "x" * 1_000_000})
    path = tmp_path / "a.json"
    for indent in (None, 1):
        path.write_text(json.dumps(items, indent=indent, ensure_ascii=False))
        assert records(path, format="chat") == items
    path.write_text(" " + json.dumps(items[7], indent=1) + "\n")
    assert records(path, format="chat") == items[7:8]
    for content in ("", "[]", " [ ] "):
        path.write_text(content)
        assert records(path, format="chat") == []
    path.write_text(json.dumps(items[::-1]))  # whose first item is longer than a piece
    assert read(tmp_path) == [item["text"] for item in items[::-1]]


def test_questions_of_squad(tmp_path):
    answers = [{"text": "b", "answer_start": 2}]
    question = {"id": "q1", "question": "who?", "answers": answers}
    tree = {"data": [{"title": "T", "paragraphs": [{"context": "a b", "qas": [question]}]}]}
    (tmp_path / "q.json").write_text("\ufeff" + json.dumps(tree))
    source = f"squad:{tmp_path / 'q.json'}"
    expected = {**question, "context": "a b", "title": "T"}
    assert records(source, format="squad") == [expected]
    assert describe_source(spec_of(source, format="squad"))["files"][0]["bytes"] > 9
    tree["data"] = [{"paragraphs": [{"context": "a b" * 50_000, "qas": [question]}]}] * 30
    (tmp_path / "q.json").write_text(json.dumps(tree))
    fractions = [item.fraction for item in opened(source, format="squad").items()]
    assert len(fractions) == 30 and fractions[0] < 0.2  # one article after another
    for content in ("[]", "{oops", '{"data": [{"paragraphs": [{}]}]}'):
        (tmp_path / "q.json").write_text(content)
        with refused("q.json", "SQuAD"):
            records(source, format="squad")
