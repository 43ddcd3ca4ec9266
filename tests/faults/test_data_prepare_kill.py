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
"""Shards that each attempt gets done before it is killed; there are about 100."""
WORDS = "the quick brown fox jumps over the lazy dog and goes on to something else entirely".split()


def texts(count):
    for i in range(count):
        words = " ".join(WORDS[(i * j) % len(WORDS)] for j in range(1, 40 + i % 50))
        yield f"{i} {words}"


def write_source(kind: str, folder: Path) -> str:
    """A source of a format; the value of `data.source`."""
    items = list(texts(10_000))
    if kind == "text":
        (folder / "x.txt").write_text("\n".join(items))
    elif kind == "squad":
        questions = []
        for number, text in enumerate(items):
            answer = {"text": str(number), "answer_start": 0}
            qa = {"id": str(number), "question": "What number is it?", "answers": [answer]}
            questions.append({"title": text[:20], "paragraphs": [{"context": text, "qas": [qa]}]})
        (folder / "x.json").write_text(json.dumps({"data": questions}))
        return f"squad:{folder / 'x.json'}"
    else:
        with (folder / "x.jsonl").open("w") as file:
            for number, text in enumerate(items):
                said = [{"role": "user", "content": text}, {"role": "assistant", "content": "yes"}]
                item = {"text": text} if kind == "jsonl" else {"messages": said}
                line = json.dumps(item)
                file.write(line[: None if number % 100 else 9] + "\n")  # some cannot be read
    return str(next(folder.glob("x.*")))


def prepare(kind, source, directory):
    form = {"chat": "chat", "squad": "squad"}.get(kind, "text")
    settings = [f"data.source={source}", f"data.dir={directory}", f"data.format={form}"]
    settings += ["data.max_tokens=0", "data.shard_tokens=20000", "data.workers=2"]
    settings += ["data.on_bad_item=skip", "data.tokenizer=byte", "model.context=1024"]
    return command("prepare", "quickstart", *settings)


def start(kind, source, directory, log):
    with log.open("a") as out:
        words = prepare(kind, source, directory)
        return subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT)


def content(directory: Path):
    skipped = (".lock", "verified.json")
    files = [p for p in directory.rglob("*") if p.is_file() and p.name not in skipped]
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def committed(directory: Path) -> int:
    return len(list(directory.glob("*/shard-*.bin")))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A source of a format, and the content of its data directory."""
    done = {}

    def of(kind):
        if kind not in done:
            folder = tmp_path_factory.mktemp(kind)
            source = write_source(kind, folder)
            words = prepare(kind, source, folder / "whole")
            subprocess.run(words, check=True, capture_output=True, timeout=120)
            done[kind] = source, content(folder / "whole")
        return done[kind]

    return of


@pytest.mark.parametrize("kind", ["jsonl", "text", "chat", "squad"])
def test_killed_again_and_again_it_ends_with_the_same_bytes(prepared, tmp_path, kind):
    source, wanted = prepared(kind)
    directory, log = tmp_path / "data", tmp_path / "log.txt"
    kills = 0
    while True:
        process = start(kind, source, directory, log)
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
    assert process.returncode == 0 and "going on after" in log.read_text(), log.read_text()
    assert kills >= 2 and content(directory) == wanted
    assert not list(directory.rglob(".*.tmp")) and not list(directory.rglob(".*.new"))


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


def test_of_many_at_once_one_works_and_a_killed_one_is_taken_over(prepared, tmp_path):
    source, wanted = prepared("jsonl")
    directory, log = tmp_path / "data", tmp_path / "log.txt"
    processes = [start("jsonl", source, directory, log) for _ in range(3)]
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
    assert log.read_text().count("going on after") == 1 and content(directory) == wanted
    assert log.read_text().count("already") == 1  # who waited to the end made nothing
