"""Trackers beside a training: a process for each (`main`) follows the ledger, so a hanging import
or a dead address hurts only that process. Its standard input closes when the training ends; its
standard output brings at most two lines: the run's place in the tracker, the first error."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, BinaryIO, NamedTuple

from windlass.errors import RunFailed, UserError, first_line, require
from windlass.fileio import acquire_lock
from windlass.processes import MODULE
from windlass.recipe import flatten
from windlass.recipe.strategies import Sizes
from windlass.run import PLACE, STARTS, Line, Run, decode, effective, last_start, timestamp
from windlass.telemetry import measures
from windlass.telemetry.backends import BACKENDS, Point
from windlass.variables import scrub

FLUSH_SECONDS = 30.0  # the longest that trackers may take after the end of a run
POLL_SECONDS, RETRY_SECONDS = 1.0, 10.0
WATCH_SECONDS = 5.0  # between two checks that the training lives; a closed pipe ends it at once
# fields of the event of starting that trackers get as hyper-parameters, beside the recipe's
STARTED = ("parameters", "trained", "steps", "precision", "device")
RANKS = 8  # the first ranks, which have curves in the trackers; reports have all


def stream(line: Line) -> str:
    return "/".join([line["kind"], *(str(line[key]) for key in ("suite", "index") if key in line)])


def point(line: Line) -> Point:
    """The numbers and texts of a line that a tracker gets."""
    sequence, texts, scalars = stream(line), dict[str, str](), dict[str, float]()
    if line["kind"] == "sample":
        texts = {f"samples/{line.get('index', 0)}": scrub(str(line.get("text", "")))}
    numbers = {key: float(x) for key, x in flatten(line).items() if type(x) in (int, float)}
    for key, value in numbers.items():
        path, measure = key.replace(".", "/"), measures.of_eval(key)
        if line["kind"] == "train":
            if key in measures.TRAIN and (name := measures.TRAIN[key].tracker):
                scalars[name] = value
            elif measures.of_source(key):
                scalars[f"train/{path}"] = value
        elif key in PLACE or key.startswith("seconds."):  # wall_time has the seconds
            continue
        elif line["kind"] == "log":  # its names begin with `log.`
            scalars[path] = value
        elif line["kind"] == "summary":
            if key != "best_score" or line.get("best_measure", "loss") != "loss":
                scalars[f"summary/{path}"] = value
        elif line["kind"] == "eval" and measure.role not in ("count", "place"):
            scalars[f"{'eval' if sequence == 'eval/loss' else sequence}/{path}"] = value
    return Point(line["step"], timestamp(line), sequence, scalars, texts)


class DeviceReader:
    """The means of the ranks' device samples between one `train` line and the next."""

    def __init__(self, run: Run):
        self.run = run
        self._files: dict[Path, Any] = {}

    def find(self) -> None:
        """Open new files: the files of ranks on other hosts may come late."""
        for rank in range(RANKS):
            path = self.run.devices_dir / f"rank-{rank:05d}.jsonl"
            if path not in self._files and path.exists():
                self._files[path] = path.open("rb")

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def read(self, line: Line) -> dict[str, float]:
        """Means by name for a `train` line; the utilisation of training steps only."""
        means = dict[str, float]()
        for file in self._files.values():
            read = new_lines(file, until=line["time"])
            new = [x for x in read if x.get("attempt") == line.get("attempt")]
            steps = [x for x in new if x.get("phase") == "train"]
            for m in measures.DEVICE.values():
                samples = [x for x in (steps if m.name == "util_pct" else new) if m.name in x]
                if m.tracker and samples:
                    name = f"device/rank{samples[0]['rank']}/{m.tracker}"
                    means[name] = fmean(x[m.name] for x in samples)
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


class Follower:
    """Sends the new lines of a run's ledger to a backend, each step once. `connect` makes the
    backend, also after a failure."""

    def __init__(self, run: Run, connect: Callable[..., Any]):
        self.run, self.connect = run, connect
        self.backend: Any = None
        self._devices = DeviceReader(run)
        self._raw: list[Line] = []
        self._offset = self._sent = self._attempt = 0

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
        lines = self._raw[self._sent :]
        if self.backend is None:
            lines = effective(self._raw)
            self._devices.close()
            self._devices = DeviceReader(self.run)
            # In every tracker the run's id is a hash of its ledger's first line, which stays.
            first = self._raw[0]
            run_id = hashlib.sha256(json.dumps(first, sort_keys=True).encode()).hexdigest()[:12]
            self.backend = self.connect(self.run, run_id, self._settings(lines), timestamp(first))
        self._sent, self._attempt = len(self._raw), newest["attempt"]
        self._devices.find()
        devices = {id(x): self._devices.read(x) for x in lines if x["kind"] == "train"}
        marks = self.backend.marks
        new = [x for x in lines if x["kind"] != "event" and x["step"] > marks.get(stream(x), -1)]
        if new:
            marks |= {stream(line): line["step"] for line in new}
            points = ((point(line), devices.get(id(line), {})) for line in new)
            self.backend.write(one._replace(scalars=one.scalars | more) for one, more in points)
        if last:
            self.backend.close(self.run.state, timestamp(newest))

    def _settings(self, lines: list[Line]) -> dict[str, Any]:
        recipe, start = self.run.recipe, last_start(lines)
        world = next((x["world"] for x in reversed(lines) if "world" in x), 1)
        settings = scrub(recipe.flat())
        study = self.run.path.resolve().parent.parent
        if (study / "study.json").is_file():
            settings["study"] = study.name
        settings |= {"world": world, "strategy": recipe.strategy(world).name}
        settings |= {"config_hash": recipe.config_hash}
        if layout := Sizes(**start.get("mesh", {})).layout:
            settings["layout"] = layout
        return settings | {name: start[name] for name in STARTED if start.get(name) is not None}


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


def main(run: str, name: str, flush_seconds: str) -> int:
    """Send lines until the training ends, through any failure; returns 0 if all is delivered."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # meant for the training
    os.nice(10)  # without a free core, a tracker's imports would halve the training's speed
    reports, reported = os.dup(1), set[bool]()
    os.dup2(2, 1)  # the log gets the output of the libraries

    def report(text: str, warning: bool) -> None:
        if warning not in reported:  # one line of each kind, short enough for one write to a pipe
            reported.add(warning)
            with contextlib.suppress(OSError):  # the training is gone
                os.write(reports, json.dumps([text[:500], warning]).encode() + b"\n")

    ending, seconds = threading.Event(), min(float(flush_seconds), 1e6)
    threading.Thread(target=watch_parent, args=(ending, seconds), daemon=True).start()
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


if __name__ == "__main__":
    os._exit(main(*sys.argv[1:]))  # also if a library's thread or exit handler hangs


class Note(NamedTuple):
    text: str
    warning: bool = False  # a problem; else the place at which a tracker shows the run


class Trackers:
    """The exporter processes of a run; each has `flush_seconds` left when this process ends. Only
    `finish` waits, and nothing here raises OSError."""

    def __init__(self, run: Path, names: Sequence[str], flush_seconds: float = FLUSH_SECONDS):
        self.run = run
        self.processes: dict[str, Any] = {}  # subprocess.Popen by name
        self._notes: list[Note] = []
        self._warned: set[str] = set()
        for name in names:
            arguments = ["windlass.telemetry.trackers", str(run), name, str(flush_seconds)]
            try:
                (run / "trackers").mkdir(parents=True, exist_ok=True)
                with open(run / "trackers" / f"{name}.log", "ab") as log:
                    self.processes[name] = subprocess.Popen(
                        [*MODULE, *arguments],
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
            code = process.poll()  # before reading, for the last messages of an ended process
            for line in (process.stdout.read() or b"").splitlines():  # a pipe splits no short line
                self._note(name, *json.loads(line))
            if code:
                self._note(name, f"its exporter ended early (exit code {code})")
        notes, self._notes = self._notes, []
        return notes

    def finish(self, timeout: float = FLUSH_SECONDS) -> list[Note]:
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
                os.killpg(process.pid, signal.SIGKILL)  # with its children
            process.wait()
        self.close()
        return notes + self.poll()

    def close(self) -> None:
        for process in self.processes.values():
            process.stdin.close()
            process.stdout.close()
            process.returncode = process.returncode or 0  # against a ResourceWarning
        self.processes = {}

    def _note(self, name: str, text: str, warning: bool = True) -> None:
        """Keep a message, and only the first warning of each tracker, with its remedy."""
        if not warning:
            self._notes.append(Note(f"{name}: {text}"))
        elif name not in self._warned:
            self._warned.add(name)
            remedy = f"nothing is lost: `windlass track {self.run} --to {name}` replays the ledger"
            self._notes.append(Note(f"{name}: {text}; {remedy}", warning=True))


def track(run: str | Path | Run, name: str, timeout: float = 0.0) -> list[Note]:
    """Send the part of a run's ledger that a tracker lacks; returns messages for the user.

    Args:
        run: A run or its directory.
        name: `tensorboard`, `mlflow` or `wandb`.
        timeout: Seconds; 0 waits without a limit.

    Raises:
        UserError: There is nothing to send, or the library is missing.
        RunFailed: The tracker did not take everything.
    """
    if name not in BACKENDS:
        raise UserError(f"{name} is not a tracker; write one of {', '.join(BACKENDS)}")
    require(name, f"the tracker {name}")
    run = run if isinstance(run, Run) else Run.open(run)
    if not run.ledger():
        raise UserError(f"{run.path} lacks a ledger ({run.metrics_path.name}): train first")
    trackers = Trackers(run.path, [name], timeout or 1e6)
    process = trackers.processes.get(name)
    notes = trackers.finish(timeout or 1e6)
    if process is None or process.returncode:
        texts = [note.text for note in notes]
        raise RunFailed("\n".join([*texts, f"see {run.path / 'trackers' / name}.log"]))
    return notes
