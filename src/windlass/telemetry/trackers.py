"""Trackers beside a training: an exporter process for each (`exporter.py`) follows the ledger.

`Trackers` is the training's side of two pipes. An exporter's standard input closes when the
training ends. Its standard output brings at most two lines of JSON: the place of the run in
the tracker, and the first error. A hanging import, a dead address or a full disk hurts only the exporter.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from windlass.errors import RunFailed, UserError, require
from windlass.processes import MODULE
from windlass.run import Run
from windlass.telemetry.backends import BACKENDS


class Note(NamedTuple):
    text: str
    warning: bool = False  # a problem; else the place at which a tracker shows the run


class Trackers:
    """The exporter processes of a run. Nothing here raises OSError, and only `finish` waits.

    When this process ends, an exporter has `flush_seconds` left.
    """

    def __init__(self, run: Path, names: Sequence[str], flush_seconds: float):
        self.run = run
        self.processes: dict[str, Any] = {}  # subprocess.Popen by name
        self._notes: list[Note] = []
        self._warned: set[str] = set()
        for name in names:
            arguments = ["windlass.telemetry.exporter", str(run), name, str(flush_seconds)]
            try:
                (run / "trackers").mkdir(parents=True, exist_ok=True)
                with open(run / "trackers" / f"{name}.log", "ab") as log:
                    self.processes[name] = subprocess.Popen(
                        [*MODULE, *arguments],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=log,
                        bufsize=0,
                        process_group=0,  # Ctrl-C in the terminal is for the training
                        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
                    )
                os.set_blocking(self.processes[name].stdout.fileno(), False)
            except OSError as error:
                self._note(name, f"its exporter could not be started ({error})")

    def poll(self) -> list[Note]:
        """The messages since the last call."""
        for name, process in self.processes.items():
            code = process.poll()  # before reading, for the last messages of an ended process
            for line in (process.stdout.read() or b"").splitlines():  # a pipe splits no short line
                self._note(name, *json.loads(line))
            if code:
                self._note(name, f"its exporter ended early (exit code {code})")
        notes, self._notes = self._notes, []
        return notes

    def finish(self, timeout: float) -> list[Note]:
        """Wait up to `timeout` seconds until the trackers have the rest, then end the processes."""
        deadline = time.monotonic() + timeout
        for process in self.processes.values():
            process.stdin.close()
        for process in self.processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0.0))
        notes = self.poll()
        for name, process in self.processes.items():
            if process.poll() is None:
                self._note(name, f"not done {timeout:.0f} s after the end")
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)  # with its children
            process.wait()
        self.close()
        return notes + self.poll()

    def close(self) -> None:
        """Close the pipes without waiting; the exporters send the rest and end."""
        for process in self.processes.values():
            process.stdin.close()
            process.stdout.close()
            process.returncode = process.returncode or 0  # against a ResourceWarning
        self.processes = {}

    def _note(self, name: str, text: str, warning: bool = True) -> None:
        """Keep a message, and only the first warning of each tracker, with its remedy."""
        if not warning:
            self._notes.append(Note(f"{name}: {text}"))
        elif name not in self._warned:
            self._warned.add(name)
            remedy = f"nothing is lost: `windlass track {self.run} --to {name}` replays the ledger"
            self._notes.append(Note(f"{name}: {text}; {remedy}", warning=True))


def track(run: str | Path | Run, name: str, timeout: float = 0.0) -> list[Note]:
    """Send the part of a run's ledger that a tracker lacks; returns messages for the user.

    Args:
        run: A run or its directory.
        name: `tensorboard`, `mlflow` or `wandb`.
        timeout: Seconds; 0 waits without a limit.

    Raises:
        UserError: There is nothing to send, or the library is missing.
        RunFailed: The tracker did not take everything.
    """
    if name not in BACKENDS:
        raise UserError(f"{name} is not a tracker; write one of {', '.join(BACKENDS)}")
    require(name, f"the tracker {name}")
    run = run if isinstance(run, Run) else Run.open(run)
    if not run.ledger():
        raise UserError(f"{run.path} lacks a ledger ({run.metrics_path.name}): train first")
    trackers = Trackers(run.path, [name], timeout or 1e6)
    process = trackers.processes.get(name)
    notes = trackers.finish(timeout or 1e6)
    if process is None or process.returncode:
        texts = [note.text for note in notes]
        raise RunFailed("\n".join([*texts, f"see {run.path / 'trackers' / name}.log"]))
    return notes
