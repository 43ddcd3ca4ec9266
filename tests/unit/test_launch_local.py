"""The local launcher with tiny workers: real processes, real signals."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from windlass.errors import UserError
from windlass.launch import local
from windlass.launch.local import launch, next_world, parse_worlds

WORKER = """
import json, os, signal, sys, time
from pathlib import Path
rank, world, attempt = (int(os.environ[k]) for k in ("RANK", "WORLD_SIZE", "WINDLASS_ATTEMPT"))
here = Path(sys.argv[1])
def ready(**more):
    (here / f"{attempt}-{rank}.tmp").write_text(json.dumps({"pid": os.getpid(), "environ": dict(os.environ), **more}))
    (here / f"{attempt}-{rank}.tmp").rename(here / f"{attempt}-{rank}.json")
def others():
    while len(list(here.glob(f"{attempt}-*.json"))) < world:
        time.sleep(0.01)
def wait():
    time.sleep(60)
"""


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorter waits: the tests measure what happens, not when."""
    monkeypatch.setattr(local, "SETTLE_SECONDS", 0.3)
    monkeypatch.setattr(local, "TERM_SECONDS", 0.5)


@pytest.fixture
def run(tmp_path: Path, quick: None) -> Callable[..., tuple[int, str, dict[str, dict]]]:
    def run(body: str, worlds: int | list[int] = 2, restarts: int = 0, **more) -> tuple[int, str, dict[str, dict]]:
        said: list[str] = []
        command = [sys.executable, "-c", WORKER + body, str(tmp_path)]
        code = launch(command, worlds, restarts, log=said.append, **more)
        return code, "\n".join(said), words(tmp_path)

    return run


def words(folder: Path) -> dict[str, dict]:
    """What the workers left, by `attempt-rank`."""
    return {file.stem: json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))}


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_each_rank_knows_its_place(run):
    code, said, left = run(
        "ready(); others()", 3, environ={**os.environ, "KEPT": "yes", "RANK": "9"} | {"OMP_NUM_THREADS": "7"}
    )
    assert (code, said, len(left)) == (0, "", 3)
    for rank in range(3):
        environ = left[f"0-{rank}"]["environ"]
        place = {k: environ[k] for k in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "WINDLASS_LAUNCHED")}
        assert place == {
            "RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "WINDLASS_LAUNCHED": "1",
        }  # fmt: skip
        assert (environ["KEPT"], environ["OMP_NUM_THREADS"], environ["MASTER_ADDR"]) == ("yes", "7", "127.0.0.1")
        assert ("WINDLASS_STORE_FD" in environ) == (rank == 0)
    assert len({word["environ"]["MASTER_PORT"] for word in left.values()}) == 1
    assert not Path(left["0-0"]["environ"]["WINDLASS_WATCH_DIR"]).exists()


def test_cores_are_shared_among_the_ranks(run):
    environ = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    _, _, left = run("ready()", 2, environ=environ)
    assert left["0-1"]["environ"]["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 2))


def test_rank_0_is_given_the_port_open(run):
    body = """
import socket
if rank == 0:
    held = socket.socket(fileno=int(os.environ["WINDLASS_STORE_FD"]))
    ready(port=held.getsockname()[1], listens=held.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
"""
    code, _, left = run(body)
    assert code == 0
    assert (str(left["0-0"]["port"]), left["0-0"]["listens"]) == (left["0-0"]["environ"]["MASTER_PORT"], 1)


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


def test_bad_input_is_said_once(run, capfd: pytest.CaptureFixture[str]):
    code, said, _ = run("print('windlass: no such key', file=sys.stderr); sys.exit(2)", 3)
    assert (code, said) == (2, "")
    assert capfd.readouterr().err == "windlass: no such key\n"


def test_bad_input_of_another_rank_alone_is_said_too(run):
    code, said, _ = run(
        "ready(); others()\nif rank: print('windlass: no such file here', file=sys.stderr); sys.exit(2)\nwait()"
    )
    assert (code, said) == (2, "windlass: no such file here")


def test_a_killed_rank_ends_the_rest_and_is_named(run):
    code, said, left = run("ready(); others()\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)\nwait()", 3)
    assert code == 1
    assert "rank 1 of 3 on" in said
    assert "was killed by SIGKILL" in said
    assert all(gone(word["pid"]) for word in left.values())


def test_a_rank_that_ignores_sigterm_is_killed(run):
    body = "signal.signal(signal.SIGTERM, signal.SIG_IGN); ready(); others()\nif rank == 1: sys.exit(7)\nwait()"
    code, said, left = run(body)
    assert code == 1
    assert "rank 1 of 2" in said
    assert "failed with exit code 7" in said
    assert gone(left["0-0"]["pid"])


def test_the_failing_ranks_own_words_are_shown(run):
    code, said, _ = run(
        "ready(); others()\nif rank == 1: print('so far'); raise ValueError('a shape is wrong')\nwait()"
    )
    assert code == 1
    assert "[rank 1] so far" in said
    assert "[rank 1] ValueError: a shape is wrong" in said


def test_the_first_failure_is_the_cause_not_its_echo(run):
    body = """
from windlass.processes import Failure
ready(); others()
word = Failure(rank, "h", 12, "backward", "ValueError: it was me" if rank == 1 else "connection closed", time.time(), rank != 1)
if rank == 1: time.sleep(0.15)
word.write(os.environ["WINDLASS_WATCH_DIR"], rank)
sys.exit(1)
"""
    code, said, _ = run(body)
    assert code == 1
    assert "rank 1 of 2" in said
    assert "last error: ValueError: it was me" in said


def test_a_rank_that_is_slow_to_end_after_its_failure_is_the_cause_all_the_same(run):
    """It reported, the other ended by that, and it was still at tidying up when the launcher ended it."""
    code, said, _ = run("""
from windlass import processes
failure = processes.Failure(0, "here", 7, "forward", "ValueError: mine", time.time())
directory = os.environ[processes.WATCH_DIR]
if rank == 0:
    failure.write(directory, 0)
    wait()
while not processes.read_failure(directory, 0):
    time.sleep(0.01)
failure.write(directory, 1)
sys.exit(1)
""")
    assert code == 1
    assert "rank 0 of 2" in said and " failed; the run has ended" in said and "last error: ValueError: mine" in said


def test_step_and_phase_of_a_killed_rank(run):
    body = """
from windlass import processes
status = processes.RankStatus(rank, os.environ[processes.WATCH_DIR])
status.mark(12, "a rather long phase")
status.mark(12, "backward")
ready(); others()
if rank == 1: os.kill(os.getpid(), signal.SIGKILL)
wait()
"""
    code, said, _ = run(body)
    assert code == 1
    assert "rank 1 of 2" in said and "at step 12, phase backward;" in said


def test_a_suspended_rank_is_lost(run):
    body = "ready(); others()\nif rank == 1: os.kill(os.getpid(), signal.SIGSTOP)\nwait()"
    code, said, left = run(body, stopped_seconds=0.3)
    assert code == 1
    assert "rank 1 of 2" in said
    assert "was suspended" in said
    assert all(gone(word["pid"]) for word in left.values())


def test_restart_with_fewer_ranks_after_a_loss(run):
    body = "ready(); others()\nif attempt == 0 and rank == 2: os.kill(os.getpid(), signal.SIGKILL)\nif attempt == 0: wait()"
    code, said, left = run(body, [2, 4, 3], 2)
    assert code == 0
    assert "restart 1 of 2, with 3 ranks" in said
    assert sorted(left) == ["0-0", "0-1", "0-2", "0-3", "1-0", "1-1", "1-2"]
    assert left["0-0"]["environ"]["MASTER_PORT"] != left["1-0"]["environ"]["MASTER_PORT"]


def test_restart_with_as_many_after_an_error_and_no_more_often_than_allowed(run):
    code, said, left = run("ready(); sys.exit(1)", [2, 1], 2)
    assert code == 1
    assert said.count("restart") == 2
    assert sorted(left) == ["0-0", "0-1", "1-0", "1-1", "2-0", "2-1"]


@pytest.mark.parametrize("code", [2, 75, 0])
def test_no_restart_where_it_would_change_nothing(run, code: int):
    assert run(f"ready(); sys.exit({code})", 2, 3)[0] == code
    assert sorted(run(f"ready(); sys.exit({code})", 2, 3)[2]) == ["0-0", "0-1"]


def test_a_command_that_does_not_exist():
    with pytest.raises(UserError, match="/no/such/program"):
        launch(["/no/such/program"], 2)


@pytest.mark.parametrize(("text", "worlds"), [("1", [1]), ("4", [4]), ("2..4", [4, 3, 2]), ("3..3", [3])])
def test_numbers_of_ranks(text: str, worlds: list[int]):
    assert parse_worlds(text) == worlds


@pytest.mark.parametrize("text", ["", "0", "x", "4..2", "..", "2..", "-1", "1.5", "1..2..3"])
def test_wrong_numbers_of_ranks(text: str):
    with pytest.raises(UserError, match="neither a number of ranks"):
        parse_worlds(text)


def test_next_world():
    assert next_world([4, 2, 1], 4, lost=True) == 2
    assert next_world([4, 2, 1], 4, lost=False) == 4
    assert next_world([4], 4, lost=True) == 4


DRIVER = """
import sys
from windlass.launch.local import launch
sys.exit(launch(sys.argv[2:], 2))
"""


@pytest.fixture
def driven(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen]]:
    """A launcher in a process of its own, whose workers are ready."""
    started: list[subprocess.Popen] = []

    def start(body: str, **more) -> subprocess.Popen:
        command = [sys.executable, "-c", DRIVER, "-", sys.executable, "-c", WORKER + body, str(tmp_path)]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **more)
        started.append(process)
        wait_for(lambda: len(words(tmp_path)) == 2)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stderr.close()
    for word in words(tmp_path).values():
        assert gone(word["pid"]), "a worker outlived its launcher"


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.02)


SAVES = "signal.signal(signal.{name}, lambda *_: sys.exit(75)); ready(); wait()"


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2"])
def test_a_signal_is_passed_on_and_75_comes_back(driven, name: str):
    process = driven(SAVES.format(name=name))
    process.send_signal(getattr(signal, name))
    assert process.wait(20) == 75
    assert process.stderr.read() == ""


def test_a_closed_terminal_stops_like_sigterm(driven):
    process = driven(SAVES.format(name="SIGTERM"))
    process.send_signal(signal.SIGHUP)
    assert process.wait(20) == 75


def test_a_signal_before_there_is_anything_to_save(driven):
    process = driven("ready(); wait()")
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 75
    assert process.stderr.read().count("stopped by SIGTERM before step 1 of this start") == 1


def test_a_second_interrupt_ends_everything_at_once(driven, tmp_path: Path):
    process = driven(
        "signal.signal(signal.SIGINT, lambda *_: (here / f'noted{rank}').touch()); ready(); wait(); wait()"
    )
    process.send_signal(signal.SIGINT)
    wait_for(lambda: len(list(tmp_path.glob("noted*"))) == 2)
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 1
    assert "interrupted twice" in process.stderr.read()
    assert all(gone(word["pid"]) for word in words(tmp_path).values())


def test_workers_do_not_outlive_a_killed_launcher(driven, tmp_path: Path):
    process = driven("signal.signal(signal.SIGTERM, signal.SIG_IGN); ready(); wait()")
    workers = [word["pid"] for word in words(tmp_path).values()]
    assert len(workers) == 2 and not any(map(gone, workers))
    process.kill()
    process.wait()
    wait_for(lambda: all(map(gone, workers)))


SWEEP = """
import os, subprocess, sys, threading, time
cell = "import os, sys, time; from windlass.processes import exit_with_parent; exit_with_parent(os.getppid()); "
cell += "print(os.getpid(), flush=True); time.sleep(60)"
started = []
thread = threading.Thread(target=lambda: started.append(subprocess.Popen([sys.executable, "-c", cell])))
thread.start()
thread.join()
time.sleep(60)
"""


def test_a_process_outlives_the_thread_that_started_it_but_not_the_process():
    parent = subprocess.Popen([sys.executable, "-c", SWEEP], stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    time.sleep(0.7)
    assert not gone(child)
    parent.kill()
    parent.wait()
    wait_for(lambda: gone(child))
    parent.stdout.close()


def test_rank_0_has_the_terminal(tmp_path: Path):
    controller, terminal = pty.openpty()
    body = "ready(out=sys.stdout.isatty(), err=sys.stderr.isatty(), columns=os.get_terminal_size().columns if rank == 0 else 0)"
    command = [sys.executable, "-c", DRIVER, "-", sys.executable, "-c", WORKER + body, str(tmp_path)]
    process = subprocess.Popen(command, stdout=terminal, stderr=terminal)
    assert process.wait(20) == 0
    os.close(terminal)
    os.close(controller)
    left = words(tmp_path)
    assert (left["0-0"]["out"], left["0-0"]["err"]) == (True, True)
    assert (left["0-1"]["out"], left["0-1"]["err"]) == (False, False)
