"""Sources: each kind of file, whole and from the middle; and what is wrong with a file is said with its name and place."""

from __future__ import annotations

import gzip
import hashlib
import http.server
import json
import threading

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from windlass.data.remote import download
from windlass.data.sources import find_files, open_corpus, slug
from windlass.errors import RunFailed, UserError
from windlass.recipe import DataSettings

TEXTS = [f"document {i} \u00e9\u4e2d\U0001f642\n" * (i % 5) for i in range(23)]


def lines(texts, key="text"):
    return "".join(json.dumps({"id": i, key: t}) + "\n" for i, t in enumerate(texts)).encode()


def compressed(raw):
    return pa.compress(raw, codec="zstd", asbytes=True)


def zst(raw, frames=3):
    size = -(-len(raw) // frames)
    return b"".join(compressed(raw[i : i + size]) for i in range(0, len(raw), size))


def parquet(path, texts, key="text", rows=5):
    pq.write_table(
        pa.table({"id": list(range(len(texts))), key: pa.array(texts, pa.string())}), path, row_group_size=rows
    )


def write_all(folder):
    """One corpus in each form: the source of each, by name."""
    for i, text in enumerate(TEXTS):
        (folder / f"{i:02d}.txt").write_bytes(text.encode())
        (folder / f"{i:02d}.txt.gz").write_bytes(gzip.compress(text.encode()))
        (folder / f"{i:02d}.md.zst").write_bytes(zst(text.encode() or b"", 2) if text else compressed(b""))
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
    names = ["*.txt", "*.txt.gz", "*.md.zst", "all.jsonl", "all.jsonl.gz", "all.jsonl.zst", "all.parquet", "halves"]
    return {name: str(folder / name) for name in names}


def read(source, start=0, **settings):
    corpus = open_corpus(DataSettings(source=source, **settings), source)
    return list(corpus.documents(start))


def test_every_form_gives_the_same_documents_from_any_place_on(tmp_path):
    for name, source in write_all(tmp_path).items():
        assert read(source) == TEXTS, name
        for start in (1, 5, 9, 11, 22, 23, 24):
            assert read(source, start) == TEXTS[start:], (name, start)
        corpus = open_corpus(DataSettings(), source)
        corpus.limit = 7
        assert list(corpus.documents(3)) == TEXTS[3:7]
        assert list(corpus.documents(9)) == []


def test_the_fraction_read_ends_at_one(tmp_path):
    for name, source in write_all(tmp_path).items():
        corpus = open_corpus(DataSettings(), source)
        assert corpus.fraction == 0.0
        for _ in corpus.documents():
            assert 0 <= corpus.fraction <= 1
        assert corpus.fraction == 1.0, name


def test_a_single_text_is_one(tmp_path):
    (tmp_path / "one.txt").write_bytes(b"\xef\xbb\xbfa\r\nb")
    corpus = open_corpus(DataSettings(), str(tmp_path / "one.txt"))
    assert corpus.single_text and list(corpus.documents()) == ["a\r\nb"]
    (tmp_path / "one.jsonl").write_bytes(lines(["a"]))
    assert not open_corpus(DataSettings(), str(tmp_path / "one.jsonl")).single_text


def damaged(folder):
    """File name, content, and what must be said of it."""
    raw = lines(TEXTS)
    parquet(folder / "whole.parquet", TEXTS)
    table = (folder / "whole.parquet").read_bytes()
    return [
        ("a.txt", b"abc\xff\xfe", r"a\.txt is not UTF-8: byte 0xff at byte 3"),
        ("b.jsonl", raw[:60] + b"\n{oops\n", r"b\.jsonl, line 2"),
        ("c.jsonl", b'{"text": "a"}\n{"content": "b"}\n', r"c\.jsonl, line 2 has no 'text'; it has 'content'"),
        ("d.jsonl", b'{"text": 3}\n', r"d\.jsonl, line 1: 'text' holds int, not text"),
        ("e.jsonl", b'["text"]\n', r"e\.jsonl, line 1: each line is one object"),
        ("f.jsonl", b'{"text": "\xff"}\n', r"f\.jsonl is not UTF-8: byte 0xff at line 1"),
        ("g.jsonl.gz", gzip.compress(raw)[:-20], r"g\.jsonl\.gz is damaged, cut short"),
        ("h.jsonl.gz", b"not gzip at all", r"h\.jsonl\.gz is damaged, cut short"),
        ("i.jsonl.zst", zst(raw)[:-20], r"i\.jsonl\.zst is damaged, cut short"),
        ("j.txt.zst", b"not zst at all", r"j\.txt\.zst is damaged, cut short"),
        ("k.parquet", table[:-30], r"k\.parquet is damaged, cut short"),
        ("l.parquet", b"", r"l\.parquet is damaged, cut short"),
        ("m.txt.gz", gzip.compress(b"abc")[:-9] + b"\0" * 9, r"m\.txt\.gz is damaged, cut short"),
        ("n.jsonl", b'{"text": ' + b"[" * 200_000 + b"\n", r"n\.jsonl, line 1 is no JSON"),
    ]


def test_what_is_wrong_is_said_with_name_and_place(tmp_path):
    for name, content, message in damaged(tmp_path):
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(UserError, match=message):
            read(str(path))


def test_columns_are_named(tmp_path):
    parquet(tmp_path / "x.parquet", ["a", None, "b"], key="content")
    with pytest.raises(UserError, match=r"has no column 'text'; it has id, content: set data\.text_key"):
        read(str(tmp_path / "x.parquet"))
    assert read(str(tmp_path / "x.parquet"), text_key="content") == ["a", "", "b"]
    with pytest.raises(UserError, match=r"'id' holds int, not text"):
        read(str(tmp_path / "x.parquet"), text_key="id")


def test_there_is_no_such_source(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "x.json").write_text("{}")
    (tmp_path / "x.bin").write_bytes(b"12")
    for source, message in [
        (f"{tmp_path}/none.txt", r"there is no file .*none\.txt; a source is stdlib, a path"),
        (f"{tmp_path}/*.csv", r"nothing matches the pattern"),
        (f"{tmp_path}/empty", r"there is no txt/jsonl/ndjson/parquet file in the directory"),
        (f"{tmp_path}/x.json", r"one object a line in a \.jsonl file"),
        (f"{tmp_path}/x.bin", r"write shards:"),
        ("shakespeare", r"there is no file shakespeare"),
    ]:
        with pytest.raises(UserError, match=message):
            read(source)


def test_files_are_in_the_order_of_their_names(tmp_path):
    for name in ("b", "a", "c"):
        (tmp_path / f"{name}.txt").write_text(name)
    assert [p.name for p in find_files(f"{tmp_path}/*.txt")] == ["a.txt", "b.txt", "c.txt"]


def test_the_standard_library(monkeypatch, tmp_path):
    corpus = open_corpus(DataSettings(), "stdlib")
    texts = list(corpus.documents())
    assert len(texts) == corpus.description["files"] > 200
    assert sum(map(len, texts)) > 5_000_000 and corpus.fraction == 1.0
    assert list(corpus.documents(len(texts) - 3)) == texts[-3:]
    assert not any("site-packages" in text[:40] for text in texts) and "\r" not in "".join(texts[:50])
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(UserError, match="no source of its standard library"):
        open_corpus(DataSettings(), "stdlib")


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("stdlib", "stdlib"),
        ("hf:allenai/c4:en", "c4-en"),
        ("hf:/data/My Set/", "my-set"),
        ("texts/tiny shakespeare.txt", "tiny-shakespeare"),
        ("texts/*.jsonl.gz", "texts"),
        ("texts/part-*.jsonl.gz", "part"),
        ("texts/**/*", "texts"),
        ("https://host/a/input.txt?download=1", "input"),
        ("shards:edu_fineweb10B/*.npy", "edu-fineweb10b"),
        ("/", "corpus"),
    ],
)
def test_short_names(source, name):
    assert slug(source) == name


class Handler(http.server.BaseHTTPRequestHandler):
    content = b"some text\n" * 1000
    asked = 0

    def do_GET(self):
        type(self).asked += 1
        if "missing" in self.path:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.content) + (100 if "short" in self.path else 0)))
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
    good = hashlib.sha256(Handler.content).hexdigest()
    told = []
    for _ in range(2):
        corpus = open_corpus(DataSettings(), f"{web}/a/input.txt?x=1", sha256=good, notify=told.append)
        assert corpus.single_text and next(corpus.documents()) == Handler.content.decode()
    assert Handler.asked == 1 and len(told) == 1
    (target,) = (tmp_path / "data" / "downloads").iterdir()
    target.write_bytes(b"damaged")
    assert next(open_corpus(DataSettings(), f"{web}/a/input.txt", sha256=good).documents()) == Handler.content.decode()
    assert Handler.asked == 2


def test_downloads_that_fail(web, tmp_path):
    good = hashlib.sha256(Handler.content).hexdigest()
    with pytest.raises(UserError, match=f"its SHA-256 is {good}, data.sha256 = 000"):
        download(f"{web}/input.txt", "0" * 64, tmp_path)
    with pytest.raises(UserError, match="HTTP 404"):
        download(f"{web}/missing.txt", good, tmp_path)
    with pytest.raises(UserError, match=r"could not be downloaded|broke off"):
        download(f"{web}/short.txt", good, tmp_path)
    with pytest.raises(UserError, match="could not be downloaded"):
        download("http://127.0.0.1:9/input.txt", good, tmp_path)
    with pytest.raises(UserError, match="needs the SHA-256"):
        download(f"{web}/input.txt", "", tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def datasets_():
    return pytest.importorskip("datasets", reason="datasets is not installed")


def test_datasets_from_disk(datasets_, tmp_path):
    table = datasets_.Dataset.from_dict({"id": list(range(len(TEXTS))), "text": TEXTS})
    table.save_to_disk(tmp_path / "table")
    datasets_.DatasetDict({"train": table, "validation": table.select(range(3))}).save_to_disk(tmp_path / "splits")
    (tmp_path / "files").mkdir()
    parquet(tmp_path / "files" / "train.parquet", TEXTS)
    for place in ("table", "splits", "files"):
        for streaming in (False, True):
            source = f"hf:{tmp_path / place}"
            assert read(source, streaming=streaming) == TEXTS
            assert read(source, 5, streaming=streaming) == TEXTS[5:]
    held = open_corpus(DataSettings(), f"hf:{tmp_path / 'splits'}", split="validation")
    assert list(held.documents()) == TEXTS[:3] and held.fraction is not None
    with pytest.raises(UserError, match="has no split 'test'; it has train, validation"):
        open_corpus(DataSettings(), f"hf:{tmp_path / 'splits'}", split="test")
    for streaming in (False, True):
        with pytest.raises(UserError, match=r"has no (column )?'content'"):
            read(f"hf:{tmp_path / 'table'}", text_key="content", streaming=streaming)


def test_datasets_that_are_not_there(datasets_, tmp_path):
    with pytest.raises(UserError, match="hf:nobody/nothing"):
        read("hf:nobody/nothing-of-the-kind")
    with pytest.raises(UserError, match="hf:"):
        read(f"hf:{tmp_path}")
    (tmp_path / "x.jsonl").write_text("{oops")
    with pytest.raises(UserError, match="cannot be loaded"):
        read(f"hf:{tmp_path}")
    with pytest.raises((UserError, RunFailed), match=r"cannot be loaded|broke off"):
        read(f"hf:{tmp_path}", streaming=True)
