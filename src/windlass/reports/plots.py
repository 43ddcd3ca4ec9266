"""Charts as pictures for paper, drawn by matplotlib without pyplot or a display. The same run gives
the same bytes, because the files lack date and version, and the user's style is left out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import style, ticker
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_pdf import FigureCanvasPdf
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from windlass.reports.charts import Axis, Chart
from windlass.reports.view import RunView

SOFT, GREY = "#6b7280", "#b6bcc5"
# eight colours that stay apart for colour-blind readers and in print
PALETTE = ("#2f5fb3", "#c45a12", "#24806a", "#a8328c", "#856815", "#5b4bb0", "#b3352f", "#23829d")
DASHES: list[Any] = ["-", (0, (5, 2)), (0, (1.2, 1.6)), (0, (6, 1.6, 1.2, 1.6)), (0, (10, 2.5))]
SHAPES = "osD^v"
SIZE, DPI = (6.4, 3.6), 200
STYLE = Path(__file__).with_name("plots.mplstyle")


def write_plots(
    charts: Iterable[Chart], runs: Sequence[RunView], folder: Path, skip: int, pdf: bool
) -> dict[str, Path]:
    """Draw every chart into `folder`; returns the paths of the PNG files by the chart's id.

    `skip`: `loss-late.png` leaves out the steps before this one; `pdf`: also write PDF files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pictures: list[tuple[Chart, float]] = []
    for chart in charts:
        pictures.append((chart, -math.inf))
        if chart.id == "loss" and any((s.x >= skip).sum() > 1 for s in chart.series if s.smooth):
            late = replace(chart, id="loss-late", title=f"Loss from step {skip:,} on")
            pictures.append((late, skip))
    paths = {}
    with style.context(STYLE, after_reset=True):  # without the user's own style
        for chart, first_step in pictures:
            figure = draw(chart, runs, first_step)
            paths[chart.id] = path = folder / f"{chart.id}.png"
            FigureCanvasAgg(figure).print_png(path, metadata={"Software": None})
            if pdf:
                unsigned = dict.fromkeys(("Creator", "Producer", "CreationDate"))
                FigureCanvasPdf(figure).print_pdf(path.with_suffix(".pdf"), metadata=unsigned)
    return paths


def draw(chart: Chart, runs: Sequence[RunView] = (), first_step: float = -math.inf) -> Figure:
    """One chart from the step `first_step` on."""
    layout = ConstrainedLayoutEngine(w_pad=0.09, h_pad=0.09)
    figure = Figure(figsize=SIZE, dpi=DPI, layout=layout)
    axes = figure.add_subplot(title=chart.title)
    axes.margins(x=0.015)
    _lines(axes, chart, runs, first_step)
    if chart.y.zero:
        axes.set_ylim(0, axes.get_ylim()[1] * 1.06)
    if chart.y.log:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
        axes.yaxis.set_major_formatter(ticker.ScalarFormatter())
        axes.yaxis.set_minor_locator(ticker.NullLocator())
    if chart.id == "lr":
        axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 4), useMathText=False)
    elif axes.get_ylim()[1] >= 10_000:
        axes.yaxis.set_major_formatter(ticker.EngFormatter(sep=" "))
    if chart.x.values:
        _name_ticks(axes, chart.x)
    else:
        if axes.get_xlim()[1] >= 20_000:
            axes.xaxis.set_major_formatter(ticker.EngFormatter(sep=" "))
        axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True, nbins=8, steps=[1, 2, 5, 10]))
    names = axes.get_legend_handles_labels()[1]
    longest = max(map(len, names), default=0)
    if len(names) > 4 or longest > 24:  # a large legend lies below, and the figure grows by it
        columns = max(1, min(4, len(names), 96 // (longest + 9)))
        figure.set_size_inches(SIZE[0], SIZE[1] + 0.19 * -(-len(names) // columns))
        figure.legend(loc="outside lower center", ncols=columns)
    elif names:
        axes.legend(loc="best")
    return figure


def _lines(axes: Any, chart: Chart, runs: Sequence[RunView], first_step: float) -> None:
    """Curves over optimizer steps with the runs' restarts, or curves over a study's axis."""
    axes.set(xlabel=chart.x.label or "optimizer steps", ylabel=chart.unit)
    several = len(runs) > 1 and not chart.x.label
    named: set[str] = set()

    def label(name: str) -> str | None:
        new = bool(name) and name not in named
        named.add(name)
        return name if new else None

    for series in chart.series:
        keep = series.x >= first_step
        # the lines name several runs, their points do not
        unnamed = len(chart.series) == 1 or (several and series.points == "only")
        x, y = series.x[keep], series.y[keep]
        colour = GREY if series.grey else PALETTE[series.colour]
        if series.low is not None and series.high is not None:
            band = {"color": colour, "alpha": 0.14, "linewidth": 0}
            axes.fill_between(x, series.low[keep], series.high[keep], **band)
        looks: dict[str, Any] = {"color": colour, "linestyle": DASHES[series.dash]}
        if series.points == "only":
            looks["linestyle"] = "none"
        if series.points or len(x) == 1:
            looks["markerfacecolor"] = colour if series.points == "median" else "white"
            looks |= {"marker": SHAPES[series.dash], "markersize": 4.5, "markeredgewidth": 1.2}
        looks["linewidth"] = 1.1 if series.minor or series.points or series.grey else 1.6
        looks["zorder"] = 1.5 if series.grey else {"": 2, "median": 3}.get(series.points, 4)
        axes.plot(x, y, label=None if unnamed else label(series.name), **looks)
        bad = x[~np.isfinite(y) & series.bad]
        if len(bad):
            cross = {"linestyle": "none", "marker": "x", "zorder": 5, "color": PALETTE[6]}
            cross["label"] = f"not finite{f', {series.name}' if several else ''}"
            axes.plot(bad, [0.98] * len(bad), transform=axes.get_xaxis_transform(), **cross)
    for run in runs if not chart.x.label else ():
        dotted = {"linewidth": 0.9, "linestyle": (0, (2, 2)), "zorder": 1, "color": SOFT}
        for restart in run.restarts:
            if restart.step >= first_step:
                axes.axvline(restart.step, label=label(restart.what), **dotted)


def _name_ticks(axes: Any, x: Axis) -> None:
    """A tick at each place of a study's axis; a name that would touch the last one is left out."""
    axes.set_xscale("log" if x.log else "linear")
    axes.xaxis.set_major_locator(ticker.FixedLocator(x.values))
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    at = np.log(x.values) if x.log else np.array(x.values)
    names, free = list[str](), -math.inf
    for place, name in zip((at - at[0]) / (at[-1] - at[0] or 1), x.names, strict=True):
        names.append(name if place >= free else "")
        free = place + 0.08 if names[-1] else free
    axes.set_xticklabels(names)
    axes.margins(x=0.06)
