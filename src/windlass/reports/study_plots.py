"""A study's pictures for a paper: the loss against what was swept, and the heat map of two swept settings."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from windlass.reports.plots import DASHES, PALETTE, RING, SIZE, legend, new_figure, ramp, save, styled, write_plots
from windlass.reports.study import StudyView, short
from windlass.reports.study_page import looks
from windlass.reports.swept import Heat, Sweep, heats, sweeps
from windlass.reports.text import show


def write_study_plots(study: StudyView, folder: Path, skip: int | None = None) -> dict[str, Path]:
    """Draw the runs' charts over each other, and what was swept; returns the paths by the chart's id."""
    names = [cell.label_without_seed for cell in study.begun]
    written = write_plots(study.views, folder, skip, looks(study.cells), names) if study.views else {}
    folder.mkdir(parents=True, exist_ok=True)
    with styled():
        for sweep in sweeps(study.cells):
            name = f"loss-against-{short(sweep.key)}"
            written[name] = save(sweep_figure(sweep), folder / f"{name}.png")
        for found, name in zip(heats(study.cells), ("heat-map", "heat-map-final"), strict=False):
            written[name] = save(heat_figure(found), folder / f"{name}.png")
    return written


def sweep_figure(sweep: Sweep) -> Figure:
    """The best evaluation loss against one swept setting (its final one dashed), a line for each choice of the others."""
    figure, axes = new_figure(f"Evaluation loss against {sweep.key}", "nats per token", short(sweep.key))
    for place, line in enumerate(sweep.lines):
        colour, dash = PALETTE[place % len(PALETTE)], DASHES[place // len(PALETTE) % len(DASHES)]
        suffix = f", {line.name}" if line.name else ""
        x, y = [sweep.x(v) for v, _ in line.median], [loss for _, loss in line.median]
        axes.plot(x, y, color=colour, linestyle=dash, label=f"{'best' if line.final else 'best and final'}{suffix}")
        if line.final:
            axes.plot([sweep.x(v) for v, _ in line.final], [loss for _, loss in line.final], color=colour, linewidth=1,
                      linestyle=(0, (5, 2)), label=f"final{suffix}")  # fmt: skip
        axes.plot([sweep.x(v) for v, _ in line.every], [loss for _, loss in line.every], linestyle="none", color=colour,
                  **RING)  # fmt: skip
    if sweep.log:
        axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator([sweep.x(v) for v in sweep.values]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels([show(v) for v in sweep.values])
    axes.margins(x=0.06)
    legend(figure, axes)
    return figure


def heat_figure(found: Heat) -> Figure:
    """The heat map with the loss written into each cell."""
    table = np.array([[np.nan if value is None else value for value in row] for row in found.loss], dtype=np.float64)
    height = 1.5 + 0.5 * len(found.rows)
    figure, axes = new_figure(found.title, short(found.row_key), short(found.column_key), (SIZE[0], height))
    low, high = float(np.nanmin(table)), float(np.nanmax(table))
    image = axes.imshow(
        np.ma.masked_invalid(table), cmap=ramp(), aspect="auto", vmin=low, vmax=high if high > low else low + 1
    )
    for (row, column), value in np.ndenumerate(table):
        dark = np.isfinite(value) and (value - low) < 0.6 * (high - low)
        text = show(float(value), "loss") if np.isfinite(value) else "–"
        axes.text(column, row, text, ha="center", va="center", color="white" if dark else "#22262b", fontsize=8.5)
    axes.set_xticks(range(len(found.columns)), [show(v) for v in found.columns])
    axes.set_yticks(range(len(found.rows)), [show(v) for v in found.rows])
    axes.grid(False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    figure.colorbar(image, ax=axes, label="nats per token").outline.set_visible(False)
    return figure
