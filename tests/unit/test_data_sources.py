"""Sources: each kind of file, whole and from the middle; what a source leaves out; what is wrong
with an item, by its name and place; and how much memory reading takes.
"""

import bz2
import gzip
import hashlib
import http.server
import json
import lzma
import os
import subprocess
import sys
import threading
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from helpers import refused
from windlass import hub
from windlass.data.files import expand
from windlass.data.records import BLOCK
from windlass.data.sources import (
    SourceSpec,
    changes,
    describe_source,
    download,
    find_files,
    form_of,
    open_source,
    record_of,
    text_of,
)
from windlass.errors import RunFailed, UserError

TEXTS = [f"document {i} \u00e9\u4e2d\U0001f642\n" * (i % 5) for i in range(23)]
TALK = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


def lines(texts, key="text"):
    return "".join(json.dumps({"id": i, key: t}) + "\n" for i, t in enumerate(texts)).encode()


def zst(raw, frames=3):
    size = max(1, -(-len(raw) // frames))
    parts = [raw[i : i + size] for i in range(0, len(raw) or 1, size)]
    return b"".join(pa.compress(part, "zstd", asbytes=True) for part in parts)


def parquet(path, texts, key="text"):
    table = pa.table({"id": list(range(len(texts))), key: pa.array(texts, pa.string())})
    pq.write_table(table, path, row_group_size=5)
    return path.read_bytes()


def cells(texts, comma):
    quoted = ('"' + text.replace('"', '""') + '"' for text in texts)
    return "\ufeff" + "".join(
        f"{comma.join(row)}\r\n" for row in [("id", "text"), *enumerated(quoted)]
    )


def enumerated(texts):
    return [(str(i), text) for i, text in enumerate(texts)]


def write_all(folder):
    for i, text in enumerate(TEXTS):
        raw = text.encode()
        (folder / f"{i:02d}.txt").write_bytes(raw)
        (folder / f"{i:02d}.txt.gz").write_bytes(gzip.compress(raw))
        (folder / f"{i:02d}.md.zst").write_bytes(zst(raw, 2))
        (folder / f"{i:02d}.txt.xz").write_bytes(lzma.compress(raw))
        (folder / f"{i:02d}.md.bz2").write_bytes(bz2.compress(raw[:9]) + bz2.compress(raw[9:]))
    raw = lines(TEXTS)
    (folder / "all.jsonl").write_bytes(b"\xef\xbb\xbf" + raw.replace(b"\n", b"\n\n", 3))
    (folder / "all.jsonl.gz").write_bytes(gzip.compress(raw[:300]) + gzip.compress(raw[300:]))
    (folder / "all.jsonl.zst").write_bytes(zst(raw))
    (folder / "all.jsonl.xz").write_bytes(lzma.compress(raw))
    (folder / "all.csv").write_text(cells(TEXTS, ","), newline="")
    (folder / "all.tsv").write_text(cells(TEXTS, "\t"), newline="")
    records = [{"text": text} for text in TEXTS]
    (folder / "array.json").write_text(json.dumps(records, indent=1))
    (folder / "lines.json").write_bytes(b"\xef\xbb\xbf" + raw)
    (folder / "marks.text").write_text("<|endoftext|>\n".join(f"{text}\n" for text in TEXTS))
    parquet(folder / "all.parquet", TEXTS)
    half = folder / "halves"
    half.mkdir()
    (half / "a.jsonl").write_bytes(lines(TEXTS[:9]))
    parquet(half / "b.parquet", TEXTS[9:12])
    (half / "c.jsonl.gz").write_bytes(gzip.compress(lines(TEXTS[12:])))
    (half / "notes.md").write_text("not a part of it")
    names = "*.txt *.txt.gz *.txt.xz *.md.zst *.md.bz2 all.jsonl all.jsonl.gz all.jsonl.zst"
    names += " all.jsonl.xz all.csv all.tsv array.json lines.json all.parquet halves"
    return [str(folder / name) for name in names.split()]


def spec_of(source, **settings):
    return SourceSpec(str(source), str(source), **settings)


def opened(source, notes=None, **settings):
    return open_source(spec_of(source, **settings), [].append if notes is None else notes.append)


def read(source, start=0, **settings):
    """The documents of a source from `start` on, their blocks joined."""
    texts, continues = [], False
    found = opened(source, **settings)
    for item in found.items(start):
        text = text_of(item, found.spec)
        texts[-1:] = [texts[-1] + text] if continues else [*texts[-1:], text]
        continues = item.more
    assert not continues
    return texts


def records(source, **settings):
    found = opened(source, **settings)
    return [record_of(item, found.spec) for item in found.items()]


def test_every_form_gives_the_same_documents_from_any_place_on(tmp_path):
    for source in write_all(tmp_path):
        for start in (0, 1, 5, 9, 11, 22, 23, 24):
            assert read(source, start) == TEXTS[start:], (source, start)
        fractions = [item.fraction for item in opened(source).items()]
        assert fractions == sorted(fractions) and 0 <= fractions[0] <= fractions[-1] <= 1
    (tmp_path / "one.txt").write_bytes(b"\xef\xbb\xbfa\r\nb")
    source = opened(tmp_path / "one.txt")
    assert source.single_text and [item.value for item in source.items()] == ["a\r\nb"]


def test_a_text_comes_in_blocks_that_end_at_lines(tmp_path):
    path, line = tmp_path / "long.txt", "\u4e2d\U0001f642 words  and words\n"
    text = (line * 3 + "\n\n ") * 40_000
    path.write_text(text)
    (tmp_path / "short.txt").write_text("short")
    found = opened(tmp_path)
    items = list(found.items())
    assert "".join(item.value for item in items[:-1]) == text and items[-1].value == "short"
    assert [item.more for item in items] == [True] * (len(items) - 2) + [False, False]
    assert len(items) > 3 and all(len(item.value) <= BLOCK for item in items)
    for item in items[:-2]:
        assert item.value.endswith("words\n")
    assert [item.value for item in found.items(1)] == ["short"] and not list(found.items(2))
    path.write_text("x" * (2 * BLOCK))  # without a line's end
    assert read(path) == ["x" * (2 * BLOCK)]


def test_a_separator_divides_a_text_file_and_a_note_names_it(tmp_path):
    mark, notes = "<|endoftext|>", []
    long = "a line of a long story\n" * 80_000
    stories = ["one\n\n two", long.strip("\n"), "three", "four"]
    path = tmp_path / "stories.txt"
    path.write_text(f"\n{mark}\n".join(["", *stories[:3], "", stories[3], "\n"]))
    whole = opened(path, notes)
    assert whole.single_text and f'data.separator="{mark}"' in notes[0] and str(path) in notes[0]
    notes.clear()
    assert not opened(path, notes, separator=mark).single_text and notes == []
    for start in range(5):
        assert read(path, start, separator=mark) == stories[start:]
    path.write_text("a\nb\n\nc\r\n")
    assert read(path, separator="\n") == ["a", "b", "c"]
    # a mark at each place near the edge of the pieces that are read
    for count in range((1 << 18) - 15, (1 << 18) + 3):
        path.write_text("x" * count + mark + "y")
        assert read(path, separator=mark) == ["x" * count, "y"]


def test_what_is_wrong_is_said_with_name_and_place(tmp_path):
    raw, table = lines(TEXTS), parquet(tmp_path / "whole.parquet", TEXTS)
    other_key = b'{"text": "a"}\n{"content": "b"}\n'
    cases = [
        ("a.txt", b"abc\xff\xfe", ["0xff", "position 3", "UTF-8"]),
        ("aa.txt", "\u00e9".encode() * 400_001 + b"\xc3", ["0xc3", "position 800,002"]),
        ("b.jsonl", raw[:60] + b"\n{oops\n", ["line 2"]),
        ("talk.jsonl", b'{"messages": []}\n', ["'messages'", 'data.format="chat"']),
        ("c.jsonl", other_key, ["line 2", "'text'", "'content'", "data.text_key"]),
        ("d.jsonl", b'{"text": 3}\n', ["line 1", "'text' holds int"]),
        ("e.jsonl", b'["text"]\n', ["line 1", "a list"]),
        ("f.jsonl", b'{"text": "\xff"}\n', ["line 1", "0xff"]),
        ("g.jsonl.gz", gzip.compress(raw)[:-20], ["damaged"]),
        ("h.txt.xz", lzma.compress(b"abc")[:-9], ["damaged"]),
        ("i.txt.bz2", bz2.compress(b"abc")[:-9], ["damaged"]),
        ("j.txt.zst", zst(b"abc" * 99, 1)[:-9], ["damaged"]),
        ("k.parquet", table[:-30], ["damaged"]),
        ("m.txt.gz", gzip.compress(b"abc")[:-9] + b"\0" * 9, ["damaged"]),
        ("n.jsonl", b'{"text": ' + b"[" * 200_000 + b"\n", ["line 1", "JSON"]),
        ("o.json", b'[{"text": "a"}, {"text": "b"}', ["item 3", "no end"]),
        ("p.json", b'[{"text": "a"}, {"te', ["item 2", "JSON"]),
        ("q.json", b'[{"text": "a"}, 12]', ["item 2", "a number"]),
        ("qq.json", b"[{oops}" + b" " * 400_000 + b"]", ["item 1", "JSON"]),
        ("r.csv", b"id,text\n1,a\n2,b,c\n", ["line 3", "3 fields", "2"]),
        ("s.csv", b'id,text\n1,"a" b\n', ["line 2", "quotation mark"]),
        ("t.csv", b"id,content\n1,a\n", ["'text'", "'content'", "data.text_key"]),
        ("u.zip", b"PK", ["unpack"]),
    ]
    for name, content, words in cases:
        (tmp_path / name).write_bytes(content)
        with refused(name, *words):
            read(str(tmp_path / name))
    parquet(tmp_path / "x.parquet", ["a", None, "b"], key="content")
    assert read(str(tmp_path / "x.parquet"), text_key="content") == ["a", "", "b"]
    for key, words in (
        ("text", ["'text'", "'id', 'content'", "data.text_key"]),
        ("id", ["'id' holds int"]),
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
    for indent in (None, 1):
        (tmp_path / "a.json").write_text(json.dumps(items, indent=indent, ensure_ascii=False))
        assert records(tmp_path / "a.json", format="chat") == items
    (tmp_path / "a.json").write_text(" " + json.dumps(items[7], indent=1) + "\n")
    assert records(tmp_path / "a.json", format="chat") == items[7:8]
    for content in ("", "[]", " [ ] "):
        (tmp_path / "a.json").write_text(content)
        assert records(tmp_path / "a.json", format="chat") == []


def test_questions_of_squad(tmp_path):
    answers = [{"text": "b", "answer_start": 2}]
    question = {"id": "q1", "question": "who?", "answers": answers}
    tree = {"data": [{"title": "T", "paragraphs": [{"context": "a b", "qas": [question]}]}]}
    (tmp_path / "q.json").write_text("\ufeff" + json.dumps(tree))
    source = f"squad:{tmp_path / 'q.json'}"
    expected = {**question, "context": "a b", "title": "T"}
    assert records(source, format="squad") == [expected]
    assert describe_source(spec_of(source, format="squad"))["files"][0]["bytes"] > 9
    for content in ("[]", "{oops", '{"data": [{"paragraphs": [{}]}]}'):
        (tmp_path / "q.json").write_text(content)
        with refused("q.json", "SQuAD"):
            records(source, format="squad")


def test_files_that_a_directory_leaves_out_are_named(tmp_path):
    (tmp_path / ".git").mkdir()
    for name in (
        "a.txt",
        "README.md",
        "b.md",
        "notes",
        ".git/config.txt",
        ".hidden.txt",
        "._a.txt",
    ):
        (tmp_path / name).write_text("text " * 9)
    (tmp_path / "items.json").write_text('[{"text": "b"}]')
    (tmp_path / "tree.json").write_text('{"a": {"text": "b"}}')
    notes = []
    opened(tmp_path, notes)
    left_out = "1 .json (tree.json), 2 .md (README.md, b.md), 1 without ending (notes)"
    assert notes == [
        f"{tmp_path}: 2 files (1 .txt, 1 .json): a.txt, items.json; not read: {left_out}"
    ]
    for name in ("a.txt", "items.json"):
        (tmp_path / name).unlink()
    with refused("not read: ", "2 .md (README.md, b.md)", f"'{tmp_path}/**/*.md'"):
        read(tmp_path)
    assert len(read(f"{tmp_path}/**/*.md")) == 2


def test_a_directory_is_read_without_windlasss_own_and_each_real_file_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = ["runs/r/recipe.toml", "runs/r/ledger.jsonl", "runs/r/samples.txt"]
    own += ["studies/s/study.json", "studies/s/recipe.toml", "studies/s/note.txt"]
    own += ["data/in-1/index.json", "data/in-1/tokenizer/merges.txt", "data/in-1/left-out.txt"]
    own += ["data/downloads/x.txt"]
    for name in [*own, "a/1.txt", "a/b/2.txt", "data/3.txt", "index.json", ".venv/4.txt"]:
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
    notes = []
    assert sorted(item.value for item in opened(".", notes).items()) == sorted(texts)
    assert "made by Windlass" in notes[0] and "downloads" in notes[0]
    assert sorted(read("**/*.txt")) == sorted(texts) and read("a/**") == ["a/1.txt", "a/b/2.txt"]
    assert read("data/in-1/*.txt") == ["data/in-1/left-out.txt"]  # which the recipe names
    assert [str(path) for path in find_files("a/*.txt", "x")] == ["a/1.txt"]
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
    with refused("caf\\xe9.txt", "not UTF-8", "rename"):
        read(os.fsdecode(name))
    for pattern in ("x" * 300, "x" * 300 + "*"):
        with refused("data.source", "there is no file"):
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


def test_the_key_of_a_source_has_what_determines_its_items():
    plain = spec_of("a.txt")
    assert plain.key == {"name": "a.txt", "format": "text"} and plain.slug == "a"
    same = {"place": "/home/a.txt", "split": "test", "revision": "x", "streaming": True}
    assert replace(plain, **same, setting="data.eval_source", answers="last").key == plain.key
    for change in ({"separator": "|"}, {"text_key": "t"}, {"on_bad_item": "skip"}):
        assert replace(plain, **change).key == plain.key | change
    there = spec_of("hf:org/name", split="test", revision="abc", separator="|", streaming=True)
    assert there.key == {
        "name": "hf:org/name",
        "format": "text",
        "split": "test",
        "revision": "abc",
    }
    talk = spec_of("t.jsonl", format="chat", answers="last", text_key="t")
    assert talk.key == {"name": "t.jsonl", "format": "chat", "answers": "last"}
    assert "python" in spec_of("stdlib").key
    slugs = {"hf:allenai/c4:en": "c4-en", "squad:a/dev-v1.1.json": "dev-v1", ".": "corpus"}
    assert {source: spec_of(source).slug for source in slugs} == slugs
    assert spec_of("https://host/a/Some_File.txt?x=1").slug == "some-file"


def test_a_changed_source_is_described_in_words(tmp_path):
    folder = tmp_path / "texts"
    (folder / "b").mkdir(parents=True)
    for name in ("a.txt", "b/a.txt", "c.txt"):
        (folder / name).write_text(name)
    spec = spec_of(folder)
    then = opened(folder).description
    assert not changes(then, describe_source(spec))
    moved = folder.rename(tmp_path / "moved")
    assert describe_source(spec) is None
    assert not changes(then, describe_source(spec_of(moved)))
    (moved / "b/a.txt").write_text("other")
    (moved / "c.txt").unlink()
    (moved / "d.txt").write_text("d")
    now = describe_source(spec_of(moved))
    assert changes(then, now) == "b/a.txt has 2 bytes less, c.txt is gone, d.txt is new"
    (moved / "a.txt").write_text("b.txt")
    assert "a.txt has other content" in changes(now, describe_source(spec_of(moved)))
    large = {"files": [{"file": "x/a.txt", "bytes": 5, "changed_ns": 1}]}
    later = {"files": [{"file": "y/a.txt", "bytes": 5, "changed_ns": 2}]}
    assert changes(large, later) == "a.txt has other content"
    assert changes({"commit": "abc"}, {"commit": "def"}) == "its commit is def, and was abc"
    assert describe_source(spec_of("https://host/a.txt")) is None


def test_the_standard_library():
    source = opened("stdlib")
    items = list(source.items())
    assert len(items) == source.description["modules"] > 200
    assert sum(len(item.value) for item in items) > 5_000_000 and items[-1].fraction == 1.0
    assert list(source.items(len(items) - 3)) == items[-3:]
    assert not changes(source.description, describe_source(source.spec))


class Handler(http.server.BaseHTTPRequestHandler):
    content = b"some text\n" * 1000
    asked = 0

    def do_GET(self):
        type(self).asked += 1
        if "missing" in self.path:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.content)))
        self.end_headers()
        self.wfile.write(self.content)

    def log_message(self, *args):
        pass


@pytest.fixture
def web():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    Handler.asked = 0
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_download_is_made_once_and_checked(web, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    good, notes = hashlib.sha256(Handler.content).hexdigest(), []

    def fetch(times):
        source = opened(f"{web}/{'a' * 300}/{'b' * 230}/input.txt?x=1", notes, sha256=good)
        assert source.single_text and next(source.items()).value == Handler.content.decode()
        assert Handler.asked == len(notes) == times

    fetch(1)
    fetch(1)
    (target,) = (tmp_path / "data" / "downloads").iterdir()
    target.write_bytes(b"damaged")
    fetch(2)
    assert download(f"{web}/{'b' * 300}.txt", good, tmp_path, notes.append).suffix == ".txt"


def test_downloads_that_fail(web, tmp_path):
    good = hashlib.sha256(Handler.content).hexdigest()
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
    table = datasets.Dataset.from_dict({"id": list(range(len(TEXTS))), "text": TEXTS})
    table.save_to_disk(tmp_path / "table")
    splits = datasets.DatasetDict({"train": table, "validation": table.select(range(3))})
    splits.save_to_disk(tmp_path / "splits")
    talks = datasets.Dataset.from_list([{**TALK, "id": i} for i in range(5)])
    talks.save_to_disk(tmp_path / "talks")
    for place in ("files", "bad"):
        (tmp_path / place).mkdir()
    parquet(tmp_path / "files" / "train.parquet", TEXTS)
    for place in ("table", "splits", "files"):
        for start in (0, 5):
            assert read(f"hf:{tmp_path / place}", start, streaming=streaming) == TEXTS[start:]
    source = f"hf:{tmp_path / 'splits'}"
    held_out = opened(source, split="validation", streaming=streaming)
    items = list(held_out.items())
    assert [item.value for item in items] == TEXTS[:3]
    assert items[-1].fraction == (0.0 if streaming else 1.0)
    assert held_out.description["rows"] == (0 if streaming else 3)
    assert not changes(held_out.description, describe_source(held_out.spec))
    assert records(f"hf:{tmp_path / 'talks'}", format="chat", streaming=streaming) == [*talks]
    with refused("'test'", "train, validation"):
        opened(source, split="test", streaming=streaming)
    with refused("'content'", "data.text_key"):
        read(f"hf:{tmp_path / 'table'}", text_key="content", streaming=streaming)
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


def test_the_form_of_the_first_item(tmp_path):
    contents = {
        "a.txt": "text",
        "b.jsonl": '{"text": "a"}',
        "c.jsonl": '{"content": "a", "id": 1}',
        "d.jsonl": json.dumps(TALK),
        "e.json": json.dumps([{"instruction": "a", "output": "b"}]),
        "f.csv": "prompt,completion\na,b\n",
    }
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
    forms = [form_of(str(tmp_path / name), "--data") for name in contents]
    text, chat = {"format": "text"}, {"format": "chat"}
    assert forms == [text, text, text | {"text_key": "content"}, chat, chat, chat]
    assert form_of("stdlib", "--data") == text and form_of("hf:org/name", "--data") == {}
    assert form_of("squad", "--data") == {"format": "squad"}
    (tmp_path / "q.json").write_text('{"data": [], "version": 1}')
    with refused("--data", "squad:"):
        form_of(str(tmp_path / "q.json"), "--data")
    for source in (f"{tmp_path}/none.txt", f"shards:{tmp_path}/none.bin"):
        with refused("--data", "there is no file"):
            form_of(source, "--data")


MEASURE = """
import resource, sys
from windlass.data.sources import SourceSpec, open_source, text_of
spec = SourceSpec(sys.argv[1], sys.argv[1])
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
small, size = SourceSpec(sys.argv[2], sys.argv[2]), 0
for each in (small, spec):
    before = peak()
    for item in open_source(each).items():
        size += len(text_of(item, each))
print(peak() - before, size)
"""


@pytest.mark.parametrize("ending", ["txt", "txt.gz", "jsonl", "json", "csv", "parquet"])
def test_the_memory_of_reading_does_not_grow_with_the_file(ending, tmp_path):
    """A small file first, so that libraries and buffers are in the measure of neither."""
    text = "some words of a line, which is as long as others\n" * 20
    for name, count in (("small", 1_000), ("large", 64_000)):
        path = tmp_path / f"{name}.{ending}"
        if ending == "txt":
            path.write_text(text * count)
        elif ending == "txt.gz":
            path.write_bytes(gzip.compress((text * count).encode(), 1))
        elif ending == "csv":
            path.write_text("text\n" + f'"{text}"\n' * count)
        elif ending == "parquet":
            table = pa.table({"text": [f"{i} {text}" for i in range(count)]})
            pq.write_table(table, path, row_group_size=count, use_dictionary=False)
        elif ending == "json":
            path.write_text(f"[{','.join([json.dumps({'text': text})] * count)}]")
        else:
            path.write_text(f"{json.dumps({'text': text})}\n" * count)
    names = [str(tmp_path / f"{name}.{ending}") for name in ("large", "small")]
    done = subprocess.run([sys.executable, "-c", MEASURE, *names], capture_output=True, text=True)
    grown, size = map(int, done.stdout.split()[-2:])
    assert size > 60_000_000 and grown < 0.5 * size, done.stderr
