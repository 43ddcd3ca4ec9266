"""Feeds trackers from the ledger through sidecar processes: whatever a tracker does, training does not notice."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from windlass.recipe import Recipe
from windlass.run import Run

TRACKERS = ("tensorboard", "mlflow", "wandb")

UP_SECONDS = 120.0
"""A tracker that has not said within this time that it is there is reported; it goes on trying."""


class Note(str):
    """A line to show of a tracker."""

    warning: bool
    """Whether it is a warning, and not merely where to look."""

    def __new__(cls, text: str, warning: bool = False) -> Note:
        """A line, and which of the two it is."""
        note = super().__new__(cls, text)
        note.warning = warning
        return note


NICE = 10
"""How far a sidecar stands behind the training for the processor; a replay stands behind nobody."""


@dataclass
class _Sidecar:
    """One tracker's process, seen from the training process: nothing here ever waits, but for `finish`."""

    name: str
    process: subprocess.Popen[bytes]
    messages: int
    """Read end of the pipe it speaks through; never blocks."""
    since: float
    up: bool = False
    complete: bool = False
    reported: bool = False
    rest: bytes = b""
    hints: set[str] = field(default_factory=set)

    def poll(self) -> list[Note]:
        """What it says of itself, new since the last call."""
        said: list[Note] = []
        with contextlib.suppress(OSError):
            while chunk := os.read(self.messages, 65536):
                self.rest += chunk
        *whole, self.rest = self.rest.split(b"\n")
        for raw in whole:
            message = json.loads(raw)
            self.up = self.up or message["kind"] in ("up", "complete")
            self.complete = self.complete or message["kind"] == "complete"
            if message["kind"] == "trouble":
                said += self.report(message["text"])
            elif message.get("text") and message["text"] not in self.hints:
                self.hints.add(message["text"])
                said.append(Note(f"{self.name}: {message['text']}"))
        return said

    def report(self, text: str) -> list[Note]:
        """A trouble, said once in a run."""
        if self.reported:
            return []
        self.reported = True
        return [Note(f"{self.name}: {text}", warning=True)]

    def send(self, text: str) -> None:
        """Tell it to come to an end; a process that is gone does not matter."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.write(text.encode())
        with contextlib.suppress(OSError):
            self.process.stdin.close()

    def kill(self) -> None:
        """End it and whatever it started."""
        with contextlib.suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@dataclass
class Trackers:
    """The sidecars of a run. `poll` at each log, `finish` at the end; both return lines to show."""

    run: Path
    sidecars: list[_Sidecar] = field(default_factory=list)
    said: list[Note] = field(default_factory=list)

    def poll(self) -> list[Note]:
        """What the trackers have to say since the last call: where they show the run, or what is wrong. Never waits."""
        said, self.said = self.said, []
        for sidecar in self.sidecars:
            said += sidecar.poll()
            code = sidecar.process.poll()
            if code is not None and not sidecar.complete:
                said += sidecar.report(f"ended early (exit code {code}); {self.remedy(sidecar.name)}")
            elif not sidecar.up and time.monotonic() - sidecar.since > UP_SECONDS:
                said += sidecar.report(f"not there after {UP_SECONDS:.0f} s; {self.remedy(sidecar.name)}")
        return said

    def finish(self, timeout: float) -> list[Note]:
        """Let the trackers take the rest of the ledger, for at most `timeout` seconds in all, then end them."""
        deadline = time.monotonic() + timeout
        for sidecar in self.sidecars:
            sidecar.send(f"{timeout}\n")
        for sidecar in self.sidecars:
            while (left := deadline - time.monotonic()) > 0 and sidecar.process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    sidecar.process.wait(min(left, 0.5))
        said = self.poll()
        for sidecar in self.sidecars:
            if sidecar.process.poll() is None:
                said += sidecar.report(f"not done {timeout:.0f} s after the end; {self.remedy(sidecar.name)}")
            sidecar.kill()
            os.close(sidecar.messages)
        self.sidecars = []
        return said

    def remedy(self, name: str) -> str:
        """What to do about a tracker that did not get everything."""
        return remedy(self.run, name)

    def close(self) -> None:
        """Let go of the trackers without waiting, as where the run failed: they send the rest by themselves.

        Nothing to do after `finish`.
        """
        for sidecar in self.sidecars:
            sidecar.send("")
            os.close(sidecar.messages)
        _LET_GO.extend(self.sidecars)
        self.sidecars = []


_LET_GO: list[_Sidecar] = []
"""Sidecars that nobody waits for any more; kept so that they are not taken for forgotten ones."""


def start_trackers(run: Run | Path, recipe: Recipe, attempt: int = 0) -> Trackers:
    """Start a sidecar for each of `telemetry.trackers`; called on rank 0 alone. Returns at once and never raises OSError.

    A sidecar lives in a process group of its own, so that Ctrl-C does not reach it, and ends with this process: it then
    has `telemetry.flush_seconds` to send the rest.
    """
    path = Path(run.path if isinstance(run, Run) else run)
    handle = Trackers(path)
    for name in recipe.telemetry.trackers:
        if find_spec(name) is None:
            text = f"{name}: not installed (pip install 'windlass[{name}]'); {handle.remedy(name)}"
            handle.said.append(Note(text, warning=True))
            continue
        try:
            handle.sidecars.append(_spawn(path, name, attempt, recipe.telemetry.flush_seconds))
        except OSError as error:
            text = f"{name}: could not be started ({error}); {handle.remedy(name)}"
            handle.said.append(Note(text, warning=True))
    return handle


def replay(run: Run, name: str, timeout: float | None = None) -> Iterator[Note]:
    """Send a run's ledger to a tracker, as far as the tracker does not have it, and yield what there is to say.

    Raises:
        windlass.errors.RunFailed: The tracker did not take all of it.
    """
    from windlass.errors import RunFailed

    sidecar = _spawn(run.path, name, -1, timeout if timeout is not None else 1e9)
    sidecar.send("")
    try:
        while sidecar.process.poll() is None:
            yield from sidecar.poll()
            with contextlib.suppress(subprocess.TimeoutExpired):
                sidecar.process.wait(0.1)
        yield from sidecar.poll()
        if not sidecar.complete:
            raise RunFailed(f"{name} did not take all of the ledger; see {run.path / 'trackers' / name}.log")
    finally:
        sidecar.kill()
        os.close(sidecar.messages)


def remedy(run: Path, name: str) -> str:
    """What to do about a tracker that did not get everything."""
    return f"nothing is lost: `windlass track {run} --to {name}` replays the ledger"


def _spawn(run: Path, name: str, attempt: int, flush_seconds: float) -> _Sidecar:
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    command = [
        sys.executable,
        "-m",
        "windlass.telemetry.trackers.exporter_process",
        str(run),
        "--to",
        name,
        "--attempt",
        str(attempt),
    ]
    command += ["--flush-seconds", str(flush_seconds), "--messages", str(writing)]
    command += ["--nice", str(NICE if attempt >= 0 else 0)]
    log = _log(run, name)
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            pass_fds=(writing,),
            process_group=0,
            env=_environment(),
        )
    except OSError:
        os.close(reading)
        raise
    finally:
        os.close(writing)
        if not isinstance(log, int):
            log.close()
    return _Sidecar(name, process, reading, time.monotonic())


def _log(run: Path, name: str) -> IO[Any] | int:
    """Where a sidecar's own output goes; nowhere where the disk is full."""
    try:
        (run / "trackers").mkdir(parents=True, exist_ok=True)
        return open(run / "trackers" / f"{name}.log", "ab")
    except OSError:
        return subprocess.DEVNULL


def _environment() -> dict[str, str]:
    """The sidecar's environment: ours, without the ranks' variables, and one thread for each numeric library."""
    ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {key: value for key, value in os.environ.items() if key not in ranks}
    return kept | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
