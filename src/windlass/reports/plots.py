"""The charts as PNG and PDF files of a size for paper, drawn by matplotlib without pyplot or a display.

The same run gives the same bytes: neither date nor version is written into the files, and a user's style is ignored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import style
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_pdf import FigureCanvasPdf
from matplotlib.colors import LinearSegmentedColormap, to_hex
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import EngFormatter, FixedLocator, MaxNLocator, NullLocator

from windlass.reports.charts import Chart, run_dashes, smoothed, smoothing
from windlass.reports.scaling_charts import STEP_PARTS, Bars
from windlass.reports.study import Heat
from windlass.reports.text import show
from windlass.reports.view import RunView

INK, SOFT, HAIR = "#22262b", "#6b7280", "#e4e6ea"
# eight colours that stay apart for colour-blind readers and in print
PALETTE = ("#2f5fb3", "#d2691e", "#2e8b6f", "#a8328c", "#8a6d1d", "#5b4bb0", "#b3352f", "#2b8aa5")
RAMP = LinearSegmentedColormap.from_list(
    "windlass", ["#2d4fa8", "#2e8b6f", "#e0a03a"]
)  # by a swept setting's value
DASHES: tuple[Any, ...] = (
    "solid",
    (0, (5, 2)),
    (0, (1.2, 1.6)),
    (0, (6, 1.6, 1.2, 1.6)),
    (0, (10, 2.5)),
)
RING: dict[str, Any] = {
    "marker": "o",
    "markersize": 4,
    "markerfacecolor": "white",
    "markeredgewidth": 1.2,
}
DIAMOND: dict[str, Any] = {"marker": "D", "markersize": 5.5}
SIZE, DPI = (6.4, 3.6), 200

STYLE: dict[str, Any] = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 9,
    "axes.edgecolor": SOFT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": HAIR,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "text.parse_math": False,
    "pdf.fonttype": 42,  # fonts as text that can be edited
}


def write_plots(
    views: Sequence[RunView],
    charts: Sequence[Chart],
    folder: Path,
    skip: int | None = None,
    tones: Sequence[float] = (),
    heat: Heat | None = None,
    bars: Bars | None = None,
) -> dict[str, Path]:
    """Draw every chart into `folder`, as PNG and PDF; returns the paths of the PNG files by the chart's id.

    `skip`: `loss-late.png` leaves out the steps before this one; None: the first tenth of the run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    figures: dict[str, Figure] = {}
    weight = smoothing(charts)
    with style.context(STYLE, after_reset=True):  # ours, and nothing of the user's own
        for chart in charts:
            figures[chart.id] = draw(chart, views, tones, weight)
            if chart.id == "loss":
                first = (
                    skip if skip is not None else math.ceil(max(view.step for view in views) / 10)
                )
                if any((view.train["step"] >= first).sum() > 1 for view in views):
                    late = replace(chart, title=f"Loss from step {first:,} on")
                    figures["loss-late"] = draw(late, views, tones, weight, first)
        if heat:
            figures["heat-map"] = heat_figure(heat)
        if bars:
            figures["step-parts"] = bars_figure(bars)
        for name, figure in figures.items():
            FigureCanvasAgg(figure).print_png(folder / f"{name}.png", metadata={"Software": None})
            unsigned = dict.fromkeys(
                ("Creator", "Producer", "CreationDate")
            )  # equal runs give equal bytes
            FigureCanvasPdf(figure).print_pdf(folder / f"{name}.pdf", metadata=unsigned)
    return {name: folder / f"{name}.png" for name in figures}


def new_figure(title: str, x_label: str, unit: str, height: float = SIZE[1]) -> tuple[Figure, Any]:
    """An empty figure with its axes."""
    figure = Figure(
        figsize=(SIZE[0], height), dpi=DPI, layout=ConstrainedLayoutEngine(w_pad=0.09, h_pad=0.09)
    )
    axes = figure.add_subplot(title=title, xlabel=x_label, ylabel=unit)
    axes.margins(x=0.015)
    return figure, axes


def draw(
    chart: Chart,
    views: Sequence[RunView],
    tones: Sequence[float] = (),
    weight: float = 0,
    first_step: float = 0,
) -> Figure:
    """One chart over optimizer steps, or over a swept setting; `weight`: see `charts.smoothed`, 0 for none."""
    figure, axes = new_figure(chart.title, chart.x_label or "optimizer steps", chart.unit)
    several = len(views) > 1
    colours = [to_hex(RAMP(tone)) for tone in tones] or [
        PALETTE[run % len(PALETTE)] for run in range(len(views))
    ]
    dashes = run_dashes(len(views), tones)
    named: set[str] = set()
    for series in chart.series:
        keep = series.step >= first_step
        x, y = series.step[keep], series.y[keep]
        colour = (
            colours[series.run] if series.colour is None else PALETTE[series.colour % len(PALETTE)]
        )
        if series.low is not None and series.high is not None:
            axes.fill_between(
                x, series.low[keep], series.high[keep], color=colour, alpha=0.14, linewidth=0
            )
        drawn = y
        if series.smooth and weight:  # the curve itself is pale, with the smoothed one over it
            axes.plot(x, y, color=colour, alpha=0.28, linewidth=0.9)
            drawn = smoothed(y, weight)
        dash = series.dash + (dashes[series.run] if series.colour is None else 0)
        shown = series.name and series.name not in named and len(chart.series) > 1
        named.add(series.name)
        axes.plot(
            x,
            drawn,
            color=colour,
            linestyle="none" if series.points == "only" else DASHES[dash % len(DASHES)],
            linewidth=1.1 if series.minor or series.points else 1.6,
            zorder={"": 2, "median": 3}.get(series.points, 4),
            label=series.name
            if shown and (chart.x_label or not several or series.points != "only")
            else None,
            **(
                DIAMOND
                if series.points == "median"
                else RING
                if series.points or len(x) == 1
                else {}
            ),
        )
        bad = x[~np.isfinite(y) & series.bad]
        if len(bad):
            axes.plot(
                bad,
                [0.98] * len(bad),
                transform=axes.get_xaxis_transform(),
                linestyle="none",
                marker="x",
                zorder=5,
                color=PALETTE[6],
                label=f"not finite{f', {series.name}' if several else ''}",
            )
    for run, view in enumerate(views if not chart.x_label else ()):
        colour = colours[run] if several else SOFT
        for restart in view.restarts:
            if restart.step >= first_step:
                label = None if restart.what in named else restart.what
                named.add(restart.what)
                axes.axvline(
                    restart.step,
                    color=colour,
                    linewidth=0.9,
                    linestyle=(0, (2, 2)),
                    label=label,
                    zorder=1,
                )
    _axes(axes, chart, first_step)
    names = axes.get_legend_handles_labels()[1]
    longest = max(map(len, names), default=0)
    if len(names) > 4 or longest > 24:  # below the axes in columns, for which the figure grows
        columns = max(1, min(4, len(names), 96 // (longest + 9)))
        figure.set_size_inches(SIZE[0], SIZE[1] + 0.19 * -(-len(names) // columns))
        figure.legend(loc="outside lower center", ncols=columns)
    elif names:
        axes.legend(loc="best")
    return figure


def _axes(axes: Any, chart: Chart, first_step: float) -> None:
    high = chart.ceiling(first_step)
    if high is not None:  # runs that diverged leave the picture at its upper edge
        finite = [s.y[(s.step >= first_step) & np.isfinite(s.y)] for s in chart.series]
        low = min(float(values.min()) for values in finite if len(values))
        axes.set_ylim(low - 0.04 * (high - low), high + 0.12 * (high - low))
        axes.set_title(
            "what diverged is cut off above",
            loc="right",
            fontsize=8.5,
            fontweight="normal",
            color=SOFT,
        )
    if chart.zero:
        axes.set_ylim(0, axes.get_ylim()[1] * 1.06)
    if chart.id == "lr":
        axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 4), useMathText=False)
    elif axes.get_ylim()[1] >= 10_000:
        axes.yaxis.set_major_formatter(EngFormatter(sep=" "))
    if chart.x_values:
        axes.set_xscale("log" if chart.x_log else "linear")
        axes.xaxis.set_major_locator(FixedLocator(chart.x_values))
        axes.xaxis.set_minor_locator(NullLocator())
        at = np.log(chart.x_values) if chart.x_log else np.array(chart.x_values)
        names, free = list[str](), -math.inf
        for place, name in zip((at - at[0]) / (at[-1] - at[0] or 1), chart.x_names, strict=True):
            names.append(
                name if place >= free else ""
            )  # a name that would touch the one before is left out
            free = place + 0.08 if names[-1] else free
        axes.set_xticklabels(names)
        axes.margins(x=0.06)
        return
    if axes.get_xlim()[1] >= 20_000:
        axes.xaxis.set_major_formatter(EngFormatter(sep=" "))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, steps=[1, 2, 5, 10]))


def heat_figure(heat: Heat) -> Figure:
    """A study's heat map with the value in each cell; the stronger the colour, the better."""
    figure, axes = new_figure(heat.title, heat.names[1], heat.names[0], 1.5 + 0.5 * len(heat.rows))
    axes.imshow(heat.shares, cmap="Blues", aspect="auto", vmin=0, vmax=1.8)
    for row, values in enumerate(heat.cells):
        for column, value in enumerate(values):
            axes.text(column, row, show(value, "loss"), ha="center", va="center", fontsize=8.5)
    axes.set_xticks(range(len(heat.columns)), [show(value) for value in heat.columns])
    axes.set_yticks(range(len(heat.rows)), [show(value) for value in heat.rows])
    axes.grid(False)
    axes.spines[:].set_visible(False)
    return figure


def bars_figure(bars: Bars) -> Figure:
    """The parts of a step of each setup, stacked."""
    figure, axes = new_figure(STEP_PARTS, "ms", "", 1.3 + 0.34 * len(bars.names))
    left = np.zeros(len(bars.names))
    for (name, values), colour in zip(bars.parts.items(), bars.colours, strict=True):
        axes.barh(bars.names, values, left=left, height=0.62, color=PALETTE[colour], label=name)
        left += values
    axes.invert_yaxis()  # the first one at the top
    axes.grid(axis="x", color=HAIR)
    axes.grid(False, axis="y")
    figure.legend(loc="outside lower center", ncols=len(bars.parts))
    return figure
