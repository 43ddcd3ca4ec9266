"""A cell as a process: its command, its environment, its output, and how it ended."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from windlass import errors, processes
from windlass.processes import WINDLASS
from windlass.recipe import typed
from windlass.study.grid import Cell
from windlass.study.study import Study

# SIGHUP: the terminal or ssh connection is gone.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STOPPED = "stopped with everything saved; the same command continues"


class CellProcess(subprocess.Popen[bytes]):
    """A `windlass train` process in a session of its own; its output goes to `DIRECTORY.out`."""

    def __init__(
        self,
        cell: Cell,
        command: Sequence[str],
        directory: Path,
        threads: int = 0,  # of a rank; 0: its own choice
        devices: Sequence[str] = (),  # that it may use; empty: all
    ):
        self.cell, self.devices = cell, devices
        directory.parent.mkdir(parents=True, exist_ok=True)
        self.log_path = directory.parent / f"{directory.name}.out"
        env = os.environ | {processes.QUIET_END: "1", processes.PARENT: str(os.getpid())}
        if threads:
            env.setdefault("OMP_NUM_THREADS", str(threads))
        if devices:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        with self.log_path.open("ab") as log:
            super().__init__(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def kill(self) -> None:
        """Kill the process and its ranks. A signal handler may call it, so it does not wait."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def failure(self, code: int) -> str:
        """Why it ended with this exit code; empty if it finished or was asked to stop."""
        if code in (errors.DONE, errors.STOPPED):
            return ""
        kind = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        if code == errors.BAD_INPUT:
            kind = "bad input"
        text = self.log_path.read_text(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        messages = [line for line in lines if line.startswith("windlass:")]
        return ": ".join([kind, *(messages or lines)[-1:]])


def train_command(study: Study, cell: Cell) -> list[str]:
    recipe, directory = study.path / "recipe.toml", study.run_of(cell).path
    places = {"run.dir": str(directory), "run.base": study.recipe.run.base}
    words = [f"{key}={typed(place)}" for key, place in places.items()]
    return [*WINDLASS, "train", str(recipe), *cell.overrides, *words]
