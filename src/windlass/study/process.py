"""A cell's training as a child process. No torch."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from windlass.errors import BAD_INPUT, DONE, STOPPED
from windlass.processes import MODULE, WINDLASS
from windlass.study.grid import Cell

# SIGHUP: the terminal or ssh connection is gone.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def launch_words(cell: Cell) -> list[str]:
    """The launch of a cell's ranks; a cell with fewer ranks uses a part of its job's."""
    per_host = ["--per-host", str(cell.world // cell.nodes)] if cell.world else []
    return [*WINDLASS, "launch", *per_host, "--"]


def cell_environment(threads: int, devices: Sequence[str] = ()) -> dict[str, str]:
    env = {"OMP_NUM_THREADS": str(threads)} if threads else {}
    env |= os.environ | {"WINDLASS_QUIET_END": "1", "WINDLASS_PARENT": str(os.getpid())}
    return env | ({"CUDA_VISIBLE_DEVICES": ",".join(devices)} if devices else {})


class ForkServer:
    """A process with torch imported, which forks itself for each command (windlass/forkserver.py)."""

    def __init__(self, env: Mapping[str, str]):
        self.env = dict(env)
        self._process = subprocess.Popen(
            [*MODULE, "windlass.forkserver"],
            bufsize=0,
            env=self.env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # what is wrong with torch is in the log of a new process
            start_new_session=True,
        )
        assert self._process.stdin and self._process.stdout
        self._commands, self._messages = self._process.stdin, self._process.stdout
        self.alive = True
        self._codes = dict[int, int]()

    def start(self, arguments: Sequence[str], log: Path) -> int:
        """Start a `windlass` command; returns its process, or 0 if the server has ended."""
        try:
            self._commands.write(json.dumps([arguments, str(log.absolute())]).encode() + b"\n")
        except BrokenPipeError:
            self.alive = False
        pid = 0
        while self.alive and not pid:
            pid = self._read()
        return pid

    def code(self, pid: int) -> int | None:
        """The exit code of a process; None while it lives."""
        while self.alive and select.select([self._messages], [], [], 0)[0]:
            self._read()
        # The forks end soon after their server.
        return self._codes.get(pid, None if self.alive else -signal.SIGKILL)

    def _read(self) -> int:
        """Read a message; returns the process whose begin it reports, or 0."""
        line = self._messages.readline()
        self.alive = bool(line)
        pid, code = json.loads(line or "[0, null]")
        if code is None:
            return int(pid)
        self._codes[pid] = code
        return 0

    def close(self) -> None:
        self._process.kill()  # it may still import torch
        self._process.communicate()
        self.alive = False


class CellProcess:
    """A `windlass train` process in a session of its own; its output goes to `runs/<cell>.out`."""

    def __init__(
        self,
        cell: Cell,
        command: list[str],
        directory: Path,
        threads: int,
        devices: Sequence[str],
        server: ForkServer | None = None,
    ):
        self.cell, self.devices, self.pid = cell, devices, 0
        directory.parent.mkdir(parents=True, exist_ok=True)
        self.log_path = directory.parent / f"{directory.name}.out"
        env = cell_environment(threads, devices)
        words = len(WINDLASS)
        if server and server.env == env and tuple(command[:words]) == WINDLASS:
            self.pid = server.start(command[words:], self.log_path)
        if server and self.pid:
            self._server: ForkServer | None = server
            return
        self._server = None
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it lives."""
        return self._server.code(self.pid) if self._server else self._process.poll()

    def terminate(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        if self.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
            while self.poll() is None:
                time.sleep(0.01)

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
