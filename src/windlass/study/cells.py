"""Running one cell of a study as a process of its own. No torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import IO

from windlass.errors import BAD_INPUT, DONE, STOPPED
from windlass.study.grid import Cell
from windlass.study.study import Study


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

    def close(self) -> None:
        """Let go of its log, when it has ended."""
        self.log.close()

    def reason(self, code: int) -> str:
        """Why a cell that ended with `code` did not finish, in a line."""
        if code in (DONE, STOPPED):
            return ""
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
