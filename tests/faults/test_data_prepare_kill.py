"""`windlass prepare` under kill -9, for every format, and many at once: one works, none is lost, the
bytes are the same, and no process outlives its parent.
"""

import json
import random
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import forked
from data_fixtures import conversations, jsonl, questions
from helpers import command
from windlass.data.shards import Index, Table

WORDS = "the quick brown fox jumps over the lazy dog and goes on to something else entirely".split()


def texts(count):
    return [
        f"{i} " + " ".join(WORDS[(i * j) % len(WORDS)] for j in range(1, 40 + i % 50))
        for i in range(count)
    ]


def write(folder: Path, kind: str) -> tuple[list[str], int]:
    """Settings of a source, and the items that it has."""
    if kind == "text":
        (folder / "x.txt").write_text("\n".join(texts(9000)))
        return [f"data.source={folder / 'x.txt'}"], 1
    if kind == "jsonl":
        source = jsonl(folder / "x.jsonl", texts(9000))
    elif kind == "parquet":
        source = folder / "x.parquet"
        pq.write_table(pa.table({"text": texts(9000)}), source, row_group_size=1000)
    elif kind == "chat":
        source = conversations(folder / "x.jsonl", 4000)
        return [f"data.source={source}", "data.format=chat", "model.context=2048"], 4000
    else:
        source = questions(folder / "x.json", 1500)
        return [f"data.source=squad:{source}", "data.format=squad"], 7500
    return [f"data.source={source}"], 9000


def prepare(settings, root):
    sizes = "data.max_tokens=0", "data.shard_tokens=20000", "data.workers=2"
    return command("prepare", "quickstart", *settings, *sizes, f"data.dir={root}")


def start(settings, root, log):
    with log.open("a") as out:
        words = prepare(settings, root)
        return forked.Forked(words, stdout=out, stderr=subprocess.STDOUT)


def content(root: Path):
    skipped = (".lock", "verified.json")
    files = [p for p in root.rglob("*") if p.is_file() and p.name not in skipped]
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


def committed(root: Path) -> int:
    return len(list(root.glob("*/shard-*.bin")))


def whole_of(folder: Path, kind: str):
    """Settings of a source, and the files of its undisturbed preparation."""
    settings, items = write(folder, kind)
    assert forked.run(prepare(settings, folder / "whole"), timeout=120).returncode == 0
    (directory,) = [path.parent for path in (folder / "whole").glob("*/index.json")]
    index = Index.load(directory)
    assert index.complete and index.items == index.documents == items  # none lost, none double
    if kind != "text":
        table = Table(directory, index)
        assert len(np.unique(table.field("text"))) == items
    return settings, content(folder / "whole")


def children(process) -> list[psutil.Process]:
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.Error:
        return []


@pytest.mark.parametrize(
    "kind",
    [
        "jsonl",
        "chat",
        *(pytest.param(kind, marks=pytest.mark.full) for kind in ("text", "parquet", "squad")),
    ],
)
def test_killed_again_and_again_it_ends_with_the_same_bytes(tmp_path, kind):
    settings, wanted = whole_of(tmp_path, kind)
    root, log, draw = tmp_path / "data", tmp_path / "log.txt", random.Random(5)
    kills, kill_after = 0, max(2, len(wanted) // 12)
    orphans: list[psutil.Process] = []
    while True:
        process = start(settings, root, log)
        before, deadline = committed(root), time.monotonic() + 100
        while (
            process.poll() is None
            and committed(root) < before + kill_after
            and time.monotonic() < deadline
        ):
            time.sleep(0.002)
        time.sleep(draw.random() * 0.02)
        if process.poll() is not None:
            break
        orphans += children(process)
        process.kill()
        process.wait()
        kills += 1
        assert kills < 50
    assert process.returncode == 0 and "going on after" in log.read_text(), log.read_text()
    assert kills >= 2 and content(root) == wanted
    _, alive = psutil.wait_procs(orphans, timeout=20)
    assert not alive and (kind not in ("chat", "squad") or orphans)


def works(process, root) -> bool:
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


def test_of_many_at_once_one_works_and_a_killed_one_is_taken_over(tmp_path):
    settings, wanted = whole_of(tmp_path, "jsonl")
    root, log = tmp_path / "data", tmp_path / "log.txt"
    processes = [start(settings, root, log) for _ in range(3)]
    deadline = time.monotonic() + 100
    while committed(root) < 3 and time.monotonic() < deadline:
        time.sleep(0.005)
    working: list[subprocess.Popen[bytes]] = []
    while not working and time.monotonic() < deadline:
        working = [process for process in processes if works(process, root)]
    assert len(working) == 1
    working[0].send_signal(signal.SIGSTOP)
    while log.read_text().count("waiting for another process") < 2 and time.monotonic() < deadline:
        time.sleep(0.005)
    working[0].kill()
    codes = [p.wait(timeout=100) for p in processes]
    assert sorted(codes) == [-9, 0, 0], log.read_text()
    assert log.read_text().count("going on after") == 1 and content(root) == wanted
    assert log.read_text().count("already") == 1  # who waited to the end made nothing
    assert json.loads(next(root.glob("*/verified.json")).read_text())
