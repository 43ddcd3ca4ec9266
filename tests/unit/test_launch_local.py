"""The local launcher with tiny workers: real processes, real signals."""

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helpers import gone, wait_for
from windlass.errors import UserError
from windlass.launch import local
from windlass.launch.local import launch

WORKER = """
import json, os, signal, sys, time
from pathlib import Path
from windlass.launch import rank_status
from windlass.fileio import read_json
rank, world, attempt = (int(os.environ[k]) for k in ("RANK", "WORLD_SIZE", "WINDLASS_ATTEMPT"))
here, watch = Path(sys.argv[1]), os.environ[rank_status.WATCH_DIR]
def ready(**more):
    (here / f"{attempt}-{rank}.tmp").write_text(json.dumps({"pid": os.getpid(), "environ": dict(os.environ), **more}))
    (here / f"{attempt}-{rank}.tmp").rename(here / f"{attempt}-{rank}.json")
def meet():
    ready()
    while len(list(here.glob(f"{attempt}-*.json"))) < world:
        time.sleep(0.01)
def failed(error, secondary=False, rank=rank):
    status = rank_status.RankStatus(rank, watch)
    status.mark(12, "backward")
    status.write(status.failure(error, secondary))
def wait():
    time.sleep(60)
"""


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, dict[str, dict]]]:
    """Launch workers with a body; the exit code, what was logged, and what they left. The waits are
    shorter than a user's, and no worker outlives its launcher.
    """
    for name, seconds in (("SETTLE", 0.3), ("TERM", 0.5)):
        monkeypatch.setattr(local, f"{name}_SECONDS", seconds)

    def run(body: str, world: int = 2, restarts: int = 0) -> tuple[int, str, dict[str, dict]]:
        logged: list[str] = []
        command = [sys.executable, "-c", WORKER + body, str(tmp_path)]
        code = launch(command, world, restarts, log=logged.append)
        left = reports(tmp_path)
        assert all(gone(report["pid"]) for report in left.values())
        return code, "\n".join(logged), left

    return run


def reports(folder: Path) -> dict[str, dict]:
    return {file.stem: json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))}


def test_each_rank_knows_its_numbers(run, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("RANK", "9")
    code, logged, left = run("meet()", 3)
    assert (code, logged, len(left)) == (0, "", 3)
    cores = str(max(1, len(os.sched_getaffinity(0)) // 3))
    for rank in range(3):
        wanted = {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": "3"}
        wanted |= {"LOCAL_WORLD_SIZE": "3", "WINDLASS_LAUNCHED": "1", "MASTER_ADDR": "127.0.0.1"}
        wanted |= {"OMP_NUM_THREADS": cores, "WINDLASS_PARENT": str(os.getpid())}
        environ = left[f"0-{rank}"]["environ"]
        assert environ.items() >= wanted.items()
        assert ("WINDLASS_STORE_FD" in environ) == (rank == 0)
    assert len({report["environ"]["MASTER_PORT"] for report in left.values()}) == 1
    assert not Path(left["0-0"]["environ"]["WINDLASS_WATCH_DIR"]).exists()


@pytest.mark.parametrize(
    ("exits", "code"),
    [
        ("0 if rank else 75", 75),
        ("75", 75),
        ("1 if rank else 0", 1),
        ("3", 1),
        ("46", 46),
        ("2", 2),
    ],
)
def test_exit_codes(run, exits: str, code: int):
    assert run(f"sys.exit({exits})")[0] == code


def test_bad_input_is_logged_once(run, capfd: pytest.CaptureFixture[str]):
    body = "print('windlass: no such key', file=sys.stderr); sys.exit(2)"
    assert run(body, 3)[:2] == (2, "")
    assert capfd.readouterr().err == "windlass: no such key\n"
    assert run(f"meet()\nif rank: {body}\nwait()")[:2] == (2, "windlass: no such key")


@pytest.mark.parametrize(
    ("body", "texts"),
    [
        (
            "signal.signal(signal.SIGTERM, signal.SIG_IGN); meet()\nif rank == 1: sys.exit(7)\nwait()",
            ["failed with exit code 7"],
        ),
        (
            "if rank == 1: print('so far'); raise ValueError('a shape is wrong')\nwait()",
            ["[rank 1] so far", "[rank 1] ValueError: a shape is wrong"],
        ),
        # With its step and phase, the last of several.
        (
            "status = rank_status.RankStatus(rank, watch); status.mark(11, 'a rather long phase'); status.mark(12, 'backward')\n"
            "meet()\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)\nwait()",
            ["was killed by SIGKILL", "at step 12, phase backward;"],
        ),
        # Rank 0 fails earlier, but only because it lost contact.
        (
            "failed('ValueError: it was me' if rank == 1 else 'connection closed', secondary=rank != 1)\n"
            "time.sleep(0.15 * rank); sys.exit(1)",
            ["failed with exit code 1", "last error: ValueError: it was me"],
        ),
        # Rank 1 reported, rank 0 ended by that, and rank 1 was still busy when the launcher ended
        # it.
        (
            "if rank == 1: failed('ValueError: mine'); wait()\n"
            "while not (other := read_json(Path(watch, 'failure-1.json'))): time.sleep(0.01)\n"
            "rank_status.RankStatus(0, watch).write(rank_status.Failure(**other)); sys.exit(1)",
            [
                " failed at step 12, phase backward; the run has ended",
                "last error: ValueError: mine",
            ],
        ),
    ],
)
def test_a_failed_rank_ends_the_rest_and_is_named(run, body: str, texts: list[str]):
    code, logged, _ = run(body if "meet()" in body else f"meet()\n{body}", 2)
    assert code == 1 and all(text in logged for text in ["rank 1 of 2 on", *texts]), logged


@pytest.mark.parametrize(("code", "attempts"), [(1, 4), (2, 1), (75, 1), (0, 1)])
def test_a_restart_only_if_it_helps(run, code: int, attempts: int):
    ended, logged, left = run(f"ready(); sys.exit({code})", 2, 3)
    assert (ended, logged.count("restart ")) == (code, attempts - 1)
    assert sorted(left) == [f"{attempt}-{rank}" for attempt in range(attempts) for rank in range(2)]


def test_a_command_that_does_not_exist():
    with pytest.raises(UserError, match="/no/such/program"):
        launch(["/no/such/program"], 2)


DRIVER = "import sys; from windlass.launch.local import launch; sys.exit(launch(sys.argv[1:], 2))"


@pytest.fixture
def driven(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen]]:
    """A launcher in a process of its own, whose workers are ready."""
    started: list[subprocess.Popen] = []

    def start(body: str, **more) -> subprocess.Popen:
        command = [sys.executable, "-c", DRIVER, sys.executable, "-c", WORKER + body, str(tmp_path)]
        pipes = {"stderr": subprocess.PIPE, "text": True} | more
        started.append(subprocess.Popen(command, **pipes))
        wait_for(lambda: len(reports(tmp_path)) == 2)
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()
    for report in reports(tmp_path).values():
        wait_for(lambda report=report: gone(report["pid"]))  # a worker never outlives its launcher


@pytest.mark.parametrize("sent", ["SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP"])
def test_a_signal_is_passed_on_and_75_comes_back(driven, sent: str):
    received = "SIGTERM" if sent == "SIGHUP" else sent
    process = driven(f"signal.signal(signal.{received}, lambda *_: sys.exit(75)); ready(); wait()")
    process.send_signal(getattr(signal, sent))
    assert (process.wait(20), process.stderr.read()) == (75, "")


STOP = "rank_status.RankStatus(0, watch).mark(12, rank_status.STOPPED)"


@pytest.mark.parametrize(("saves", "code", "shown"), [(f"rank or {STOP}", 75, 0), ("None", 130, 1)])
def test_a_second_interrupt_ends_everything_at_once(
    driven, tmp_path: Path, saves: str, code: int, shown: int
):
    """Its message does not contradict a rank that has stopped."""
    process = driven(
        f"def note(*_): (here / f'noted{{rank}}').touch(); {saves}\n"
        "signal.signal(signal.SIGINT, note); ready(); wait(); wait()"
    )
    process.send_signal(signal.SIGINT)
    wait_for(lambda: len(list(tmp_path.glob("noted*"))) == 2)
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == code
    text = process.stderr.read()
    assert text.count("\n") == text.count("interrupted twice") == shown


def test_ranks_do_not_outlive_a_killed_launcher(driven, tmp_path: Path):
    process = driven("signal.signal(signal.SIGTERM, signal.SIG_IGN); ready(); wait()")
    workers = [report["pid"] for report in reports(tmp_path).values()]
    assert len(workers) == 2 and not any(map(gone, workers))
    process.kill()
    process.wait()
    wait_for(lambda: all(map(gone, workers)))


def test_rank_0_has_the_terminal(driven, tmp_path: Path):
    controller, terminal = pty.openpty()
    process = driven(
        "ready(out=sys.stdout.isatty(), err=sys.stderr.isatty())", stdout=terminal, stderr=terminal
    )
    assert process.wait(20) == 0
    os.close(terminal)
    os.close(controller)
    shown = [(report["out"], report["err"]) for report in reports(tmp_path).values()]
    assert shown == [(True, True), (False, False)]
