"""A scaling study in a report: the table of setups with its sentences, the charts, and the
recommended setup."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from windlass.errors import by_text
from windlass.reports.charts import Axis, Chart, Series
from windlass.reports.study import Recommendation
from windlass.reports.tables import Column, Table
from windlass.reports.view import Numbers
from windlass.study.grid import NODES, WORLD
from windlass.study.setups import WARMUP, Setup, baseline
from windlass.study.study import Scaling, Study
from windlass.telemetry.measures import SETUP, show

if TYPE_CHECKING:
    from rich.console import Group

RANKS = "N0 the fewest ranks, p = N ÷ N0; speed-up = efficiency · p"
FORMULAS = {
    "strong": f"Efficiency = T(N0) · N0 ÷ (T(N) · N), T the time of a step, {RANKS}.",
    "fixed-data": f"Efficiency = T(N0) · N0 ÷ (T(N) · N), T the time of a sample, {RANKS}.",
    "weak batch": f"Efficiency = T(N0) ÷ T(N), T the time of a step, {RANKS}.",
    "weak model": "Efficiency = T(N0) ÷ T(N) · F(N) ÷ F(N0), T the time and F the FLOPs of a rank "
    f"in a step, {RANKS}.",
    "strategies": "Recommended: the setup with the least memory among those within 2 % of the "
    "fastest.",
}
DESCRIPTIONS = {
    "strong": "strong scaling: the batch of a step stays",
    "fixed-data": "fixed data: the batch of a rank and the data stay",
    "weak batch": "weak scaling: the batch of a rank stays",
    "weak model": "weak scaling: the layers grow with the ranks",
    "strategies": "strategies at one number of ranks",
}


def setup_table(study: Study, setups: Sequence[Setup]) -> Table:
    """A row for each setup. The CSV has every number; people see the columns with a value."""
    strategies = any("recommended" in row.values for row in setups)
    keys = dict.fromkeys(k for row in setups for k in row.assignment if k not in (WORLD, NODES))
    columns = [Column("setup", "Setup", short="setup"), Column("state", "State", short="state")]
    columns += [Column(key, shown=False) for key in keys]
    for name, own in SETUP.items():
        values = [row.values[name] for row in setups if row.values.get(name) is not None]
        different = len({show(value, own.kind) for value in values}) > 1
        shown = bool(own.heading and values) and (different or own.only != "varied")
        shown &= strategies or own.only != "strategies"
        columns.append(Column(name, own.heading, own.kind, own.short, shown))
    hidden = ("reason", "remarks", "recommended_because", "reasons")
    columns += [Column(name, shown=False) for name in hidden]
    rows = []
    for row in setups:
        cells = {
            **row.assignment,
            **row.values,
            "setup": row.name,
            "state": row.result.state,
            "reason": row.result.reason,
            "remarks": "; ".join(row.remarks),
            "recommended_because": row.recommended_because,
            "reasons": "; ".join(f"{name}: {text}" for name, text in row.missing.items()),
        }
        rows.append([cells.get(column.name) for column in columns])
    return Table("scaling", columns, rows, "Setups", sentences(study, setups))


def sentences(study: Study, setups: Sequence[Setup]) -> list[str]:
    scaling = study.scaling or Scaling("strategies")
    measured = [row for row in setups if row.measured]
    text = [
        "Step: the median over the lines of the ledger that begin after "
        f"{WARMUP} steps of each start. {FORMULAS[scaling.kind]}"
    ]
    text += by_text((row.name, f"{remark}.") for row in setups for remark in row.remarks)
    text += by_text((row.name, row.result.reason) for row in setups if row.result.reason)
    return text + _reasons(scaling, measured)


def _reasons(scaling: Scaling, measured: Sequence[Setup]) -> list[str]:
    """Why columns have dashes, in one note: a sentence for each reason."""
    other = "compared" if scaling.mode == "strategies" else "strategies"
    columns: dict[str, dict[str, None]] = {}  # titles by reason
    for name, measure in SETUP.items():
        if measure.heading and measure.only not in ("optional", other):
            for row in measured:
                if name in row.missing:
                    title = measure.title.partition(" (")[0]
                    columns.setdefault(row.missing[name], {})[title] = None
    text = [f"{', '.join(titles)}: {why}." for why, titles in columns.items()]
    return [f"A dash marks a missing value. {' '.join(text)}"] if text else []


def recommended(study: Study, setups: Sequence[Setup]) -> list[Recommendation]:
    """The recommended setup of a study of strategies."""
    recommendations = []
    for row in setups:
        if row.recommended_because:
            assignment = {key: value for key, value in row.assignment.items() if key != NODES}
            command = study.winner_command(assignment, row.world)
            speed = show(row.values["samples_per_s"], "rate")
            memory = show(row.values["peak_mem_mb"], "mb")
            why = f"{speed} samples/s, {memory} MB on the fullest rank; recommended: "
            cells = [study.cells.index(row.result.cell)]
            why += row.recommended_because
            recommendations.append(Recommendation(row.name, why, command, cells))
    return recommendations


def terminal(study: Study, setups: Sequence[Setup], width: int) -> list[Group | str]:
    """The whole study for `windlass scale`: setups, sentences, and the winner."""
    table = setup_table(study, setups)
    parts: list[Group | str] = [table.terminal(width, str(study.path)), *table.notes]
    for best in recommended(study, setups):
        parts.append(f"{best.text}\n  {best.command}")
    return parts


def scaling_charts(scaling: Scaling, setups: Sequence[Setup]) -> list[Chart]:
    """Throughput and efficiency against ranks; none at one number of ranks."""
    measured = sorted((s for s in setups if s.measured), key=lambda setup: setup.world)
    if len({setup.world for setup in measured}) < 2:
        return []
    ranks = np.array([float(setup.world) for setup in measured])
    axis = Axis("ranks", ranks.tolist(), [f"{n:g}" for n in ranks], log=True)
    note = "against ranks"
    throughput, efficiency = [_measured(measured, "samples_per_s", 1)], list[Series]()
    base = baseline(setups)
    if base.measured:  # nothing compares with a baseline without numbers
        growth = ranks / base.world
        if scaling.grow == "model":
            flops = np.array([setup.values["flops_per_device"] for setup in measured])
            growth = base.values["flops_per_device"] / flops
        throughput.append(_ideal(ranks, base.values["samples_per_s"] * growth))
        efficiency.append(_measured(measured, "efficiency", 100))
        efficiency.append(_ideal(ranks, np.full_like(ranks, 100)))
    # proportional throughput is a straight line only if both scales are logarithmic
    log, zero = Axis(log=True), Axis(zero=True)
    charts = [
        Chart("scaling-throughput", "Throughput", "samples/s", throughput, axis, log, note),
        Chart("scaling-efficiency", "Efficiency", "%", efficiency, axis, zero, note),
    ]
    return [chart for chart in charts if chart.series]


def _measured(setups: Sequence[Setup], name: str, factor: float) -> Series:
    y = np.array([setup.values.get(name, np.nan) for setup in setups], dtype=np.float64)
    x = {"x": np.array([float(setup.world) for setup in setups])}
    return Series("measured", y * factor, x, points="line")


def _ideal(ranks: Numbers, y: Numbers) -> Series:
    return Series("ideal", y, {"x": ranks}, number=1, grey=True, minor=True)
