"""Which charts a report has, told once for the page and for the plots on paper; and how long curves are thinned. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from windlass.reports.devices import RankTrack, grid, on_grid
from windlass.reports.measures import SPEED
from windlass.reports.view import RunView, Seam, Track, interpolate, tokens_at
from windlass.study.study import diverged

Numbers = NDArray[np.float64]

POINTS = 4000
"""Points of a curve on the page, over all runs at least 600 each: more than a screen has pixels."""
GRID = 400
"""Points of a rank's curve."""
FEW_RANKS = 8
"""Up to so many ranks have a line each; more are drawn as mean and range, with the extreme ranks by name."""


@dataclass(frozen=True)
class Curve:
    """One line of a chart: the column it shows, what it is called, and whether it is the chart's second voice."""

    column: str
    name: str
    minor: bool = False


@dataclass(frozen=True)
class Chart:
    """A chart of one quantity (or of parts of it) over the run."""

    id: str
    title: str
    unit: str
    curves: tuple[Curve, ...]
    source: str = "train"
    """`train`, `ranks`, or `eval:<suite>`."""
    smooth: bool = False
    """Whether smoothing makes sense."""
    zero: bool = False
    """Whether the axis begins at zero."""
    scale: float = 1.0
    note: str = ""

    def first_only(self) -> Chart:
        """The chart with its first curve alone, for several runs in one picture."""
        return Chart(
            self.id, self.title, self.unit, self.curves[:1], self.source, self.smooth, self.zero, self.scale, self.note
        )


LOSS = Chart("loss", "Loss", "nats per token", (Curve("loss", "training"),), smooth=True)
TRAIN_CHARTS = (
    Chart("lr", "Learning rate", "", (Curve("lr", "learning rate"),), zero=True),
    Chart("grad_norm", "Gradient norm", "before clipping", (Curve("grad_norm", "gradient norm"),), smooth=True, zero=True),
    Chart("throughput", "Throughput", "tokens/s, all ranks", (Curve("tokens_per_s", "tokens/s"),), smooth=True, zero=True),
    Chart("samples_per_s", "Throughput in samples", "samples/s, all ranks", (Curve("samples_per_s", "samples/s"),),
          smooth=True, zero=True),
    Chart("step_time", "Time of a step", "ms", (
        Curve("step_ms", "whole step"), Curve("forward_ms", "forward", True), Curve("backward_ms", "backward", True),
        Curve("optimizer_ms", "optimizer", True), Curve("data_ms", "waiting for data", True),
    ), smooth=True, zero=True),
    Chart("mfu", "Model FLOPs utilisation", "% of the device's peak", (Curve("mfu", "MFU"),), smooth=True, zero=True, scale=100),
)  # fmt: skip
RANK_CHARTS = (
    Chart("memory", "Device memory of each rank", "MB",
          (Curve("mem_alloc_mb", "allocated"), Curve("mem_reserved_mb", "reserved", True)), "ranks", zero=True),
    Chart("resident", "Memory of each rank's process", "MB resident", (Curve("rss_mb", "resident"),), "ranks", zero=True),
    Chart("utilisation", "Utilisation of each rank", "%", (Curve("util_pct", "utilisation"),), "ranks", zero=True,
          note="while training; evaluations and saves are left out"),
    Chart("power", "Power of each device", "W", (Curve("power_w", "power"),), "ranks", zero=True),
)  # fmt: skip
TRAINING_ONLY = ("util_pct",)


PART_COLOURS = {"train": 0, "eval": 1, "save": 2, "compile": 3, "startup": 4, "data": 5, "lost": 6, "sample": 7}
PART_NAMES = {
    "train": "training steps", "eval": "evaluation", "save": "saving", "sample": "generating samples", "compile": "compiling", "startup": "start-up",
    "data": "waiting for data", "data_wait": "waiting for data", "lost": "steps done again after a failure",
}  # fmt: skip
"""What wall time is spent on: the number of its colour in the palette, and its name for people."""


def charts(views: Sequence[RunView]) -> list[Chart]:
    """The charts for which at least one run has numbers, the loss first."""
    found = [LOSS] if any(v.train.has("loss") or "loss" in v.evals for v in views) else []
    for suite in dict.fromkeys(s for v in views for s in v.evals if s != "loss"):
        names = dict.fromkeys(n for v in views if suite in v.evals for n in v.evals[suite].measures() if n not in SPEED)
        if names:
            curves = tuple(Curve(n, n.replace("_", " ")) for n in names)
            found.append(Chart(f"suite-{_slug(suite)}", _suite_title(suite), "", curves, f"eval:{suite}"))
    found += [chart for chart in TRAIN_CHARTS if any(v.train.has(c.column) for v in views for c in chart.curves)]
    if not any(_samples_tell_more(v.train) for v in views):
        found = [chart for chart in found if chart.id != "samples_per_s"]
    found += [chart for chart in RANK_CHARTS if any(t.has(chart.curves[0].column) for v in views for t in v.ranks)]
    return found


def wild(view: RunView) -> bool:
    """Whether the run's training loss diverged: beside others it does not stretch the axis of the loss."""
    losses = view.train["loss"]
    return bool(view.nonfinite_steps) or bool(len(losses) and diverged(float(losses[0]), float(losses[-1])))


def ceiling(views: Sequence[RunView], first_step: int = 0) -> float | None:
    """The highest loss from a step on of the runs that did not diverge; None where no run diverged above it."""
    tops: dict[bool, list[float]] = {True: [], False: []}
    for view in views:
        for track in (view.train, view.evals.get("loss")):
            if track is not None:
                values = track["loss"][track["step"] >= first_step]
                tops[wild(view)] += values[np.isfinite(values)].tolist()
    high = max(tops[False], default=math.inf)
    return high if high < max(tops[True], default=-math.inf) else None


def _samples_tell_more(train: Track) -> bool:
    """Whether samples/s is no mere multiple of tokens/s, as it is where all samples are equally long."""
    tokens, samples = train["tokens_per_s"], train["samples_per_s"]
    good = np.isfinite(samples) & (samples > 0)
    length = tokens[good] / samples[good]
    length = length[np.isfinite(length)]
    return bool(good.any() and (not len(length) or np.ptp(length) > 0.02 * np.mean(length)))


def _slug(text: str) -> str:
    return "".join(c if c.isalnum() and c.isascii() else "-" for c in text)


def _suite_title(suite: str) -> str:
    return {"hellaswag": "HellaSwag", "squad": "SQuAD"}.get(suite, suite)


def thin(x: Numbers, y: Numbers, limit: int) -> NDArray[np.int64]:
    """The places of at most about `limit` points that look like the whole: of each span the first, lowest and highest.

    Args:
        x: [n] rising.
        y: [n], NaN allowed: the first NaN of a span is kept too, so that a gap or a bad step stays visible.
        limit: points to keep.

    Returns:
        Rising places into `x`; all of them where there are no more than `limit`.
    """
    n = len(x)
    if n <= limit:
        return np.arange(n)
    keep = {0, n - 1}
    edges = np.linspace(0, n, max(2, limit // 3) + 1).astype(np.int64)
    for start, stop in itertools.pairwise(edges):
        span = y[start:stop]
        bad = np.flatnonzero(~np.isfinite(span))
        good = np.flatnonzero(np.isfinite(span))
        keep.add(int(start))
        if len(bad):
            keep.add(int(start + bad[0]))
        if len(good):
            keep |= {int(start + good[np.argmin(span[good])]), int(start + good[np.argmax(span[good])])}
    return np.array(sorted(keep), dtype=np.int64)


def smoothing_for(points: int) -> float:
    """The weight that evens out a curve of so many points without taking its shape: a reach of about 1/80 of it."""
    return min(0.98, round(1 - 1 / max(1.0, points / 80), 2))


def smoothed(y: Numbers, weight: float) -> Numbers:
    """Each value as the mean of all, the one n places away weighted by weight^n: smooth, and without a lag.

    What is not finite is passed over and left out; at the ends the mean is over what there is.
    """
    ahead, ahead_norm = _decayed(y, weight)
    back, back_norm = (part[::-1] for part in _decayed(y[::-1], weight))
    good = np.isfinite(y)
    out = np.full(len(y), math.nan)
    np.divide(ahead + back - np.where(good, y, 0.0), ahead_norm + back_norm - 1, out=out, where=good)
    return out


def _decayed(y: Numbers, weight: float) -> tuple[Numbers, Numbers]:
    """Sum over what came before, the one n places back weighted by weight^n, and the sum of the weights."""
    sums, norms = np.zeros(len(y)), np.zeros(len(y))
    total = norm = 0.0
    for i, value in enumerate(y):
        total, norm = weight * total, weight * norm
        if math.isfinite(value):
            total, norm = total + value, norm + 1
        sums[i], norms[i] = total, norm
    return sums, norms


@dataclass(frozen=True)
class RankCurves:
    """A field of all ranks on one grid of time."""

    steps: Numbers
    tokens: Numbers
    hours: Numbers
    lines: dict[str, Numbers]
    """By name (`rank 3`); of many ranks only those with the lowest and the highest mean."""
    mean: Numbers
    low: Numbers
    high: Numbers
    many: bool


def rank_curves(view: RunView, column: str, buckets: int = GRID) -> RankCurves | None:
    """A field of each rank over the run; None where no rank has it. Utilisation counts only while training."""
    ranks = [t for t in view.ranks if t.has(column)]
    if not ranks:
        return None
    if column in TRAINING_ONLY and any((t["training"] > 0).any() for t in ranks):
        ranks = [_training_only(t) for t in ranks]
        ranks = [t for t in ranks if t.has(column)]
    longest = max(len(t["hours"]) for t in ranks)
    buckets = max(1, min(buckets, longest))
    table = on_grid(ranks, column, buckets)
    hours = grid(ranks, buckets)
    known = np.isfinite(table).any(axis=0)
    table, hours = table[:, known], hours[known]
    steps = steps_at(hours, view)
    count = np.isfinite(table).sum(axis=0)
    mean = np.nansum(table, axis=0) / count
    many = len(ranks) > FEW_RANKS
    chosen: Sequence[int] = range(len(ranks))
    if many:
        means = np.array([np.nanmean(row) if np.isfinite(row).any() else math.nan for row in table])
        chosen = sorted({int(np.nanargmin(means)), int(np.nanargmax(means))})
    lines = {f"rank {ranks[i].rank}": table[i] for i in chosen}
    low, high = np.nanmin(table, axis=0), np.nanmax(table, axis=0)
    return RankCurves(steps, tokens_at(steps, view.train), hours, lines, mean, low, high, many)


def _training_only(track: RankTrack) -> RankTrack:
    keep = track["training"] > 0
    return RankTrack(track.rank, {name: values[keep] for name, values in track.columns.items()})


def steps_at(hours: Numbers, view: RunView) -> Numbers:
    """Steps done at hours of training, by the lines around them."""
    known = sorted(
        {
            (0.0, 0.0),
            *zip(view.train["hours"], view.train["step"], strict=True),
            *((s.hours, s.step) for s in view.seams),
        }
    )
    known = [(h, s) for h, s in known if math.isfinite(h)]
    return interpolate(hours, np.array([h for h, _ in known]), np.array([s for _, s in known]))


def seam_at(seam: Seam, axis: str) -> float:
    """Where a seam lies on an axis."""
    return {"step": seam.step, "tokens": seam.tokens, "hours": seam.hours}[axis]
