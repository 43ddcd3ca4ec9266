"""Trackers that hang, refuse, swallow, answer nonsense or run out of disk: the run beside them does
not notice.
"""

import http.server
import os
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import psutil
import pytest

from helpers import wait_for
from windlass.fileio import locked
from windlass.ledger import Ledger, read_lines
from windlass.recipe import Recipe
from windlass.telemetry.trackers import Trackers

KEY = "0123456789abcdef0123456789abcdef01234567"
STEPS = 20


@pytest.fixture
def run(tmp_path, monkeypatch) -> Path:
    """A run that has no trainer, with its recipe."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    path = tmp_path / "runs" / "run"
    path.mkdir(parents=True)
    (path / "recipe.toml").write_text(Recipe().toml())
    return path


def train(run: Path, *handles: Trackers) -> list:
    """The stand-in for training: a ledger of STEPS steps, polling the trackers as the loop does."""
    ledger, notes = Ledger(run / "metrics.jsonl"), []
    ledger.write("event", 0, event="started", world=1)
    for step in range(1, STEPS + 1):
        ledger.write("train", step, loss=1 / step)
        notes += [note for handle in handles for note in handle.poll()]
    ledger.write("event", STEPS, event="finished")
    ledger.close()
    return notes


def pids(*handles: Trackers) -> list[int]:
    return [process.pid for handle in handles for process in handle.processes.values()]


def gone(pid: int) -> bool:
    """Whether a process and its whole group have ended."""
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) == pid and process.status() != psutil.STATUS_ZOMBIE:
                return False
    return True


def unharmed(run: Path) -> bool:
    """Whether the ledger is as without trackers."""
    steps = [line["step"] for line in read_lines(run / "metrics.jsonl") if line["kind"] == "train"]
    return steps == [*range(1, STEPS + 1)]


def shown_by_tensorboard(run: Path) -> list[int]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard")).Reload()
    return [x.step for x in events.Scalars("train/loss")]


def put_first(monkeypatch, folder: Path, code: str, *names: str) -> None:
    """Libraries of these names, with this code, before the real ones for every process that is
    started from now on.
    """
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)


@pytest.fixture
def hung_imports(tmp_path, monkeypatch):
    code = "import time\ntime.sleep(3600)\n"
    put_first(monkeypatch, tmp_path / "hung", code, "tensorboard", "mlflow", "wandb")


def test_imports_that_hang_and_an_exporter_that_dies_cost_a_bounded_time_and_one_line_each(
    run, hung_imports
):
    handle = Trackers(run, ["tensorboard", "mlflow", "wandb"], 60.0)
    started = pids(handle)
    os.kill(handle.processes["mlflow"].pid, signal.SIGKILL)
    handle.processes["mlflow"].wait()
    notes = train(run, handle) + handle.finish(0.5)
    assert [note.text.partition(":")[0] for note in notes] == ["mlflow", "tensorboard", "wandb"]
    assert all(note.warning and f"windlass track {run} --to" in note.text for note in notes)
    assert handle.poll() == [] and unharmed(run) and all(gone(pid) for pid in started)


@contextmanager
def black_hole(backlog: int = 0, fill: int = 3):
    """An address that takes no more connections and does not say so: its queue is full."""
    with socket.socket() as server, ExitStack() as stack:
        server.bind(("127.0.0.1", 0))
        server.listen(backlog)
        for _ in range(fill):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(server.getsockname())
        yield server.getsockname()[1]


@contextmanager
def broken():
    """A server whose every answer is 500."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(500)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_POST = do_PUT = do_GET

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


@contextmanager
def full_disk():
    """What is started in here can make no file longer than a kilobyte."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_no_way_to_the_server_and_no_room_on_the_disk(run, tmp_path, monkeypatch):
    filled = shutil.copytree(run, tmp_path / "filled")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://me:{KEY}@127.0.0.1:{port}")
    handles = [Trackers(run, ["mlflow"], 60.0)]
    with full_disk():
        handles.append(Trackers(filled, ["tensorboard"], 60.0))
    started, notes = pids(*handles), train(filled, *handles) + train(run, *handles)

    def both_failed():
        notes.extend(note for handle in handles for note in handle.poll())
        return len(notes) == 2

    wait_for(both_failed, 120)
    notes += [note for handle in handles for note in handle.finish(3.0)]
    assert unharmed(run) and unharmed(filled) and all(gone(pid) for pid in started)
    assert sorted(note.text.partition(":")[0] for note in notes) == ["mlflow", "tensorboard"]
    assert all(note.warning and "windlass track" in note.text for note in notes)
    text = "\n".join(note.text for note in notes)
    assert "File too large" in text and KEY not in text
    logs = b"".join(path.read_bytes() for path in tmp_path.rglob("*.log"))
    assert b"Connection refused" in logs and KEY.encode() not in logs


@pytest.mark.full
@pytest.mark.parametrize(
    "server", [black_hole, partial(black_hole, 64, 0), broken], ids=["full", "silent", "broken"]
)
@pytest.mark.parametrize("name", ["mlflow", "wandb"])
def test_servers_of_every_bad_kind(run, monkeypatch, name, server):
    with server() as port:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        handle = Trackers(run, [name], 60.0)
        started = pids(handle)
        notes = train(run, handle) + handle.finish(60.0)
    assert unharmed(run) and all(gone(pid) for pid in started)
    assert notes[-1].warning and f"--to {name}" in notes[-1].text
    assert not any(KEY.encode() in path.read_bytes() for path in run.rglob("*") if path.is_file())


PARENT = """
import sys, time
from pathlib import Path
from windlass.telemetry.trackers import Trackers
handle = Trackers(Path(sys.argv[1]), ["tensorboard"], float(sys.argv[2]))
print(handle.processes["tensorboard"].pid, flush=True)
time.sleep(3600)
"""


@pytest.mark.parametrize("hung", [False, True])
def test_an_exporter_outlives_a_killed_run_only_to_send_the_rest(run, request, hung):
    if hung:
        request.getfixturevalue("hung_imports")
    command = [sys.executable, "-c", PARENT, str(run), "0.5" if hung else "60"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert select.select([parent.stdout], [], [], 60)[0]
        pid = int(parent.stdout.readline())
        train(run)
        parent.kill()
    wait_for(lambda: gone(pid), 60)
    assert unharmed(run)
    assert hung or shown_by_tensorboard(run) == list(range(1, STEPS + 1))


def test_a_run_that_fails_lets_go_without_waiting(run):
    handle = Trackers(run, ["tensorboard"], 60.0)
    (pid,) = pids(handle)
    train(run, handle)
    handle.close()
    assert handle.finish(5.0) == [] and handle.poll() == []
    wait_for(lambda: gone(pid), 60)
    assert shown_by_tensorboard(run) == list(range(1, STEPS + 1))


def test_two_exporters_do_not_write_into_one_tracker(run):
    """The one of a run that was killed still sends the rest; the next start's waits for it."""
    (run / "trackers").mkdir()
    with locked(run / "trackers" / "tensorboard.lock"):
        handle = Trackers(run, ["tensorboard"], 60.0)
        notes = train(run, handle)
        time.sleep(3)
        assert not list(run.glob("tensorboard/*"))
    notes += handle.finish(60)
    assert list(run.glob("tensorboard/*")) and not any(note.warning for note in notes)
