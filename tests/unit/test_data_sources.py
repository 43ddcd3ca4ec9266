"""Sources: each kind of file, whole and from the middle; and what is wrong with a file is said with
its name and place.
"""

import gzip
import hashlib
import http.server
import json
import threading

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from helpers import refused
from windlass.data.files import has_changed
from windlass.data.sources import download, open_corpora, open_corpus
from windlass.errors import RunFailed, UserError
from windlass.recipe import DataSettings

TEXTS = [f"document {i} \u00e9\u4e2d\U0001f642\n" * (i % 5) for i in range(23)]


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


def write_all(folder):
    for i, text in enumerate(TEXTS):
        (folder / f"{i:02d}.txt").write_bytes(text.encode())
        (folder / f"{i:02d}.txt.gz").write_bytes(gzip.compress(text.encode()))
        (folder / f"{i:02d}.md.zst").write_bytes(zst(text.encode(), 2))
    raw = lines(TEXTS)
    (folder / "all.jsonl").write_bytes(raw.replace(b"\n", b"\n\n", 3))
    (folder / "all.jsonl.gz").write_bytes(gzip.compress(raw[:300]) + gzip.compress(raw[300:]))
    (folder / "all.jsonl.zst").write_bytes(zst(raw))
    parquet(folder / "all.parquet", TEXTS)
    half = folder / "halves"
    half.mkdir()
    (half / "a.jsonl").write_bytes(lines(TEXTS[:9]))
    parquet(half / "b.parquet", TEXTS[9:12])
    (half / "c.jsonl.gz").write_bytes(gzip.compress(lines(TEXTS[12:])))
    (half / "notes.md").write_text("not a part of it")
    names = "*.txt *.txt.gz *.md.zst all.jsonl all.jsonl.gz all.jsonl.zst all.parquet halves"
    return [str(folder / name) for name in names.split()]


def read(source, start=0, **settings):
    corpus = open_corpus(DataSettings(source=source, **settings), source)
    return list(corpus.documents(start))


def test_every_form_gives_the_same_documents_from_any_place_on(tmp_path):
    for source in write_all(tmp_path):
        for start in (0, 1, 5, 9, 11, 22, 23, 24):
            assert read(source, start) == TEXTS[start:], (source, start)
        corpus = open_corpus(DataSettings(), source)
        for _ in corpus.documents():
            assert 0 <= corpus.fraction_read <= 1
        corpus.limit = 7
        assert list(corpus.documents(3)) == TEXTS[3:7] and list(corpus.documents(9)) == []
    (tmp_path / "one.txt").write_bytes(b"\xef\xbb\xbfa\r\nb")
    corpus = open_corpus(DataSettings(), str(tmp_path / "one.txt"))
    assert corpus.single_text and list(corpus.documents()) == ["a\r\nb"]


def test_what_is_wrong_is_said_with_name_and_place(tmp_path):
    raw, table = lines(TEXTS), parquet(tmp_path / "whole.parquet", TEXTS)
    other_key = b'{"text": "a"}\n{"content": "b"}\n'
    cases = [
        ("a.txt", b"abc\xff\xfe", ["0xff", "position 3", "UTF-8"]),
        ("b.jsonl", raw[:60] + b"\n{oops\n", ["line 2"]),
        ("talk.jsonl", b'{"messages": []}\n', ["'messages'", 'data.format="chat"']),
        ("c.jsonl", other_key, ["line 2", "'text'", "'content'", "data.text_key"]),
        ("d.jsonl", b'{"text": 3}\n', ["line 1", "'text' holds int"]),
        ("f.jsonl", b'{"text": "\xff"}\n', ["line 1", "0xff"]),
        ("g.jsonl.gz", gzip.compress(raw)[:-20], ["cut short"]),
        ("k.parquet", table[:-30], ["damaged"]),
        ("m.txt.gz", gzip.compress(b"abc")[:-9] + b"\0" * 9, ["damaged"]),
        ("n.jsonl", b'{"text": ' + b"[" * 200_000 + b"\n", ["line 1", "JSON"]),
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


def test_files_that_a_directory_leaves_out_are_named(tmp_path):
    (tmp_path / ".git").mkdir()
    for name in ("a.txt", "README.md", "b.md", "notes", ".git/config", ".hidden"):
        (tmp_path / name).write_text("text " * 9)
    said = []
    open_corpus(DataSettings(), str(tmp_path), notify=said.append)
    assert said == [f"{tmp_path}: 1 file: a.txt; not read: 2 .md, 1 without ending"]
    (tmp_path / "a.txt").unlink()
    with refused("not read: 2 .md, 1 without ending", f"'{tmp_path}/**/*.md'"):
        read(str(tmp_path))
    assert len(read(f"{tmp_path}/**/*.md")) == 2


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


def test_the_standard_library():
    corpus = open_corpus(DataSettings(), "stdlib")
    texts = list(corpus.documents())
    assert len(texts) == corpus.description["modules"] > 200
    assert sum(map(len, texts)) > 5_000_000 and corpus.fraction_read == 1.0
    assert list(corpus.documents(len(texts) - 3)) == texts[-3:]


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
        url = f"{web}/a/input.txt?x=1"
        corpus = open_corpus(DataSettings(), url, sha256=good, notify=notes.append)
        assert corpus.single_text and next(corpus.documents()) == Handler.content.decode()
        assert Handler.asked == len(notes) == times

    fetch(1)
    fetch(1)
    (target,) = (tmp_path / "data" / "downloads").iterdir()
    target.write_bytes(b"damaged")
    fetch(2)


def test_downloads_that_fail(web, tmp_path):
    good = hashlib.sha256(Handler.content).hexdigest()
    for url, sha256, words in [
        (f"{web}/input.txt", "0" * 64, [good, "data.sha256"]),
        (f"{web}/missing.txt", good, ["404"]),
        ("http://127.0.0.1:9/input.txt", good, ["path of a file"]),
    ]:
        with refused(*words):
            download(url, sha256, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("streaming", [False, True])
def test_datasets(streaming, tmp_path):
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    table = datasets.Dataset.from_dict({"id": list(range(len(TEXTS))), "text": TEXTS})
    table.save_to_disk(tmp_path / "table")
    splits = datasets.DatasetDict({"train": table, "validation": table.select(range(3))})
    splits.save_to_disk(tmp_path / "splits")
    for place in ("files", "bad"):
        (tmp_path / place).mkdir()
    parquet(tmp_path / "files" / "train.parquet", TEXTS)
    for place in ("table", "splits", "files"):
        for start in (0, 5):
            assert read(f"hf:{tmp_path / place}", start, streaming=streaming) == TEXTS[start:]
    splits, settings = f"hf:{tmp_path / 'splits'}", DataSettings(streaming=streaming)
    held = open_corpus(settings, splits, split="validation")
    assert list(held.documents()) == TEXTS[:3] and held.fraction_read == (0.0 if streaming else 1.0)
    with refused("'test'", "train, validation"):
        open_corpus(settings, splits, split="test")
    with refused("'content'", "data.text_key"):
        read(f"hf:{tmp_path / 'table'}", text_key="content", streaming=streaming)
    (tmp_path / "bad" / "x.jsonl").write_text("{oops")
    for source in ("hf:nobody/nothing-of-the-kind", f"hf:{tmp_path / 'bad'}"):
        with pytest.raises((UserError, RunFailed), match="hf:"):
            read(source, streaming=streaming)


def test_each_source_of_a_list_is_a_corpus_and_json_arrays_are_as_lines(tmp_path):
    write_all(tmp_path)
    array = tmp_path / "array.json"
    array.write_text(json.dumps([{"text": text} for text in TEXTS], indent=1))
    assert read(str(array)) == TEXTS and read(str(array), start=7) == TEXTS[7:]
    names = [str(array), "stdlib", f"{tmp_path}/all.jsonl"]
    several = open_corpora(DataSettings(), names, notify=lambda text: None)
    assert list(several[0].documents()) == TEXTS == list(several[2].documents())
    assert [corpus.name for corpus in several] == names
    assert not any(corpus.single_text for corpus in several)
    assert all(corpus.size > 0 for corpus in several)
    assert not has_changed(str(array), several[0].description)
    array.write_text("[]")
    assert has_changed(names[0], several[0].description)
    assert not has_changed(names[2], several[2].description)


def test_the_files_of_a_pattern_are_named_with_those_that_are_no_part_of_a_corpus(tmp_path):
    for name in ("a.txt", "b.txt", "c.txt", "LICENSE", "README.txt"):
        (tmp_path / name).write_text("text")
    said: list[str] = []
    open_corpora(DataSettings(), [f"{tmp_path}/*"], notify=said.append)
    assert "5 files (4 .txt, 1 without ending)" in said[0]
    assert "with LICENSE, README.txt: narrow" in said[0]
    open_corpora(DataSettings(), [f"{tmp_path}/?.txt"], notify=said.append)
    assert said[1].endswith("3 files: a.txt, b.txt, c.txt")
    open_corpora(DataSettings(), [f"{tmp_path}/a.txt"], notify=said.append)
    assert len(said) == 2
