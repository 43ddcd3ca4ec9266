"""Trackers (TensorBoard, MLflow, W&B) beside a training: one exporter process for each, which
follows the ledger.

`Trackers` is the training's side of two pipes: an exporter's standard input closes when the
training ends, its standard output brings at most two lines of JSON (where the run is shown, and the
first error). The exporter, `python -m` of this file, is all that a hanging import, a dead address
or a full disk can hurt. Exit code 0: all is delivered.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from windlass.errors import RunFailed, UserError, first_line, require
from windlass.fileio import acquire_lock
from windlass.recipe import flatten
from windlass.run import PLACE, STARTS, Line, Run, decode, effective, last_start, timestamp
from windlass.telemetry import measures
from windlass.telemetry.backends import BACKENDS, Point
from windlass.variables import scrub

POLL_SECONDS, RETRY_SECONDS = 1.0, 10.0
WATCH_SECONDS = 5.0  # between two checks that the training lives; a closed pipe ends it at once
STARTED = ("parameters", "trained", "steps", "precision", "device")
"""Fields of the event of starting that a tracker gets as hyper-parameters beside the recipe's."""
EACH_RANK = 8  # most ranks with curves of their own; more ranks have mean, lowest and highest


class Note(NamedTuple):
    text: str  # where a tracker shows the run, or what is wrong
    warning: bool = False


class Trackers:
    """The exporter processes of a run. Nothing here raises OSError, and only `finish` waits.

    When this process ends, an exporter has `flush_seconds` left.
    """

    def __init__(self, run: Path, names: Sequence[str], flush_seconds: float):
        self.run = run
        self.processes: dict[str, Any] = {}  # subprocess.Popen by name; Any: no pipe is None
        self._notes: list[Note] = []
        self._warned: set[str] = set()
        for name in names:
            arguments = ["windlass.telemetry.trackers", str(run), name, str(flush_seconds)]
            try:
                (run / "trackers").mkdir(parents=True, exist_ok=True)
                with open(run / "trackers" / f"{name}.log", "ab") as log:
                    self.processes[name] = subprocess.Popen(
                        [sys.executable, "-m", *arguments],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=log,
                        bufsize=0,
                        process_group=0,  # Ctrl-C in the terminal is for the training
                        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
                    )
                os.set_blocking(self.processes[name].stdout.fileno(), False)
            except OSError as error:
                self._note(name, f"its exporter could not be started ({error})")

    def poll(self) -> list[Note]:
        """The messages since the last call."""
        for name, process in self.processes.items():
            code = process.poll()  # before reading: then the reports of an ended process are read
            for line in (process.stdout.read() or b"").splitlines():  # a short line is never split
                self._note(name, *json.loads(line))
            if code:
                self._note(name, f"its exporter ended early (exit code {code})")
        notes, self._notes = self._notes, []
        return notes

    def finish(self, timeout: float) -> list[Note]:
        """Wait up to `timeout` seconds until the trackers have the rest, then end the processes."""
        deadline = time.monotonic() + timeout
        for process in self.processes.values():
            process.stdin.close()
        for process in self.processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0.0))
        notes = self.poll()
        for name, process in self.processes.items():
            if process.poll() is None:
                self._note(name, f"not done {timeout:.0f} s after the end")
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)  # and what it started
            process.wait()
        self.close()
        return notes + self.poll()

    def close(self) -> None:
        """Close the pipes without waiting; the exporters send the rest and end."""
        for process in self.processes.values():
            process.stdin.close()
            process.stdout.close()
            process.returncode = process.returncode or 0  # nobody waits for it: no ResourceWarning
        self.processes = {}

    def _note(self, name: str, text: str, warning: bool = True) -> None:
        """Keep a message; of warnings the first one of each tracker, with its remedy."""
        if not warning:
            self._notes.append(Note(f"{name}: {text}"))
        elif name not in self._warned:
            self._warned.add(name)
            remedy = f"nothing is lost: `windlass track {self.run} --to {name}` replays the ledger"
            self._notes.append(Note(f"{name}: {text}; {remedy}", warning=True))


def replay(run: str | Path | Run, name: str, timeout: float = 0.0) -> list[Note]:
    """Send the part of a run's ledger that a tracker lacks; returns messages for the user.

    `timeout` is in seconds; 0 waits without a limit. Raises UserError if there is nothing to send
    or the library is missing, and RunFailed if the tracker did not take everything.
    """
    if name not in BACKENDS:
        raise UserError(f"there is no tracker {name}; there are {', '.join(BACKENDS)}")
    require(name, f"the tracker {name}")
    run = run if isinstance(run, Run) else Run.open(run)
    if not run.ledger():
        raise UserError(f"{run.path} has no ledger yet ({run.metrics_path.name}): train first")
    trackers = Trackers(run.path, [name], timeout or 1e6)
    process = trackers.processes.get(name)
    notes = trackers.finish(timeout or 1e6)
    if process is None or process.returncode:
        raise RunFailed(
            "\n".join([*(note.text for note in notes), f"see {run.path / 'trackers' / name}.log"])
        )
    return notes


def stream(line: Line) -> str:
    """The stream of a line, which has one line per step: its kind, with the suite or the index."""
    return "/".join([line["kind"], *(str(line[key]) for key in ("suite", "index") if key in line)])


def point(line: Line) -> Point:
    """The numbers and texts of a line that a tracker gets."""
    sequence, texts, scalars = stream(line), dict[str, str](), dict[str, float]()
    if line["kind"] == "sample":
        texts = {f"samples/{line.get('index', 0)}": scrub(str(line.get("text", "")))}
    for key, value in numbers(flatten(line)).items():
        path, measure = key.replace(".", "/"), measures.of_eval(key)
        if line["kind"] == "train":
            if key in measures.TRAIN and (name := measures.TRAIN[key].tracker):
                scalars[name] = value
        elif key in PLACE or key.startswith("seconds."):  # wall_time has the seconds
            continue
        elif line["kind"] == "log":  # its names begin with `log.`
            scalars[path] = value
        elif line["kind"] == "summary":
            if key != "best_score" or line.get("best_measure", "loss") != "loss":
                summary = measures.SUMMARY.get(key)
                scalars[f"summary/{summary.tracker if summary else path}"] = value
        elif line["kind"] == "eval" and measure.role not in ("count", "place"):
            scalars[f"{'eval' if sequence == 'eval/loss' else sequence}/{path}"] = value
    return Point(line["step"], timestamp(line), sequence, scalars, texts)


def numbers(line: Mapping[str, Any]) -> dict[str, float]:
    """The numeric fields of a line."""
    return {key: float(v) for key, v in line.items() if type(v) in (int, float)}


class DeviceReader:
    """What the ranks' samples of their devices say between one `train` line and the next."""

    def __init__(self, run: Run):
        self.run = run
        self._files: dict[Path, Any] = {}
        self._next: dict[Path, Line] = {}  # by file the sample that was read ahead

    def find(self) -> None:
        """Open the files that have come: those of ranks on other hosts may be late."""
        for path in sorted(self.run.devices_dir.glob("rank-*.jsonl")):
            if path not in self._files:
                self._files[path] = path.open("rb")

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _until(self, path: Path, time: str) -> Iterator[Line]:
        """The samples of a file up to a time (UTC, as text), each given once."""
        while True:
            if path not in self._next:
                at = self._files[path].tell()
                if not (text := self._files[path].readline()).endswith(b"\n"):
                    self._files[path].seek(at)  # is being written
                    return
                with contextlib.suppress(ValueError):  # torn by a kill
                    self._next[path] = json.loads(text)
                continue
            if self._next[path].get("time", "") > time:
                return
            yield self._next.pop(path)

    def read(self, line: Line) -> dict[str, float]:
        """Means by name for a `train` line; utilisation counts in training steps alone."""
        means, many = dict[str, list[float]](), len(self._files) > EACH_RANK
        for path in self._files:
            read = self._until(path, line["time"])
            new = [x for x in read if x.get("attempt") == line.get("attempt")]
            steps = [x for x in new if x.get("phase") == "train"]
            for m in measures.DEVICE.values():
                samples = [x for x in (steps if m.name == "util_pct" else new) if m.name in x]
                if m.tracker and samples:
                    rank = "" if many else f"rank{samples[0].get('rank', 0)}/"
                    values = means.setdefault(f"device/{rank}{m.tracker}", [])
                    values.append(fmean(x[m.name] for x in samples))
        if not many:
            return {name: value for name, (value,) in means.items()}
        summaries: dict[str, Any] = {"mean": fmean, "min": min, "max": max}
        both = itertools.product(means.items(), summaries.items())
        return {f"{name}_{what}": of(values) for (name, values), (what, of) in both}


class Follower:
    """Sends the new lines of a run's ledger to a backend, each step once.

    `connect` makes the backend, and makes it again after a failure.
    """

    def __init__(self, run: Run, connect: Callable[..., Any]):
        self.run, self.connect = run, connect
        self.backend: Any = None
        self._devices = DeviceReader(run)
        self._raw: list[Line] = []
        self._offset = self._sent = self._attempt = 0

    def flush(self, last: bool = False) -> None:
        """Send what is new, and with `last` the run's state."""
        with contextlib.suppress(FileNotFoundError), open(self.run.metrics_path, "rb") as file:
            file.seek(self._offset)
            for text in file:
                if not text.endswith(b"\n"):  # is being written
                    break
                self._offset += len(text)
                with contextlib.suppress(ValueError):  # torn by a kill
                    self._raw.append(decode(json.loads(text)))
        # A warning may come before the start.
        begun = any(x["kind"] == "event" and x.get("event") in STARTS for x in self._raw)
        if not self._raw or not (begun or self.backend or last):
            return
        first, newest = self._raw[0], self._raw[-1]
        began, latest = map(timestamp, (first, newest))
        if self.backend and newest["attempt"] > self._attempt:
            # the run went back to a checkpoint: the backend starts over from what is still valid
            self.backend.close("running", latest)
            self.backend = None
        lines = self._raw[self._sent :]
        if self.backend is None:
            lines, recipe = effective(self._raw), self.run.recipe
            self._devices.close()
            self._devices, start = DeviceReader(self.run), last_start(lines)
            world = next((x["world"] for x in reversed(lines) if "world" in x), 1)
            settings = scrub(recipe.flat())
            study = self.run.path.resolve().parents[1]
            if (study / "study.json").is_file():
                settings["telemetry.group"] = settings["telemetry.group"] or study.name
            settings |= {
                "world": world,
                "strategy": recipe.strategy(world).name,
                "config_hash": recipe.config_hash,
            }
            settings |= {name: start[name] for name in STARTED if start.get(name) is not None}
            # the run's id in every tracker is a hash of its ledger's very first line, which no
            # resume changes
            run_id = hashlib.sha256(json.dumps(first, sort_keys=True).encode()).hexdigest()[:12]
            self.backend = self.connect(self.run, run_id, settings, began)
        self._sent, self._attempt = len(self._raw), newest["attempt"]
        marks = self.backend.marks
        self._devices.find()
        devices = {id(x): self._devices.read(x) for x in lines if x["kind"] == "train"}
        if lines := [
            x for x in lines if x["kind"] != "event" and x["step"] > marks.get(stream(x), -1)
        ]:
            marks |= {stream(line): line["step"] for line in lines}
            points = ((point(line), devices.get(id(line), {})) for line in lines)
            self.backend.write(one._replace(scalars=one.scalars | more) for one, more in points)
        if last:
            self.backend.close(self.run.state, latest)


def watch_parent(ending: threading.Event, flush_seconds: float) -> None:
    """Set `ending` when the training process is gone, and end this one `flush_seconds` later with
    all it started.

    No Python thread runs while a library holds the interpreter (a hung import of compiled code):
    the alarm ends it then.
    """
    parent, closed = os.getppid(), list[Any]()
    while (
        not closed and os.getppid() == parent
    ):  # a forked worker of the training may hold the pipe open
        signal.alarm(1 + int(flush_seconds + 4 * WATCH_SECONDS))
        closed, _, _ = select.select([0], [], [], WATCH_SECONDS)
    signal.alarm(1 + int(flush_seconds + WATCH_SECONDS))
    ending.set()
    time.sleep(flush_seconds)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def main(run: str, name: str, flush_seconds: str) -> int:
    """Send lines as they come until the parent pipe closes, through any failure; 0 where the
    tracker has everything."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(
            number, signal.SIG_IGN
        )  # meant for the training; its end reaches us through the pipe
    os.nice(
        10
    )  # on a machine without a free core, a tracker's imports would halve the training's speed
    reports, reported = os.dup(1), set()
    os.dup2(2, 1)  # what a library prints goes to the log

    def report(text: str, warning: bool) -> None:
        if (
            warning not in reported
        ):  # one line of each kind; short enough to be written into a pipe as a whole
            reported.add(warning)
            with contextlib.suppress(OSError):  # the training is gone
                os.write(reports, json.dumps([text[:500], warning]).encode() + b"\n")

    ending = threading.Event()
    threading.Thread(
        target=watch_parent, args=(ending, min(float(flush_seconds), 1e6)), daemon=True
    ).start()
    with contextlib.suppress(OSError):  # a full disk
        # Held to the end, because another exporter may still send the rest of a killed run.
        _lock = acquire_lock(Path(run) / "trackers" / f"{name}.lock")
    follower = Follower(Run(run), BACKENDS[name])
    while True:
        last, wait = (
            ending.is_set(),
            POLL_SECONDS,
        )  # asked before reading: what was written before the end is read
        try:
            follower.flush(last)
            if follower.backend:
                report(follower.backend.hint, False)
            if last:
                return 0
        except Exception as error:  # any error of a tracker's library leaves the run alone
            wait, follower.backend = RETRY_SECONDS, None
            report(scrub(first_line(error)), True)
            print(
                f"{time.ctime()}: {type(error).__name__}: {scrub(str(error))}",
                file=sys.stderr,
                flush=True,
            )
            if last:
                return 1
        ending.wait(wait)


if __name__ == "__main__":
    os._exit(
        main(*sys.argv[1:])
    )  # a library's thread or exit handler that hangs does not hold us up
