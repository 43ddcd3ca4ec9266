"""Trackers (TensorBoard, MLflow, W&B) beside a training: one exporter process for each, which follows the ledger.

Training writes its ledger and nothing else; `exporter_process.py` reads `metrics.jsonl` and the devices' files and
sends what is new, so that a tracker that hangs holds up no other and costs the training nothing. This file is the
training's side: it starts the processes, asks without waiting how they are, and ends them. The pipe to an exporter's
standard input shows it that this process lives; its standard output brings its reports.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from windlass.errors import RunFailed, UserError
from windlass.recipe import Recipe
from windlass.run import Run

TRACKERS = ("tensorboard", "mlflow", "wandb")

CONNECT_SECONDS = 120.0
"""A tracker that is not connected after this time is reported; its exporter goes on trying."""


class Note(NamedTuple):
    """A line to show of a tracker: where it shows the run, or (`warning`) what is wrong."""

    text: str
    warning: bool = False


class Exporter:
    """One exporter process, seen from the training. Raises OSError where it cannot be started."""

    def __init__(self, run: Path, name: str, live: bool, flush_seconds: float):
        self.run, self.name = run, name
        self.connected = self.complete = self.warned = False
        self._since, self._unread = time.monotonic(), b""
        module = "windlass.telemetry.trackers.exporter_process"
        (run / "trackers").mkdir(parents=True, exist_ok=True)
        with open(run / "trackers" / f"{name}.log", "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, str(run), name, "live" if live else "replay", str(flush_seconds)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                process_group=0,  # Ctrl-C in the terminal is for the training
                env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            )  # fmt: skip
        assert self.process.stdin is not None and self.process.stdout is not None
        self._parent_pipe, self.reports = self.process.stdin, self.process.stdout
        os.set_blocking(self.reports.fileno(), False)

    def poll(self) -> list[Note]:
        """What there is to show since the last call. Never waits."""
        code = self.process.poll()  # asked before reading: what an ended process reported is in the pipe
        with contextlib.suppress(OSError):  # nothing more to read
            while chunk := os.read(self.reports.fileno(), 65536):
                self._unread += chunk
        *lines, self._unread = self._unread.split(b"\n")
        notes: list[Note] = []
        for line in lines:
            report = json.loads(line)
            if report["kind"] == "warning":
                notes += self.warn(report["text"])
            elif report["kind"] == "connected":
                self.connected = True
                notes.append(Note(f"{self.name}: {report['text']}"))
            else:
                self.complete = True
        if code is not None and not self.complete:
            notes += self.warn(f"its exporter ended early (exit code {code})")
        elif not self.connected and time.monotonic() - self._since > CONNECT_SECONDS:
            notes += self.warn(f"not connected after {CONNECT_SECONDS:.0f} s")
        return notes

    def warn(self, text: str) -> list[Note]:
        """A warning with its remedy, the first time only."""
        notes = [] if self.warned else [_warning(self.run, self.name, text)]
        self.warned = True
        return notes

    def close_pipe(self) -> None:
        """Close the pipe: the process sends the rest and ends by itself within its `flush_seconds`."""
        with contextlib.suppress(OSError):
            self._parent_pipe.close()

    def kill(self) -> None:
        """End it and whatever it started."""
        with contextlib.suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.close_pipe()
        self.reports.close()


class Trackers:
    """The exporters of a run. `poll` at each log, `finish` at the end; both return lines to show."""

    def __init__(self, exporters: list[Exporter], notes: list[Note]):
        self.exporters, self._notes = exporters, notes

    def poll(self) -> list[Note]:
        """What there is to show since the last call. Never waits."""
        notes, self._notes = self._notes, []
        return notes + [note for exporter in self.exporters for note in exporter.poll()]

    def finish(self, timeout: float) -> list[Note]:
        """Give the trackers `timeout` seconds in all to take the rest of the ledger, then end their processes."""
        deadline = time.monotonic() + timeout
        for exporter in self.exporters:
            exporter.close_pipe()
        for exporter in self.exporters:
            with contextlib.suppress(subprocess.TimeoutExpired):
                exporter.process.wait(max(deadline - time.monotonic(), 0.0))
        notes = self.poll()
        for exporter in self.exporters:
            if exporter.process.poll() is None:
                notes += exporter.warn(f"not done {timeout:.0f} s after the end")
            exporter.kill()
        self.exporters = []
        return notes

    def close(self) -> None:
        """Let go of the trackers without waiting, as where the run failed; nothing to do after `finish`."""
        for exporter in self.exporters:
            exporter.close_pipe()
            exporter.reports.close()
            exporter.process.returncode = 0  # nobody waits for it: no ResourceWarning where this process lives on
        self.exporters = []


def start_trackers(run: Path, recipe: Recipe) -> Trackers:
    """Start an exporter process for each of `telemetry.trackers`; for rank 0. Returns at once and never raises
    OSError."""
    exporters, notes = [], []
    for name in recipe.telemetry.trackers:
        if find_spec(name) is None:
            notes.append(_warning(run, name, f"not installed (pip install 'windlass[{name}]')"))
            continue
        try:
            exporters.append(Exporter(run, name, True, recipe.telemetry.flush_seconds))
        except OSError as error:
            notes.append(_warning(run, name, f"its exporter could not be started ({error})"))
    return Trackers(exporters, notes)


def replay(run: Run, name: str, timeout: float = 0.0) -> list[Note]:
    """Send a run's ledger to a tracker, as far as the tracker does not have it; returns what there is to show.

    Args:
        run: The run.
        name: One of TRACKERS.
        timeout: Give up after so many seconds; 0: wait as long as it takes.

    Raises:
        UserError: There is no such tracker, it is not installed, or there is nothing to send.
        RunFailed: The tracker did not take all of it.
    """
    if name not in TRACKERS:
        raise UserError(f"--to {name}: there are {', '.join(TRACKERS)}")
    if timeout < 0:
        raise UserError(f"--timeout {timeout:g}: seconds, or 0 to wait as long as it takes")
    if not run.ledger():
        raise UserError(f"{run.path} has no ledger yet ({run.metrics_path.name}): train first")
    if find_spec(name) is None:
        raise UserError(f"{name} is not installed: pip install 'windlass[{name}]'")
    exporter = Exporter(run.path, name, False, timeout or 1e6)
    notes = Trackers([exporter], []).finish(timeout or 1e6)
    if not exporter.complete:
        raise RunFailed("\n".join([*(note.text for note in notes), f"see {run.path / 'trackers' / name}.log"]))
    return notes


def _warning(run: Path, name: str, text: str) -> Note:
    return Note(f"{name}: {text}; nothing is lost: `windlass track {run} --to {name}` replays the ledger", warning=True)
