"""What a chart is: one description, drawn by matplotlib (`plots.py`) and by the page.

The page draws lines in SVG (`chart.js`, `page.js`), and bars and heat maps in HTML (`page.html`).
Each line is thinned at its own extremes, so that a spike of the gradient norm survives even if the
loss is smooth there. Both drawers smooth the same points by the same formula (`smoothed`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from windlass.reports.tracks import Numbers
from windlass.reports.view import Restart, RunView

COLOURS, DASHES = 8, 5  # of the palette, and of the patterns and shapes in plots.py and chart.js
FEW = 4  # lines of a chart in colour; of more lines the best BEST are in colour, the rest in grey
BEST = 3
SPREAD = 8  # of the values on a logarithmic axis, at least: the highest over the lowest


@dataclass(frozen=True)
class Axis:
    """A scale, with names for its places if it does not show numbers."""

    label: str = ""
    values: Sequence[float] = ()  # the places that have a tick; empty: the drawer chooses them
    names: Sequence[str] = ()  # of these places, or of the bars, or of a heat map's cells
    notes: Sequence[str] = ()  # beside the names of bars
    log: bool = False
    zero: bool = False  # whether it begins at zero


@dataclass(frozen=True)
class Series:
    """A line, one part of every bar, or a row of a heat map."""

    name: str  # in the legend; empty: without an entry
    y: Numbers
    # places of the points: by `step`, `tokens` and `hours` along a run, or by `x` on a study's axis
    at: Mapping[str, Numbers] = field(default_factory=dict)
    run: int = -1  # index of the run, for its colour and for hiding it; -1: not a run's
    colour: int | None = None  # index into the palette; None: the run's own colour
    dash: int = 0  # index of the pattern of the line and of the shape of its points
    grey: bool = False  # one of many, without a colour of its own
    minor: bool = False  # a thin line: part of a whole
    # `line`: hollow points joined by a line; `median`: solid ones joined; `only`: hollow ones
    points: str = ""
    smooth: bool = False
    low: Numbers | None = None  # lower edge of a band around the line
    high: Numbers | None = None
    bad: bool = False  # whether to mark the values that are not finite
    diverged: bool = False  # whether to ignore it when choosing the vertical axis
    texts: Sequence[str] = ()  # of the values, in bars and heat maps
    shades: Sequence[float] = ()  # of a heat map's cells, from 0 to 1: how good each value is

    @property
    def x(self) -> Numbers:
        """The place of each point in a picture."""
        return self.at["x"] if "x" in self.at else self.at["step"]


def is_spread(lines: Iterable[Series]) -> bool:
    """Whether positive values span so much that only a logarithmic scale shows them all."""
    values = np.concatenate([[], *(one.y for one in lines if not one.diverged)])
    good = values[np.isfinite(values)]
    return bool(len(good) and good.min() > 0 and good.max() / good.min() >= SPREAD)


@dataclass(frozen=True)
class Chart:
    """A chart of one quantity, or of its parts."""

    id: str  # and the name of its files
    title: str
    unit: str
    series: Sequence[Series]
    kind: str = "line"  # or `bars`, stacked and horizontal, or `heat`
    x: Axis = Axis()  # without values: the axis that all curves along runs share
    y: Axis = Axis()
    note: str = ""

    @property
    def summary(self) -> str:
        """The chart in words, for people who do not see it."""
        parts = [", ".join(filter(None, [self.title, self.unit, self.note]))]
        named = [s for s in self.series if s.name and np.isfinite(s.y).any()]
        for one in named[:BEST]:
            good = one.y[np.isfinite(one.y)]
            ends = f"from {good[0]:.4g} to {good[-1]:.4g}, " if len(good) > 1 else ""
            parts.append(f"{one.name}: {ends}lowest {good.min():.4g}, highest {good.max():.4g}")
        parts += [f"{len(named) - BEST} more lines are in the numbers"] * (len(named) > BEST)
        return ". ".join(parts) + "."

    def ceiling(self, first_step: float = -math.inf) -> float | None:
        """The highest value of lines that did not diverge; None if no diverged line is higher."""
        tops = {True: -math.inf, False: -math.inf}
        for one in self.series:
            values = one.y[(one.x >= first_step) & np.isfinite(one.y)]
            tops[one.diverged] = max(tops[one.diverged], values.max(initial=-math.inf))
        return float(tops[False]) if -math.inf < tops[False] < tops[True] else None

    def stacks(self) -> list[tuple[str, float, str, list[tuple[Series, float, str]]]]:
        """Each bar's name, length in % of the longest, note, and parts with share and text."""
        values = np.array([one.y for one in self.series])  # [parts, bars]
        totals = values.sum(axis=0)
        bars = []
        for i, (name, total) in enumerate(zip(self.y.names, totals, strict=True)):
            parts = [(one, one.y[i] / total, one.texts[i]) for one in self.series if one.y[i] > 0]
            bars.append((name, 100 * total / totals.max(), self.y.notes[i], parts))
        return bars


@dataclass(frozen=True)
class Look:
    """A run's place in palette and patterns, its rank among the runs (0: the best), restarts."""

    label: str
    place: int
    rank: int
    grey: bool
    restarts: Sequence[Restart]


def looks(views: Sequence[RunView], ranking: Sequence[int] = ()) -> list[Look]:
    """The looks of some runs; `ranking`: their indices, the best first.

    The best runs have the first colours. No two runs look the same until all 40 pairs are used.
    """
    ranks = {run: rank for rank, run in enumerate(ranking or range(len(views)))}
    many, chosen = len(views) > FEW, []
    for run, view in enumerate(views):
        rank = ranks[run]
        place = rank if many else run
        chosen.append(Look(view.label, place, rank, many and rank >= BEST, view.restarts))
    return chosen


def pattern(number: int) -> dict[str, Any]:
    """Colour and dash of a line by its place: lines differ in both, and 40 pairs are unlike."""
    return {"colour": number % COLOURS, "dash": number % DASHES}


def smoothing(charts: Iterable[Chart]) -> float:
    """The weight that evens out curves and keeps their shape: it reaches 1/80 of the longest."""
    longest = max((len(s.y) for chart in charts for s in chart.series if s.smooth), default=0)
    return min(0.98, round(1 - 1 / max(1.0, longest / 80), 2))


def smoothed(y: Numbers, weight: float) -> Numbers:
    """Each value as the mean of all, the one n points away weighted by weight^n: without a lag.

    Values that are not finite are left out and stay NaN. `smooth` in page.js is the same formula; a
    test compares them.
    """
    good = np.isfinite(y)
    values = np.where(good, y, 0.0)

    def decayed(part: Any) -> Numbers:
        """The sum over the values so far, the one n points back weighted by weight^n."""
        sums = itertools.accumulate(part, lambda total, value: weight * total + value)
        return np.array(list(sums), dtype=np.float64)

    # a sum from the left and one from the right have the value itself twice
    total = decayed(values) + decayed(values[::-1])[::-1] - values
    norm = decayed(good * 1.0) + decayed(good[::-1] * 1.0)[::-1] - 1
    return np.divide(total, norm, out=np.full(len(y), math.nan), where=good)
