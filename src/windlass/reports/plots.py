"""The charts as PNG files of a size for paper, drawn by matplotlib without pyplot or a display.

The same run gives the same bytes: neither date nor version is written into the files, and a user's style is ignored.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context, rcParams, rcParamsDefault
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap, to_hex
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import EngFormatter, FixedLocator, MaxNLocator, NullLocator

from windlass.reports.charts import Chart, Look, Series, smoothed, smoothing
from windlass.reports.measures import PARTS, goodput
from windlass.reports.study import Heat, short
from windlass.reports.text import show
from windlass.reports.view import RunView

INK, SOFT, HAIR = "#22262b", "#6b7280", "#e4e6ea"
PALETTE = ("#2f5fb3", "#d2691e", "#2e8b6f", "#a8328c", "#8a6d1d", "#5b4bb0", "#b3352f", "#2b8aa5")
"""Eight colours that stay apart for colour-blind readers and in print."""
RAMP = LinearSegmentedColormap.from_list("windlass", ["#2d4fa8", "#2e8b6f", "#e0a03a"])
"""From low to high values of a swept setting."""
DASHES: tuple[Any, ...] = ("solid", (0, (5, 2)), (0, (1.2, 1.6)))
RING: dict[str, Any] = {"marker": "o", "markersize": 4, "markerfacecolor": "white", "markeredgewidth": 1.2}
SIZE, DPI = (6.4, 3.6), 200

STYLE: dict[str, Any] = {
    "font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"], "font.size": 9, "axes.titlesize": 10,
    "axes.titleweight": "bold", "axes.titlelocation": "left", "axes.titlepad": 9, "axes.edgecolor": SOFT,
    "axes.labelcolor": INK, "axes.linewidth": 0.8, "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y", "axes.axisbelow": True, "grid.color": HAIR, "grid.linewidth": 0.8, "text.color": INK,
    "xtick.color": SOFT, "ytick.color": SOFT, "xtick.labelcolor": INK, "ytick.labelcolor": INK, "xtick.major.width": 0.8,
    "ytick.major.size": 0, "legend.frameon": False, "legend.fontsize": 8.5, "lines.linewidth": 1.6,
    "lines.solid_capstyle": "round", "figure.facecolor": "white", "savefig.facecolor": "white", "text.usetex": False,
    "text.parse_math": False, "axes.unicode_minus": True, "path.simplify": True,
}  # fmt: skip


def write_plots(
    views: Sequence[RunView], charts: Sequence[Chart], folder: Path, skip: int | None = None, looks: Sequence[Look] = (),
    heats: Sequence[Heat] = (),
) -> dict[str, Path]:  # fmt: skip
    """Draw every chart into `folder`, one PNG each; returns their paths by the chart's id.

    Args:
        views: the runs of the charts.
        charts: as `charts.charts` and `study.sweep_charts` describe them.
        folder: made where it is missing.
        skip: `loss-late.png` leaves out the steps before this one; None: the first tenth of the run.
        looks: see `charts.Look`.
        heats: a study's heat maps.
    """
    folder.mkdir(parents=True, exist_ok=True)
    figures: dict[str, Figure] = {}
    weight = smoothing(charts)
    with styled():
        for chart in charts:
            figures[chart.id] = draw(chart, len(views) > 1, looks, weight)
            if chart.id == "loss":
                first = skip if skip is not None else math.ceil(max(view.step for view in views) / 10)
                if any((view.train["step"] >= first).sum() > 1 for view in views):
                    late = replace(chart, title=f"Loss from step {first:,} on")
                    figures["loss-late"] = draw(late, len(views) > 1, looks, weight, first)
        if any(goodput(view) for view in views):
            figures["goodput"] = goodput_figure(views)
        for name, heat in zip(("heat-map", "heat-map-final"), heats, strict=False):
            figures[name] = heat_figure(heat)
        return {name: save(figure, folder / f"{name}.png") for name, figure in figures.items()}


@contextmanager
def styled() -> Iterator[None]:
    """Our style and nothing of the user's own inside; what was before, after."""
    keep = {"backend", "backend_fallback", "toolbar", "interactive"}
    with rc_context():
        rcParams.update({k: v for k, v in rcParamsDefault.items() if k not in keep and not k.startswith("_")})
        rcParams.update(STYLE)
        yield


def save(figure: Figure, path: Path) -> Path:
    """Write a figure as PNG, the same bytes each time."""
    FigureCanvasAgg(figure).print_png(path, metadata={"Software": None})
    return path


def new_figure(title: str, x_label: str, unit: str, size: tuple[float, float] = SIZE) -> tuple[Figure, Any]:
    """An empty figure with its axes."""
    figure = Figure(figsize=size, dpi=DPI, layout=ConstrainedLayoutEngine(w_pad=0.09, h_pad=0.09))
    axes = figure.add_subplot()
    axes.set_title(title)
    axes.set_xlabel(x_label)
    axes.set_ylabel(unit)
    axes.margins(x=0.015)
    return figure, axes


def draw(
    chart: Chart, several: bool = False, looks: Sequence[Look] = (), weight: float = 0, first_step: float = 0
) -> Figure:
    """One chart over optimizer steps, or over a swept setting; `weight`: see `charts.smoothed`, 0 for none."""
    figure, axes = new_figure(chart.title, chart.x_label or "optimizer steps", chart.unit)
    named: set[str] = set()
    for series in chart.series:
        keep = series.step >= first_step
        tone = looks[series.run][0] if looks and 0 <= series.run < len(looks) else None
        index = series.run if series.colour is None else series.colour
        colour = to_hex(RAMP(tone)) if tone is not None and series.colour is None else PALETTE[index % len(PALETTE)]
        shown = series.name and series.name not in named and len(chart.series) > 1
        label = series.name if shown and not (several and series.points == "only") else None
        named.add(series.name)
        _draw_series(axes, series, keep, colour, label, weight)
        bad = series.step[keep & ~np.isfinite(series.y) & series.bad]
        if len(bad):
            axes.plot(
                bad, [0.98] * len(bad), transform=axes.get_xaxis_transform(), linestyle="none", marker="x", zorder=5,
                color=PALETTE[6], label=f"not finite{f', {series.name}' if several else ''}",
            )  # fmt: skip
    for mark in chart.marks:
        if mark.restart.step >= first_step:
            tone = looks[mark.run][0] if looks else None
            own = PALETTE[mark.run % len(PALETTE)] if tone is None else to_hex(RAMP(tone))
            label = None if mark.restart.what in named else mark.restart.what
            named.add(mark.restart.what)
            colour = own if several else SOFT
            axes.axvline(mark.restart.step, color=colour, linewidth=0.9, linestyle=(0, (2, 2)), label=label, zorder=1)
    _axes(axes, chart, first_step)
    _legend(figure, axes)
    return figure


def _draw_series(axes: Any, series: Series, keep: Any, colour: str, label: str | None, weight: float) -> None:
    x, y, dash = series.step[keep], series.y[keep], DASHES[series.dash % 3]
    if series.low is not None and series.high is not None:
        axes.fill_between(x, series.low[keep], series.high[keep], color=colour, alpha=0.14, linewidth=0)
    if series.smooth and weight:  # the curve itself is pale, with the smoothed one over it
        axes.plot(x, y, color=colour, alpha=0.28, linewidth=0.9)
        y = smoothed(y, weight)
    width = 1.1 if series.minor or series.points == "line" else 1.6
    marker = RING if series.points or len(x) == 1 else {}
    style = "none" if series.points == "only" else dash
    axes.plot(
        x, y, color=colour, linestyle=style, linewidth=width, label=label, zorder=4 if series.points else 2, **marker
    )


def _axes(axes: Any, chart: Chart, first_step: float) -> None:
    high = chart.ceiling(first_step)
    if high is not None:  # runs that diverged leave the picture at its upper edge
        finite = [s.y[(s.step >= first_step) & np.isfinite(s.y)] for s in chart.series]
        low = min(float(values.min()) for values in finite if len(values))
        axes.set_ylim(low - 0.04 * (high - low), high + 0.12 * (high - low))
        note = "what diverged is cut off above"
        axes.set_title(note, loc="right", fontsize=8.5, fontweight="normal", color=SOFT)
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
        axes.set_xticklabels(chart.x_names)
        axes.margins(x=0.06)
        return
    if axes.get_xlim()[1] >= 20_000:
        axes.xaxis.set_major_formatter(EngFormatter(sep=" "))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, steps=[1, 2, 5, 10]))


def _legend(figure: Figure, axes: Any) -> None:
    """A few short names inside the axes; more or longer ones below in columns, for which the figure grows."""
    names = axes.get_legend_handles_labels()[1]
    if not names:
        return
    longest = max(map(len, names))
    if len(names) <= 4 and longest <= 24:
        axes.legend(loc="best")
        return
    columns = max(1, min(4, len(names), 96 // (longest + 9)))
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + 0.19 * -(-len(names) // columns))
    figure.legend(loc="outside lower center", ncols=columns)


def goodput_figure(views: Sequence[RunView]) -> Figure:
    """A bar a run: wall time by phase, in percent."""
    parts = {view.label: spent for view in views if (spent := goodput(view))}
    names = [name for name in PARTS if any(name in spent for spent in parts.values())]
    figure, axes = new_figure("Where the time went", "% of wall time", "")
    left = np.zeros(len(parts))
    for name in names:
        widths = np.array([100 * spent.get(name, 0.0) / sum(spent.values()) for spent in parts.values()])
        text, colour = PARTS[name]
        label = text + (f" {widths[0]:.1f} %" if len(parts) == 1 else "")
        axes.barh(range(len(parts)), widths, left=left, height=0.6, color=PALETTE[colour], label=label)
        left += widths
    axes.set_yticks(range(len(parts)), list(parts) if len(parts) > 1 else [""])
    axes.set_ylim(len(parts) - 0.5, -0.5)
    axes.set_xlim(0, 100)
    axes.grid(False)
    labels = axes.get_legend_handles_labels()[1]
    columns = 3 if max(map(len, labels)) < 30 else 2
    figure.set_size_inches(SIZE[0], 1.15 + 0.34 * len(parts) + 0.19 * -(-len(labels) // columns))
    figure.legend(loc="outside lower center", ncols=columns)
    return figure


def heat_figure(heat: Heat) -> Figure:
    """A study's heat map with the value in each cell."""
    table = np.array([[np.nan if value is None else value for value in row] for row in heat.values], dtype=np.float64)
    size = (SIZE[0], 1.5 + 0.5 * len(heat.rows))
    figure, axes = new_figure(heat.title, short(heat.column_key), short(heat.row_key), size)
    low, high = float(np.nanmin(table)), float(np.nanmax(table))
    top = high if high > low else low + 1
    image = axes.imshow(np.ma.masked_invalid(table), cmap=RAMP, aspect="auto", vmin=low, vmax=top)
    for (row, column), value in np.ndenumerate(table):
        colour = "white" if np.isfinite(value) and (value - low) < 0.6 * (high - low) else INK
        text = show(float(value), "loss") if np.isfinite(value) else "–"
        axes.text(column, row, text, ha="center", va="center", color=colour, fontsize=8.5)
    axes.set_xticks(range(len(heat.columns)), [show(value) for value in heat.columns])
    axes.set_yticks(range(len(heat.rows)), [show(value) for value in heat.rows])
    axes.grid(False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    figure.colorbar(image, ax=axes, label=heat.unit).outline.set_visible(False)
    return figure
