"""Running one cell of a study as a process of its own, and looking at how it does through its ledger. No torch."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from typing import IO, Any

from windlass.errors import BAD_INPUT, DONE, STOPPED
from windlass.run import Run
from windlass.study.grid import Cell
from windlass.study.study import Study

DIVERGED_NATS = 1.0
"""A loss this far above the run's first one counts as diverged."""


@dataclass
class Progress:
    """How a cell stands, from its ledger."""

    step: int = 0
    steps: int = 0
    loss: float | None = None
    first_loss: float | None = None
    eval_loss: float | None = None
    best_loss: float | None = None
    tokens: int = 0
    tokens_per_s: float | None = None

    @property
    def diverged(self) -> str:
        """Why the cell counts as diverged; empty while it does not."""
        if self.loss is not None and not math.isfinite(self.loss):
            return f"loss {self.loss} at step {self.step}"
        if self.loss is not None and self.first_loss is not None and self.loss > self.first_loss + DIVERGED_NATS:
            return f"loss {self.loss:.3f} at step {self.step}, {DIVERGED_NATS:g} above the first"
        return ""


def progress(run: Run) -> Progress:
    """Read a run's ledger once."""
    found = Progress()
    for line in run.ledger():
        if line["kind"] == "train":
            found.step, found.loss = line["step"], _number(line.get("loss"))
            found.first_loss = found.loss if found.first_loss is None else found.first_loss
            found.tokens, found.tokens_per_s = int(line.get("tokens", 0)), line.get("tokens_per_s")
        elif line["kind"] == "eval" and line.get("suite", "loss") == "loss":
            found.eval_loss = _number(line.get("loss"))
            if found.eval_loss is not None and math.isfinite(found.eval_loss):
                best = found.best_loss
                found.best_loss = found.eval_loss if best is None else min(best, found.eval_loss)
        elif line["kind"] == "event" and line.get("steps"):
            found.steps = int(line["steps"])
    return found


def evaluations(run: Run) -> list[tuple[int, float]]:
    """Step and validation loss of each evaluation after step 0."""
    lines = [x for x in run.lines("eval") if x.get("suite", "loss") == "loss" and x["step"] > 0]
    return [(x["step"], float(_number(x.get("loss")) or math.nan)) for x in lines]


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


class CellProcess:
    """A running cell: `windlass train` on the study's recipe with the cell's overrides."""

    def __init__(self, study: Study, cell: Cell, world: int, threads: int, devices: str | None):
        self.study, self.cell, self.run, self.devices = study, cell, study.run_of(cell), devices
        self.run.path.parent.mkdir(parents=True, exist_ok=True)
        self.log: IO[bytes] = (self.run.path.parent / f"{self.run.name}.out").open("ab")
        environment = dict(os.environ, WINDLASS_QUIET_END="1", WINDLASS_PARENT=str(os.getpid()))
        environment.setdefault("OMP_NUM_THREADS", str(threads))
        if devices is not None:
            environment["CUDA_VISIBLE_DEVICES"] = devices
        self.process = subprocess.Popen(
            [*command(study, cell), "--world", str(world)],
            stdin=subprocess.DEVNULL, stdout=self.log, stderr=subprocess.STDOUT, env=environment, start_new_session=True,
        )  # fmt: skip

    def poll(self) -> int | None:
        """The exit code, None while it runs."""
        return self.process.poll()

    def stop(self) -> None:
        """Ask it to save and end."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it and its ranks at once."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def reason(self, code: int) -> str:
        """Why a cell that ended with `code` did not finish, in a line."""
        if code in (DONE, STOPPED):
            return ""
        self.log.flush()
        path = self.run.path.parent / f"{self.run.name}.out"
        lines = [line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip()]
        said = next((line for line in reversed(lines) if line.startswith("windlass:")), lines[-1] if lines else "")
        kind = "bad input" if code == BAD_INPUT else f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        return f"{kind}: {said}" if said else kind


def command(study: Study, cell: Cell) -> list[str]:
    """The command line that trains a cell."""
    place = study.run_of(cell).path
    return [
        sys.executable,
        "-m",
        "windlass",
        "train",
        str(study.path / "recipe.toml"),
        *cell.overrides,
        f"run.dir='{place}'",
    ]
