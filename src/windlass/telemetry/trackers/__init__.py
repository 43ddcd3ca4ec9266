"""Trackers (TensorBoard, MLflow, W&B) beside a training: one exporter process for each, which follows the ledger.

This file is the training's side of two pipes: an exporter's standard input closes when this process ends, its standard
output brings at most two lines of JSON (where the run is shown, and the first error). Exit code 0: all is delivered.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from windlass.errors import RunFailed, UserError
from windlass.run import Run

TRACKERS = ("tensorboard", "mlflow", "wandb")


class Note(NamedTuple):
    text: str  # where a tracker shows the run, or what is wrong
    warning: bool = False


class Trackers:
    """The exporter processes of a run. Nothing here raises OSError, and only `finish` waits.

    When this process ends, an exporter has `flush_seconds` left.
    """

    def __init__(self, run: Path, names: Sequence[str], flush_seconds: float):
        self.run, module = run, "windlass.telemetry.trackers.exporter_process"
        self.processes: dict[str, Any] = {}  # subprocess.Popen by name; Any: their pipes are never None here
        self._notes: list[Note] = []
        self._warned: set[str] = set()
        for name in names:
            if find_spec(name) is None:
                self._note(name, f"not installed (pip install 'windlass[{name}]')")
                continue
            command = [sys.executable, "-m", module, str(run), name, str(flush_seconds)]
            try:
                (run / "trackers").mkdir(parents=True, exist_ok=True)
                with open(run / "trackers" / f"{name}.log", "ab") as log:
                    self.processes[name] = subprocess.Popen(
                        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, bufsize=0,
                        process_group=0,  # Ctrl-C in the terminal is for the training
                        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
                    )  # fmt: skip
                os.set_blocking(self.processes[name].stdout.fileno(), False)
            except OSError as error:
                self._note(name, f"its exporter could not be started ({error})")

    def poll(self) -> list[Note]:
        """What there is to show since the last call."""
        for name, process in self.processes.items():
            code = process.poll()  # asked before reading: what an ended process reported is in the pipe
            for line in (process.stdout.read() or b"").splitlines():  # lines are short, so the pipe never splits one
                self._note(name, *json.loads(line))
            if code:
                self._note(name, f"its exporter ended early (exit code {code})")
        notes, self._notes = self._notes, []
        return notes

    def finish(self, timeout: float) -> list[Note]:
        """Give the trackers `timeout` seconds in all to take the rest of the ledger, then end their processes."""
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
                os.killpg(process.pid, signal.SIGKILL)  # and whatever it started
            process.wait()
        self.close()
        return notes + self.poll()

    def close(self) -> None:
        """Close the pipes without waiting, as where the run failed: the exporters send the rest and end."""
        for process in self.processes.values():
            process.stdin.close()
            process.stdout.close()
            process.returncode = process.returncode or 0  # nobody waits for it: no ResourceWarning
        self.processes = {}

    def _note(self, name: str, text: str, warning: bool = True) -> None:
        """A line to show; a warning with its remedy, the first of each tracker only."""
        if not warning:
            self._notes.append(Note(f"{name}: {text}"))
        elif name not in self._warned:
            self._warned.add(name)
            remedy = f"nothing is lost: `windlass track {self.run} --to {name}` replays the ledger"
            self._notes.append(Note(f"{name}: {text}; {remedy}", warning=True))


def replay(run: str | Path | Run, name: str, timeout: float = 0.0) -> list[Note]:
    """Send a run's ledger to a tracker, as far as the tracker does not have it; returns what there is to show.

    Gives up after `timeout` seconds; 0: waits as long as it takes. Raises UserError where there is nothing to send or no
    such library, RunFailed where the tracker did not take all of it.
    """
    if name not in TRACKERS:
        raise UserError(f"--to {name}: there are {', '.join(TRACKERS)}")
    if find_spec(name) is None:
        raise UserError(f"--to {name}: {name} is not installed; pip install 'windlass[{name}]'")
    run = run if isinstance(run, Run) else Run.open(run)
    if not run.ledger():
        raise UserError(f"{run.path} has no ledger yet ({run.metrics_path.name}): train first")
    timeout = timeout or 1e6
    trackers = Trackers(run.path, [name], timeout)
    process = trackers.processes.get(name)
    notes = trackers.finish(timeout)
    if process is None or process.returncode:
        raise RunFailed("\n".join([*(note.text for note in notes), f"see {run.path / 'trackers' / name}.log"]))
    return notes
