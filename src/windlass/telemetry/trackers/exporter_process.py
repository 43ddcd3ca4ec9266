"""The process that sends a run's ledger to one tracker: `python -m windlass.telemetry.trackers.exporter_process`.

It is all that a hanging import, a dead address or a full disk can hurt. What a tracker's library prints goes to the log.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from filelock import FileLock

from windlass.errors import first_line
from windlass.recipe.load import flatten
from windlass.run import Run, effective
from windlass.telemetry.environment import scrub
from windlass.telemetry.ledger import Line, tail
from windlass.telemetry.trackers.backends import BACKENDS, Point

POLL_SECONDS, RETRY_SECONDS = 1.0, 10.0
WATCH_SECONDS = 5.0  # how often to see whether the training lives; that it closed the pipe is noticed at once
NO_METRIC = {"kind", "step", "time", "attempt", "suite", "index", "rank", "cores"}


def stream(line: Line) -> str:
    """The sequence of steps that a line belongs to, with one line a step: its kind, with the suite or the index."""
    return "/".join([line["kind"], *(str(line[key]) for key in ("suite", "index") if key in line)])


def point(line: Line, devices: Mapping[str, float]) -> Point:
    """What a line gives a tracker; with a `train` line the means of the devices' samples since the one before it."""
    sequence, texts = stream(line), {}
    if line["kind"] == "train":
        scalars = {"run/attempt": float(line.get("attempt", 0))}
        scalars |= {f"goodput/{key}_s": value for key, value in numbers(line.get("seconds", {})).items()}
        for key, value in numbers(line).items():
            group = "time" if key.endswith("_ms") else "throughput" if "per_s" in key or key == "mfu" else "train"
            scalars[f"{group}/{key}"] = value
    elif line["kind"] == "sample":
        scalars, texts = {}, {f"samples/{line.get('index', 0)}": str(line.get("text", ""))}
    else:
        prefix, fields = "eval" if sequence == "eval/loss" else sequence, flatten({**line, "seconds": None})
        scalars = {f"{prefix}/{key.replace('.', '/')}": value for key, value in numbers(fields).items()}
    return Point(line["step"], seconds(line), sequence, {**scalars, **devices}, texts)


def numbers(line: Mapping[str, Any]) -> dict[str, float]:
    """The numeric fields of a line; the words that stand for non-finite numbers become floats again."""
    numeric = {k: v for k, v in line.items() if isinstance(v, int | float) or v in ("NaN", "Infinity", "-Infinity")}
    return {key: float(v) for key, v in numeric.items() if key not in NO_METRIC and not isinstance(v, bool)}


def seconds(line: Line) -> float:
    """A line's time, since 1970."""
    return datetime.fromisoformat(line["time"]).timestamp()


class Follower:
    """Sends what is new in a run's ledger to a backend, each step once; `connect` is called again after a failure."""

    def __init__(self, run: Run, connect: Callable[..., Any]):
        self.run, self.connect = run, connect
        self.backend: Any = None
        self._raw: list[Line] = []
        self._offset = self._sent = self._attempt = 0
        self._offsets: dict[Path, int] = {}  # of the devices' files

    def flush(self, last: bool = False) -> None:
        """Send what is new, and with `last` the run's state."""
        for self._offset, line in tail(self.run.metrics_path, self._offset):  # noqa: B020
            self._raw.append(line)
        if not self._raw:
            return
        newest = self._raw[-1]
        if self.backend and newest["attempt"] > self._attempt:
            # the run went back to a checkpoint: the backend starts over from what is still valid
            self.backend.close("running", seconds(newest))
            self.backend = None
        lines = self._raw[self._sent :]
        if self.backend is None:
            lines, recipe, first = effective(self._raw), self.run.recipe, self._raw[0]
            world = next((x["world"] for x in reversed(lines) if "world" in x), 1)
            settings = {key: scrub(value) if isinstance(value, str) else value for key, value in recipe.flat().items()}
            settings |= {"world": world, "strategy": recipe.strategy(world), "config_hash": recipe.config_hash}
            # the run's id in every tracker is a hash of its ledger's very first line, which no resume changes
            id = hashlib.sha256(json.dumps(first, sort_keys=True).encode()).hexdigest()[:12]
            self.backend = self.connect(self.run, id, settings, seconds(first))
            sent, self._offsets = self.backend.marks.get("train", -1), {}
            times = [x["time"] for x in lines if x["kind"] == "train" and x["step"] <= sent]
            device_means(self.run.devices_dir, self._offsets, max(times, default=""))  # leaves out what was sent
        self._sent, self._attempt = len(self._raw), newest["attempt"]
        marks = self.backend.marks
        if lines := [x for x in lines if x["kind"] != "event" and x["step"] > marks.get(stream(x), -1)]:
            marks |= {stream(line): line["step"] for line in lines}
            devices, offsets = self.run.devices_dir, self._offsets
            means = (device_means(devices, offsets, x["time"]) if x["kind"] == "train" else {} for x in lines)
            self.backend.write(map(point, lines, means))
        if last:
            self.backend.close(self.run.state, seconds(newest))


def device_means(directory: Path, offsets: dict[Path, int], until: str) -> dict[str, float]:
    """Means of the ranks' samples behind `offsets`, which it moves on, up to a time: `device/<field>/rank_<n>`."""
    values: dict[str, list[float]] = {}
    for path in sorted(directory.glob("rank-*.jsonl"))[:64]:  # the report shows all ranks
        for offset, sample in tail(path, offsets.get(path, 0)):
            if sample["time"] > until:
                break
            offsets[path] = offset
            for key, value in numbers(sample).items() if "phase" in sample else ():  # not the head of a start
                values.setdefault(f"device/{key}/rank_{sample['rank']}", []).append(value)
    return {name: sum(some) / len(some) for name, some in values.items()}


def watch_parent(ending: threading.Event, flush_seconds: float) -> None:
    """Set `ending` when the training process is gone, and end this one `flush_seconds` later with all it started.

    No Python thread runs while a library holds the interpreter (a hung import of compiled code): the alarm ends it then.
    """
    parent, closed = os.getppid(), list[Any]()
    while not closed and os.getppid() == parent:  # a forked worker of the training may hold the pipe open
        signal.alarm(1 + int(flush_seconds + 4 * WATCH_SECONDS))
        closed, _, _ = select.select([0], [], [], WATCH_SECONDS)
    signal.alarm(1 + int(flush_seconds + WATCH_SECONDS))
    ending.set()
    time.sleep(flush_seconds)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def main(run: str, name: str, flush_seconds: str) -> int:
    """Send lines as they come until the parent pipe closes, through any failure; 0 where the tracker has everything."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # meant for the training; its end reaches us through the pipe
    os.nice(10)  # on a machine without a free core, a tracker's imports would halve the training's speed
    reports, reported = os.dup(1), set()
    os.dup2(2, 1)  # what a library prints goes to the log

    def report(text: str, warning: bool) -> None:
        if warning not in reported:  # one line of each kind; short enough to be written into a pipe as a whole
            reported.add(warning)
            with contextlib.suppress(OSError):  # the training is gone
                os.write(reports, json.dumps([text[:500], warning]).encode() + b"\n")

    ending = threading.Event()
    threading.Thread(target=watch_parent, args=(ending, min(float(flush_seconds), 1e6)), daemon=True).start()
    lock = FileLock(Path(run) / "trackers" / f"{name}.lock")  # another exporter may send the rest of a killed run
    with contextlib.suppress(OSError, NotImplementedError):  # a full disk, or a file system without locks
        lock.acquire()
    follower = Follower(Run(run), BACKENDS[name])
    while True:
        last, wait = ending.is_set(), POLL_SECONDS  # asked before reading: what was written before the end is read
        try:
            follower.flush(last)
            if follower.backend:
                report(follower.backend.hint, False)
            if last:
                return 0
        except Exception as error:  # any error of a tracker's library leaves the run alone
            wait, follower.backend = RETRY_SECONDS, None
            report(scrub(first_line(error)), True)
            print(f"{time.ctime()}: {type(error).__name__}: {scrub(str(error))}", file=sys.stderr, flush=True)
            if last:
                return 1
        ending.wait(wait)


if __name__ == "__main__":
    os._exit(main(*sys.argv[1:]))  # a library's thread or exit handler that hangs does not hold us up
