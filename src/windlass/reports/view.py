"""What a report reads of a run: columns of numbers along the run, restarts, devices, samples. No torch.

A run that was killed and resumed is one curve: the ledger is the effective one, and `hours` are hours of training,
without the pauses between attempts, their start-up, and the steps that were done twice.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from windlass.checkpoint.retention import comparable
from windlass.estimate.time import PredictedAndActual, predicted_and_actual
from windlass.recipe import typed
from windlass.run import Line, Run, effective, last_start, read_lines, timestamp
from windlass.study.compare import Evaluated, evaluated
from windlass.telemetry.timing import (
    Throughput,
    device_hours,
    evaluation_speed,
    throughput,
    wall_time,
)
from windlass.variables import scrub

Numbers = NDArray[np.float64]

BOOKKEEPING = (
    "kind",
    "step",
    "time",
    "attempt",
    "epoch",
    "samples",
    "samples_trained",
    "tokens",
    "label_tokens",
    "suite",
    "event",
    "index",
    "runtime_s",
    "hours",
    "batches",
    "first_batch_s",
    "comparable",
    "full_tokens",
    "full_samples",
    "train_tokens",
    "train_samples",
)
"""Fields that place a line in the run and measure nothing."""

# events that begin an attempt, and what a chart calls the restart
STARTS = {
    "started": "started again",
    "resumed": "resumed",
    "branched": "branched",
    "rewound": "rewound",
}

DEVICE_FIELDS = (
    "util_pct",
    "mem_alloc_mb",
    "mem_reserved_mb",
    "mem_used_mb",
    "peak_alloc_mb",
    "rss_mb",
    "power_w",
)
MAX_DEVICE_BYTES = (
    8_000_000  # of all ranks' samples together are parsed whole; of larger files every n-th line
)


def number(value: Any) -> float:
    """A field of the ledger as a float; NaN where it is missing or no number. The ledger has non-finite ones as text."""
    try:
        return math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return math.nan


@dataclass(frozen=True)
class Track:
    """Columns of equal length: `step`, `tokens`, `hours` along the run, and what was measured there.

    A rank's device samples have `hours`, `training` (1 in the phase `train`) and some of DEVICE_FIELDS.
    """

    columns: Mapping[str, Numbers]
    rank: int = 0

    def __getitem__(self, name: str) -> Numbers:
        """The column, all NaN where nothing of that name was written."""
        column = self.columns.get(name)
        return np.full(len(self), math.nan) if column is None else column

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def has(self, name: str) -> bool:
        """Whether the column holds a finite number."""
        return bool(np.isfinite(self[name]).any())

    def measures(self) -> list[str]:
        """The columns that measure something, in the order they were first written."""
        return [name for name in self.columns if name not in BOOKKEEPING and self.has(name)]


class Restart(NamedTuple):
    """Where an attempt after the first one starts."""

    what: str  # one of the words in STARTS, `extended`, or `settings changed`
    step: float
    tokens: float
    hours: float
    time: str  # of day, as in the ledger
    text: str  # what happened, for people


@dataclass(frozen=True)
class RunView:
    """A run as a report sees it."""

    run: Run
    label: str
    state: str
    settings: Mapping[str, Any]
    train: Track
    evals: Mapping[str, Track]  # by suite
    logged: Track  # what a user's callbacks have logged
    ranks: Sequence[Track]
    restarts: Sequence[Restart]
    samples: Sequence[Line]
    events: Sequence[Line]
    changed: Sequence[
        Line
    ]  # events of settings that a resume changed: `settings`, by key the old and the new value
    start: Line  # the last event of starting, with what it lacks from those before
    evaluated: Evaluated | None  # what its validation loss was measured on
    summary: Line
    speed: Throughput | None
    evaluation: Mapping[
        str, float
    ]  # how long the evaluations of the loss took, and their samples a second
    wall: Mapping[str, float]  # seconds by phase over all starts, and their `total`
    device_hours: float | None
    outcome: PredictedAndActual

    @property
    def step(self) -> int:
        """Steps done."""
        steps = [
            int(line["step"])
            for line in self.events
            if line.get("event") in ("finished", "checkpoint")
        ]
        return max([*steps, *(int(s) for s in self.train["step"][-1:]), 0])


class Attempt(NamedTuple):
    """One start of the run: its clock in seconds since 1970, and the seconds of training before it."""

    number: int
    start: float
    end: float
    before: float


class Clock:
    """Converts times of day into hours of training."""

    def __init__(self, ledger: Sequence[Line]):
        lines: dict[int, list[Line]] = {}
        for line in ledger:
            # other events may come from steps that were done again
            if line["kind"] != "event" or line.get("event") in (*STARTS, "checkpoint", "finished"):
                lines.setdefault(int(line.get("attempt", 0)), []).append(line)
        self.attempts: list[Attempt] = []
        before = 0.0
        for attempt, own in sorted(lines.items()):
            times = [timestamp(line) for line in own]
            start = next(
                (at for line, at in zip(own, times, strict=True) if line.get("event") in STARTS),
                min(times),
            )
            self.attempts.append(Attempt(attempt, start, max(times), before))
            before += max(times) - start

    def hours(self, at: float, attempt: int | None = None) -> float:
        """Hours of training at a time of day; NaN in a pause or in work that was done again.

        Without `attempt` (device samples do not have one) it is the attempt that ran at that time.
        """
        begun = [
            a for a in self.attempts if (a.start <= at if attempt is None else a.number == attempt)
        ]
        if not begun or (
            attempt is None and at > begun[-1].end and begun[-1] is not self.attempts[-1]
        ):
            return math.nan
        return (begun[-1].before + max(0.0, at - begun[-1].start)) / 3600


def interpolate(train: Track, axis: str, places: Numbers, column: str) -> Numbers:
    """A column of the `train` lines at some places of another one, from 0 at 0 on, constant beyond the last line."""
    x, y = np.append(0.0, train[axis]), np.append(0.0, train[column])
    good = np.isfinite(x) & np.isfinite(y)
    return np.where(np.isfinite(places), np.interp(places, x[good], y[good]), math.nan)


def view(run: Run, label: str | None = None) -> RunView:
    """Read a run; a run without any step is a view without lines. Raises UserError where its recipe cannot be read."""
    raw = list(read_lines(run.metrics_path))
    # only texts can hold a secret, and the many lines of numbers have none
    ledger = [
        scrub(line) if line["kind"] in ("event", "sample") else line for line in effective(raw)
    ]
    clock = Clock(ledger)
    train = _track([line for line in ledger if line["kind"] == "train"], clock)
    logged, evals = _track([line for line in ledger if line["kind"] == "log"], clock).columns, {}
    for suite in dict.fromkeys(
        line.get("suite", "loss") for line in ledger if line["kind"] == "eval"
    ):
        own = [
            line for line in ledger if line["kind"] == "eval" and line.get("suite", "loss") == suite
        ]
        same = [float(line in comparable(own)) for line in own]
        columns = {**_track(own, clock).columns, "comparable": np.array(same)}
        # `tokens` of an `eval` line are those evaluated on; a chart's axis needs those trained on
        evals[suite] = Track(
            {**columns, "tokens": interpolate(train, "step", columns["step"], "tokens")}
        )
    events = [line for line in ledger if line["kind"] == "event"]
    starts = {int(x.get("attempt", 0)): x for x in reversed(events) if x.get("event") in STARTS}
    changed = [line for line in events if line.get("event") == "settings_changed"]
    restarts = []
    for attempt in clock.attempts[1:]:
        if begun := starts.get(attempt.number):
            step = float(begun["step"])
            tokens = float(interpolate(train, "step", np.array([step]), "tokens")[0])
            before = begun.get("extended_from")
            own = [x["settings"] for x in changed if x.get("attempt") == attempt.number]
            what = "extended" if before else "settings changed" if own else STARTS[begun["event"]]
            text = (
                f"extended from {before:,} to {begun['steps']:,} steps"
                if before
                else STARTS[begun["event"]]
            )
            pairs = [(key, *pair) for x in own for key, pair in x.items()]
            text += "".join(
                f"; {key} = {typed(new)} from here on, not {typed(old)}" for key, old, new in pairs
            )
            restarts.append(Restart(what, step, tokens, attempt.before / 3600, begun["time"], text))
    files = sorted(run.devices_dir.glob("rank-*.jsonl"))
    ranks = [_rank(path, MAX_DEVICE_BYTES // len(files), clock) for path in files]
    return RunView(
        run=run,
        label=scrub(label or run.name),
        state=run.state_by(raw),
        settings=scrub(run.recipe.flat()),
        train=train,
        evals=evals,
        logged=Track({**logged, "tokens": interpolate(train, "step", logged["step"], "tokens")}),
        ranks=[rank for rank in ranks if len(rank)],
        restarts=restarts,
        samples=[
            line for line in ledger if line["kind"] == "sample" and line.get("text") is not None
        ],
        events=events,
        changed=changed,
        start=last_start(ledger),
        evaluated=evaluated(run, run.recipe, ledger),
        summary=next((line for line in reversed(ledger) if line["kind"] == "summary"), {}),
        speed=throughput(ledger),
        evaluation=evaluation_speed(ledger),
        wall=wall_time(raw),
        device_hours=device_hours(raw) or None,
        outcome=predicted_and_actual(run),
    )


def views(runs: Sequence[Run]) -> list[RunView]:
    """Read several runs, each under a label of its own: the name, or the path where names repeat."""
    names = [run.name for run in runs]
    return [view(run, run.name if names.count(run.name) == 1 else str(run.path)) for run in runs]


def _track(lines: Sequence[Line], clock: Clock) -> Track:
    """Every field that is a number somewhere, and `loss` also where it never is: a run of NaN has a loss to show."""
    fields = (field for line in lines for field in line.items())
    keys = dict.fromkeys(
        key for key, value in fields if key == "loss" or not math.isnan(number(value))
    )
    columns = {
        key: np.array([number(line.get(key)) for line in lines], dtype=np.float64) for key in keys
    }
    hours = [clock.hours(timestamp(line), int(line.get("attempt", 0))) for line in lines]
    columns |= {
        "step": np.array([line["step"] for line in lines], dtype=np.float64),
        "hours": np.array(hours),
    }
    columns.setdefault("tokens", np.full(len(lines), math.nan))
    return Track(columns)


def _rank(path: Path, limit: int, clock: Clock) -> Track:
    """A rank's samples, without those in a pause or in work that was done again."""
    rows = []
    for text in path.read_bytes().split(b"\n")[
        :: 1 + path.stat().st_size // limit
    ]:  # parsing is what takes time
        with suppress(ValueError):
            line = json.loads(text)
            if isinstance(line, dict) and line.get("kind", "sample") == "sample":
                rows.append((clock.hours(timestamp(line)), line))
    rows = sorted((row for row in rows if not math.isnan(row[0])), key=lambda row: row[0])
    names = [name for name in DEVICE_FIELDS if any(name in line for _, line in rows)]
    columns = {
        name: np.array([number(line.get(name)) for _, line in rows], dtype=np.float64)
        for name in names
    }
    training = np.array([line.get("phase", "train") == "train" for _, line in rows], dtype=bool)
    if "util_pct" in columns and training.any():  # utilisation is that of the steps
        columns["util_pct"] = np.where(training, columns["util_pct"], math.nan)
    columns |= {
        "hours": np.array([hours for hours, _ in rows]),
        "training": training.astype(np.float64),
    }
    return Track(columns, int(path.stem.removeprefix("rank-")))
