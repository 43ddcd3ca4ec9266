"""A study in a report: its cells and the score against each swept setting, or its setups with their
throughput and efficiency; and the best cell or the recommended setup.

The score is the measure that `checkpoint.best` names, such as the validation loss or `squad.f1`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from windlass.errors import by_text
from windlass.reports.charts import SPREAD, Axis, Chart, Series, is_spread
from windlass.reports.tables import Column, Table, measure_column, numeric
from windlass.reports.view import Numbers, RunView
from windlass.study.grid import NODES, SEED, WORLD, label_of, short_names
from windlass.study.numbers import BITS, WARMUP
from windlass.study.results import SeedGroup, seed_groups
from windlass.study.setups import Setup, baseline, read_setups
from windlass.study.study import Scaling, Study
from windlass.telemetry.measures import LOSS, SETUP, show, title_of
from windlass.variables import scrub

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


class Recommendation(NamedTuple):
    name: str  # the settings
    why: str  # it was chosen; empty: the first lines of the report have its score
    command: str  # that trains it
    rows: list[int]  # its rows in the table of cells, if it is the best of all

    @property
    def text(self) -> str:
        return f"{self.name}: {self.why}" if self.why else self.name


class StudyView:
    """A study with its cells as they stood when it was read, and the runs of started cells."""

    def __init__(self, path: str | Path):
        self.study = study = Study.open(path)
        self.title = title_of(study.measure)  # the measure's name in a sentence
        # at the start of a heading; another name than the loss stays as it is
        self.heading = self.title.capitalize() if study.measure in (LOSS, BITS) else self.title
        self.unit = "nats per token" if study.measure == LOSS else ""
        self.results = study.results()
        self.groups = seed_groups(self.results)
        self.winners = study.winners(self.results)
        several = {key: values for key, values in study.values.items() if len(values) > 1}
        self.varied = list(several) or study.keys
        # settings with several values but the seed; numbers rising
        self.swept = {
            key: sorted(values) if numeric(values) else values
            for key, values in several.items()
            if key != SEED
        }
        self.views = list[RunView]()
        for result in self.results:
            if result.run.exists:
                label = label_of({key: result.cell.assignment[key] for key in self.varied})
                self.views.append(RunView(result.run, label))
        # of a scaling study
        self.setups = read_setups(study, self.results) if study.scaling else []

    @property
    def recommendations(self) -> list[Recommendation]:
        """The best cell of each group, or the recommended setup of a scaling study."""
        if self.study.scaling:
            return recommended(self.study, self.setups)
        recommendations = []
        for place, group in enumerate(self.winners.groups):
            command = self.study.winner_command(group.assignment)
            settings = ", ".join(f"{key} = {show(x)}" for key, x in group.assignment.items())
            name = settings or "the recipe as it is"
            rows = [i for i, one in enumerate(self.results) if one is self.winners.cell]
            recommendations.append(Recommendation(name, "", command, [] if place else rows))
        return recommendations


def cell_table(seen: StudyView) -> Table:
    names = "state steps tokens train_loss eval_loss"
    columns = [measure_column(name) for name in names.split()]
    columns.append(Column("score", f"Best {seen.title}", "score"))
    columns += map(measure_column, ("train_tokens_per_s", "device_hours"))
    columns.append(Column("reason", shown=False))
    begun = {view.run.path: view.values for view in seen.views}
    rows = []
    for result in seen.results:
        state = {"state": result.state, "reason": result.reason or None}
        values = begun.get(result.run.path, {}) | state | {"score": result.numbers.score}
        measured = [values.get(column.name) for column in columns]
        rows.append([*result.cell.assignment.values(), *measured])
    notes = by_text((r.cell.label, str(scrub(r.reason))) for r in seen.results if r.reason)
    keys = [Column(key, shown=key in seen.varied) for key in seen.study.keys]
    return Table("cells", [*keys, *columns], rows, "Cells", notes)


def seed_table(seen: StudyView) -> Table:
    rows = []
    for group in seen.groups:
        scores: list[Any] = group.scores or [None]
        low, high = min(scores), max(scores)
        spread = high - low if len(scores) > 1 else None
        numbers = (group.median, low, high, spread, len(group.results), len(group.scores))
        rows.append((*group.assignment.values(), *numbers))
    columns = [
        *(Column(key) for key in seen.study.keys if key != SEED),
        Column("median", f"Best {seen.title}, median", "loss"),
        Column("low", "Lowest", "loss"),
        Column("high", "Highest", "loss"),
        Column("spread", "Spread", "loss"),
        Column("seeds", "Seeds", "count"),
        Column("finished", "Finished", "count"),
    ]
    return Table("seeds", columns, rows, "Over the seeds")


def sweep_charts(seen: StudyView) -> list[Chart]:
    """The best score against each setting: a line for each choice of the other settings. Solid
    points are medians over the seeds, with a hollow one for each seed."""
    charts, names = [], short_names(seen.study.keys)
    lower = any(result.numbers.scores.lower for result in seen.results)
    for key, values in seen.swept.items():
        numbers = numeric(values)
        places = [float(value) if numbers else float(i) for i, value in enumerate(values)]
        lines: dict[str, list[SeedGroup]] = {}  # the groups with a median, by the other settings
        for group in sorted(seen.groups, key=lambda group: values.index(group.assignment[key])):
            rest = {other: value for other, value in group.assignment.items() if other != key}
            line = lines.setdefault(label_of(rest, names), [])
            if group.scores:
                line.append(group)
        series, note = list[Series](), ""
        for number, (name, groups) in enumerate(lines.items()):
            if not groups:
                continue
            x = [places[values.index(group.assignment[key])] for group in groups]
            counts = [len(group.scores) for group in groups]
            points = "median" if max(counts) > 1 else "line"
            medians = np.array([group.median for group in groups], dtype=np.float64)
            series.append(Series(scrub(name), medians, {"x": np.array(x)}, number, points=points))
            if max(counts) > 1:
                seeds = np.array([score for group in groups for score in group.scores])
                at = {"x": np.repeat(x, counts)}
                series.append(Series("", seeds, at, number, points="only"))
                note = "solid: medians over the seeds, hollow: each seed"
        if series:
            log = numbers and places[0] > 0 and places[-1] / places[0] >= SPREAD
            chart_id = f"{seen.study.measure}-against-{names[key]}".replace(".", "-")
            title = f"{seen.title[0].upper()}{seen.title[1:]} against {key}"
            x_axis = Axis(names[key], places, [show(value) for value in values], log=log)
            y_axis = Axis(log=lower and is_spread(series))
            charts.append(Chart(chart_id, title, seen.unit, series, x_axis, y_axis, note))
    return charts


# ---------------------------------------------------------------- scaling


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
    text = [
        "Step: the median over the lines of the ledger that begin after "
        f"{WARMUP} steps of each start. {FORMULAS[scaling.kind]}"
    ]
    text += by_text((row.name, f"{remark}.") for row in setups for remark in row.remarks)
    text += by_text((row.name, row.result.reason) for row in setups if row.result.reason)
    # why columns have dashes, in one note: a sentence for each reason
    other = "compared" if scaling.mode == "strategies" else "strategies"
    columns: dict[str, dict[str, None]] = {}  # titles by reason
    for name, measure in SETUP.items():
        if measure.heading and measure.only not in ("optional", other):
            for row in setups:
                if row.measured and name in row.missing:
                    title = measure.title.partition(" (")[0]
                    columns.setdefault(row.missing[name], {})[title] = None
    reasons = [f"{', '.join(titles)}: {why}." for why, titles in columns.items()]
    return text + ([f"A dash marks a missing value. {' '.join(reasons)}"] if reasons else [])


def recommended(study: Study, setups: Sequence[Setup]) -> list[Recommendation]:
    """The recommended setup of a study of strategies."""
    recommendations = []
    for row in setups:
        if row.recommended_because:
            assignment = {key: value for key, value in row.assignment.items() if key != NODES}
            command = study.winner_command(assignment, row.world)
            speed = show(row.values["samples_per_s"], "rate")
            memory = show(row.values["peak_mem_mb"], "mb")
            why = f"{speed} samples/s, {memory} MB on the fullest rank; "
            why += f"recommended: {row.recommended_because}"
            cells = [study.cells.index(row.result.cell)]
            recommendations.append(Recommendation(row.name, why, command, cells))
    return recommendations


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
