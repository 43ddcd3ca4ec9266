"""Charts of runs, each one description that matplotlib (`plots.py`) and the page (`chart.js`,
`page.js`) draw."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from windlass.errors import plural
from windlass.reports.tables import slug
from windlass.reports.view import Numbers, RunView, Track, interpolate, thin
from windlass.study.comparable import common_measure
from windlass.study.numbers import BITS, score_fields
from windlass.telemetry.measures import DEVICE, LOSS, SOURCE, TRAIN, by_chart, of_source

COLOURS, DASHES = 8, 5  # of the palette, and of the patterns and shapes in plots.py and chart.js
POINTS = 2400  # of a line, over all runs; at least 400 of one run: more than a screen has pixels
RANK_POINTS = 400
FEW_RANKS = 4  # have a line each; more are a mean and a range
AXES = ("step", "tokens", "hours")
SPREAD = 8  # of the values on a logarithmic axis, at least: the highest over the lowest


@dataclass(frozen=True)
class Axis:
    """A scale, with names for its places if it does not show numbers."""

    label: str = ""
    values: Sequence[float] = ()  # the places that have a tick; empty: the drawer chooses them
    names: Sequence[str] = ()  # of these places
    log: bool = False
    zero: bool = False  # whether it begins at zero


@dataclass(frozen=True)
class Series:
    name: str  # in the legend; empty: without an entry
    y: Numbers
    # places of the points: by `step`, `tokens` and `hours` along a run, or by `x` on a study's axis
    at: Mapping[str, Numbers] = field(default_factory=dict)
    number: int = 0  # of its colour, line pattern and shape: 40 lines are unlike
    run: int = -1  # index of the run, for hiding it; -1: not a run's
    grey: bool = False  # without a colour: a reference
    minor: bool = False  # a thin line: part of a whole
    # `line`: hollow points joined by a line; `median`: solid ones joined; `only`: hollow ones
    points: str = ""
    smooth: bool = False  # whether the page smooths it
    low: Numbers | None = None  # lower edge of a band around the line
    high: Numbers | None = None
    bad: bool = False  # whether to mark the values that are not finite

    @property
    def x(self) -> Numbers:
        return self.at["x"] if "x" in self.at else self.at["step"]

    @property
    def colour(self) -> int:
        """Index into the palette."""
        return self.number % COLOURS

    @property
    def dash(self) -> int:
        """Index of the pattern of the line and of the shape of its points."""
        return self.number % DASHES


def is_spread(lines: Iterable[Series]) -> bool:
    """Whether positive values span so much that only a logarithmic scale shows them all."""
    values = np.concatenate([[], *(one.y for one in lines)])
    good = values[np.isfinite(values)]
    return bool(len(good) and good.min() > 0 and good.max() / good.min() >= SPREAD)


@dataclass(frozen=True)
class Chart:
    id: str  # and the name of its files
    title: str
    unit: str
    series: Sequence[Series]
    x: Axis = Axis()  # without values: the axis that all curves along runs share
    y: Axis = Axis()
    note: str = ""


def charts(views: Sequence[RunView]) -> list[Chart]:
    """The charts for which a run has numbers, the loss first; of several runs one column each."""
    drawn = [_loss_chart(views), *_score_charts(views)]
    logged: list[Track | None] = [view.logged for view in views]
    names = (name for view in views for name in view.logged.columns if name.startswith("log."))
    for name in dict.fromkeys(names):
        drawn.append(Chart(slug(name), name, "", _columns(views, logged, {name: name})))
    trains: list[Track | None] = [view.train for view in views]
    for key, measures in by_chart(TRAIN).items():
        first = measures[0]
        columns = {measure.name: measure.text for measure in measures}
        lines = _columns(views, trains, columns, 100.0 if first.kind == "share" else 1.0)
        if key != "lr":
            lines = [replace(line, smooth=True) for line in lines]
        drawn.append(Chart(key, first.title, first.unit, lines, y=Axis(zero=True)))
    for key, measures in by_chart(DEVICE).items():
        for place, measure in enumerate(measures):
            series = [x for run in range(len(views)) for x in _ranks(views, run, measure.name)]
            chart_id = f"{key}-{slug(measure.text)}" if place else key
            title = measures[0].title
            if len(measures) > 1:
                title += f", {measure.text}"
            drawn.append(Chart(chart_id, title, measures[0].unit, series, y=Axis(zero=True)))
    return [chart for chart in drawn if chart.series]


def _loss_chart(views: Sequence[RunView]) -> Chart:
    """The losses of all runs, in bits per byte if they only compare so."""
    in_bits = common_measure([view.validation for view in views])[0] == BITS
    several, series = len(views) > 1, list[Series]()
    for run, view in enumerate(views):
        factor, data = 1.0, view.validation
        if in_bits:  # bits per byte of a loss of 1 nat per token
            factor = data.tokens / (data.bytes * math.log(2)) if data and data.bytes else math.nan
        if len(view.train):
            name = view.label if several else "training"
            training = _series(views, run, view.train, "loss", name, factor)
            series.append(replace(training, smooth=True, bad=True))
        names = {
            "loss": ("validation", 1),
            "average_loss": ("validation, averaged weights", 3),
            "train_loss": ("a sample of the training data", 2),  # without dropout, always the same
        }
        if several:
            names = {"loss": (f"{view.label}, validation", run)}
        track = view.evals.get(LOSS)
        for column, (name, number) in names.items():
            if track and track.has("loss") and track.has(column):
                line = _series(views, run, track, column, name, factor)
                points = "only" if several else "line"
                series.append(replace(line, number=number, points=points))
    unit = "bits per byte" if in_bits else "nats per token"
    note = "lines: training, points: validation" if several else ""
    return Chart("loss", "Loss", unit, series, y=Axis(log=is_spread(series)), note=note)


def _score_charts(views: Sequence[RunView]) -> list[Chart]:
    """The losses of a mixture's sources, and the scores of other suites than the loss.

    One run has a chart with a line for each, but only a table for many scores; several runs have
    a chart for each.
    """
    losses, loss = [view.evals.get(LOSS) for view in views], SOURCE["loss"]
    fields = dict.fromkeys(name for track in losses if track for name in track.columns)
    sources = (name for name in fields if of_source(name) and name.endswith(".loss"))
    columns = {name: name.split(".")[1] for name in sources}
    title = f"{loss.heading}, validation"
    groups = [("source-validation", title, loss.unit, losses, columns)]
    for suite in dict.fromkeys(suite for view in views for suite in view.evals if suite != LOSS):
        lines = (view.numbers.suites.get(suite, []) for view in views)
        names = dict.fromkeys(name for own in lines for name in score_fields(own))
        columns = {name: name.replace("_", " ") for name in names}
        if len(views) > 1 or len(names) <= COLOURS:
            tracks = [view.evals.get(suite) for view in views]
            groups.append((f"suite-{slug(suite)}", suite, "", tracks, columns))
    drawn = []
    for key, title, unit, tracks, columns in groups:
        each = {key: (title, columns)}
        if len(views) > 1:
            pairs = columns.items()
            each = {f"{key}-{slug(x)}": (f"{title}, {x}", {name: x}) for name, x in pairs}
        for chart_id, (heading, shown) in each.items():
            series = [replace(one, points="line") for one in _columns(views, tracks, shown)]
            drawn.append(Chart(chart_id, heading, unit, series))
    return drawn


def _columns(
    views: Sequence[RunView],
    tracks: Sequence[Track | None],
    columns: Mapping[str, str],
    factor: float = 1.0,
) -> list[Series]:
    """A line for each run and column with numbers; for several runs only the first column."""
    series = []
    for run, (view, track) in enumerate(zip(views, tracks, strict=True)):
        present = [column for column in columns if track and track.has(column)]
        if track and present and len(views) > 1:
            series.append(_series(views, run, track, present[0], view.label, factor))
        elif track:
            for number, column in enumerate(present):
                line = _series(views, run, track, column, columns[column], factor)
                series.append(replace(line, number=number, minor=number > 0))
    return series


def _series(
    views: Sequence[RunView], run: int, track: Track, column: str, name: str, factor: float
) -> Series:
    keep = thin(track["step"], track[column], max(400, POINTS // len(views)))
    at = {axis: track[axis][keep] for axis in AXES}
    return Series(name, factor * track[column][keep], at, run if len(views) > 1 else 0, run)


def _ranks(views: Sequence[RunView], run: int, column: str) -> list[Series]:
    """A line for each rank of a run, on one grid of time.

    Many ranks are their mean and range, as are the ranks of each of several runs.
    """
    view, several, samples = views[run], len(views) > 1, []
    tracks = [track for track in view.ranks if track.has(column)]
    if not tracks:
        return []
    for track in tracks:
        good = np.isfinite(track[column])
        samples.append((track["hours"][good], track[column][good]))
    # The mean of each rank in equal spans of time, `table` [ranks, spans]. A span is wider than the
    # time between two samples, so that a late sample leaves no gap.
    times = np.concatenate([at for at, _ in samples])
    spans = min(RANK_POINTS, 1 + 2 * max(len(at) for at, _ in samples) // 3)
    edges = np.linspace(times.min(), max(times.max(), times.min() + 1e-6), spans + 1)
    table = np.full((len(tracks), spans), math.nan)
    for row, (at, values) in enumerate(samples):
        span = np.clip(np.searchsorted(edges, at, side="right") - 1, 0, spans - 1)
        count = np.bincount(span, minlength=spans)
        total = np.bincount(span, weights=values, minlength=spans)
        np.divide(total, count, out=table[row], where=count > 0)
    filled = np.isfinite(table).any(axis=0)
    table, hours = table[:, filled], ((edges[1:] + edges[:-1]) / 2)[filled]
    steps, tokens = (interpolate(view.train, "hours", hours, x) for x in ("step", "tokens"))
    axes = {"step": steps, "tokens": tokens, "hours": hours}
    if several or len(tracks) > FEW_RANKS:
        name = view.label if several else f"mean of {plural(len(tracks), 'rank')}"
        mean, low, high = (f(table, axis=0) for f in (np.nanmean, np.nanmin, np.nanmax))
        return [Series(name, mean, axes, run if several else 0, run, low=low, high=high)]
    series = []
    for row, track in enumerate(tracks):
        rank = track.rank
        place = view.sizes.place(rank) if rank < view.sizes.world else ""  # else of another start
        name = f"rank {rank} ({place})" if place else f"rank {rank}"
        series.append(Series(name, table[row], axes, row, run, minor=True))
    return series
