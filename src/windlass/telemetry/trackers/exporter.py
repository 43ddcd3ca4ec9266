"""Between a run directory and one tracker: what is new in the ledger, joined with the devices' samples, each line once."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from windlass.recipe.load import flatten
from windlass.run import Run, effective
from windlass.telemetry.environment import scrub_settings
from windlass.telemetry.ledger import Line, tail
from windlass.telemetry.trackers import points
from windlass.telemetry.trackers.points import Marks, Point

MAX_RANKS = 64
"""Ranks whose devices are shown in trackers; the report shows all."""

BATCH = 200
"""Ledger lines that are sent at once."""


@dataclass
class Source:
    """A run as a tracker sees it when it connects."""

    run: Run
    lines: list[Line]
    """The effective ledger so far."""
    seams: list[int]
    """Steps at which the ledger went back; see `points.seams`."""
    live: bool
    """More is to come: the run goes on. Otherwise this is a replay."""
    id: str
    """Names the run in every tracker."""

    @property
    def name(self) -> str:
        """What the run is called."""
        return self.run.path.resolve().name

    @property
    def project(self) -> str:
        """The project or experiment."""
        return self.run.recipe.telemetry.project

    @property
    def notes(self) -> str:
        """Free text of the recipe."""
        return str(scrub_settings({"notes": self.run.recipe.run.notes})["notes"])

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Every setting of the recipe, nested, without secrets."""
        return scrub_settings(self.run.recipe.model_dump(mode="json"))

    @cached_property
    def flat_settings(self) -> dict[str, Any]:
        """Every setting under its dotted key, without secrets."""
        return flatten(self.settings)

    @property
    def tags(self) -> dict[str, str]:
        """By what one looks for runs."""
        recipe = self.run.recipe
        worlds = [
            line["world"] for line in self.lines if line["kind"] == "event" and isinstance(line.get("world"), int)
        ]
        found = {"preset": recipe.preset, "digest": recipe.config_hash, "optimizer": recipe.optim.kind}
        if worlds:
            found |= {"world": str(worlds[-1]), "strategy": recipe.strategy(worlds[-1])}
        return found

    @property
    def began(self) -> float:
        """When the run was first started, in seconds since 1970."""
        return points.seconds(self.lines[0]["time"])

    @property
    def ended(self) -> float:
        """The time of its last line."""
        return max(points.seconds(line["time"]) for line in self.lines)

    def pending(self, marks: Marks) -> bool:
        """Whether there is anything that a tracker with these marks does not have."""
        return bool(points.pending(self.lines, marks)) or bool(self.new_figures(marks))

    @cached_property
    def figures(self) -> dict[str, Path]:
        """Pictures of the run, by name."""
        from windlass.telemetry.trackers.figures import figures

        return figures(self.run)

    def new_figures(self, marks: Marks) -> dict[str, Path]:
        """The pictures of a finished run that a tracker with these marks does not have."""
        if self.state != "finished":
            return {}
        return {name: path for name, path in self.figures.items() if marks.get(f"figure/{name}") != _checksum(path)}

    @property
    def state(self) -> str:
        """`finished`, `preempted`, `failed`, or `running` where the ledger tells no end."""
        named = ("started", "resumed", "finished", "preempted", "failed")
        last = [line["event"] for line in self.lines if line["kind"] == "event" and line.get("event") in named]
        return last[-1] if last and last[-1] in named[2:] else "running"


class Sink(Protocol):
    """A tracker. Any error it raises means: not delivered, connect anew later."""

    def open(self, source: Source) -> Marks:
        """Connect, find or make the run, and tell what it has already; `source.live` or not."""
        ...

    def write(self, batch: list[Point], marks: Marks) -> None:
        """Take points in the order of their steps; once this returns, the tracker stands at `marks`."""
        ...

    def finish(self, source: Source, state: str, figures: dict[str, Path], marks: Marks) -> None:
        """Take pictures, note how the run stands, and deliver everything before returning; then all is at `marks`."""
        ...

    @property
    def hint(self) -> str:
        """Where to look at the run: a command or an address."""
        ...


class Exporter:
    """Sends a run's ledger to one sink, from wherever the sink stands.

    Args:
        run: The run.
        make: Makes the sink; called anew after each trouble.
        live: Whether more lines are to come.
        attempt: Lines are sent once there is one of this attempt or a later one, so that what a kill made void is not sent.
    """

    def __init__(self, run: Run, make: Callable[[], Sink], live: bool, attempt: int = -1):
        self.run, self.live, self.attempt = run, live, attempt
        self._make = make
        self._sink: Sink | None = None
        self._raw: list[Line] = []
        self._offset = 0
        self._marks: Marks = {}
        self._queue: list[Line] = []
        self._devices = DeviceFiles(run.devices_dir)

    @property
    def hint(self) -> str:
        """Where to look at the run; empty before the tracker is connected."""
        return self._sink.hint if self._sink else ""

    def pump(self, last: bool = False) -> bool:
        """Send what is new; returns whether the tracker is connected.

        Args:
            last: No more lines are to come, so lines of an earlier attempt go out too.
        """
        new, self._offset = tail(self.run.metrics_path, self._offset)
        new = [line for line in new if isinstance(line.get("step"), int) and "kind" in line and "time" in line]
        before = {"kind": "", "step": 0, "attempt": self._raw[-1].get("attempt", 0) if self._raw else -1}
        went_back = bool(points.seams([before, *new]))
        self._raw += new
        if not self._raw or not (last or self._raw[-1].get("attempt", 0) >= self.attempt):
            return False
        if self._sink is not None and went_back:
            self._close()
        if self._sink is None:
            self._connect()
        else:
            self._queue += points.pending(new, self._marks)
        while self._queue:
            self._send(self._queue[:BATCH])
            self._queue = self._queue[BATCH:]
        return True

    def _connect(self) -> None:
        self._sink = self._make()
        source = self._source()
        self._marks = dict(self._sink.open(source))
        self._queue = points.pending(source.lines, self._marks)
        sent = [
            line for line in source.lines if line["kind"] == "train" and line["step"] <= self._marks.get("train", -1)
        ]
        self._devices.seek(sent[-1]["time"] if sent else "")

    def _send(self, batch: list[Line]) -> None:
        assert self._sink is not None
        ready, marks = [], dict(self._marks)
        for line in batch:
            devices = {}
            if line["kind"] == "train":
                devices = points.device_means(self._devices.until(line["time"]))
            ready.append(points.point(line, devices))
            marks[ready[-1].stream] = line["step"]
        self._sink.write(ready, marks)
        self._marks = marks

    def finish(self) -> str:
        """Send all there is, the figures and the run's end; returns where to look at it."""
        self.pump(last=True)
        if self._sink is None:
            return ""
        source = self._source()
        state = source.state if self.live or source.state != "running" else self.run.state
        state = "failed" if self.live and state == "running" else state  # the run ended without a word
        figures = source.new_figures(self._marks)
        marks = self._marks | {f"figure/{name}": _checksum(path) for name, path in figures.items()}
        self._sink.finish(source, "running" if state == "new" else state, figures, marks)
        return self._sink.hint

    def _close(self) -> None:
        """The run went back: connect anew, so that the sink can do so too."""
        assert self._sink is not None
        sink, self._sink = self._sink, None
        sink.finish(self._source(), "running", {}, self._marks)

    def again(self) -> None:
        """After a trouble: forget the sink and begin from what it will say it has."""
        self._sink = None

    def _source(self) -> Source:
        lines = effective(self._raw)
        return Source(self.run, lines, points.seams(self._raw), self.live, points.run_id(self._raw[0]))


@dataclass
class _Samples:
    """One rank's samples, read in the order of their times, a block at a time."""

    path: Path
    offset: int = 0
    waiting: list[Line] = field(default_factory=list)

    def until(self, time: str) -> Iterator[Line]:
        """The samples up to a time that were not given yet."""
        while True:
            if not self.waiting:
                self.waiting = self._block()[::-1]
            if not self.waiting or self.waiting[-1]["time"] > time:
                return
            yield self.waiting.pop()

    def _block(self) -> list[Line]:
        lines: list[Line] = []
        before = -1
        while not lines and self.offset > before:
            before = self.offset
            new, self.offset = tail(self.path, self.offset, 1 << 18)
            lines = [line for line in new if "phase" in line and isinstance(line.get("time"), str)]
        return lines

    def seek(self, time: str) -> None:
        """Go to the first sample after a time, by halving: a long run's file is large, and its times only grow."""
        with open(self.path, "rb") as file:
            low, high = 0, os.fstat(file.fileno()).st_size
            while high - low > 4096:
                middle = (low + high) // 2
                file.seek(middle)
                file.readline()
                line = file.readline()
                low, high = (middle, high) if _time(line) <= time else (low, middle)
            file.seek(low)
            self.offset = low + (len(file.readline()) if low else 0)
        self.waiting = []


def _time(raw: bytes) -> str:
    try:
        return str(json.loads(raw)["time"])
    except (ValueError, KeyError, TypeError):
        return "~"  # after any time


class DeviceFiles:
    """The samples of all ranks (see `devices.DeviceSampler`)."""

    def __init__(self, directory: Path):
        self.directory = directory
        self._since = ""
        self._open: dict[str, _Samples] = {}

    def seek(self, time: str) -> None:
        """Leave out what was sampled up to a time."""
        self._since = time
        for samples in self._open.values():
            samples.seek(time)

    def until(self, time: str) -> Iterator[Line]:
        """All ranks' samples up to a time that were not given yet; times must grow from call to call."""
        for path in sorted(self.directory.glob("rank-*.jsonl"))[:MAX_RANKS]:
            if path.name not in self._open:
                self._open[path.name] = _Samples(path)
                self._open[path.name].seek(self._since)
            yield from (sample for sample in self._open[path.name].until(time) if sample["time"] > self._since)


def _checksum(path: Path) -> int:
    import zlib

    return zlib.crc32(path.read_bytes())
