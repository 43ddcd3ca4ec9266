"""`windlass prepare` under kill -9, and many at once: one works, none is lost, the bytes are the
same.
"""

import json
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from helpers import command

KILL_AFTER = 25
"""Shards that each attempt gets done before it is killed; there are about 120."""
TEXT = "the quick brown fox jumps over the lazy dog and goes on to something else entirely"


def prepare(source, directory):
    places = f"data.source={source}", f"data.dir={directory}"
    settings = "data.max_tokens=0", "data.shard_tokens=20000", "data.workers=2"
    return command("prepare", "quickstart", *places, *settings)


def start(source, directory, log):
    with log.open("a") as out:
        return subprocess.Popen(prepare(source, directory), stdout=out, stderr=subprocess.STDOUT)


def content(directory: Path):
    skipped = (".lock", "verified.json", "progress.json")
    files = [p for p in directory.rglob("*") if p.is_file() and p.name not in skipped]
    return {path.name: path.read_bytes() for path in files}


def committed(directory: Path) -> int:
    return len(list(directory.glob("shard-*.bin")))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepare")
    source, words = folder / "x.jsonl", TEXT.split()
    with source.open("w") as file:
        for i in range(12_000):
            text = " ".join(words[(i * j) % len(words)] for j in range(1, 40 + i % 50))
            file.write(json.dumps({"text": f"{i} {text}"}) + "\n")
    subprocess.run(prepare(source, folder / "whole"), check=True, capture_output=True, timeout=120)
    return source, content(folder / "whole")


def test_killed_again_and_again_it_ends_with_the_same_bytes(whole, tmp_path):
    source, wanted = whole
    directory, log = tmp_path / "data", tmp_path / "log.txt"
    kills = 0
    while True:
        process = start(source, directory, log)
        before, deadline = committed(directory), time.monotonic() + 100
        while (
            process.poll() is None
            and committed(directory) < before + KILL_AFTER
            and time.monotonic() < deadline
        ):
            time.sleep(0.002)
        if process.poll() is not None:
            break
        process.kill()
        process.wait()
        kills += 1
        assert kills < 50
    assert process.returncode == 0 and "resuming after" in log.read_text(), log.read_text()
    assert kills >= 2 and content(directory) == wanted
    assert not list(directory.glob(".*.tmp")) and not list(directory.glob(".*.new"))


def works(process, directory) -> bool:
    """Whether a process holds the directory's lock: one that waits has the file open for a moment
    only.
    """
    for _ in range(20):
        try:
            files = psutil.Process(process.pid).open_files()
        except psutil.Error:
            return False
        if not any(Path(file.path).name == ".lock" for file in files):
            return False
        time.sleep(0.005)
    return process.poll() is None


def test_of_many_at_once_one_works_and_a_killed_one_is_taken_over(whole, tmp_path):
    source, wanted = whole
    directory, log = tmp_path / "data", tmp_path / "log.txt"
    processes = [start(source, directory, log) for _ in range(3)]
    deadline = time.monotonic() + 100
    while committed(directory) < 3 and time.monotonic() < deadline:
        time.sleep(0.005)
    working: list[subprocess.Popen[bytes]] = []
    while not working and time.monotonic() < deadline:
        working = [process for process in processes if works(process, directory)]
    assert len(working) == 1
    working[0].send_signal(signal.SIGSTOP)
    while log.read_text().count("waiting for another process") < 2 and time.monotonic() < deadline:
        time.sleep(0.005)
    working[0].kill()
    codes = [p.wait(timeout=100) for p in processes]
    assert sorted(codes) == [-9, 0, 0], log.read_text()
    assert log.read_text().count("resuming after") == 1 and content(directory) == wanted
    assert log.read_text().count("already") == 1  # who waited to the end made nothing
