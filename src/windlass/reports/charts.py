"""Which charts a report has: one description of each, drawn by matplotlib (`plots.py`) and by the page (`page.js`).

A chart is a list of series. A series has its own points: it is thinned at its own extremes, so a spike of the gradient
norm survives whatever the loss does there. Both drawers smooth the same points by the same formula (`smoothed`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windlass.reports.measures import NO_SCORES
from windlass.reports.view import Numbers, Restart, RunView, Track, tokens_at
from windlass.study.study import diverged

POINTS = 2400
"""Points of a series over all runs, of one run at least 400: more than a screen has pixels."""
RANK_POINTS = 400
FEW_RANKS = 8
"""Up to this many ranks have a line each; more are drawn as mean and range, with the two extreme ranks by name."""

Look = tuple[float | None, int]
"""A run's place on the colour ramp (0 to 1; None: a colour of its own) and its kind of dash."""


@dataclass(frozen=True)
class Series:
    """One line of a chart."""

    run: int
    """Index of the run, for its colour and for hiding it; -1: of no run."""
    name: str
    """In the legend; empty: it has no entry of its own."""
    step: Numbers
    tokens: Numbers
    hours: Numbers
    y: Numbers
    colour: int | None = None
    """Index into the palette; None: the run's own colour."""
    dash: int = 0
    """0 solid, 1 dashed, 2 dotted."""
    minor: bool = False
    """A thin line: part of a whole."""
    points: str = ""
    """`line`: points joined by a line; `only`: points without one; empty: a line without points."""
    smooth: bool = False
    low: Numbers | None = None
    """Lower edge of a band around the line; `high` its upper edge."""
    high: Numbers | None = None
    bad: bool = False
    """Whether its values that are not finite are marked."""
    diverged: bool = False
    """Whether it is left out of the choice of the vertical axis."""


@dataclass(frozen=True)
class Mark:
    """A restart on a chart."""

    run: int
    restart: Restart


@dataclass(frozen=True)
class Chart:
    """A chart of one quantity (or its parts)."""

    id: str
    title: str
    unit: str
    series: list[Series]
    marks: list[Mark] = field(default_factory=list)
    zero: bool = False
    """Whether the vertical axis begins at zero."""
    note: str = ""
    x_label: str = ""
    """Of a study's chart, whose horizontal axis (`step` of the series) is a swept setting and not the run."""
    x_values: list[float] = field(default_factory=list)
    x_names: list[str] = field(default_factory=list)
    x_log: bool = False

    def ceiling(self, first_step: float = 0) -> float | None:
        """The highest value of the series that did not diverge; None where none diverged above it."""
        tops = {True: -math.inf, False: -math.inf}
        for one in self.series:
            values = one.y[(one.step >= first_step) & np.isfinite(one.y)]
            tops[one.diverged] = max(tops[one.diverged], values.max(initial=-math.inf))
        return float(tops[False]) if -math.inf < tops[False] < tops[True] else None


# --- the charts of runs ----------------------------------------------------------------------------------------------

TRAIN: tuple[tuple[str, str, str, dict[str, str], bool, float], ...] = (
    ("lr", "Learning rate", "", {"lr": "learning rate"}, False, 1),
    ("grad_norm", "Gradient norm", "before clipping", {"grad_norm": "gradient norm"}, True, 1),
    ("throughput", "Throughput", "tokens/s, all ranks", {"tokens_per_s": "tokens/s"}, True, 1),
    ("step_time", "Time of a step", "ms", {
        "step_ms": "whole step", "forward_ms": "forward", "backward_ms": "backward", "optimizer_ms": "optimizer",
        "data_ms": "waiting for data",
    }, True, 1),
    ("mfu", "Model FLOPs utilisation", "% of the device's peak", {"mfu": "MFU"}, True, 100),
)  # fmt: skip
"""Charts of the `train` lines: id, title, unit, columns and their names, whether to smooth, factor."""

RANKS = (
    ("memory", "Device memory of each rank", "MB", {"mem_alloc_mb": "allocated", "mem_reserved_mb": "reserved"}),
    ("resident", "Memory of each rank's process", "MB resident", {"rss_mb": "resident"}),
    ("utilisation", "Utilisation of each rank", "%, in training steps only", {"util_pct": "utilisation"}),
    ("power", "Power of each device", "W", {"power_w": "power"}),
)


def charts(views: Sequence[RunView], looks: Sequence[Look] = ()) -> list[Chart]:
    """The charts for which a run has numbers, the loss first. Of several runs each chart has the first column alone."""
    several = len(views) > 1
    limit = max(400, POINTS // max(1, len(views)))
    marks = [Mark(i, restart) for i, seen in enumerate(views) for restart in seen.restarts]
    found = []
    loss = [series for i, seen in enumerate(views) for series in _loss(seen, i, several, limit)]
    if loss:
        note = "lines: training, circles: validation" if several else ""
        chart = Chart("loss", "Loss", "nats per token", loss, marks, note=note)
        cut = "what diverged is cut off above" if chart.ceiling() is not None else ""
        found.append(replace(chart, note="; ".join(x for x in (note, cut) if x)))
    for suite in dict.fromkeys(suite for seen in views for suite in seen.evals if suite != "loss"):
        tracks = [seen.evals.get(suite) for seen in views]
        names = dict.fromkeys(n for t in tracks if t is not None for n in t.measures() if n not in NO_SCORES)
        labels = {name: name.replace("_", " ") for name in names}
        series = _columns(views, tracks, labels, several, limit, points="line")
        slug = "".join(c if c.isalnum() and c.isascii() else "-" for c in suite)
        title = {"hellaswag": "HellaSwag", "squad": "SQuAD"}.get(suite, suite)
        found += [Chart(f"suite-{slug}", title, "", series, marks)] if series else []
    trains = [seen.train for seen in views]
    for key, title, unit, columns, smooth, factor in TRAIN:
        series = _columns(views, trains, columns, several, limit, smooth=smooth, factor=factor)
        found += [Chart(key, title, unit, series, marks, zero=True)] if series else []
    for key, title, unit, columns in RANKS:
        series = [one for i, seen in enumerate(views) for one in _ranks(seen, i, columns, several)]
        found += [Chart(key, title, unit, series, marks, zero=True)] if series else []
    return [replace(chart, series=[_looked(one, looks) for one in chart.series]) for chart in found]


def _looked(series: Series, looks: Sequence[Look]) -> Series:
    """With the dash of its run, where the colour is the run's too; eight runs have colours of their own."""
    if series.colour is not None:
        return series
    return replace(series, dash=(looks[series.run][1] if looks else series.run // 8) % 3)


def _loss(seen: RunView, run: int, several: bool, limit: int) -> list[Series]:
    series = []
    losses = seen.train["loss"]
    wild = bool(seen.nonfinite.any()) or (len(losses) > 0 and diverged(float(losses[0]), float(losses[-1])))
    colour = None if several else 0
    if seen.train.has("loss") or seen.nonfinite.any():
        name = seen.label if several else "training"
        series.append(
            _series(seen.train, "loss", limit, run=run, name=name, colour=colour, smooth=True, diverged=wild, bad=True)
        )
    if (track := seen.evals.get("loss")) is not None and track.has("loss"):
        name, points = (f"{seen.label}, validation", "only") if several else ("validation", "line")
        colour = None if several else 1
        series.append(_series(track, "loss", limit, run=run, name=name, colour=colour, points=points, diverged=wild))
    return series


def _columns(
    views: Sequence[RunView], tracks: Sequence[Track | None], columns: dict[str, str], several: bool, limit: int, *,
    smooth: bool = False, points: str = "", factor: float = 1,
) -> list[Series]:  # fmt: skip
    series = []
    for run, (seen, track) in enumerate(zip(views, tracks, strict=True)):
        if track is None:
            continue
        present = [name for name in columns if track.has(name)][: 1 if several else None]
        for index, name in enumerate(present):
            one = _series(track, name, limit, factor=factor, run=run, points=points, smooth=smooth, minor=index > 0)
            series.append(
                replace(one, name=seen.label if several else columns[name], colour=None if several else index)
            )
    return series


def _series(track: Track, column: str, limit: int, factor: float = 1, **rest: Any) -> Series:
    keep = thin(track["step"], track[column], limit)
    step, tokens, hours = (track[axis][keep] for axis in ("step", "tokens", "hours"))
    return Series(step=step, tokens=tokens, hours=hours, y=track[column][keep] * factor, **{"name": "", **rest})


def _ranks(seen: RunView, run: int, columns: dict[str, str], several: bool) -> list[Series]:
    """The ranks' lines on one grid of time; of many ranks (and of several runs) their mean and range."""
    series = []
    for place, (column, what) in enumerate(list(columns.items())[: 1 if several else None]):
        tracks = [track for track in seen.ranks if track.has(column)]
        if column == "util_pct" and any((track["training"] > 0).any() for track in tracks):
            tracks = [own for track in tracks if (own := track.only(track["training"] > 0)).has(column)]
        if not tracks:
            continue
        hours, table = on_grid(tracks, column)
        steps = seen.steps_at(hours)
        axes: dict[str, Any] = {"run": run, "step": steps, "tokens": tokens_at(steps, seen.train), "hours": hours}
        suffix = f", {what}" if len(columns) > 1 and not several else ""
        many, chosen = len(tracks) > FEW_RANKS, list(range(len(tracks)))
        if several or many:
            name = seen.label if several else f"mean of {len(tracks)} ranks{suffix}"
            mean, low, high = np.nanmean(table, axis=0), np.nanmin(table, axis=0), np.nanmax(table, axis=0)
            colour = None if several else 0
            series.append(Series(**axes, name=name, y=mean, low=low, high=high, colour=colour, dash=place))
            means = np.nanmean(table, axis=1)
            chosen = [] if several else sorted({int(np.argmin(means)), int(np.argmax(means))})
        for i in chosen:
            colour = (i + many) % 8
            name = f"rank {tracks[i].rank}{suffix}"
            series.append(Series(**axes, name=name, y=table[i], colour=colour, dash=place, minor=True))
    return series


def on_grid(ranks: Sequence[Track], column: str) -> tuple[Numbers, Numbers]:
    """The mean of a field in equal spans of time: hours [spans], values [ranks, spans], NaN without a sample."""
    everything = np.concatenate([track["hours"] for track in ranks])
    spans = min(
        RANK_POINTS, 1 + 2 * max(map(len, ranks)) // 3
    )  # wider than from sample to sample: a late one leaves no gap
    low, high = float(everything.min()), float(everything.max())
    edges = np.linspace(low, high if high > low else low + 1e-6, spans + 1)
    table = np.full((len(ranks), spans), math.nan)
    for row, track in enumerate(ranks):
        good = np.isfinite(track[column])
        place = np.clip(np.searchsorted(edges, track["hours"][good], side="right") - 1, 0, spans - 1)
        total = np.bincount(place, weights=track[column][good], minlength=spans)
        count = np.bincount(place, minlength=spans)
        table[row] = np.divide(total, count, out=np.full(spans, math.nan), where=count > 0)
    known = np.isfinite(table).any(axis=0)
    return ((edges[1:] + edges[:-1]) / 2)[known], table[:, known]


# --- thinning and smoothing ------------------------------------------------------------------------------------------


def thin(x: Numbers, y: Numbers, limit: int) -> NDArray[np.int64]:
    """Indices of at most about `limit` points that look like the whole: of each span the first, lowest and highest.

    Args:
        x: [n] rising.
        y: [n], NaN allowed: the first NaN of a span is kept too, so that a gap or a bad step stays visible.
        limit: points to keep.

    Returns:
        Rising indices into `x`; all of them where there are no more than `limit`.
    """
    n = len(x)
    if n <= limit:
        return np.arange(n)
    keep = {0, n - 1}
    for start, stop in itertools.pairwise(np.linspace(0, n, max(2, limit // 3) + 1).astype(np.int64)):
        span = y[start:stop]
        bad, good = np.flatnonzero(~np.isfinite(span)), np.flatnonzero(np.isfinite(span))
        keep.add(int(start))
        if len(bad):
            keep.add(int(start + bad[0]))
        if len(good):
            keep |= {int(start + good[np.argmin(span[good])]), int(start + good[np.argmax(span[good])])}
    return np.array(sorted(keep), dtype=np.int64)


def smoothing(charts: Sequence[Chart]) -> float:
    """The weight that evens out curves as long as these and keeps their shape: a reach of about 1/80 of the longest."""
    longest = max((len(one.step) for chart in charts for one in chart.series if one.smooth), default=0)
    return min(0.98, round(1 - 1 / max(1.0, longest / 80), 2))


def smoothed(y: Numbers, weight: float) -> Numbers:
    """Each value as the mean of all, the one n points away weighted by weight^n: smooth, and without a lag.

    Values that are not finite are left out and stay NaN. `smooth` in page.js is the same formula; a test compares them.
    """
    ahead, ahead_norm = _decayed(y, weight)
    back, back_norm = (part[::-1] for part in _decayed(y[::-1], weight))
    good = np.isfinite(y)
    out = np.full(len(y), math.nan)
    np.divide(ahead + back - np.where(good, y, 0.0), ahead_norm + back_norm - 1, out=out, where=good)
    return out


def _decayed(y: Numbers, weight: float) -> tuple[Numbers, Numbers]:
    """Sum over the values so far, the one n points back weighted by weight^n, and the sum of the weights."""
    sums, norms = np.zeros(len(y)), np.zeros(len(y))
    total = norm = 0.0
    for i, value in enumerate(y):
        total, norm = weight * total, weight * norm
        if math.isfinite(value):
            total, norm = total + value, norm + 1
        sums[i], norms[i] = total, norm
    return sums, norms
