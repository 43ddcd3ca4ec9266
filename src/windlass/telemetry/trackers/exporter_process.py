"""The process that sends a run's ledger to one tracker: `python -m windlass.telemetry.trackers.exporter_process`.

It is all that a hanging import, a dead address or a full disk can hurt. Its standard input is a pipe from the
training process; where that closes (the run is over, or was killed) the rest is sent and this process ends within a
bounded time, whatever the tracker's library does. What a library prints goes to the log; standard output is kept for
reports.

A back-end is a class `Backend(run, id, settings, started)` that connects when it is constructed. It has `hint`, where
to look at the run, and `marks`, the last step of each stream that the tracker has; `write(points)` takes points in the
order of their steps, after which the tracker has everything up to `marks`; `close(state, ended)` notes the run's state
and delivers everything before it returns. Any error means: not delivered, connect again later.
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
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from windlass.errors import first_line
from windlass.recipe.load import flatten
from windlass.run import Run, effective
from windlass.telemetry.environment import scrub, scrub_settings
from windlass.telemetry.ledger import Line, tail

POLL_SECONDS, RETRY_SECONDS = 1.0, 10.0
WATCH_SECONDS = 5.0  # how often to see whether the training lives; that it closed the pipe is noticed at once
LOCK_SECONDS = 60.0  # for another exporter of the same tracker, which sends the rest of a run that was killed
MAX_RANKS = 64  # ranks whose devices are shown in trackers; the report shows all

NO_METRIC = {"kind", "step", "time", "attempt", "suite", "index", "rank", "cores"}


@dataclass
class Point:
    """What one line gives a tracker at one step; `time` in seconds since 1970."""

    step: int
    time: float
    stream: str
    scalars: dict[str, float] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)


def stream(line: Line) -> str:
    """The sequence of steps that a line belongs to, with one line a step: its kind, with the suite or the index."""
    return "/".join([line["kind"], *(str(line[key]) for key in ("suite", "index") if key in line)])


def point(line: Line, devices: Mapping[str, float] | None = None) -> Point:
    """What a line gives a tracker; a `train` line with the means of the devices' samples since the one before it."""
    shown = Point(line["step"], seconds(line["time"]), stream(line))
    if line["kind"] == "train":
        for key, value in numbers(line).items():
            group = "time" if key.endswith("_ms") else "throughput" if "per_s" in key or key == "mfu" else "train"
            shown.scalars[f"{group}/{key}"] = value
        shown.scalars |= {f"goodput/{key}_s": value for key, value in numbers(line.get("seconds", {})).items()}
        shown.scalars |= {"run/attempt": float(line.get("attempt", 0)), **(devices or {})}
    elif line["kind"] == "sample":
        shown.texts = {f"samples/{line.get('index', 0)}": str(line.get("text", ""))}
    else:
        prefix = "eval" if shown.stream == "eval/loss" else shown.stream
        fields = numbers(flatten({**line, "seconds": None}))
        shown.scalars = {f"{prefix}/{key.replace('.', '/')}": value for key, value in fields.items()}
    return shown


def numbers(line: Mapping[str, Any]) -> dict[str, float]:
    """The numeric fields of a line; the words that stand for non-finite numbers become floats again."""
    numeric = {k: v for k, v in line.items() if isinstance(v, int | float) or v in ("NaN", "Infinity", "-Infinity")}
    return {key: float(v) for key, v in numeric.items() if key not in NO_METRIC and not isinstance(v, bool)}


def seconds(time: str) -> float:
    """A ledger line's time as seconds since 1970."""
    return datetime.fromisoformat(time).timestamp()


class Follower:
    """Sends what is new in a run's ledger to a backend, each step once; `connect` is called again after a failure."""

    def __init__(self, run: Run, connect: Callable[..., Any], live: bool):
        self.run, self.connect, self.live = run, connect, live
        self.backend: Any = None
        self._raw: list[Line] = []
        self._offset = self._sent = self._attempt = 0

    def flush(self, last: bool = False) -> None:
        """Send what is new, and with `last` the run's state."""
        for self._offset, line in tail(self.run.metrics_path, self._offset):  # noqa: B020
            if {"kind", "step", "time"} <= line.keys():
                self._raw.append(line)
        if not self._raw:
            return
        if self.backend and self._raw[-1].get("attempt", 0) > self._attempt:
            # the run went back to a checkpoint: the backend starts over from what is still valid
            self.backend.close("running", seconds(self._raw[-1]["time"]))
            self.backend = None
        lines = self._raw[self._sent :]
        if self.backend is None:
            lines = effective(self._raw)
            self.backend = self._connect(lines)
            mark = self.backend.marks.get("train", -1)
            before = [line["time"] for line in lines if line["kind"] == "train" and line["step"] <= mark]
            self._offsets: dict[Path, int] = {}
            device_means(self.run.devices_dir, self._offsets, max(before, default=""))
        self._sent, self._attempt = len(self._raw), self._raw[-1].get("attempt", 0)
        marks = self.backend.marks
        if lines := [x for x in lines if x["kind"] != "event" and x["step"] > marks.get(stream(x), -1)]:
            marks |= {stream(line): line["step"] for line in lines}
            self.backend.write(self._point(line) for line in lines)
        if last:
            state = self.run.state  # a live run that wrote no ending has failed: its process is gone
            state = "failed" if self.live and state in ("new", "running") else state
            self.backend.close(state, seconds(self._raw[-1]["time"]))

    def _point(self, line: Line) -> Point:
        train = line["kind"] == "train"
        return point(line, device_means(self.run.devices_dir, self._offsets, line["time"]) if train else None)

    def _connect(self, ledger: list[Line]) -> Any:
        """`id` names the run in every tracker: a hash of its ledger's very first line, which no resume changes."""
        recipe, first = self.run.recipe, self._raw[0]
        world = next((x["world"] for x in reversed(ledger) if isinstance(x.get("world"), int)), 1)
        settings = flatten(scrub_settings(recipe.model_dump(mode="json")))
        settings |= {"world": world, "strategy": recipe.strategy(world), "config_hash": recipe.config_hash}
        id = hashlib.sha256(json.dumps(first, sort_keys=True).encode()).hexdigest()[:12]
        return self.connect(self.run, id, settings, seconds(first["time"]))


def device_means(directory: Path, offsets: dict[Path, int], until: str) -> dict[str, float]:
    """Means of the ranks' samples behind `offsets`, which it moves on, up to a time: `device/<field>/rank_<n>`."""
    values: dict[str, list[float]] = defaultdict(list)
    for path in sorted(directory.glob("rank-*.jsonl"))[:MAX_RANKS]:
        for offset, sample in tail(path, offsets.get(path, 0)):
            if sample["time"] > until:
                break
            offsets[path] = offset
            for key, value in numbers(sample).items() if "phase" in sample else ():  # not the head of a start
                values[f"device/{key}/rank_{sample['rank']}"].append(value)
    return {name: sum(some) / len(some) for name, some in values.items()}


def follow(follower: Follower, ending: threading.Event, report: Callable[[str, bool], None]) -> int:
    """Send lines as they come until `ending`, through any failure; returns 0 where everything was delivered."""
    while True:
        last, wait = ending.is_set(), POLL_SECONDS  # asked before reading: what was written before the end is read
        try:
            follower.flush(last)
            if follower.backend:
                report(follower.backend.hint, False)
            if last:
                return 0
        except Exception as error:  # whatever a tracker's library raises, the run is not concerned
            wait, follower.backend = RETRY_SECONDS, None
            report(scrub(first_line(error)), True)
            print(f"{time.ctime()}: {type(error).__name__}: {scrub(str(error))}", file=sys.stderr, flush=True)
            if last:
                return 1
        ending.wait(wait)


def watch_parent(ending: threading.Event, flush_seconds: float) -> None:
    """Set `ending` when the training process is gone, and end this one `flush_seconds` later with all it started.

    While a library holds the interpreter (a hung import of compiled code), no Python thread runs: the alarm, set again
    as long as all is well, ends the process then.
    """
    parent = os.getppid()
    closed: list[Any] = []
    while not closed and os.getppid() == parent:  # a forked worker of the training may hold the pipe open
        signal.alarm(1 + int(flush_seconds + 4 * WATCH_SECONDS))
        closed, _, _ = select.select([0], [], [], WATCH_SECONDS)
    signal.alarm(1 + int(flush_seconds + WATCH_SECONDS))
    ending.set()
    time.sleep(flush_seconds)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def main(run: str, name: str, mode: str, flush_seconds: str) -> int:
    """Send until the parent pipe closes and all is delivered; 0 where the tracker has everything."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # meant for the training; its end reaches us through the pipe
    if mode == "live":
        os.nice(10)  # on a machine without a free core, a tracker's imports would halve the training's speed
    reports, reported = os.dup(1), set()
    os.dup2(2, 1)

    def report(text: str, warning: bool) -> None:
        if warning not in reported:  # one line of each kind; short enough to be written into a pipe as a whole
            reported.add(warning)
            with contextlib.suppress(OSError):  # nobody reads any more
                os.write(reports, json.dumps({"text": text[:500], "warning": warning}).encode() + b"\n")

    ending = threading.Event()
    threading.Thread(target=watch_parent, args=(ending, min(float(flush_seconds), 1e6)), daemon=True).start()
    lock = FileLock(Path(run) / "trackers" / f"{name}.lock")
    try:
        lock.acquire(timeout=LOCK_SECONDS)
    except Timeout:
        report("another process exports this run to it; try again when that one is done", True)
        return 1
    except (OSError, NotImplementedError):
        pass  # a full disk, or a file system without locks

    def connect(*arguments: Any) -> Any:
        return import_module(f"windlass.telemetry.trackers.{name}").Backend(*arguments)  # imports its library

    return follow(Follower(Run(run), connect, mode == "live"), ending, report)


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # a library's thread or exit handler that hangs does not hold us up
