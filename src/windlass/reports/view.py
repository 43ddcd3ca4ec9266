"""A run as a report sees it: curves, restarts, samples and measures of the effective ledger. No
torch. `hours` are hours of training: without pauses between attempts, start-up, and repeated steps.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from windlass.errors import plural
from windlass.model.size import describe_network, trainable
from windlass.recipe import typed
from windlass.recipe.strategies import Sizes
from windlass.run import STARTS, Line, Run, effective, last_start, read_lines, timestamp
from windlass.study.results import BITS, validation_data
from windlass.telemetry.measures import DEVICE, EPOCH_LOSS, LOSS, RUN, Measure, of_eval
from windlass.telemetry.summary import (
    Scores,
    device_hours,
    evaluation_speed,
    scores_by_step,
    throughput,
    wall_time,
)
from windlass.variables import scrub

Numbers = NDArray[np.float64]

# Windlass parses the device samples of all ranks up to this size, and every n-th line beyond it.
MAX_DEVICE_BYTES = 8_000_000


def number(value: Any) -> float:
    try:
        return math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return math.nan


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

    def measures(self) -> list[str]:
        """The columns that measure something, in the order in which they were first written."""
        return [name for name in self.columns if of_eval(name).role != "place" and self.has(name)]

    def scores(self) -> list[str]:
        return [name for name in self.measures() if of_eval(name).role == "score"]


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
        number, at = int(line.get("attempt", 0)), timestamp(line)
        attempt = self.attempts.get(number)
        if attempt is None or (at > attempt.end and number < max(self.attempts)):
            return math.nan
        return (attempt.before + max(0.0, at - attempt.start)) / 3600


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
        every = 1 + path.stat().st_size // (MAX_DEVICE_BYTES // len(files))
        for text in path.read_bytes().split(b"\n")[::every]:
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


Value = float | int | str | None


class Restart(NamedTuple):
    """The start of an attempt after the first one."""

    what: str  # `started again`, `resumed` or `branched`
    step: float
    tokens: float
    hours: float
    time: str  # of day, as in the ledger
    text: str  # the same for people, with the settings that changed


class RunView:
    """A run as a report sees it, also one without a step."""

    def __init__(self, run: Run, label: str = ""):
        raw = list(read_lines(run.metrics_path))
        self.run, self.label, self.state = run, scrub(label or run.name), run.state_by(raw)
        self.settings: Mapping[str, Any] = scrub(run.recipe.flat())
        # effective, without secrets: only texts can hold one, and most lines have numbers alone
        texts = ("event", "sample")
        every = [scrub(x) if x["kind"] in texts else x for x in effective(raw)]
        # The lines of steps are nearly all of a ledger; `train` has their numbers.
        self.ledger = [x for x in every if x["kind"] != "train"]
        self.events, self.start = self.lines("event"), last_start(self.ledger)
        self.sizes = Sizes(**self.start.get("mesh", {}))  # of the mesh
        self.summary = [{}, *self.lines("summary")][-1]
        self.samples = [x for x in self.lines("sample") if x.get("text") is not None]
        clock = Clock(every)
        self.train = train = track_of([x for x in every if x["kind"] == "train"], clock)
        suites: dict[str, list[Line]] = {}
        for line in self.lines("eval"):
            suites.setdefault(line.get("suite", LOSS), []).append(line)
        self.evals = {name: _placed(own, train, clock) for name, own in suites.items()}
        self.logged = _placed(self.lines("log"), train, clock)  # what callbacks logged
        self.ranks = rank_tracks(run.devices_dir, clock)
        # the last step of each start, with steps that a later start did again
        self.reached = {int(x.get("attempt", 0)): int(x["step"]) for x in raw}
        self.restarts = _restarts(self.events, train, clock)
        self.validation = validation_data(run, run.recipe, self.ledger)
        self.speed = throughput(every)
        self.wall = wall_time(raw)  # seconds by phase over all starts, and their `total`
        self.device_hours = device_hours(raw) or None

    def lines(self, kind: str) -> list[Line]:
        return [line for line in self.ledger if line["kind"] == kind]

    @property
    def step(self) -> int:
        """Steps done."""
        ends = (x for x in self.events if x.get("event") in ("finished", "checkpoint"))
        return max([0, *(int(x["step"]) for x in ends), *(int(s) for s in self.train["step"][-1:])])

    @cached_property
    def values(self) -> dict[str, Value]:
        return _values(self)


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
    for number, attempt in list(clock.attempts.items())[1:]:
        if number not in starts:
            continue
        start = starts[number]
        step, what = float(start["step"]), start["event"].replace("started", "started again")
        tokens = float(interpolate(train, "step", np.array([step]), "tokens")[0])
        text = what
        if before := start.get("extended_from"):
            text = f"extended from {before:,} to {plural(start['steps'], 'step')}"
        for line in events:
            if line["event"] == "settings_changed" and line.get("attempt") == number:
                for key, (old, new) in line["settings"].items():
                    text += f"; {key} = {typed(new)} from here on, not {typed(old)}"
        restarts.append(Restart(what, step, tokens, attempt.before / 3600, start["time"], text))
    return restarts


def _values(v: RunView) -> dict[str, Value]:
    start, loss, speed = v.start, v.evals.get(LOSS), v.speed
    measure = str(v.settings["checkpoint.best"])
    evaluations = v.lines("eval")
    losses = scores_by_step(evaluations, LOSS)
    scores = Scores() if measure == LOSS else scores_by_step(evaluations, measure)
    total, trained = start.get("parameters"), start.get("trained")
    batch = max(1, start.get("global_batch", 1))
    per_epoch = first((start.get("samples_per_epoch") or math.nan) / batch)
    peaks = (float(np.nanmax(t["peak_alloc_mb"])) for t in v.ranks if t.has("peak_alloc_mb"))
    power = np.concatenate([[], *(track["power_w"] for track in v.ranks)])
    power = power[np.isfinite(power)]
    kwh = float(power.mean()) * v.device_hours / 1e3 if len(power) and v.device_hours else None
    computed: dict[str, Value] = {
        "state": v.state,
        "steps": v.step,
        "trainable": trainable(trained, total) if total and trained not in (None, total) else None,
        "network": describe_network(start["network"]) if start.get("network") else None,
        "layout": v.sizes.layout or None,
        "best_eval_loss": losses.best,
        "best_eval_step": losses.best_step,
        "best_bits_per_byte": scores_by_step(evaluations, BITS).best,
        "best_measure": measure if scores else None,
        "best_score": scores.best,
        "best_score_step": scores.best_step,
        "train_samples_per_s": (speed and speed.samples_per_s) or None,
        "train_tokens_per_s": speed and speed.tokens_per_s,
        "train_steps_per_s": speed and speed.steps_per_s,
        "eval_samples_per_s": evaluation_speed(v.ledger),
        "steps_per_epoch": per_epoch,
        "peak_mem_mb": first(v.summary.get("peak_mem_mb"), max(peaks, default=None)),
        "mfu": speed and speed.mfu,
        "goodput": v.wall["train"] / v.wall["total"] if v.wall["total"] else None,
        "runtime_s": v.wall["total"] or None,
        "device_hours": v.device_hours,
        "energy_kwh": kwh,
        "starts": 1 + len(v.restarts),
    }
    values = {m.name: _read(v, m) if m.source else computed[m.name] for m in RUN.values()}
    values |= {f"{EPOCH_LOSS}{n}": x for n, x in losses_by_epoch(loss, per_epoch).items()}
    for suite, track in v.evals.items():
        names = track.scores() if suite != LOSS else ()
        values |= {f"{suite}_{name}": last_value(track, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def _read(v: RunView, measure: Measure) -> Any:
    """The value of a measure in the ledger; NaN only for a loss, as it must not be hidden."""
    for source in measure.source.split():
        line, _, field = source.partition(".")
        match line:
            case "train" | "eval":
                value = last_value(v.train if line == "train" else v.evals.get(LOSS), field)
            case "device":  # the mean over all ranks' samples in training steps
                good = (t[field][np.isfinite(t[field]) & (t["training"] > 0)] for t in v.ranks)
                samples = np.concatenate([[], *good])
                value = samples.mean() if len(samples) else None
            case "summary" | "start":
                value = (v.summary if line == "summary" else v.start).get(field)
            case event:
                value = next(
                    (x.get(field) for x in reversed(v.events) if x["event"] == event), None
                )
        if isinstance(value, str) or measure.kind == "loss" or first(value) is not None:
            return value
    return None


def losses_by_epoch(track: Track | None, steps_per_epoch: float | None) -> dict[int, float]:
    """The validation loss at the end of each whole epoch: of the first step at or past it, or of
    the run's last step if that is less than a step before it."""
    losses = dict[int, float]()
    if track is None or steps_per_epoch is None:
        return losses
    epoch = math.nan
    for epoch, loss in zip(track["epoch"].tolist(), track["loss"].tolist(), strict=True):
        if epoch >= 1 and epoch % 1 < 1 / steps_per_epoch:
            losses.setdefault(int(epoch), loss)
    if -epoch % 1 < 1 / steps_per_epoch:
        losses.setdefault(math.ceil(epoch), loss)
    return losses


def first(*values: Any) -> float | None:
    """The first finite number."""
    return next((x for x in values if isinstance(x, (int, float)) and math.isfinite(x)), None)


def last_value(track: Track | None, name: str) -> float | None:
    """The value in the last line, also if it is NaN: an earlier good value hides no bad end."""
    if track is None or not len(track) or name not in track.columns:
        return None
    return float(track[name][-1])
