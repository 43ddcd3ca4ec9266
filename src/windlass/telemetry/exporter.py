"""The process that sends a run to one tracker: it follows the ledger until the training ends.

Its standard input closes when the training ends. Its standard output brings at most two lines: the
run's place in the tracker, and the first error. The libraries write to its standard error, a log.
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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any, BinaryIO

from windlass.errors import first_line
from windlass.fileio import acquire_lock
from windlass.recipe import flatten
from windlass.recipe.strategies import Sizes
from windlass.run import PLACE, STARTS, Line, Run, decode, effective, last_start, timestamp
from windlass.telemetry.backends import BACKENDS, Point
from windlass.telemetry.measures import DEVICE, LOSS, TRAIN, of_eval, of_source
from windlass.variables import scrub

POLL_SECONDS = 1.0  # between two looks at the ledger
RETRY_SECONDS = 10.0  # after an error
WATCH_SECONDS = 5.0  # between two checks that the training lives; a closed pipe ends it at once
# fields of the event of starting that trackers get as hyper-parameters, beside the recipe's
STARTED = ("parameters", "trained", "steps", "precision", "device")
RANKS = 8  # the first ranks, which have curves in the trackers; reports have all


def main(run: str, name: str, flush_seconds: str) -> int:
    """Send lines until the training ends, through any failure; returns 0 if all is delivered."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # meant for the training
    os.nice(10)  # without a free core, a tracker's imports would halve the training's speed
    pipe = os.dup(1)
    os.dup2(2, 1)  # the log gets the output of the libraries
    reported = set[bool]()

    def report(text: str, warning: bool) -> None:
        """Send the first text of each kind, short enough for one write to a pipe."""
        if warning not in reported:
            reported.add(warning)
            with contextlib.suppress(OSError):  # the training is gone
                os.write(pipe, json.dumps([text[:500], warning]).encode() + b"\n")

    ending = threading.Event()
    watched = (ending, float(flush_seconds))
    threading.Thread(target=watch_parent, args=watched, daemon=True).start()
    with contextlib.suppress(OSError):  # a full disk
        # Held to the end, because another exporter may still send the rest of a killed run.
        _lock = acquire_lock(Path(run) / "trackers" / f"{name}.lock")
    follower = Follower(Run(run), BACKENDS[name])
    while True:
        last = ending.is_set()  # before reading, so that the last lines are read
        try:
            follower.flush(last)
            if follower.backend:
                report(follower.backend.hint, False)
            if last:
                return 0
            ending.wait(POLL_SECONDS)
        except Exception as error:  # whatever a tracker's library raises
            follower.backend = None
            report(scrub(first_line(error)), True)
            text = f"{time.ctime()}: {type(error).__name__}: {scrub(str(error))}"
            print(text, file=sys.stderr, flush=True)
            if last:
                return 1
            ending.wait(RETRY_SECONDS)


def watch_parent(ending: threading.Event, flush_seconds: float) -> None:
    """Set `ending` when the training is gone, and end this process group `flush_seconds` later.

    If a library holds the interpreter (compiled code that hangs), no Python thread runs, and the
    alarm ends this process.
    """
    parent, closed = os.getppid(), list[Any]()
    while not closed and os.getppid() == parent:  # a worker of the training may keep the pipe open
        signal.alarm(1 + int(flush_seconds + 4 * WATCH_SECONDS))
        closed, _, _ = select.select([0], [], [], WATCH_SECONDS)
    signal.alarm(1 + int(flush_seconds + WATCH_SECONDS))
    ending.set()
    time.sleep(flush_seconds)
    os.killpg(os.getpgrp(), signal.SIGKILL)


class Follower:
    """Sends the new lines of a run's ledger to a backend, each step once. `connect` makes the
    backend, also after a failure."""

    def __init__(self, run: Run, connect: Callable[..., Any]):
        self.run, self.connect = run, connect
        self.backend: Any = None
        self._devices = DeviceReader(run)
        self._raw: list[Line] = []
        self._offset = 0  # bytes read of the ledger
        self._sent = 0  # lines of `_raw` that the backend has seen
        self._attempt = 0  # of the last of them

    def flush(self, last: bool = False) -> None:
        """Send the new lines, and with `last` the run's state."""
        with contextlib.suppress(FileNotFoundError), open(self.run.metrics_path, "rb") as file:
            file.seek(self._offset)
            self._raw += map(decode, new_lines(file))
            self._offset = file.tell()
        # A warning may come before the start.
        begun = any(x["kind"] == "event" and x.get("event") in STARTS for x in self._raw)
        if not self._raw or not (begun or self.backend or last):
            return
        newest = self._raw[-1]
        if self.backend and newest["attempt"] > self._attempt:
            # The run went back to a checkpoint: the backend starts over from the effective ledger.
            self.backend.close("running", timestamp(newest))
            self.backend = None
        if self.backend:
            lines = self._raw[self._sent :]
        else:
            lines = effective(self._raw)
            self._devices.close()
            self._devices = DeviceReader(self.run)
            # In every tracker the run's id is a hash of its ledger's first line, which stays.
            first = self._raw[0]
            run_id = hashlib.sha256(json.dumps(first, sort_keys=True).encode()).hexdigest()[:12]
            self.backend = self.connect(self.run, run_id, self._settings(lines), timestamp(first))
        self._sent, self._attempt = len(self._raw), newest["attempt"]
        points = list[Point]()
        for line in lines:
            devices = self._devices.read(line) if line["kind"] == "train" else {}
            if line["kind"] != "event" and line["step"] > self.backend.marks.get(stream(line), -1):
                points.append(point(line, devices))
        if points:
            self.backend.write(points)
        if last:
            self.backend.close(self.run.state, timestamp(newest))

    def _settings(self, lines: list[Line]) -> dict[str, Any]:
        """The hyper-parameters: the recipe, and what the start resolved."""
        recipe, start = self.run.recipe, last_start(lines)
        world = start.get("world", 1)
        settings = scrub(recipe.flat())
        study = self.run.path.resolve().parent.parent
        if (study / "study.json").is_file():
            settings["study"] = study.name
        settings["world"] = world
        settings["strategy"] = recipe.strategy(world).name
        settings["config_hash"] = recipe.config_hash
        if layout := Sizes(**start.get("mesh", {})).layout:
            settings["layout"] = layout
        return settings | {name: start[name] for name in STARTED if start.get(name) is not None}


def stream(line: Line) -> str:
    """The lines of one stream have different steps."""
    return "/".join([line["kind"], *(str(line[key]) for key in ("suite", "index") if key in line)])


def point(line: Line, devices: Mapping[str, float] = MappingProxyType({})) -> Point:
    """What a tracker gets of a line: its numbers and texts by their names there, and `devices`."""
    texts = dict[str, str]()
    if line["kind"] == "sample":
        texts[f"samples/{line.get('index', 0)}"] = scrub(str(line.get("text", "")))
    scalars = dict[str, float]()
    for field, value in flatten(line).items():
        if type(value) in (int, float) and (name := name_of(field, line)):
            scalars[name] = float(value)
    return Point(line["step"], timestamp(line), stream(line), {**scalars, **devices}, texts)


def name_of(field: str, line: Line) -> str:
    """The name of a line's field in the trackers; empty if they do not get it."""
    path = field.replace(".", "/")
    if line["kind"] == "train":
        if of_source(field):
            return f"train/{path}"
        group = TRAIN[field].tracker if field in TRAIN else ""
        return f"{group}/{field}" if group else ""
    if field in PLACE or field.startswith("seconds."):  # `wall_time` has the seconds
        return ""
    match line["kind"]:
        case "log":  # its names begin with `log.`
            return path
        case "summary":
            return f"summary/{path}"
        case "eval" if of_eval(field).role not in ("count", "place"):
            suite = line.get("suite", LOSS)
            return f"eval/{path}" if suite == LOSS else f"eval/{suite}/{path}"
    return ""


class DeviceReader:
    """The means of the ranks' device samples between one `train` line and the next."""

    def __init__(self, run: Run):
        self._paths = [run.devices_dir / f"rank-{rank:05d}.jsonl" for rank in range(RANKS)]
        self._files: dict[Path, BinaryIO] = {}

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def read(self, line: Line) -> dict[str, float]:
        """Means by name for a `train` line; the utilisation of training steps only."""
        means = dict[str, float]()
        for rank, path in enumerate(self._paths):
            if path not in self._files:
                if not path.exists():  # the files of ranks on other hosts may come late
                    continue
                self._files[path] = path.open("rb")
            read = new_lines(self._files[path], until=line["time"])
            new = [x for x in read if x.get("attempt") == line.get("attempt")]
            steps = [x for x in new if x.get("phase") == "train"]
            for measure in DEVICE.values():
                samples = steps if measure.name == "util_pct" else new
                values = [x[measure.name] for x in samples if measure.name in x]
                if measure.tracker and values:
                    means[f"{measure.tracker}/rank{rank}/{measure.name}"] = fmean(values)
        return means


def new_lines(file: BinaryIO, until: str = "") -> Iterator[Line]:
    """The whole new lines of a JSON-lines file, without torn ones, up to a time (UTC, as text)."""
    while (text := file.readline()).endswith(b"\n"):
        with contextlib.suppress(ValueError):  # torn by a kill
            line = json.loads(text)
            if until and line.get("time", "") > until:
                break
            yield line
    file.seek(-len(text), os.SEEK_CUR)  # the next call reads a later line, or one half written


if __name__ == "__main__":
    os._exit(main(*sys.argv[1:]))  # also if a library's thread or exit handler hangs
