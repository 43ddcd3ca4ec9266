"""Shards at URLs, from a real HTTP server: they are downloaded once, whole, and then local."""

import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from data_fixtures import recipe_for
from helpers import refused
from windlass.data import foreign
from windlass.data.foreign import download, list_urls
from windlass.data.open import open_data
from windlass.errors import RunFailed


class Server(ThreadingHTTPServer):
    """Serves `files`, counts what it sent, and drops or refuses what a test says."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.sent = dict[str, bytes](), Counter()
        self.drops, self.status = 0, 0
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def url(self, name):
        return f"http://127.0.0.1:{self.server_port}/{name}"

    def handle_error(self, request, client_address):
        pass  # a dropped connection


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self.answer(False)

    def do_GET(self):
        self.answer(True)

    def answer(self, has_body):
        server, name = self.server, self.path.strip("/")
        status, body = 200, server.files.get(name, b"")
        if not name:
            body = "".join(f'<a href="{one}">{one}</a>' for one in server.files).encode()
        elif server.status or name not in server.files:
            status, body = server.status or 404, b""
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if has_body:
            server.sent[name] += 1
            dropped, server.drops = server.drops > 0, max(0, server.drops - 1)
            self.wfile.write(body[: len(body) // 2] if dropped else body)
            self.close_connection = dropped


@pytest.fixture
def server():
    with Server() as one:
        one.files["a.bin"] = np.random.default_rng(0).bytes(10_137)
        yield one
        one.shutdown()


def test_remote_shards_are_the_local_ones(server, tmp_path):
    draw = np.random.default_rng(3)
    for name in ("train-0.bin", "train-1.bin", "val-0.bin"):
        ids = draw.integers(0, 257, 4000).astype("<u2").tobytes()
        server.files[name] = ids
        (tmp_path / name).write_bytes(ids)
    base = {"dir": str(tmp_path / "data"), "tokenizer": "byte", "context": 32}
    local = open_data(recipe_for(f"shards:{tmp_path}/*-?.bin", **base))
    recipe = recipe_for(f"shards:{server.url('')}*-?.bin", **base)
    data = open_data(recipe)
    assert data.fingerprint == local.fingerprint and data.val.tokens == 4000
    for ours, wanted in ((data.train, local.train), (data.val, local.val)):
        rows = np.arange(len(wanted))
        assert (ours.read(rows).tokens == wanted.read(rows).tokens).all()
    server.status = 503  # nothing is asked of it any more
    assert open_data(recipe).fingerprint == data.fingerprint
    assert server.sent["train-0.bin"] == 1


def test_a_download_that_breaks_off_is_resumed(server, tmp_path):
    source = f"shards:{server.url('')}*.bin"
    server.files = {f"{n}.bin": np.ones(2000, "<u2").tobytes() for n in range(3)}
    recipe = recipe_for(source, tmp_path / "data", workers=1)
    fetch, asked = foreign.download, []

    def breaks(url, target):
        asked.append(url)
        server.drops = len(asked) == 2
        fetch(url, target)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(RunFailed, match=r"1\.bin.*again"):
        patch.setattr(foreign, "download", breaks)
        open_data(recipe)
    assert open_data(recipe).train.tokens > 5000
    assert server.sent["0.bin"] == 1 and server.sent["1.bin"] == 2


def test_urls_that_cannot_be_read(server, tmp_path):
    for status, word in ((0, "404"), (403, "403"), (503, "503")):
        server.status = status
        with refused("b.bin cannot be read", word, "credentials"):
            download(server.url("b.bin"), tmp_path / "x")
    with refused("cannot be read"):
        download("http://127.0.0.1:1/a.bin", tmp_path / "x")
    with refused("s3fs"):
        download("s3://bucket/a.bin", tmp_path / "x")


def test_urls_of_a_pattern(server):
    server.files |= {"train-1.bin": b"1", "train-0.bin": b"0", "val-0.bin": b"2"}
    base = server.url("")
    assert list_urls(f"{base}train-*.bin") == [f"{base}train-0.bin", f"{base}train-1.bin"]
    assert list_urls(f"{base}a.bin?token=1") == [f"{base}a.bin?token=1"]
    with refused("no file matches"):
        list_urls(f"{base}test-*.bin")
    with refused("Windlass reads files of s3://"):
        list_urls("nothing://a/*.bin")
