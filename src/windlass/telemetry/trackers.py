"""Trackers beside a training: a process for each (`exporter.py`) follows the ledger, so a library
that hangs or a server that does not answer hurts only that process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

from windlass.errors import RunFailed, UserError, require
from windlass.fileio import lock_held
from windlass.processes import MODULE
from windlass.recipe.settings import Tracker
from windlass.run import Run

FLUSH_SECONDS = 30.0  # the longest that trackers may take after the end of a run
NO_LIMIT = 1e6  # seconds
EXPORTER = (*MODULE, "windlass.telemetry.exporter")


class Note(NamedTuple):
    text: str
    warning: bool = False  # a problem; else the place at which a tracker shows the run


class Trackers:
    """The exporter processes of a run; each has `flush_seconds` left when this process ends. Only
    `finish` waits, and nothing here raises OSError."""

    def __init__(self, run: Path, names: Sequence[str], flush_seconds: float = FLUSH_SECONDS):
        self.run, self.is_replay = run, flush_seconds == NO_LIMIT
        self.processes: dict[str, Any] = {}  # subprocess.Popen by name
        self._notes: list[Note] = []
        self._warned: set[str] = set()
        for name in names:
            try:
                (run / "trackers").mkdir(parents=True, exist_ok=True)
                with open(run / "trackers" / f"{name}.log", "ab") as log:
                    self.processes[name] = subprocess.Popen(
                        [*EXPORTER, str(run), name, str(flush_seconds)],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=log,
                        bufsize=0,
                        process_group=0,  # Ctrl-C in the terminal is for the training
                        # its libraries need one core and no GPU
                        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
                    )
                os.set_blocking(self.processes[name].stdout.fileno(), False)
            except OSError as error:
                self._warn(name, f"its exporter could not be started ({error})")

    def poll(self) -> list[Note]:
        """The messages since the last call."""
        for name, process in self.processes.items():
            code = process.poll()  # before reading, for the last messages of an ended process
            for line in (process.stdout.read() or b"").splitlines():  # a pipe splits no short line
                text, failed = json.loads(line)
                if failed:
                    self._warn(name, text)
                else:
                    self._notes.append(Note(f"{name}: {text}"))
            if code:
                self._warn(name, f"its exporter ended early (exit code {code})")
        notes, self._notes = self._notes, []
        return notes

    def finish(self, timeout: float = FLUSH_SECONDS) -> list[Note]:
        """Wait for the exporters, and end one that needs longer; returns the last messages."""
        deadline = time.monotonic() + timeout
        for process in self.processes.values():
            process.stdin.close()
        for process in self.processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0.0))
        notes = self.poll()
        for name, process in self.processes.items():
            if process.poll() is None:
                self._warn(name, f"not done {timeout:.0f} s after the end")
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)  # with its children
            process.wait()
        self.close()
        return notes + self.poll()

    def close(self) -> None:
        """Let the exporters end by themselves."""
        for process in self.processes.values():
            process.stdin.close()
            process.stdout.close()
            process.returncode = process.returncode or 0  # against a ResourceWarning
        self.processes = {}

    def _warn(self, name: str, problem: str) -> None:
        """Keep the first warning about each tracker."""
        if name not in self._warned:
            self._warned.add(name)
            if not self.is_replay:
                command = f"`windlass track {self.run} --to {name}`"
                problem += f"; nothing is lost: {command} replays the ledger"
            self._notes.append(Note(f"{name}: {problem}", warning=True))


def track(run: str | Path | Run, name: str) -> list[Note]:
    """Send the part of a run's ledger that a tracker lacks; returns messages for the user.

    Args:
        run: A run or its directory.
        name: `tensorboard`, `mlflow` or `wandb`.

    Raises:
        UserError: There is nothing to send, the library is missing, or the training sends it.
        RunFailed: The tracker did not take everything.
    """
    if name not in get_args(Tracker):
        raise UserError(f"{name} is not a tracker; write one of {', '.join(get_args(Tracker))}")
    require(name, f"the tracker {name}")
    run = run if isinstance(run, Run) else Run.open(run)
    if not run.ledger():
        raise UserError(f"{run.path} lacks a ledger ({run.metrics_path.name}): train first")
    if run.alive and lock_held(run.path / "trackers" / f"{name}.lock"):
        problem = f"{run.path} trains, and its own exporter sends it to {name}"
        raise UserError(f"{problem}, again after each error: wait for the end of the run")
    trackers = Trackers(run.path, [name], NO_LIMIT)
    process = trackers.processes.get(name)
    notes = trackers.finish(NO_LIMIT)
    if process is None or process.returncode:
        texts = [note.text for note in notes]
        raise RunFailed("\n".join([*texts, f"see {run.path / 'trackers' / name}.log"]))
    return notes
