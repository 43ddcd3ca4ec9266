"""`windlass prepare` under kill -9, and many at once: one works, none is lost, the bytes are the same."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from windlass.data.lock import only_one

KILL_AFTER = 25
"""Shards that each attempt gets done before it is killed; there are about 120."""
WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "the",
    "lazy",
    "dog",
    "and",
    "goes",
    "on",
    "to",
    "something",
    "else",
    "entirely",
]


def corpus(path: Path, count: int) -> Path:
    with path.open("w") as file:
        for i in range(count):
            text = " ".join(WORDS[(i * j) % len(WORDS)] for j in range(1, 40 + i % 50))
            file.write(json.dumps({"text": f"{i} {text}"}) + "\n")
    return path


def command(source, directory):
    return [
        sys.executable, "-m", "windlass", "prepare", "quickstart", f"data.source={source}", f"data.dir={directory}",
        "data.max_tokens=0", "data.shard_tokens=20000", "data.workers=2",
    ]  # fmt: skip


def start(source, directory, log):
    with log.open("a") as out:
        return subprocess.Popen(command(source, directory), stdout=out, stderr=subprocess.STDOUT)


def content(directory: Path):
    skipped = (".lock", "verified.json", "progress.json")
    return {p.name: p.read_bytes() for p in directory.rglob("*") if p.is_file() and p.name not in skipped}


def committed(directory: Path) -> int:
    return len(list(directory.glob("shard-*.bin")))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepare")
    source = corpus(folder / "x.jsonl", 12_000)
    subprocess.run(command(source, folder / "whole"), check=True, capture_output=True, timeout=120)
    return source, content(folder / "whole")


def test_killed_again_and_again_it_ends_with_the_same_bytes(whole, tmp_path):
    source, wanted = whole
    directory, log = tmp_path / "data", tmp_path / "log.txt"
    kills = 0
    while True:
        process = start(source, directory, log)
        before, deadline = committed(directory), time.monotonic() + 100
        while process.poll() is None and committed(directory) < before + KILL_AFTER and time.monotonic() < deadline:
            time.sleep(0.002)
        if process.poll() is not None:
            break
        process.send_signal(signal.SIGKILL)
        process.wait()
        kills += 1
        assert kills < 50
    assert process.returncode == 0, log.read_text()
    assert kills >= 2
    assert content(directory) == wanted
    assert "going on after" in log.read_text() or kills == 0
    assert not list(directory.glob(".*.tmp"))


def test_of_many_at_once_one_works_and_a_killed_one_is_taken_over(whole, tmp_path):
    source, wanted = whole
    directory, log = tmp_path / "data", tmp_path / "log.txt"
    processes = [start(source, directory, log) for _ in range(3)]
    deadline = time.monotonic() + 100
    while committed(directory) < 3 and time.monotonic() < deadline:
        time.sleep(0.005)
    holder = json.loads((directory / ".lock").read_text())["pid"]
    assert holder in [p.pid for p in processes]
    os.kill(holder, signal.SIGKILL)
    codes = [p.wait(timeout=100) for p in processes]
    assert sorted(codes) == [-9, 0, 0], log.read_text()
    assert log.read_text().count("going on after") == 1
    assert content(directory) == wanted


def test_who_waits_says_for_whom(tmp_path, monkeypatch):
    monkeypatch.setattr("windlass.data.lock.POLL_SECONDS", 0.02)
    monkeypatch.setattr("windlass.data.lock.TELL_AFTER_SECONDS", 0.0)
    hold = (
        "import sys; from pathlib import Path; from windlass.data.lock import only_one\n"
        "with only_one(Path(sys.argv[1]), lambda: False, print, 'prepares'):\n    print('held', flush=True); sys.stdin.read()"
    )
    held = [sys.executable, "-c", hold, str(tmp_path)]
    other = subprocess.Popen(held, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None and other.stdin is not None
    assert other.stdout.readline() == "held\n"
    told = []
    asked = iter([False, False, True])
    with only_one(tmp_path, lambda: next(asked), told.append, "prepares") as left:
        assert not left  # the other one did it, though it lives on
    assert len(told) == 1 and told[0].startswith(f"waiting for process {other.pid} on ")
    other.kill()
    other.wait()
    with only_one(tmp_path, lambda: False, told.append, "prepares") as left:
        assert left  # a lock does not outlive its process
    for pipe in (other.stdout, other.stdin):
        pipe.close()
