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
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any

from windlass.errors import first_line
from windlass.fileio import acquire_lock
from windlass.ledger import PLACE, STARTS, Line, decode, effective, last_start, timestamp
from windlass.recipe import flatten
from windlass.run import Run
from windlass.telemetry.backends import BACKENDS, Point
from windlass.telemetry.measures import DEVICE, LOSS, TRAIN, of_eval, of_source
from windlass.variables import scrub

POLL_SECONDS = 1.0  # between two looks at the ledger
RETRY_SECONDS = 10.0  # after an error
WATCH_SECONDS = 5.0  # between two checks that the training lives; a closed pipe ends it at once
# fields of the event of starting that trackers get as hyper-parameters, beside the recipe's
STARTED = ("world", "strategy", "parameters", "trained", "steps", "precision", "device")
RANKS = 8  # the first ranks, which have curves in the trackers; reports have all


def main(run: str, name: str, flush_seconds: str) -> int:
    """Send lines until the training ends, through any failure; returns 0 if all is delivered."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # meant for the training
    os.nice(10)  # without a free core, a tracker's imports would halve the training's speed
    pipe = os.dup(1)
    os.dup2(2, 1)  # the log gets the output of the libraries
    ending = threading.Event()
    watched = (ending, float(flush_seconds))
    threading.Thread(target=watch_parent, args=watched, daemon=True).start()
    with contextlib.suppress(OSError):  # a full disk
        # Held to the end, because another exporter may still send the rest of a killed run.
        _lock = acquire_lock(Path(run) / "trackers" / f"{name}.lock")
    follower, told = Follower(Run(run), BACKENDS[name]), set[bool]()
    while True:
        last, failed = ending.is_set(), False  # before reading, so that the last lines are read
        try:
            follower.flush(last)
            text = follower.backend.hint if follower.backend else ""
        except Exception as error:  # whatever a tracker's library raises
            follower.backend, failed = None, True
            text = scrub(first_line(error))
            problem = f"{time.ctime()}: {type(error).__name__}: {scrub(str(error))}"
            print(problem, file=sys.stderr, flush=True)
        if text and failed not in told:
            told.add(failed)
            with contextlib.suppress(OSError):  # the training is gone
                os.write(pipe, json.dumps([text[:500], failed]).encode() + b"\n")
        if last:
            return int(failed)
        ending.wait(RETRY_SECONDS if failed else POLL_SECONDS)


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
    backend, also after a failure, which removes it."""

    def __init__(self, run: Run, connect: Callable[..., Any]):
        self.run, self.connect = run, connect
        self.backend: Any = None
        self._offsets: dict[Path, int] = {}  # bytes read of the ledger, and of the devices' files
        self._newest: Line = {}

    def flush(self, last: bool = False) -> None:
        """Send the new lines, and with `last` the run's state."""
        lines = self._read_ledger() if self.backend else []
        if lines and lines[-1]["attempt"] > self._newest["attempt"]:
            # The run went back to a checkpoint: the backend starts over from the effective ledger.
            self.backend.close("running", timestamp(lines[-1]))
            self.backend = None
        if not self.backend:
            self._offsets = {}
            lines = self._read_ledger()
            # A warning may come before the start.
            begun = any(x["kind"] == "event" and x.get("event") in STARTS for x in lines)
            if not lines or not (begun or last):
                return
            # In every tracker the run's id is a hash of its ledger's first line, which stays.
            first = lines[0]
            run_id = hashlib.sha256(json.dumps(first, sort_keys=True).encode()).hexdigest()[:12]
            self._newest, lines = lines[-1], effective(lines)
            self.backend = self.connect(self.run, run_id, self._settings(lines), timestamp(first))
        elif lines:
            self._newest = lines[-1]
        points = list[Point]()
        for line in lines:
            devices = self._device_means(line) if line["kind"] == "train" else {}
            if line["kind"] != "event" and line["step"] > self.backend.marks.get(stream(line), -1):
                points.append(point(line, devices))
        if points:
            self.backend.write(points)
        if last:
            self.backend.close(self.run.state, timestamp(self._newest))

    def _read_ledger(self) -> list[Line]:
        return [decode(line) for line in new_lines(self.run.metrics_path, self._offsets)]

    def _settings(self, lines: list[Line]) -> dict[str, Any]:
        """The hyper-parameters: the recipe, and what the start resolved."""
        settings, start = scrub(self.run.recipe.flat()), last_start(lines)
        study = self.run.path.resolve().parent.parent
        if (study / "study.json").is_file():
            settings["study"] = study.name
        settings["config_hash"] = self.run.recipe.config_hash
        return settings | {name: start[name] for name in STARTED if start.get(name) is not None}

    def _device_means(self, line: Line) -> dict[str, float]:
        """Means of the ranks' device samples between the `train` line before and this one; the
        utilisation of training steps only."""
        means = dict[str, float]()
        for rank in range(RANKS):
            path = self.run.devices_dir / f"rank-{rank:05d}.jsonl"
            read = new_lines(path, self._offsets, until=line["time"])
            new = [x for x in read if x.get("attempt") == line.get("attempt")]
            steps = [x for x in new if x.get("phase") == "train"]
            for measure in DEVICE.values():
                samples = steps if measure.name == "util_pct" else new
                values = [x[measure.name] for x in samples if measure.name in x]
                if measure.tracker and values:
                    means[f"{measure.tracker}/rank{rank}/{measure.name}"] = fmean(values)
        return means


def new_lines(path: Path, offsets: dict[Path, int], until: str = "") -> list[Line]:
    """The whole lines of a JSON-lines file after `offsets[path]`, which moves on, up to a time
    (UTC, as text); without torn ones."""
    lines = list[Line]()
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:  # it may come late
        file.seek(offsets.get(path, 0))
        while (text := file.readline()).endswith(b"\n"):
            with contextlib.suppress(ValueError):  # torn by a kill
                line = json.loads(text)
                if until and line.get("time", "") > until:
                    break
                lines.append(line)
            offsets[path] = file.tell()
    return lines


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


if __name__ == "__main__":
    os._exit(main(*sys.argv[1:]))  # also if a library's thread or exit handler hangs
