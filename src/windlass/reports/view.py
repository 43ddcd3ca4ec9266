"""A run as a report sees it: its curves, restarts, samples, and the samples of its devices.

`hours` are hours of training: without pauses between attempts, start-up, and repeated steps.
"""

from __future__ import annotations

import itertools
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from windlass.errors import plural
from windlass.ledger import STARTS, Line, effective, read_lines, timestamp
from windlass.recipe import typed
from windlass.recipe.strategies import Sizes
from windlass.run import Run
from windlass.study.comparable import validation_data
from windlass.study.numbers import RunNumbers, Value, number
from windlass.telemetry.measures import DEVICE, LOSS, show
from windlass.variables import scrub

Numbers = NDArray[np.float64]

# Windlass parses the device samples of all ranks up to this size, and every n-th line beyond it.
MAX_DEVICE_BYTES = 8_000_000


@dataclass(frozen=True)
class Track:
    """Columns of equal length: `step`, `tokens`, `hours` along the run, and the measurements.

    A rank's device samples have `hours`, `training` (1 in the phase `train`) and some of DEVICE.
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
        return bool(np.isfinite(self[name]).any())


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

    start: float
    end: float
    before: float


class Clock:
    def __init__(self, ledger: Sequence[Line]):
        lines: dict[int, list[Line]] = {}
        for line in ledger:
            # other events may come from steps that a later attempt did again
            if line["kind"] != "event" or line.get("event") in (*STARTS, "checkpoint", "finished"):
                lines.setdefault(int(line.get("attempt", 0)), []).append(line)
        self.attempts = dict[int, Attempt]()
        before = 0.0
        for attempt, own in sorted(lines.items()):
            times = [timestamp(line) for line in own]
            starts = (t for x, t in zip(own, times, strict=True) if x.get("event") in STARTS)
            start = next(starts, min(times))
            self.attempts[attempt] = Attempt(start, max(times), before)
            before += max(times) - start

    def hours(self, line: Line) -> float:
        """Hours of training at a line or device sample; NaN in work that was done again."""
        attempt_number, time = int(line.get("attempt", 0)), timestamp(line)
        attempt = self.attempts.get(attempt_number)
        if attempt is None or (time > attempt.end and attempt_number < max(self.attempts)):
            return math.nan
        return (attempt.before + max(0.0, time - attempt.start)) / 3600


def interpolate(train: Track, axis: str, places: Numbers, column: str) -> Numbers:
    """A column of the `train` lines at places of another column.

    The curve starts from 0 at 0 and is constant after the last line.
    """
    x, y = np.append(0.0, train[axis]), np.append(0.0, train[column])
    good = np.isfinite(x) & np.isfinite(y)
    return np.where(np.isfinite(places), np.interp(places, x[good], y[good]), math.nan)


def track_of(lines: Sequence[Line], clock: Clock) -> Track:
    """Every field with a number, and always `loss`, because a run of NaN has a loss to show."""
    fields = (field for line in lines for field in line.items())
    keys = dict.fromkeys(k for k, v in fields if k == "loss" or not math.isnan(number(v)))
    hours = list(map(clock.hours, lines))
    columns = {key: np.array([number(line.get(key)) for line in lines]) for key in keys} | {
        "step": np.array([line["step"] for line in lines], dtype=np.float64),
        "hours": np.array(hours, dtype=np.float64),
    }
    columns.setdefault("tokens", np.full(len(lines), math.nan))
    return Track(columns)


def rank_tracks(folder: Path, clock: Clock) -> list[Track]:
    """Each rank's device samples, without samples from pauses and from work that was done again."""
    files, tracks = sorted(folder.glob("rank-*.jsonl")), []
    for path in files:
        rows = []
        # parsing takes most of the time
        stride = 1 + path.stat().st_size // (MAX_DEVICE_BYTES // len(files))
        for text in path.read_bytes().split(b"\n")[::stride]:
            with suppress(ValueError):
                line = json.loads(text)
                rows.append((clock.hours(line), line))
        rows = sorted((row for row in rows if not math.isnan(row[0])), key=lambda row: row[0])
        if not rows:
            continue
        names = [name for name in DEVICE if any(name in line for _, line in rows)]
        columns = {name: np.array([number(line.get(name)) for _, line in rows]) for name in names}
        training = np.array([line.get("phase", "train") == "train" for _, line in rows])
        if "util_pct" in columns and training.any():  # the utilisation of the steps
            columns["util_pct"] = np.where(training, columns["util_pct"], math.nan)
        columns["hours"] = np.array([hours for hours, _ in rows])
        columns["training"] = training.astype(np.float64)
        tracks.append(Track(columns, int(path.stem.removeprefix("rank-"))))
    return tracks


class Restart(NamedTuple):
    """The start of an attempt after the first one."""

    what: str  # `started again`, `resumed` or `branched`
    step: float
    tokens: float
    hours: float
    time: str  # as in the ledger
    text: str  # `what`, with the settings that changed


class RunView:
    """A run as a report sees it, also one without a step."""

    def __init__(self, run: Run, label: str = ""):
        alive, raw = run.alive, list(read_lines(run.metrics_path))
        self.run, self.label, self.state = run, scrub(label or run.name), run.state_by(raw, alive)
        self.settings: Mapping[str, Any] = scrub(run.recipe.flat())
        # effective, without secrets: only texts can hold one, and most lines have only numbers
        texts = ("event", "sample")
        lines = [scrub(x) if x["kind"] in texts else x for x in effective(raw)]
        self.numbers = RunNumbers(raw, lines, run.recipe.checkpoint.best)
        self.events, self.start = self.numbers.events, self.numbers.start
        self.sizes = Sizes(**self.start.get("mesh", {}))  # of the mesh
        self.samples = [x for x in lines if x["kind"] == "sample" and x.get("text") is not None]
        clock = Clock(lines)
        self.train = track_of([x for x in lines if x["kind"] == "train"], clock)
        self.evals = {
            suite: _placed(own, self.train, clock) for suite, own in self.numbers.suites.items()
        }
        logged = [x for x in lines if x["kind"] == "log"]  # by callbacks
        self.logged = _placed(logged, self.train, clock)
        self.ranks = rank_tracks(run.devices_dir, clock)
        # the last step of each start, with steps that a later start did again
        self.reached = {int(x.get("attempt", 0)): int(x["step"]) for x in raw}
        self.restarts = _restarts(self.events, self.train, clock)
        self.validation = validation_data(run, run.recipe, self.numbers)

    @cached_property
    def values(self) -> dict[str, Value]:
        """Every number of the run by its name in `measures.RUN`, for tables and CSV."""
        # means over the samples of all ranks: of the power always, of the rest in training steps
        devices = {}
        for name in DEVICE:
            samples = [track[name] for track in self.ranks]
            if name not in ("power_w", "peak_alloc_mb"):
                samples = [track[name][track["training"] > 0] for track in self.ranks]
            values = np.concatenate([[], *samples])
            values = values[np.isfinite(values)]
            if len(values):
                devices[name] = float(values.max() if name == "peak_alloc_mb" else values.mean())
        return {"state": self.state, **self.numbers.values(devices)}


def views(runs: Sequence[Run]) -> list[RunView]:
    names = [run.name for run in runs]
    labels = [r.name if names.count(r.name) == 1 else str(r.path) for r in runs]
    return list(map(RunView, runs, labels))


def _placed(lines: Sequence[Line], train: Track, clock: Clock) -> Track:
    """A track whose `tokens` are the trained ones; an `eval` line's own count what it evaluated."""
    track = track_of(lines, clock)
    tokens = interpolate(train, "step", track["step"], "tokens")
    return Track({**track.columns, "tokens": tokens})


def _restarts(events: Sequence[Line], train: Track, clock: Clock) -> list[Restart]:
    starts = {int(x.get("attempt", 0)): x for x in reversed(events) if x.get("event") in STARTS}
    restarts = []
    for attempt_number, attempt in list(clock.attempts.items())[1:]:
        if attempt_number not in starts:
            continue
        start = starts[attempt_number]
        step, what = float(start["step"]), start["event"].replace("started", "started again")
        tokens = float(interpolate(train, "step", np.array([step]), "tokens")[0])
        text = what
        if before := start.get("extended_from"):
            text = f"extended from {before:,} to {plural(start['steps'], 'step')}"
        for line in events:
            if line["event"] == "settings_changed" and line.get("attempt") == attempt_number:
                for key, (old, new) in line["settings"].items():
                    text += f"; {key} = {typed(new)} from here on, not {typed(old)}"
        restarts.append(Restart(what, step, tokens, attempt.before / 3600, start["time"], text))
    return restarts


def curve(view: RunView, width: int | None = None, height: int = 13) -> str:
    """The training loss over steps as text with axes, the validation loss as `o`; empty if no loss
    is finite. `width`: None is as wide as the terminal, at most 100 columns."""
    curves = []  # steps and losses
    for track in (view.train, view.evals.get(LOSS)):
        if track is not None and track.has("loss"):
            good = np.isfinite(track["loss"])
            curves.append((track["step"][good], track["loss"][good]))
    if not curves:
        return ""
    steps, losses = (np.concatenate(part) for part in zip(*curves, strict=True))
    left, end, bottom = float(steps.min()), float(steps.max()), float(losses.min())
    across, up = end - left or 1.0, float(losses.max()) - bottom or 1.0
    digits = max(0, 2 - math.floor(math.log10(up)))
    values = [bottom + up * row / (height - 1) for row in reversed(range(height))]
    ticks = [f"{value:.{digits}f}" if row % 4 == 0 else "" for row, value in enumerate(values)]
    gutter = max(map(len, ticks)) + 1
    columns = max(10, (width or min(100, shutil.get_terminal_size((80, 24)).columns)) - gutter - 2)
    canvas = [[" "] * columns for _ in range(height)]

    def put(mark: str, step: float, loss: float) -> None:
        row = round((1 - (loss - bottom) / up) * (height - 1))
        canvas[row][round((step - left) / across * (columns - 1))] = mark

    drawn = np.linspace(left, end, columns)
    for step, loss in zip(drawn, np.interp(drawn, *curves[0]), strict=True):
        put("·", step, loss)
    for step, loss in zip(*curves[-1], strict=True) if len(curves) > 1 else ():
        put("o", step, loss)
    head = "loss in nats per token: ·· training" + (", o validation" if len(curves) > 1 else "")
    rows = zip(ticks, map("".join, canvas), strict=True)
    lines = [head, "", *(f"{tick:>{gutter}} ┤{row}".rstrip() for tick, row in rows)]
    lines.append(f"{'':>{gutter}} └{'─' * columns}")
    first, last = show(left, "count") if end > left else "", plural(int(end), "step")
    return "\n".join([*lines, f"{'':>{gutter}}  {first}{last:>{max(1, columns - len(first))}}"])
