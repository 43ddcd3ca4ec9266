"""The process that sends a run's ledger to one tracker: `python -m windlass.telemetry.trackers.exporter_process`.

It is all that a hanging import, a dead address or a full disk can hurt. Its standard input is a pipe from the
training process; where that closes (the run is over, or was killed) the rest is sent and this process ends within a
bounded time, whatever the tracker's library does. What a library prints goes to the log; standard output is kept for
reports.
"""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from filelock import FileLock, Timeout

from windlass.errors import first_line
from windlass.recipe.load import flatten
from windlass.run import Run, effective
from windlass.telemetry.environment import scrub, scrub_settings
from windlass.telemetry.ledger import Line, tail
from windlass.telemetry.trackers.points import Point, point, seconds, stream

POLL_SECONDS, RETRY_SECONDS = 1.0, 10.0
WATCH_SECONDS = 5.0
"""How often to see whether the training process lives; that it closed the pipe is noticed at once."""
LOCK_SECONDS = 60.0
"""How long to wait for another exporter of the same tracker: one that sends the rest of a run that was killed."""
MAX_RANKS = 64
"""Ranks whose devices are shown in trackers; the report shows all."""

Marks = dict[str, int]
"""The last step of each stream that a tracker has."""


@dataclass
class RunInfo:
    """What a tracker gets to know of a run when it connects."""

    id: str
    """Names the run in every tracker: a hash of the first line that its ledger ever had, which no resume changes."""
    name: str
    directory: Path
    project: str
    settings: dict[str, Any]
    """Every setting of the recipe under its dotted key, without secrets."""
    tags: dict[str, str]
    began: float
    """When the run was first started, in seconds since 1970."""


class Backend(Protocol):
    """A tracker. Any error it raises means: not delivered, connect again later."""

    hint: str
    """Where to look at the run: a command or an address."""

    def open(self, info: RunInfo) -> Marks:
        """Connect, find or make the run, and tell which steps it has."""
        ...

    def write(self, points: Iterator[Point], marks: Marks) -> None:
        """Take points in the order of their steps; once this returns, the tracker has everything up to `marks`."""
        ...

    def close(self, state: str, ended: float) -> None:
        """Note the run's state (`running`, `finished`, `preempted`, `failed`) and deliver everything before
        returning."""
        ...


class Follower:
    """Sends what is new in a run's ledger to a backend, each step once; `make_backend` is called after each failure."""

    def __init__(self, run: Run, make_backend: Callable[[], Backend], live: bool):
        self.run, self.live = run, live
        self.backend: Backend | None = None
        self._make_backend = make_backend
        self._raw: list[Line] = []
        self._offset = 0
        self._marks: Marks = {}

    def flush(self) -> bool:
        """Send what is new; returns whether the tracker is connected."""
        lines, self._offset = tail(self.run.metrics_path, self._offset)
        lines = [line for line in lines if isinstance(line.get("step"), int) and "kind" in line and "time" in line]
        if self.backend and any(line.get("attempt", 0) > self._raw[-1].get("attempt", 0) for line in lines):
            # the run went back to a checkpoint: the backend starts over from what is still valid
            self.backend.close("running", seconds(lines[-1]["time"]))
            self.backend = None
        self._raw += lines
        if self.backend is None and self._raw:
            lines = effective(self._raw)
            self.backend = self._connect(lines)
        new = [line for line in lines if stream(line) and line["step"] > self._marks.get(stream(line), -1)]
        if self.backend and new:
            marks = self._marks | {stream(line): line["step"] for line in new}
            devices = self._devices
            self.backend.write((point(x, devices.until(x["time"]) if x["kind"] == "train" else ()) for x in new), marks)
            self._marks = marks
        return self.backend is not None

    def _connect(self, ledger: list[Line]) -> Backend:
        run, recipe, first = self.run, self.run.recipe, self._raw[0]
        world = next((x["world"] for x in reversed(ledger) if isinstance(x.get("world"), int)), 1)
        tags = {"preset": recipe.preset, "config_hash": recipe.config_hash, "optimizer": recipe.optim.kind}
        tags |= {"world": str(world), "strategy": recipe.strategy(world)}
        name = hashlib.sha256(json.dumps(first, sort_keys=True).encode()).hexdigest()[:12]
        settings = flatten(scrub_settings(recipe.model_dump(mode="json")))
        where = run.path.resolve().name, run.path, recipe.telemetry.project
        backend = self._make_backend()
        self._marks = dict(backend.open(RunInfo(name, *where, settings, tags, seconds(first["time"]))))
        sent = [x["time"] for x in ledger if x["kind"] == "train" and x["step"] <= self._marks.get("train", -1)]
        self._devices = DeviceFiles(run.devices_dir, since=max(sent, default=""))
        return backend

    def finish(self) -> None:
        """Send all there is and the run's state."""
        if self.flush() and self.backend:
            state = self.run.state
            if self.live and state in ("new", "running"):
                state = "failed"  # the training process is gone and wrote no ending
            self.backend.close(state, seconds(max(line["time"] for line in self._raw)))


class DeviceFiles:
    """The samples of all ranks (see `devices.DeviceSampler`) after a time, read in the order of their times."""

    def __init__(self, directory: Path, since: str = ""):
        self._directory, self._since = directory, since
        self._offsets: dict[Path, int] = {}
        self._waiting: dict[Path, list[Line]] = {}

    def until(self, time: str) -> Iterator[Line]:
        """The samples up to a time that were not given yet."""
        for path in sorted(self._directory.glob("rank-*.jsonl"))[:MAX_RANKS]:
            waiting = self._waiting.setdefault(path, [])
            while True:
                if not waiting:  # a long run's file is large: a block at a time, in reverse for pop
                    lines, offset = tail(path, before := self._offsets.get(path, 0), limit=1 << 18)
                    self._offsets[path] = offset
                    waiting += [x for x in reversed(lines) if "phase" in x and x.get("time", "") > self._since]
                    if offset == before:
                        break
                elif waiting[-1]["time"] <= time:
                    yield waiting.pop()
                else:
                    break


def follow(follower: Follower, ending: threading.Event, report: Callable[[str, str], None]) -> bool:
    """Send lines as they come until `ending`, through any failure; returns whether everything was delivered."""
    connected = False
    while True:
        last, failed = ending.is_set(), False  # asked before reading: what was written before the end is read
        try:
            follower.flush()
            if follower.backend and not connected:
                connected = True
                report("connected", follower.backend.hint)
            if last:
                follower.finish()
                report("complete", "")
                return True
        except Exception as error:  # whatever a tracker's library raises, the run is not concerned
            failed, follower.backend = True, None
            report("warning", scrub(first_line(error)))
            print(f"{time.ctime()}: {type(error).__name__}: {scrub(str(error))}", file=sys.stderr, flush=True)
            if last:
                return False
        ending.wait(RETRY_SECONDS if failed else POLL_SECONDS)


def watch_parent(ending: threading.Event, flush_seconds: float) -> None:
    """Set `ending` when the training process is gone, and end this one `flush_seconds` later with all it started.

    While a library holds the interpreter (a hung import of compiled code), this thread does not run: the C timer of
    `faulthandler`, set again as long as all is well, ends the process then.
    """
    parent = os.getppid()
    closed: list[Any] = []
    while not closed and os.getppid() == parent:  # a forked worker of the training may hold the pipe open
        faulthandler.dump_traceback_later(flush_seconds + 4 * WATCH_SECONDS, exit=True, file=sys.__stderr__ or 2)
        closed, _, _ = select.select([0], [], [], WATCH_SECONDS)
    faulthandler.dump_traceback_later(flush_seconds + WATCH_SECONDS, exit=True, file=sys.__stderr__ or 2)
    ending.set()
    time.sleep(flush_seconds)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def main(run: str, name: str, mode: str, flush_seconds: str) -> int:
    """Send until the parent pipe closes and all is delivered; 0 where the tracker has everything."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda *_: None)  # meant for the training; its end reaches us through the pipe
    if mode == "live":
        os.nice(10)  # on a machine without a free core, a tracker's imports would halve the training's speed
    reports = os.dup(1)
    os.set_blocking(reports, False)
    os.dup2(2, 1)

    def report(kind: str, text: str) -> None:
        with contextlib.suppress(OSError):  # nobody reads any more
            os.write(reports, json.dumps({"kind": kind, "text": text}).encode() + b"\n")

    ending = threading.Event()
    threading.Thread(target=watch_parent, args=(ending, min(float(flush_seconds), 1e6)), daemon=True).start()
    lock = FileLock(Path(run) / "trackers" / f"{name}.lock")
    try:
        lock.acquire(timeout=LOCK_SECONDS)
    except Timeout:
        report("warning", "another process exports this run to it; try again when that one is done")
        return 1
    except (OSError, NotImplementedError):
        pass  # a full disk, or a file system without locks

    def make_backend() -> Backend:  # imports the tracker's library
        backend: Backend = import_module(f"windlass.telemetry.trackers.{name}").Backend()
        return backend

    return 0 if follow(Follower(Run(Path(run)), make_backend, mode == "live"), ending, report) else 1


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # a library's thread or exit handler that hangs does not hold us up
