"""What a report needs of a run, read once: columns of numbers on one time line, seams, devices, samples.

Nothing here draws or formats. A run that was killed and resumed is one line: the ledger is the effective one, and hours
are hours since training began, without the pauses between the attempts, their start-up, and the steps done twice.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windlass.errors import UserError
from windlass.reports.devices import RankTrack, read_ranks
from windlass.run import Line, Run, effective, read_lines
from windlass.telemetry.timing import device_hours, wall_time

Numbers = NDArray[np.float64]

BOOKKEEPING = frozenset(
    (
        "kind", "step", "time", "attempt", "epoch", "samples", "samples_trained", "tokens", "suite", "event", "index",
        "runtime_s", "hours",
    )
)  # fmt: skip
"""Fields that say where a line belongs, and measure nothing."""

STARTS = {"started": "started again", "resumed": "resumed", "branched": "branched", "rewound": "rewound"}
"""Events that begin an attempt, and what the seam before it is called."""
COUNTING = (*STARTS, "checkpoint", "finished")
"""Events that mark time well spent; the others may stem from steps that were done again."""


def number(value: Any) -> float:
    """A field of the ledger as a float; NaN where it is missing or no number (JSON has no NaN: it may come as text)."""
    if isinstance(value, bool) or value is None:
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def seconds_of(stamp: Any) -> float:
    """An ISO 8601 time as seconds since 1970; NaN for anything else."""
    try:
        return datetime.fromisoformat(stamp).timestamp()
    except (TypeError, ValueError):
        return math.nan


@dataclass(frozen=True)
class Track:
    """Columns of equal length along the run: `step`, `tokens` and `hours`, and what was measured there."""

    columns: Mapping[str, Numbers]

    def __getitem__(self, name: str) -> Numbers:
        """The column, all NaN where nothing of that name was written."""
        found = self.columns.get(name)
        return np.full(len(self), math.nan) if found is None else found

    def __len__(self) -> int:
        return len(self.columns["step"])

    def has(self, name: str) -> bool:
        """Whether the column holds a number."""
        return bool(np.isfinite(self[name]).any())

    def measures(self) -> list[str]:
        """The columns that measure something, in the order they were first written."""
        return [name for name in self.columns if name not in BOOKKEEPING and self.has(name)]

    def last(self, name: str) -> float | None:
        """The last finite value; None where there is none."""
        finite = self[name][np.isfinite(self[name])]
        return float(finite[-1]) if len(finite) else None

    def mean(self, name: str) -> float | None:
        """The mean of the finite values; None where there is none."""
        finite = self[name][np.isfinite(self[name])]
        return float(finite.mean()) if len(finite) else None


@dataclass(frozen=True)
class Seam:
    """Where an attempt after the first took up the run."""

    attempt: int
    what: str
    """`resumed`, `started again`, `rewound`."""
    step: float
    tokens: float
    hours: float
    stamp: str
    """Time of day of the new start, as the ledger has it."""


@dataclass(frozen=True)
class Sample:
    """A generated text."""

    step: int
    index: int
    prompt: str
    text: str


@dataclass(frozen=True)
class Attempt:
    """One start of the run: its clock in seconds since 1970, and the seconds of training before it."""

    number: int
    start: float
    end: float
    before: float


class Clock:
    """Turns times of day into hours of training."""

    def __init__(self, ledger: Iterable[Line]):
        spans: dict[int, list[float]] = {}
        starts: dict[int, float] = {}
        for line in ledger:
            attempt, at = int(line.get("attempt", 0)), seconds_of(line.get("time"))
            if math.isnan(at):
                continue
            if line["kind"] == "event" and line.get("event") in STARTS:
                starts.setdefault(attempt, at)
            if line["kind"] != "event" or line.get("event") in COUNTING:
                spans.setdefault(attempt, []).append(at)
        self.attempts: list[Attempt] = []
        before = 0.0
        for attempt in sorted(spans):
            start = starts.get(attempt, min(spans[attempt]))
            end = max(start, *spans[attempt])
            self.attempts.append(Attempt(attempt, start, end, before))
            before += end - start

    def hours(self, at: float, attempt: int | None = None) -> float:
        """Hours of training at a time of day; NaN in a pause or in work that was done again."""
        if attempt is None:
            place = bisect.bisect_right([a.start for a in self.attempts], at) - 1
            found = self.attempts[place] if place >= 0 else None
            if found is not None and at > found.end and place < len(self.attempts) - 1:
                return math.nan
        else:
            found = next((a for a in self.attempts if a.number == attempt), None)
        if found is None or math.isnan(at):
            return math.nan
        return (found.before + max(0.0, at - found.start)) / 3600


@dataclass(frozen=True)
class RunView:
    """A run as a report sees it."""

    label: str
    state: str
    settings: Mapping[str, Any]
    train: Track
    evals: Mapping[str, Track]
    ranks: Sequence[RankTrack]
    seams: Sequence[Seam]
    samples: Sequence[Sample]
    events: Sequence[Line]
    summary: Line
    environment: Mapping[str, Any]
    wall: Mapping[str, float] = field(default_factory=dict)
    """Seconds by phase over all starts, and their `total`; empty where the ledger does not say."""
    device_hours: float | None = None

    @property
    def step(self) -> int:
        """Steps done."""
        steps = [int(line["step"]) for line in self.events if line.get("event") in ("finished", "checkpoint")]
        return max([*steps, *(int(s) for s in self.train["step"][-1:]), 0])

    @property
    def hours(self) -> float:
        """Hours of training up to the last line."""
        return max((float(h) for t in (self.train, *self.evals.values()) for h in t["hours"][-1:]), default=0.0)

    @property
    def nonfinite_steps(self) -> list[int]:
        """Steps whose loss was written as something other than a finite number."""
        if "loss" not in self.train.columns:
            return []
        return [int(s) for s in self.train["step"][~np.isfinite(self.train["loss"])]]


def _columns(lines: Sequence[Line], clock: Clock, keys: Sequence[str]) -> dict[str, Numbers]:
    columns = {key: np.array([number(line.get(key)) for line in lines], dtype=np.float64) for key in keys}
    columns["step"] = np.array([float(line["step"]) for line in lines], dtype=np.float64)
    hours = [clock.hours(seconds_of(line.get("time")), int(line.get("attempt", 0))) for line in lines]
    columns["hours"] = np.array(hours, dtype=np.float64)
    return columns


def _keys(lines: Sequence[Line]) -> list[str]:
    """Every field that holds a number somewhere, in the order of first writing."""
    found: dict[str, None] = {}
    for line in lines:
        for key, value in line.items():
            if key not in found and not isinstance(value, (dict, list)) and not math.isnan(number(value)):
                found[key] = None
    return [key for key in found if key not in ("step", "hours")]


def interpolate(x: Numbers, known_x: Numbers, known_y: Numbers) -> Numbers:
    """Linear interpolation that leaves NaN where nothing is known, and holds the ends."""
    good = np.isfinite(known_x) & np.isfinite(known_y)
    if not good.any():
        return np.full(len(x), math.nan)
    filled = np.interp(x, known_x[good], known_y[good])
    return np.where(np.isfinite(x), filled, math.nan)


def _train_track(lines: Sequence[Line], clock: Clock) -> Track:
    keys = _keys(lines)
    if lines and "loss" not in keys and any("loss" in line for line in lines):
        keys.append("loss")
    columns = _columns(lines, clock, keys)
    columns.setdefault("tokens", np.full(len(lines), math.nan))
    return Track(columns)


def _eval_track(lines: Sequence[Line], clock: Clock, train: Track) -> Track:
    """Here `tokens` are those trained on so far; the ledger's own are those that were evaluated on."""
    columns = _columns(lines, clock, _keys(lines))
    return Track(columns | {"tokens": tokens_at(columns["step"], train)})


def tokens_at(steps: Numbers, train: Track) -> Numbers:
    """Tokens trained on after so many steps, by the train lines around them (0 at step 0)."""
    return interpolate(steps, np.concatenate([[0.0], train["step"]]), np.concatenate([[0.0], train["tokens"]]))


def _seams(ledger: Sequence[Line], clock: Clock, train: Track) -> list[Seam]:
    starts: dict[int, Line] = {}
    for line in ledger:
        if line["kind"] == "event" and line.get("event") in STARTS:
            starts.setdefault(int(line.get("attempt", 0)), line)
    seams = []
    for attempt in clock.attempts[1:]:
        start = starts.get(attempt.number)
        if start is not None:
            step = float(start["step"])
            tokens = float(tokens_at(np.array([step]), train)[0])
            what = STARTS[str(start["event"])]
            seams.append(Seam(attempt.number, what, step, tokens, attempt.before / 3600, str(start.get("time", ""))))
    return seams


def _samples(ledger: Sequence[Line]) -> list[Sample]:
    found = []
    for line in ledger:
        if line["kind"] == "sample" and line.get("text") is not None:
            index = line.get("index")
            prompt = str(line.get("prompt") or "")
            found.append(Sample(int(line["step"]), index if isinstance(index, int) else 0, prompt, str(line["text"])))
    return found


def view(run: Run, label: str | None = None) -> RunView:
    """Read a run. Raises UserError where its recipe cannot be read; a run without any step is a view without lines."""
    raw = list(read_lines(run.metrics_path))
    ledger = effective(raw)
    clock = Clock(ledger)
    train = _train_track([line for line in ledger if line["kind"] == "train"], clock)
    suites: dict[str, list[Line]] = {}
    for line in ledger:
        if line["kind"] == "eval":
            suites.setdefault(str(line.get("suite") or "loss"), []).append(line)
    summaries = [line for line in ledger if line["kind"] == "summary"]
    wall = wall_time(raw)
    return RunView(
        label=label or run.name,
        state=run.state_by(raw),
        settings=run.recipe.flat(),
        train=train,
        evals={suite: _eval_track(lines, clock, train) for suite, lines in suites.items()},
        ranks=read_ranks(run.devices_dir, lambda at: clock.hours(seconds_of(at))),
        seams=_seams(ledger, clock, train),
        samples=_samples(ledger),
        events=[line for line in ledger if line["kind"] == "event"],
        summary=summaries[-1] if summaries else {},
        environment=run.environment,
        wall=wall if wall["total"] else {},
        device_hours=device_hours(raw) if wall["total"] else None,
    )


def labels(runs: Sequence[Run]) -> list[str]:
    """A short name for each run, told apart by their parent directories where names repeat."""
    names = [run.name for run in runs]
    parents = [f"{run.path.resolve().parent.name}/{run.name}" for run in runs]
    chosen = [parents[i] if names.count(name) > 1 else name for i, name in enumerate(names)]
    return [f"{name} ({i + 1})" if chosen.count(name) > 1 else name for i, name in enumerate(chosen)]


def views(runs: Sequence[Run]) -> list[RunView]:
    """Read several runs, each under a name of its own."""
    return [view(run, label) for run, label in zip(runs, labels(runs), strict=True)]
