"""Which charts a report has: one description of each, drawn by matplotlib (`plots.py`) and by the page (`page.js`).

A chart is a list of series. A series has its own points: it is thinned at its own extremes, so a spike of the gradient
norm survives where the loss is smooth. Both drawers smooth the same points by the same formula (`smoothed`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windlass.reports.tables import NO_SCORES
from windlass.reports.view import Numbers, RunView, Track, interpolate
from windlass.study.compare import BITS, common_measure
from windlass.study.results import diverged

POINTS = 2400  # of a series over all runs, of one run at least 400: more than a screen has pixels
RANK_POINTS = 400
COLOURS, DASHES = 8, 5  # of lines: so many colours and patterns there are, in plots.py and page.js
FEW_RANKS = (
    8  # have a line each; more are drawn as mean and range, with the two extreme ranks by name
)
FEW_LINES = 24  # of the ranks of several runs; more are drawn as the mean and range of each run


@dataclass(frozen=True)
class Series:
    """One line of a chart."""

    run: int  # index of the run, for its colour and for hiding it; -1: of no run
    name: str  # in the legend; empty: it has no entry of its own
    step: Numbers
    tokens: Numbers
    hours: Numbers
    y: Numbers
    colour: int | None = None  # index into the palette; None: the run's own colour
    dash: int = 0  # pattern: 0 solid, 1 dashed, 2 dotted …; with the run's own colour it is added to the run's pattern
    minor: bool = False  # a thin line: part of a whole
    points: str = ""  # `line`: circles joined by a line; `median`: diamonds joined by one; `only`: circles; empty: a line
    smooth: bool = False
    low: Numbers | None = None  # lower edge of a band around the line
    high: Numbers | None = None  # its upper edge
    bad: bool = False  # whether its values that are not finite are marked
    diverged: bool = False  # whether it is left out of the choice of the vertical axis


@dataclass(frozen=True)
class Chart:
    """A chart of one quantity (or its parts)."""

    id: str
    title: str
    unit: str
    series: list[Series]
    zero: bool = False  # whether the vertical axis begins at zero
    note: str = ""
    x_label: str = (
        ""  # of a study's chart, whose horizontal axis (`step` of the series) is a swept setting
    )
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


TRAIN: tuple[tuple[str, str, str, dict[str, str], bool, float], ...] = (
    ("lr", "Learning rate", "", {"lr": "learning rate"}, False, 1),
    ("grad_norm", "Gradient norm", "before clipping", {"grad_norm": "gradient norm"}, True, 1),
    ("throughput", "Throughput", "tokens/s, all ranks", {"tokens_per_s": "tokens/s"}, True, 1),
    (
        "step_time",
        "Time of a step",
        "ms",
        {
            "step_ms": "whole step",
            "forward_ms": "forward",
            "backward_ms": "backward",
            "optimizer_ms": "optimizer",
            "data_ms": "waiting for data",
        },
        True,
        1,
    ),
    ("mfu", "Model FLOPs utilisation", "% of the device's peak", {"mfu": "MFU"}, True, 100),
)
"""Charts of the `train` lines: id, title, unit, columns and their names, whether to smooth, factor."""

RANKS = (
    (
        "memory",
        "Device memory of each rank",
        "MB",
        {"mem_alloc_mb": "allocated", "mem_reserved_mb": "reserved"},
    ),
    ("resident", "Memory of each rank's process", "MB resident", {"rss_mb": "resident"}),
    (
        "utilisation",
        "Utilisation of each rank",
        "%, in training steps only",
        {"util_pct": "utilisation"},
    ),
    ("power", "Power of each device", "W", {"power_w": "power"}),
)


def charts(views: Sequence[RunView]) -> list[Chart]:
    """The charts for which a run has numbers, the loss first. Of several runs a chart has one column."""
    several = len(views) > 1
    in_bits = common_measure([seen.evaluated for seen in views])[0] == BITS
    series = [
        one
        for run, seen in enumerate(views)
        for one in _loss(views, run, bits_factor(seen) if in_bits else 1.0)
    ]
    loss = Chart("loss", "Loss", "bits per byte" if in_bits else "nats per token", series)
    notes = ["lines: training, circles: validation"] if several else []
    notes += ["what diverged is cut off above"] if loss.ceiling() is not None else []
    described = [replace(loss, note="; ".join(notes))]
    for suite in dict.fromkeys(suite for seen in views for suite in seen.evals if suite != "loss"):
        tracks = [seen.evals.get(suite) for seen in views]
        scores = dict.fromkeys(
            name for t in tracks if t is not None for name in t.measures() if name not in NO_SCORES
        )
        words = {name: name.replace("_", " ") for name in scores}
        for name, text in words.items() if several else ():  # a chart for each measure
            series = _columns(views, tracks, {name: text}, points="line")
            described.append(
                Chart(f"suite-{slug(suite)}-{slug(name)}", f"{suite}, {text}", "", series)
            )
        if not several:
            described.append(
                Chart(
                    f"suite-{slug(suite)}", suite, "", _columns(views, tracks, words, points="line")
                )
            )
    for name in dict.fromkeys(name for seen in views for name in seen.logged.measures()):
        series = _columns(views, [seen.logged for seen in views], {name: name})
        described.append(Chart(slug(name), name, "", series))
    for key, title, unit, columns, smooth, factor in TRAIN:
        series = _columns(views, [seen.train for seen in views], columns, factor, smooth=smooth)
        described.append(Chart(key, title, unit, series, zero=True))
    for key, title, unit, columns in RANKS:
        for number, (column, what) in (
            enumerate(columns.items()) if several else ()
        ):  # a chart for each column
            series = [
                one for run in range(len(views)) for one in _ranks(views, run, {column: what})
            ]
            own = f"{title}, {what}" if len(columns) > 1 else title
            described.append(
                Chart(f"{key}-{slug(what)}" if number else key, own, unit, series, zero=True)
            )
        if not several:
            described.append(Chart(key, title, unit, _ranks(views, 0, columns), zero=True))
    return [chart for chart in described if chart.series]


def pattern(number: int) -> tuple[int, int]:
    """Colour and dash of a line by its place among others: no two are equal before all combinations are used up."""
    return number % COLOURS, number // COLOURS % DASHES


def run_dashes(runs: int, tones: Sequence[float] = ()) -> list[int]:
    """The pattern of each run's lines: another one if its colour (its `tone`, or its place in the palette) was there."""
    colours = list(tones) or [run % COLOURS for run in range(runs)]
    return [colours[:run].count(colour) % DASHES for run, colour in enumerate(colours)]


def slug(text: str) -> str:
    """A text as a part of a file's name."""
    return "".join(c if c.isalnum() and c.isascii() else "-" for c in text)


def bits_factor(seen: RunView) -> float:
    """Bits per byte of a loss of 1 nat per token, by the tokens and bytes of the validation data; NaN if not known."""
    own = seen.evaluated
    return own.tokens / (own.bytes * math.log(2)) if own and own.bytes else math.nan


def _loss(views: Sequence[RunView], run: int, factor: float) -> list[Series]:
    """A run's training and validation loss."""
    seen, several, series = views[run], len(views) > 1, []
    losses = seen.train["loss"]
    wild = not np.isfinite(losses).all() or (
        len(losses) > 0 and diverged(float(losses[0]), float(losses[-1]))
    )
    if len(losses):
        look: dict[str, Any] = (
            {"name": seen.label, "colour": None} if several else {"name": "training", "colour": 0}
        )
        series.append(
            _series(views, run, seen.train, "loss", smooth=True, diverged=wild, bad=True, **look)
        )
    if (track := seen.evals.get("loss")) is not None and track.has("loss"):
        look = {"name": "validation", "colour": 1, "points": "line"}
        if several:
            look = {"name": f"{seen.label}, validation", "colour": None, "points": "only"}
        series.append(_series(views, run, track, "loss", diverged=wild, **look))
        if not several and track.has(
            "train_loss"
        ):  # without dropout, on the same samples each time
            look = {"name": "a sample of the training data", "colour": 2, "points": "line"}
            series.append(_series(views, run, track, "train_loss", diverged=wild, **look))
    return [replace(one, y=one.y * factor) for one in series]


def _columns(
    views: Sequence[RunView],
    tracks: Sequence[Track | None],
    columns: Mapping[str, str],
    factor: float = 1,
    **rest: Any,
) -> list[Series]:
    """A series for each run and column with numbers; of several runs the first column alone."""
    several, series = len(views) > 1, []
    for run, (seen, track) in enumerate(zip(views, tracks, strict=True)):
        present = [column for column in columns if track is not None and track.has(column)]
        for index, column in enumerate(present[: 1 if several else None]):
            assert track is not None
            colour, dash = (None, 0) if several else pattern(index)
            name = seen.label if several else columns[column]
            one = _series(
                views,
                run,
                track,
                column,
                name=name,
                colour=colour,
                dash=dash,
                minor=index > 0,
                **rest,
            )
            series.append(replace(one, y=one.y * factor))
    return series


def _series(views: Sequence[RunView], run: int, track: Track, column: str, **rest: Any) -> Series:
    """A column of a track, thinned."""
    keep = thin(track["step"], track[column], max(400, POINTS // len(views)))
    step, tokens, hours = (track[axis][keep] for axis in ("step", "tokens", "hours"))
    return Series(run=run, step=step, tokens=tokens, hours=hours, y=track[column][keep], **rest)


def _ranks(views: Sequence[RunView], run: int, columns: Mapping[str, str]) -> list[Series]:
    """The lines of a run's ranks on one grid of time; of many ranks (or many runs) their mean and range."""
    seen, several, series = views[run], len(views) > 1, []
    lines = max(len(one.ranks) for one in views) * len(views) if several else 0  # at most
    for place, (column, what) in enumerate(columns.items()):
        tracks = [track for track in seen.ranks if track.has(column)]
        if not tracks:
            continue
        # the means in equal spans of time; spans are wider than from sample to sample, so a late sample leaves no gap
        samples = [
            (t["hours"][np.isfinite(t[column])], t[column][np.isfinite(t[column])]) for t in tracks
        ]
        every = np.concatenate([at for at, _ in samples])
        spans = min(RANK_POINTS, 1 + 2 * max(len(at) for at, _ in samples) // 3)
        edges = np.linspace(every.min(), max(every.max(), every.min() + 1e-6), spans + 1)
        table = np.full((len(tracks), spans), math.nan)  # [ranks, spans]; NaN without a sample
        for row, (at, values) in enumerate(samples):
            span = np.clip(np.searchsorted(edges, at, side="right") - 1, 0, spans - 1)
            count = np.bincount(span, minlength=spans)
            np.divide(
                np.bincount(span, weights=values, minlength=spans),
                count,
                out=table[row],
                where=count > 0,
            )
        filled = np.isfinite(table).any(axis=0)
        hours, table = ((edges[1:] + edges[:-1]) / 2)[filled], table[:, filled]
        steps, tokens = (
            interpolate(seen.train, "hours", hours, name) for name in ("step", "tokens")
        )
        axes: dict[str, Any] = {"run": run, "step": steps, "tokens": tokens, "hours": hours}
        suffix = f", {what}" if len(columns) > 1 and not several else ""
        many = (
            len(tracks) > FEW_RANKS
            or lines > FEW_LINES
            or (several and (len(tracks) == 1 or len(views) > COLOURS))
        )
        chosen = list(range(len(tracks)))
        if many:
            name = seen.label if several else f"mean of {len(tracks)} ranks{suffix}"
            mean, low, high = (
                np.nanmean(table, axis=0),
                np.nanmin(table, axis=0),
                np.nanmax(table, axis=0),
            )
            colour = None if several else 0
            series.append(
                Series(**axes, name=name, y=mean, low=low, high=high, colour=colour, dash=place)
            )
            means = np.nanmean(table, axis=1)
            chosen = [] if several else sorted({int(np.argmin(means)), int(np.argmax(means))})
        for i in chosen:
            look: dict[str, Any] = {"colour": (i + many) % 8, "dash": place}
            if several:  # the run's own colour
                look = {"colour": None, "dash": i}
            name = f"{f'{seen.label}, ' * several}rank {tracks[i].rank}{suffix}"
            series.append(Series(**axes, name=name, y=table[i], minor=True, **look))
    return series


def thin(x: Numbers, y: Numbers, limit: int) -> NDArray[np.int64]:
    """Indices of about `limit` points that look like the whole: of each span the first, lowest, highest and first NaN.

    `x` [n] rises; `y` [n] may have NaN, of which some stay so that a gap or a bad step is visible. All where n <= limit.
    """
    n = len(x)
    if n <= limit:
        return np.arange(n)
    keep = {0, n - 1}
    for start, stop in itertools.pairwise(
        np.linspace(0, n, max(2, limit // 3) + 1).astype(np.int64)
    ):
        good = np.isfinite(y[start:stop])
        keep |= {start, *(start + np.flatnonzero(~good)[:1])}
        if good.any():
            keep |= {start + np.argmin(np.where(good, y[start:stop], np.inf))}
            keep |= {start + np.argmax(np.where(good, y[start:stop], -np.inf))}
    return np.array(sorted(keep), dtype=np.int64)


def smoothing(charts: Sequence[Chart]) -> float:
    """The weight that evens out curves as long as these and keeps their shape: a reach of about 1/80 of the longest."""
    longest = max(
        (len(one.step) for chart in charts for one in chart.series if one.smooth), default=0
    )
    return min(0.98, round(1 - 1 / max(1.0, longest / 80), 2))


def smoothed(y: Numbers, weight: float) -> Numbers:
    """Each value as the mean of all, the one n points away weighted by weight^n: smooth, and without a lag.

    Values that are not finite are left out and stay NaN. `smooth` in page.js is the same formula; a test compares them.
    """
    good = np.isfinite(y)
    values = np.where(good, y, 0.0)

    def decayed(
        part: Any,
    ) -> Numbers:  # the sum over the values so far, the one n points back weighted by weight^n
        return np.array(
            list(itertools.accumulate(part, lambda total, value: weight * total + value)),
            dtype=np.float64,
        )

    # a sum from the left and one from the right have the value itself twice
    total = decayed(values) + decayed(values[::-1])[::-1] - values
    norm = decayed(good * 1.0) + decayed(good[::-1] * 1.0)[::-1] - 1
    return np.divide(total, norm, out=np.full(len(y), math.nan), where=good)
