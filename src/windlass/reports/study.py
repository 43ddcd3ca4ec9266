"""What a report adds for a study: its cells, the score against each swept setting, the best. The
score is the measure that `checkpoint.best` names, as the validation loss or `squad.f1`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from windlass.errors import by_text
from windlass.reports.charts import SPREAD, Axis, Chart, Series, is_spread, pattern
from windlass.reports.tables import Column, Table, measure_column, numeric
from windlass.reports.view import RunView
from windlass.study.grid import NODES, SEED, WORLD, label_of, short_names
from windlass.study.probe import WARMUP
from windlass.study.results import BITS, SeedGroup, seed_groups
from windlass.study.setups import Setup, baseline, read_setups
from windlass.study.study import Scaling, Study
from windlass.telemetry.measures import LOSS, SETUP, show, title_of
from windlass.variables import scrub

if TYPE_CHECKING:
    from rich.console import Group


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
        self.lower = any(result.lower for result in self.results)  # whether less is better
        begun = [result for result in self.results if result.run.exists]
        varied = {key for key, values in study.values.items() if len(values) > 1}
        self.varied = [key for key in study.keys if key in varied] or study.keys
        assigned = [{key: r.cell.assignment[key] for key in self.varied} for r in begun]
        labels = map(label_of, assigned)
        self.views = [RunView(r.run, x) for r, x in zip(begun, labels, strict=True)]
        self.groups = seed_groups(self.results)  # the cells without the seed
        self.winners = study.winners(self.results)
        # settings with several values but the seed; numbers rising
        swept = {k: v for k, v in study.values.items() if k != SEED and len(v) > 1}
        self.swept = {k: sorted(v) if numeric(v) else v for k, v in swept.items()}
        # of a scaling study
        self.setups = read_setups(study, self.results) if study.scaling else []

    @property
    def recommendations(self) -> list[Recommendation]:
        groups, recommendations = self.winners.groups, []
        for group in groups:
            command = self.study.winner_command(group.assignment)
            best = self.winners.cell if group is groups[0] else None
            rows = [place for place, result in enumerate(self.results) if result is best]
            settings = ", ".join(f"{key} = {show(x)}" for key, x in group.assignment.items())
            name = settings or "the recipe as it is"
            recommendations.append(Recommendation(name, "", command, rows))
        return recommendations


def cell_table(seen: StudyView) -> Table:
    names = "state steps tokens train_loss eval_loss best_eval_loss train_tokens_per_s device_hours"
    columns = list(map(measure_column, names.split()))
    if seen.study.measure != LOSS:
        columns.append(Column("score", f"Best {seen.title}", "score"))
    columns.append(Column("reason", shown=False))
    runs, rows = {one.run.path: one.values for one in seen.views}, []
    for r in seen.results:
        own = {"state": r.state, "score": r.score, "reason": r.reason or None}
        values = runs.get(r.run.path, {}) | own
        rows.append((*r.cell.assignment.values(), *(values.get(column.name) for column in columns)))
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
    charts = [_against(seen, key, values) for key, values in seen.swept.items()]
    return [chart for chart in charts if chart.series]


def _against(seen: StudyView, key: str, values: Sequence[Any]) -> Chart:
    """The best score against a setting: a line for each choice of the other settings. Solid points
    are medians over the seeds, with a hollow one for each seed."""
    names, numbers = short_names(seen.study.keys), numeric(values)
    places = [float(v) if numbers else float(i) for i, v in enumerate(values)]
    others: dict[str, list[SeedGroup]] = {}
    for group in sorted(seen.groups, key=lambda group: values.index(group.assignment[key])):
        rest = {k: v for k, v in group.assignment.items() if k != key}
        others.setdefault(label_of(rest, names), []).append(group)
    series = list[Series]()
    for number, (name, groups) in enumerate(others.items()):
        medians, seeds = list[Any](), list[Any]()
        for group in groups:
            if group.median is not None:
                x = places[values.index(group.assignment[key])]
                medians.append((x, group.median))
                seeds += [(x, score) for score in group.scores]
        several = len(seeds) > len(medians)
        parts = [(name, "median" if several else "line", medians)]
        parts += [("", "only", seeds)] if several else []
        for title, points, pairs in parts:
            if pairs:
                x, y = np.array(pairs, dtype=np.float64).T
                series.append(Series(scrub(title), y, {"x": x}, points=points, **pattern(number)))
    circles = any(one.points == "only" for one in series)
    log = numbers and places[0] > 0 and places[-1] / places[0] >= SPREAD
    return Chart(
        f"{seen.study.measure.replace('.', '-')}-against-{names[key].replace('.', '-')}",
        f"{seen.title[0].upper()}{seen.title[1:]} against {key}",
        seen.unit,
        series,
        x=Axis(names[key], places, [show(value) for value in values], log=log),
        y=Axis(log=seen.lower and is_spread(series)),
        note="solid: medians over the seeds, hollow: each seed" * circles,
    )


RANKS = "N0 the fewest ranks, p = N ÷ N0; speed-up = efficiency · p"
FORMULAS = {
    "strong": f"Efficiency = T(N0) · N0 ÷ (T(N) · N), T the time of a step, {RANKS}.",
    "fixed-data": f"Efficiency = T(N0) · N0 ÷ (T(N) · N), T the time of a sample, {RANKS}.",
    "weak": f"Efficiency = T(N0) ÷ T(N), T the time of a step, {RANKS}.",
    "weak model": "Efficiency = T(N0) ÷ T(N) · F(N) ÷ F(N0), T the time and F the FLOPs of a rank "
    f"in a step, {RANKS}.",
    "strategies": "Recommended: the setup with the least memory among those within 2 % of the "
    "fastest, or within the spread of its repeats.",
}
LEDES = {
    "strong": "strong scaling: the batch of a step stays",
    "fixed-data": "fixed data: the batch of a rank and the data stay",
    "weak batch": "weak scaling: the batch of a rank stays",
    "weak model": "weak scaling: the layers grow with the ranks",
    "strategies": "strategies at one number of ranks",
}


def lede(scaling: Scaling) -> str:
    text = LEDES[f"{scaling.mode} {scaling.grow}".strip()]
    return f"{text}; {scaling.repeats} repeats" if scaling.repeats > 1 else text


def setup_table(study: Study, setups: Sequence[Setup]) -> Table:
    """A row for each setup. The CSV has every number; people see the columns with a value."""
    strategies = any("pareto" in row.values for row in setups)
    keys = dict.fromkeys(k for row in setups for k in row.assignment if k not in (WORLD, NODES))
    columns = [Column("setup", "Setup", short="setup"), Column("state", "State", short="state")]
    columns += [Column(key, shown=False) for key in keys]
    for name, own in SETUP.items():
        values = [row.values[name] for row in setups if row.values.get(name) is not None]
        different = len({show(value, own.kind) for value in values}) > 1
        shown = bool(own.heading and values) and (different or own.only != "varied")
        shown &= strategies or own.only != "strategies"
        columns.append(Column(name, own.heading, own.kind, own.short, shown))
        if name == "step_ms":
            repeated = any(name in row.spread for row in setups)
            columns.append(Column("spread", "Lowest to highest (ms)", "", "low to high", repeated))
    ends = [f"{name}_{end}" for name in ("step_ms", "samples_per_s") for end in ("low", "high")]
    hidden = (*ends, "repeats", "reason", "remarks", "reasons")
    columns += [Column(name, shown=False) for name in hidden]
    rows = []
    for row in setups:
        cells = {
            **row.assignment,
            **row.values,
            "setup": row.name,
            "state": row.state,
            "reason": row.reason,
            "repeats": len(row.results),
            "remarks": "; ".join(row.remarks),
            "reasons": "; ".join(f"{name}: {text}" for name, text in row.missing.items()),
        }
        for name in ("samples_per_s", "step_ms"):
            if name in row.spread:
                cells[f"{name}_low"], cells[f"{name}_high"] = low, high = row.spread[name]
                cells["spread"] = f"{show(low, 'rate')} to {show(high, 'rate')}"
        rows.append([cells.get(column.name) for column in columns])
    return Table("scaling", columns, rows, "Setups", sentences(study, setups))


def sentences(study: Study, setups: Sequence[Setup]) -> list[str]:
    scaling = study.scaling or Scaling("strategies")
    measured = [row for row in setups if row.measured]
    repeats = f", then over {scaling.repeats} repeats" if scaling.repeats > 1 else ""
    formula = FORMULAS["weak model" if scaling.grow == "model" else scaling.mode]
    text = [
        "Step: the median over the lines of the ledger that begin after "
        f"{WARMUP} steps of each start{repeats}. {formula}"
    ]
    if scaling.mode == "strategies" and scaling.repeats == 1 and len(measured) > 1:
        text.append(
            "Each setup ran once, so a difference may be noise, and the next study may recommend "
            "another setup. With `--repeats 3` the table has the spread of each setup."
        )
    hosts = set().union(*(row.hosts for row in measured))
    if len(hosts) == 1:
        text.append(
            f"All setups ran on one host, {hosts.pop()}: this says nothing about several hosts."
        )
    remarks = [(row.name, f"{remark}.") for row in setups for remark in row.remarks]
    text += by_text(pair for pair in remarks if not pair[1].startswith("recommended"))
    text += by_text((row.name, row.reason) for row in setups if row.reason)
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
    for row in setups:
        if row.values.get("recommended"):
            assignment = {key: value for key, value in row.assignment.items() if key != NODES}
            command = study.winner_command(assignment, row.world)
            speed = show(row.values["samples_per_s"], "rate")
            memory = show(row.values["peak_mem_mb"], "mb")
            why = next(text for text in row.remarks if text.startswith("recommended"))
            why = f"{speed} samples/s, {memory} MB on the fullest rank; {why}"
            own = {result.cell.key for result in row.results}
            cells = [place for place, cell in enumerate(study.cells) if cell.key in own]
            return [Recommendation(row.name, why, command, cells)]
    return []


def terminal(study: Study, setups: Sequence[Setup], width: int) -> list[Group | str]:
    """The whole study for `windlass scale`: setups, sentences, and the winner."""
    table = setup_table(study, setups)
    parts: list[Group | str] = [table.terminal(width, str(study.path)), *table.notes]
    for best in recommended(study, setups):
        parts.append(f"{best.text}\n  {best.command}")
    return parts


def scaling_charts(scaling: Scaling, table: Sequence[Setup]) -> list[Chart]:
    """Charts against ranks, or at one world throughput against memory."""
    measured = [setup for setup in table if setup.measured]
    if scaling.mode == "strategies":
        return pareto(measured, scaling.repeats)
    return against_ranks(scaling, measured, baseline(table))


def against_ranks(scaling: Scaling, measured: Sequence[Setup], base: Setup) -> list[Chart]:
    measured = sorted(measured, key=lambda setup: setup.world)
    if len({setup.world for setup in measured}) < 2:
        return []
    ranks = np.array([float(setup.world) for setup in measured])

    def line(name: str, factor: float = 1) -> Series:
        y = np.array([setup.values.get(name, np.nan) for setup in measured], dtype=np.float64)
        ends = (setup.spread.get(name, (v, v)) for setup, v in zip(measured, y, strict=True))
        low, high = np.array(list(ends)).T * factor
        spread = any(name in setup.spread for setup in measured)
        band = {"low": low, "high": high} if spread else {}
        return Series("measured", y * factor, {"x": ranks}, colour=0, points="line", **band)

    def ideal(y: Any) -> Series:
        y = np.broadcast_to(np.asarray(y, dtype=np.float64), ranks.shape)
        return Series("ideal", y, {"x": ranks}, grey=True, dash=1, minor=True)

    def chart(name: str, title: str, unit: str, *series: Series, **options: Any) -> Chart:
        x = Axis("ranks", ranks.tolist(), [f"{n:g}" for n in ranks], log=True)
        return Chart(f"scaling-{name}", title, unit, series, x=x, **options)

    note = "against ranks"
    throughput, efficiency = [line("samples_per_s")], [line("efficiency", factor=100)]
    charts = []
    if base.measured:  # nothing compares with a baseline without numbers
        growth = ranks / base.world
        if scaling.grow == "model":
            flops = np.array([setup.values["flops_per_device"] for setup in measured])
            growth = base.values["flops_per_device"] / flops
        throughput.append(ideal(base.values["samples_per_s"] * growth))
        efficiency.append(ideal(100))
        zero = Axis(zero=True)
        charts.append(chart("efficiency", "Efficiency", "%", *efficiency, y=zero, note=note))
    if any("samples_per_s" in setup.spread for setup in measured):
        note += ", band: lowest to highest of the repeats"
    # proportional throughput is a straight line only if both scales are logarithmic
    both = chart("throughput", "Throughput", "samples/s", *throughput, y=Axis(log=True), note=note)
    return [both, *charts]


def pareto(measured: Sequence[Setup], repeats: int) -> list[Chart]:
    """Throughput against memory, with the line of the setups that no other one beats in both.

    There is none on a CPU, where resident memory is mostly libraries.
    """
    rivals = [setup for setup in measured if "pareto" in setup.values and not setup.on_cpu]
    rivals.sort(key=lambda setup: setup.values["peak_mem_mb"])
    places = sorted({float(setup.values["peak_mem_mb"]) for setup in rivals})
    if len(places) < 2:
        return []

    def series(name: str, setups: Sequence[Setup], **look: Any) -> Series:
        x = np.array([setup.values["peak_mem_mb"] for setup in setups], dtype=np.float64)
        y = np.array([setup.values["samples_per_s"] for setup in setups], dtype=np.float64)
        return Series(name, y, {"x": x}, **look)

    front, others = ([r for r in rivals if r.values["pareto"] is on] for on in (True, False))
    lines = [series("Pareto front", front, grey=True, dash=1, minor=True)]
    for i, setup in enumerate(front):
        name = setup.name + ", recommended" * setup.values["recommended"]
        lines.append(series(name, [setup], points="only", **pattern(i)))
    if others:  # the table names them; there are more of them than colours
        lines.append(series("not on the front", others, grey=True, points="only"))
    x = "MB allocated on the fullest rank"
    noise = "each setup ran once" if repeats == 1 else f"medians over {repeats} repeats"
    axis, note = Axis(x, places, [show(place, "mb") for place in places]), f"against {x}; {noise}"
    title = "Throughput against memory"
    return [Chart("scaling-pareto", title, "samples/s", lines, x=axis, note=note)]
