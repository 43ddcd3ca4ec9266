"""A cell's training as a child process. No torch."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from windlass.errors import BAD_INPUT, DONE, STOPPED
from windlass.processes import WINDLASS
from windlass.study.grid import Cell

# SIGHUP: the terminal or ssh connection is gone.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def launch_words(cell: Cell) -> list[str]:
    """The launch of a cell's ranks; a cell with fewer ranks uses a part of its job's."""
    per_host = ["--per-host", str(cell.world // cell.nodes)] if cell.world else []
    return [*WINDLASS, "launch", *per_host, "--"]


class CellProcess(subprocess.Popen[bytes]):
    """A `windlass train` process in a session of its own; its output goes to `runs/<cell>.out`."""

    def __init__(
        self,
        cell: Cell,
        command: list[str],
        directory: Path,
        threads: int,
        devices: Sequence[str],
        attempt: int = -1,
    ):
        self.cell, self.devices = cell, devices
        self.attempt = attempt  # of the last `train` line before
        directory.parent.mkdir(parents=True, exist_ok=True)
        self.log_path = directory.parent / f"{directory.name}.out"
        env = {"OMP_NUM_THREADS": str(threads)} if threads else {}
        env |= os.environ | {"WINDLASS_QUIET_END": "1", "WINDLASS_PARENT": str(os.getpid())}
        env |= {"CUDA_VISIBLE_DEVICES": ",".join(devices)} if devices else {}
        with self.log_path.open("ab") as log:
            output: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            super().__init__(command, env=env, start_new_session=True, **output)

    def kill(self) -> None:
        """Kill the process and its ranks. A signal handler may call it, so it does not wait."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def failure(self, code: int) -> str:
        """One line on why a process that exited with `code` failed; empty if it did not."""
        if code in (DONE, STOPPED):
            return ""
        kind = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        kind = "bad input" if code == BAD_INPUT else kind
        text = self.log_path.read_text(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
        own = [line for line in lines if line.startswith("windlass:")]
        message = (own or lines)[-1]
        return f"{kind}: {message}" if message else kind
