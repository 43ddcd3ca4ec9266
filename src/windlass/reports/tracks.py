"""Columns of numbers along a run, and the clock that converts times of day. No torch."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from windlass.run import Line, timestamp
from windlass.telemetry.measures import DEVICE, is_place, is_score
from windlass.telemetry.timing import BEGINS

Numbers = NDArray[np.float64]

# the events that begin an attempt, with a chart's word for the restart
STARTS = {name: name for name in BEGINS} | {"started": "started again"}

# Windlass parses the device samples of all ranks up to this size, and every n-th line beyond it.
MAX_DEVICE_BYTES = 8_000_000


def number(value: Any) -> float:
    """A field of the ledger as a float; NaN if it is missing or not a number."""
    try:
        return math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return math.nan


@dataclass(frozen=True)
class Track:
    """Columns of equal length: `step`, `tokens`, `hours` along the run, and the measurements.

    A rank's device samples have `hours`, `training` (1 in the phase `train`) and some of
    DEVICE.
    """

    columns: Mapping[str, Numbers]
    rank: int = 0

    def __getitem__(self, name: str) -> Numbers:
        """The column; all NaN if the ledger does not have it."""
        column = self.columns.get(name)
        return np.full(len(self), math.nan) if column is None else column

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def has(self, name: str) -> bool:
        """Whether the column holds a finite number."""
        return bool(np.isfinite(self[name]).any())

    def measures(self) -> list[str]:
        """The columns that measure something, in the order in which they were first written."""
        return [name for name in self.columns if not is_place(name) and self.has(name)]

    def scores(self) -> list[str]:
        """The measures of an evaluation that say how good the model is."""
        return [name for name in self.measures() if is_score(name)]

    def thinned(self, rows: int) -> Track:
        """About `rows` of the rows at most: half by the loss, half by the extremes of measures."""
        if len(self) <= rows:
            return self
        names, half = self.measures(), rows // 2
        limits = [("loss", half), *((name, half // len(names)) for name in names)]
        parts = [thin(self["step"], self[name], limit) for name, limit in limits]
        keep = np.unique(np.concatenate(parts))
        return Track({name: column[keep] for name, column in self.columns.items()}, self.rank)


def thin(x: Numbers, y: Numbers, limit: int) -> NDArray[np.int64]:
    """Indices of about `limit` points that look like the whole curve; all if there are fewer.

    They are the first, lowest and highest point and the first NaN of each span. `x` [n] rises; some
    NaN of `y` [n] stay, so that a gap or a bad step is visible.
    """
    n = len(x)
    if n <= limit:
        return np.arange(n)
    keep = {0, n - 1}
    edges = np.linspace(0, n, max(2, limit // 3) + 1).astype(np.int64)
    for start, stop in itertools.pairwise(edges):
        good = np.isfinite(y[start:stop])
        keep |= {start, *(start + np.flatnonzero(~good)[:1])}
        if good.any():
            keep |= {start + np.argmin(np.where(good, y[start:stop], np.inf))}
            keep |= {start + np.argmax(np.where(good, y[start:stop], -np.inf))}
    return np.array(sorted(keep), dtype=np.int64)


class Attempt(NamedTuple):
    """One start of the run: its clock in seconds since 1970, and the seconds of training before."""

    number: int
    start: float
    end: float
    before: float


class Clock:
    """Converts times of day into hours of training."""

    def __init__(self, ledger: Sequence[Line]):
        lines: dict[int, list[Line]] = {}
        for line in ledger:
            # other events may come from steps that a later attempt did again
            if line["kind"] != "event" or line.get("event") in (*STARTS, "checkpoint", "finished"):
                lines.setdefault(int(line.get("attempt", 0)), []).append(line)
        self.attempts: list[Attempt] = []
        before = 0.0
        for attempt, own in sorted(lines.items()):
            times = [timestamp(line) for line in own]
            starts = (t for x, t in zip(own, times, strict=True) if x.get("event") in STARTS)
            start = next(starts, min(times))
            self.attempts.append(Attempt(attempt, start, max(times), before))
            before += max(times) - start

    def hours(self, at: float, attempt: int | None = None) -> float:
        """Hours of training at a time of day; NaN in a pause or in work that was done again.

        Device samples have no `attempt`; without one, it is the attempt that ran at that time.
        """
        own = attempt is not None
        begun = [a for a in self.attempts if (a.number == attempt if own else a.start <= at)]
        pause = bool(begun) and at > begun[-1].end and begun[-1] is not self.attempts[-1]
        if not begun or (pause and not own):
            return math.nan
        return (begun[-1].before + max(0.0, at - begun[-1].start)) / 3600


def interpolate(train: Track, axis: str, places: Numbers, column: str) -> Numbers:
    """A column of the `train` lines at places of another column.

    The curve starts from 0 at 0 and is constant after the last line.
    """
    x, y = np.append(0.0, train[axis]), np.append(0.0, train[column])
    good = np.isfinite(x) & np.isfinite(y)
    return np.where(np.isfinite(places), np.interp(places, x[good], y[good]), math.nan)


def track_of(lines: Sequence[Line], clock: Clock) -> Track:
    """Every field with a number, and always `loss`: a run of NaN has a loss to show."""
    fields = (field for line in lines for field in line.items())
    keys = dict.fromkeys(k for k, v in fields if k == "loss" or not math.isnan(number(v)))
    hours = [clock.hours(timestamp(line), int(line.get("attempt", 0))) for line in lines]
    columns = {key: np.array([number(line.get(key)) for line in lines]) for key in keys} | {
        "step": np.array([line["step"] for line in lines], dtype=np.float64),
        "hours": np.array(hours, dtype=np.float64),
    }
    columns.setdefault("tokens", np.full(len(lines), math.nan))
    return Track(columns)


def rank_tracks(folder: Path, clock: Clock) -> list[Track]:
    """Each rank's device samples, without samples from pauses and from work that was done again."""
    files = sorted(folder.glob("rank-*.jsonl"))
    tracks = (_rank(path, MAX_DEVICE_BYTES // len(files), clock) for path in files)
    return [track for track in tracks if len(track)]


def _rank(path: Path, limit: int, clock: Clock) -> Track:
    rows = []
    every = 1 + path.stat().st_size // limit  # parsing takes most of the time
    for text in path.read_bytes().split(b"\n")[::every]:
        with suppress(ValueError):
            line = json.loads(text)
            if isinstance(line, dict) and line.get("kind", "sample") == "sample":
                rows.append((clock.hours(timestamp(line)), line))
    rows = sorted((row for row in rows if not math.isnan(row[0])), key=lambda row: row[0])
    columns = {
        name: np.array([number(line.get(name)) for _, line in rows])
        for name in DEVICE
        if any(name in line for _, line in rows)
    }
    training = np.array([line.get("phase", "train") == "train" for _, line in rows], dtype=bool)
    if "util_pct" in columns and training.any():  # the utilisation of the steps
        columns["util_pct"] = np.where(training, columns["util_pct"], math.nan)
    columns["hours"] = np.array([hours for hours, _ in rows])
    columns["training"] = training.astype(np.float64)
    return Track(columns, int(path.stem.removeprefix("rank-")))
