"""Remote files: a real HTTP server with ranges, its faults, the bound of the cache, two readers."""

import contextlib
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from data_fixtures import recipe_for
from helpers import refused
from windlass.data import remote
from windlass.data.open import open_data
from windlass.data.remote import RemoteFile, list_urls
from windlass.errors import RunFailed

BLOCK = 1000


class Server(ThreadingHTTPServer):
    """Serves `files`; counts the ranges that it sent, and drops or refuses what a test says."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.sent, self.lock = dict[str, bytes](), Counter(), threading.Lock()
        self.drops, self.status, self.whole = 0, 0, False
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
        self.do_GET()

    def do_GET(self):
        server, name = self.server, self.path.strip("/")
        body, asked = server.files.get(name, b""), self.headers.get("Range")
        status = server.status or (200 if name in server.files else 404)
        headers = {}
        if not name:
            status = 200
            body = "".join(f'<a href="{one}">{one}</a>' for one in server.files).encode()
        elif status == 200:
            headers = {"ETag": f'"{hash(body)}"', "Accept-Ranges": "bytes"}
            if asked and not server.whole:
                first, last = map(int, asked.removeprefix("bytes=").split("-"))
                status, body = (206, body[first : last + 1]) if first < len(body) else (416, b"")
                with server.lock:
                    server.sent[name, first] += status == 206
                    dropped, server.drops = server.drops > 0, max(0, server.drops - 1)
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if status == 206 and dropped:
            body, self.close_connection = body[: len(body) // 2], True
        if self.command == "GET":
            self.wfile.write(body)


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(remote, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(remote, "RETRY_SECONDS", (0.01, 0.01))
    with Server() as one:
        one.files["a.bin"] = np.random.default_rng(0).bytes(10 * BLOCK + 137)
        yield one
        one.shutdown()


def size_of(cache):
    """The bytes of a cache, which another process may change meanwhile."""
    total = 0
    for path in cache.iterdir():
        with contextlib.suppress(FileNotFoundError):
            total += 0 if path.name.endswith(".lock") else path.stat().st_size
    return total


@pytest.fixture
def remote_file(server, tmp_path):
    """Opens a file of the server."""
    return lambda name="a.bin", cache="cache", size=1 << 20, version="": RemoteFile(
        server.url(name), tmp_path / cache, size, version
    )


def test_any_part_is_what_the_server_has_and_a_block_is_sent_once(server, remote_file):
    body, random = server.files["a.bin"], np.random.default_rng(1)
    file = remote_file()
    assert file.size == len(body)
    for _ in range(60):
        start, count = int(random.integers(len(body))), int(random.integers(1, 2500))
        assert file.pread(count, start) == body[start : start + count]
    assert file.pread(5, len(body) - 2) == body[-2:] and file.pread(5, len(body)) == b""
    assert remote_file().pread(len(body), 0) == body
    assert set(server.sent.values()) == {1} and len(server.sent) == 11


def test_the_cache_keeps_its_bound_and_what_was_used_last(server, remote_file, tmp_path):
    body, cache = server.files["a.bin"], tmp_path / "cache"
    file = remote_file(size=3 * BLOCK + 10)
    for number in (0, 2, 0, 4, 0, 6, 0, 8, 0):
        assert file.pread(BLOCK, number * BLOCK) == body[number * BLOCK : (number + 1) * BLOCK]
        assert size_of(cache) <= 3 * BLOCK + 10
    assert server.sent["a.bin", 0] == 1
    small = remote_file(cache="small", size=BLOCK // 2)  # smaller than a block
    assert small.pread(len(body), 0) == body and size_of(tmp_path / "small") <= BLOCK // 2


def test_a_dropped_connection_and_a_busy_server_are_tried_again(server, remote_file, tmp_path):
    server.drops = 2
    file = remote_file(size=0)
    assert file.pread(BLOCK, 0) == server.files["a.bin"][:BLOCK]
    assert server.sent["a.bin", 0] == 3
    server.drops = 3
    with refused("a.bin cannot be read after 3 attempts", "start again", error=RunFailed):
        file.pread(BLOCK, BLOCK)
    server.status = 503
    with refused("a.bin cannot be read after 3 attempts: 503", error=RunFailed):
        remote_file()
    with refused("cannot be read after 3 attempts", error=RunFailed):
        RemoteFile("http://127.0.0.1:1/a.bin", tmp_path, 1 << 20)


def test_a_missing_or_closed_file_is_not_tried_again(server, remote_file):
    server.status = 403
    with refused("403", "credentials"):
        remote_file()
    server.status = 0
    file = remote_file()
    with refused("b.bin cannot be read: it does not exist", "check the URL"):
        remote_file("b.bin")
    del server.files["a.bin"]
    started = time.monotonic()
    with refused("a.bin cannot be read: it does not exist"):
        file.pread(1, 0)
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("size", [10 * BLOCK + 137, BLOCK])
def test_a_file_that_changes_is_not_read_on(server, remote_file, size):
    old, file = server.files["a.bin"], remote_file()
    assert file.pread(10, 0) == old[:10]
    server.files["a.bin"] = np.random.default_rng(2).bytes(size)
    with refused("a.bin has changed", "prepare the data again", error=RunFailed):
        file.pread(10, 5 * BLOCK)
    new = remote_file()  # nothing of the old one
    assert new.version != file.version
    with refused("a.bin has changed since it was prepared"):
        remote_file(version=file.version)
    assert new.pread(size, 0) == server.files["a.bin"]


def test_a_server_without_ranges_is_refused(server, remote_file):
    server.whole = True
    with refused("sends the whole file", "download it", error=RunFailed):
        remote_file().pread(1, 0)


def test_what_a_killed_process_left_is_no_block(server, remote_file, tmp_path):
    body, first = server.files["a.bin"], remote_file(size=2 * BLOCK)
    first.pread(BLOCK, 4 * BLOCK)
    (torn,) = (tmp_path / "cache").glob("*-000004")
    torn.write_bytes(b"torn")
    (tmp_path / "cache" / ".other.123.new").write_bytes(b"left over")
    assert first.pread(BLOCK, 4 * BLOCK) == body[4 * BLOCK : 5 * BLOCK]
    assert torn.stat().st_size == BLOCK
    assert first.pread(len(body), 0) == body and size_of(tmp_path / "cache") <= 2 * BLOCK


def test_two_readers_share_a_cache(server, remote_file, tmp_path):
    """As two processes do: each opens the lock files for itself."""
    body = server.files["b.bin"] = server.files["a.bin"]

    def read_all(_):
        """The first file within a small cache, the second within a large one."""
        largest = 0
        for name, size in (("a.bin", 3 * BLOCK), ("b.bin", 1 << 20)):
            file = remote_file(name, str(size), size)
            for place in range(0, len(body), 250):
                assert file.pread(250, place) == body[place : place + 250]
                largest = max(largest, size_of(tmp_path / str(3 * BLOCK)))
        return largest

    with ThreadPoolExecutor(2) as pool:
        assert max(pool.map(read_all, range(2))) <= 3 * BLOCK
    assert {count for (name, _), count in server.sent.items() if name == "b.bin"} == {1}


def test_remote_shards_are_the_local_ones_and_sources_share_a_cache(server, tmp_path):
    draw = np.random.default_rng(3)
    for name in ("train-0.bin", "train-1.bin", "val-0.bin", "other-2.bin"):
        server.files[name] = draw.integers(0, 257, 4000).astype("<u2").tobytes()
        (tmp_path / name).write_bytes(server.files[name])
    here, there = (
        recipe_for(
            [f"shards:{place}*-[01].bin", f"shards:{place}other-*.bin"],
            tmp_path / "data",
            context=32,
            cache_gb=5e-6,
        )
        for place in (f"{tmp_path}/", server.url(""))
    )
    local, data = open_data(here), open_data(there)
    for ours, wanted in ((data.train, local.train), (data.val, local.val)) * 2:
        rows = np.arange(len(wanted))
        assert len(ours) == len(wanted) > 100
        assert (ours.read(rows).tokens == wanted.read(rows).tokens).all()
    caches = [path for path in (tmp_path / "data").rglob("*cache") if path.is_dir()]
    assert 2 * BLOCK < sum(map(size_of, caches)) <= 5000
    server.files["train-1.bin"] = draw.integers(0, 257, 4000).astype("<u2").tobytes()
    with refused("has changed since it was prepared"):
        open_data(there).train.read(np.arange(len(local.train)))


def test_urls_of_a_pattern(server, tmp_path):
    server.files |= {"train-1.bin": b"1", "train-0.bin": b"0", "val-0.bin": b"2"}
    base = server.url("")
    assert list_urls(f"{base}train-*.bin") == [f"{base}train-0.bin", f"{base}train-1.bin"]
    assert list_urls(f"{base}a.bin?token=1") == [f"{base}a.bin?token=1"]
    for words, call in (
        ("no file matches", lambda: list_urls(f"{base}test-*.bin")),
        ("nothing://", lambda: list_urls("nothing://a/*.bin")),
        ("s3fs", lambda: RemoteFile("s3://bucket/a.bin", tmp_path, 0)),
    ):
        with refused(words):
            call()
