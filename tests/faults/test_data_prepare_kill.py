"""`windlass prepare` under kill -9, for every format, and many at once: one works, none is lost, the
bytes are the same, and no process outlives its parent.
"""

import contextlib
import json
import random
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

import forked
from data_fixtures import documents, write_source
from helpers import command
from windlass.data.recipe_sources import SourceSpec
from windlass.data.shards import Corpus, Index
from windlass.data.tokenizer_kinds import byte_tokenizer

ITEMS = {"txt": 1, "chat": 4000, "squad": 7500, "mix": 8000}  # of other kinds 9,000


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
    items = ITEMS.get(kind, 9000)
    texts = [f"{i} {text}" for i, text in enumerate(documents(max(items, 4000), longest=200))]
    how = write_source(folder, kind, texts)
    if kind == "mix":  # in TOML
        parts = [", ".join(f'{key} = "{value}"' for key, value in p.items()) for p in how["mix"]]
        how["mix"] = f"[{', '.join(f'{{{part}}}' for part in parts)}]"
    settings = [f"data.{key}={value}" for key, value in how.items()] + ["model.context=2048"]
    assert forked.run(prepare(settings, folder / "whole"), timeout=120).returncode == 0
    paths = [path.parent for path in (folder / "whole").glob("*/index.json")]
    spec, tokenizer = SourceSpec("x", "x"), byte_tokenizer()
    corpora = [Corpus(path, Index.load(path), spec, tokenizer) for path in paths]
    counts = [(c.index.items, c.documents, len(np.unique(c.field("text")))) for c in corpora]
    # none lost, none double
    assert np.sum(counts, axis=0).tolist() == [items] * 3 and all(c.index.complete for c in corpora)
    return settings, content(folder / "whole")


@pytest.mark.parametrize(
    "kind",
    [
        "jsonl",
        "chat",
        *(
            pytest.param(kind, marks=pytest.mark.full)
            for kind in ("txt", "parquet", "csv", "json", "jsonl.gz", "hf", "mix", "squad")
        ),
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
        with contextlib.suppress(psutil.Error):
            orphans += psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.wait()
        kills += 1
        assert kills < 50
    assert process.returncode == 0 and "going on after" in log.read_text(), log.read_text()
    assert kills >= 2 and content(root) == wanted
    _, alive = psutil.wait_procs(orphans, timeout=20)
    assert not alive and (kind not in ("chat", "squad", "mix") or orphans)


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
