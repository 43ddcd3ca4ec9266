"""The charts as PNG files fit for a paper. matplotlib is imported here and nowhere else, without pyplot or a display.

The same run gives the same bytes: no date and no version is written into the files.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context, rcParams, rcParamsDefault
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap, to_hex
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import EngFormatter, MaxNLocator

from windlass.recipe import Horizon, Recipe
from windlass.reports.charts import (
    LOSS,
    PART_COLOURS,
    PART_NAMES,
    Chart,
    Curve,
    ceiling,
    charts,
    rank_curves,
    smoothed,
    smoothing_for,
    thin,
)
from windlass.reports.measures import goodput
from windlass.reports.view import RunView, Track

INK, SOFT, HAIR = "#22262b", "#6b7280", "#e4e6ea"
PALETTE = ("#2f5fb3", "#d2691e", "#2e8b6f", "#a8328c", "#8a6d1d", "#5b4bb0", "#b3352f", "#2b8aa5")
"""Eight colours that stay apart for colour-blind readers and in print."""
DASHES: tuple[Any, ...] = ("solid", (0, (5, 2)), (0, (1.2, 1.6)))

Looks = Sequence[tuple[float | None, int]]
"""For each run its place on the colour ramp (None: a colour of its own) and its kind of dash."""

STYLE: dict[str, Any] = {
    "font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"], "font.size": 9, "axes.titlesize": 10,
    "axes.titleweight": "bold", "axes.titlelocation": "left", "axes.titlepad": 9, "axes.edgecolor": SOFT,
    "axes.labelcolor": INK, "axes.linewidth": 0.8, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
    "axes.grid.axis": "y", "axes.axisbelow": True, "grid.color": HAIR, "grid.linewidth": 0.8, "text.color": INK,
    "xtick.color": SOFT, "ytick.color": SOFT, "xtick.labelcolor": INK, "ytick.labelcolor": INK, "xtick.major.width": 0.8,
    "ytick.major.size": 0, "legend.frameon": False, "legend.fontsize": 8.5, "lines.linewidth": 1.6,
    "lines.solid_capstyle": "round", "figure.facecolor": "white", "savefig.facecolor": "white", "text.usetex": False,
    "text.parse_math": False, "axes.unicode_minus": True, "path.simplify": True, "svg.hashsalt": "windlass",
}  # fmt: skip
"""The whole style, so that a user's own matplotlibrc changes nothing that matters here."""

RING: dict[str, Any] = {"marker": "o", "markersize": 4, "markerfacecolor": "white", "markeredgewidth": 1.2}
"""The mark of a single measurement."""
SIZE, DPI = (6.4, 3.6), 200
MANY_POINTS = 60
"""A noisy curve of more points is drawn pale with its moving average over it."""
WRITTEN_POINTS = 3000


def write_plots(
    views: Sequence[RunView], folder: Path, skip: int | None = None, looks: Looks = (), names: Sequence[str] = ()
) -> dict[str, Path]:
    """Draw every chart that has numbers into `folder`, one PNG each; returns their paths by the chart's id.

    Args:
        views: one run, or several to be laid over each other.
        folder: made where it is missing.
        skip: the second picture of the loss leaves out the steps before this one; None: the first tenth of the run.
        looks: for each run its place on a colour ramp and its kind of dash, where the runs have an order.
        names: for each run what the legend calls it, runs of one name (and look) once; empty: the runs' own names.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pens = pens_for(views, looks, names)
    written: dict[str, Path] = {}
    with styled():
        for chart in charts(views):
            written[chart.id] = save(draw(chart, views, pens), folder / f"{chart.id}.png")
            if chart is LOSS:
                late = late_loss(views, pens, skip)
                if late is not None:
                    written["loss-late"] = save(late, folder / "loss-late.png")
        if any(goodput(view) for view in views):
            written["goodput"] = save(goodput_figure(views), folder / "goodput.png")
    return written


@contextmanager
def styled() -> Iterator[None]:
    """Our style and nothing of the user's own inside; what was before, after."""
    keep = {"backend", "backend_fallback", "toolbar", "interactive"}
    with rc_context():
        rcParams.update({k: v for k, v in rcParamsDefault.items() if k not in keep and not k.startswith("_")})
        rcParams.update(STYLE)
        yield


def ramp() -> LinearSegmentedColormap:
    """From low to high values: blue, green, orange."""
    return LinearSegmentedColormap.from_list("windlass", ["#2d4fa8", "#2e8b6f", "#e0a03a"])


@dataclass(frozen=True)
class Pen:
    """How a run's curves look; `name` is None where there is one run, and empty where another run has said it."""

    colour: str
    dash: Any
    name: str | None

    def said(self, alone: str) -> str | None:
        """The legend's word for the curve: the run's name, or `alone` where there is one run."""
        return (alone if self.name is None else self.name) or None


def pens_for(views: Sequence[RunView], looks: Looks = (), names: Sequence[str] = ()) -> list[Pen]:
    """A pen for each run."""
    called = list(names) or [view.label for view in views]
    pens = []
    for number in range(len(views)):
        tone, dash = looks[number] if number < len(looks) else (None, number // len(PALETTE))
        colour = PALETTE[number % len(PALETTE)] if tone is None else to_hex(ramp()(tone))
        name = "" if called[number] in called[:number] else called[number]
        pens.append(Pen(colour, DASHES[dash % len(DASHES)], name if len(views) > 1 else None))
    return pens


def save(figure: Figure, path: Path) -> Path:
    """Write a figure as PNG, the same bytes each time."""
    FigureCanvasAgg(figure).print_png(path, metadata={"Software": None})
    return path


def new_figure(
    title: str, unit: str, x_label: str = "optimizer steps", size: tuple[float, float] = SIZE
) -> tuple[Figure, Any]:
    """An empty figure with its axes, in our style."""
    figure = Figure(figsize=size, dpi=DPI, layout=ConstrainedLayoutEngine(w_pad=0.09, h_pad=0.09))
    axes = figure.add_subplot()
    axes.set_title(title)
    axes.set_xlabel(x_label)
    axes.set_ylabel(unit)
    axes.margins(x=0.015)
    return figure, axes


def draw(chart: Chart, views: Sequence[RunView], pens: Sequence[Pen] = (), first_step: int = 0) -> Figure:
    """One chart: of one run all its curves, of several runs the first curve of each."""
    figure, axes = new_figure(chart.title, chart.unit)
    pens = pens or pens_for(views)
    shown = chart.first_only() if len(views) > 1 else chart
    for view, pen in zip(views, pens, strict=True):
        if chart.source == "ranks":
            _draw_ranks(axes, shown, view, pen)
        elif chart.id == "loss":
            _draw_loss(axes, view, pen, first_step)
        else:
            track = view.evals.get(chart.source.removeprefix("eval:")) if chart.source != "train" else view.train
            if track is not None:
                _draw_track(axes, shown, track, pen)
    _seams(axes, views, pens, first_step)
    if chart.id == "loss":
        _cut_off(axes, views, first_step)
    _finish(figure, axes, chart)
    return figure


def _draw_loss(axes: Any, view: RunView, pen: Pen, first_step: int) -> None:
    alone = pen.name is None
    if view.train.has("loss"):
        _noisy(axes, view.train, LOSS.curves[0], 1.0, pen, "training", first_step)
    evals = view.evals.get("loss")
    if evals is not None and evals.has("loss"):
        keep = (evals["step"] >= first_step) & np.isfinite(evals["loss"])
        axes.plot(
            evals["step"][keep], evals["loss"][keep], color=PALETTE[1] if alone else pen.colour, linewidth=1.2,
            linestyle="solid" if alone else "none", label="validation" if alone else None, zorder=4, **RING,
        )  # fmt: skip
    bad = [s for s in view.nonfinite_steps if s >= first_step]
    if bad:
        axes.plot(
            bad, [0.98] * len(bad), transform=axes.get_xaxis_transform(), linestyle="none", marker="x", color=PALETTE[6],
            label=f"not finite{'' if alone else f', {view.label}'}", zorder=5,
        )  # fmt: skip


def _cut_off(axes: Any, views: Sequence[RunView], first_step: int) -> None:
    """Runs that diverged leave the picture at its upper edge, so that the others can still be told apart."""
    high = ceiling(views, first_step)
    if high is None:
        return
    drawn = [line.get_ydata() for line in axes.lines if line.get_transform().contains_branch(axes.transData)]
    finite = [values[np.isfinite(values)] for values in (np.asarray(one, dtype=np.float64) for one in drawn)]
    low = min(float(values.min()) for values in finite if len(values))
    axes.set_ylim(low - 0.04 * (high - low), high + 0.12 * (high - low))
    axes.set_title("what diverged is cut off above", loc="right", fontsize=8.5, fontweight="normal", color=SOFT)


def _noisy(axes: Any, track: Track, curve: Curve, scale: float, pen: Pen, alone: str, first_step: int = 0) -> None:
    """A curve; one of many points pale, with its moving average over it."""
    steps, values = track["step"], track[curve.column] * scale
    keep = steps >= first_step
    busy = int(np.isfinite(values).sum()) > MANY_POINTS
    if busy:
        places = thin(steps[keep], values[keep], WRITTEN_POINTS)
        axes.plot(steps[keep][places], values[keep][places], color=pen.colour, alpha=0.28, linewidth=0.9)
        values = smoothed(values, smoothing_for(int(keep.sum())))
    places = thin(steps[keep], values[keep], WRITTEN_POINTS)
    axes.plot(steps[keep][places], values[keep][places], color=pen.colour, linestyle=pen.dash, label=pen.said(alone))


def _draw_track(axes: Any, chart: Chart, track: Track, pen: Pen) -> None:
    present = [c for c in chart.curves if track.has(c.column)]
    for number, curve in enumerate(present):
        alone = curve.name if len(present) > 1 else ""
        if chart.smooth and len(present) == 1:
            _noisy(axes, track, curve, chart.scale, pen, alone)
            continue
        places = thin(track["step"], track[curve.column], WRITTEN_POINTS)
        ring = RING if chart.source.startswith("eval") else {}
        axes.plot(
            track["step"][places], track[curve.column][places] * chart.scale, linestyle=pen.dash, label=pen.said(alone),
            color=PALETTE[number % len(PALETTE)] if pen.name is None else pen.colour,
            linewidth=1.1 if curve.minor else 1.6, **ring,
        )  # fmt: skip


def _draw_ranks(axes: Any, chart: Chart, view: RunView, pen: Pen) -> None:
    for curve in chart.curves:
        found = rank_curves(view, curve.column)
        if found is None:
            continue
        style = (0, (5, 2)) if curve.minor else pen.dash
        suffix = f", {curve.name}" if len(chart.curves) > 1 else ""
        if found.many or pen.name is not None:
            axes.fill_between(found.steps, found.low, found.high, color=pen.colour, alpha=0.14, linewidth=0)
            name = pen.said(f"mean of {len(view.ranks)} ranks{suffix}")
            axes.plot(found.steps, found.mean, color=pen.colour, linestyle=style, label=name)
            continue
        for number, (name, values) in enumerate(found.lines.items()):
            tone = PALETTE[number % len(PALETTE)]
            label = f"{name}{suffix}" if len(found.lines) > 1 or suffix else None
            dot = "." if len(values) == 1 else None
            axes.plot(found.steps, values, color=tone, linestyle=style, linewidth=1.2, marker=dot, label=label)


def _seams(axes: Any, views: Sequence[RunView], pens: Sequence[Pen], first_step: int) -> None:
    said: set[str] = set()
    for view, pen in zip(views, pens, strict=True):
        for seam in view.seams:
            if seam.step >= first_step:
                tone = SOFT if pen.name is None else pen.colour
                label = None if seam.what in said else seam.what
                axes.axvline(seam.step, color=tone, linewidth=0.9, linestyle=(0, (2, 2)), label=label, zorder=1)
                said.add(seam.what)


def _finish(figure: Figure, axes: Any, chart: Chart) -> None:
    if chart.zero:
        axes.set_ylim(bottom=0)
        low, high = axes.get_ylim()
        axes.set_ylim(low, high * 1.06)
    if chart.id == "lr":
        axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 4), useMathText=False)
    elif axes.get_ylim()[1] >= 10_000:
        axes.yaxis.set_major_formatter(EngFormatter(sep=" "))
    if axes.get_xlim()[1] >= 20_000:
        axes.xaxis.set_major_formatter(EngFormatter(sep=" "))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, steps=[1, 2, 5, 10]))
    legend(figure, axes)


def legend(figure: Figure, axes: Any) -> None:
    """A few short names inside the axes, more or longer ones below in columns, for which the figure grows."""
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


def late_loss(views: Sequence[RunView], pens: Sequence[Pen] = (), skip: int | None = None) -> Figure | None:
    """The loss without its steep beginning; None where nothing is left of it."""
    longest = max(view.step for view in views)
    first_step = skip if skip is not None else math.ceil(longest / 10)
    if not any((v.train["step"] >= first_step).sum() > 1 for v in views):
        return None
    figure = draw(LOSS, views, pens, first_step)
    figure.axes[0].set_title(f"Loss from step {first_step:,} on")
    return figure


def goodput_figure(views: Sequence[RunView]) -> Figure:
    """A bar a run: wall time by what it was spent on, in percent."""
    parts = {view.label: goodput(view) for view in views if goodput(view)}
    names = list(dict.fromkeys(["train", *(name for found in parts.values() for name in found)]))
    figure, axes = new_figure("Where the time went", "", "% of wall time", (SIZE[0], 1.5 + 0.34 * len(parts)))
    left = np.zeros(len(parts))
    for name in names:
        widths = np.array([100 * found.get(name, 0.0) / sum(found.values()) for found in parts.values()])
        said = PART_NAMES.get(name, name) + (f" {widths[0]:.1f} %" if len(parts) == 1 else "")
        tone = PALETTE[PART_COLOURS.get(name, 7)]
        axes.barh(range(len(parts)), widths, left=left, height=0.6, color=tone, label=said)
        left += widths
    axes.set_yticks(range(len(parts)), list(parts) if len(parts) > 1 else [""])
    axes.set_ylim(len(parts) - 0.5, -0.5)
    axes.set_xlim(0, 100)
    axes.grid(False)
    _, said = axes.get_legend_handles_labels()
    columns = 3 if max(map(len, said)) < 30 else 2
    figure.set_size_inches(SIZE[0], 1.15 + 0.34 * len(parts) + 0.19 * -(-len(said) // columns))
    figure.legend(loc="outside lower center", ncols=columns)
    return figure
