"""What a report adds for a study: its cells, the score against each swept setting, the best. The
score is the measure that `checkpoint.best` names, as the validation loss or `squad.f1`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from windlass.errors import by_text
from windlass.reports.charts import COLOURED, FEW, SPREAD, Axis, Chart, Series, is_spread, pattern
from windlass.reports.tables import Column, Table, measure_column, numeric
from windlass.reports.view import ROWS, RunView
from windlass.study.grid import SEED, label_of, short_names
from windlass.study.results import BITS, SeedGroup, seed_groups
from windlass.study.setups import read_setups
from windlass.study.study import Study
from windlass.telemetry.ledger import LOSS
from windlass.telemetry.measures import show, title_of
from windlass.variables import scrub


class Recommendation(NamedTuple):
    name: str  # the settings
    why: str  # it was chosen; empty: the first lines of the report have its score
    command: str  # that trains it
    remark: str
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
        begun = [result for result in self.results if result.begun]
        varied = {key for key, values in study.values.items() if len(values) > 1}
        self.varied = [key for key in study.keys if key in varied] or study.keys
        rows = ROWS // max(1, len(begun))
        assigned = [{key: r.cell.assignment[key] for key in self.varied} for r in begun]
        labels = map(label_of, assigned)
        self.views = [RunView(r.run, x, rows) for r, x in zip(begun, labels, strict=True)]
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
            command, remark = self.study.winner_command(group.assignment)
            best = self.winners.cell if group is groups[0] else None
            rows = [place for place, result in enumerate(self.results) if result is best]
            settings = ", ".join(f"{key} = {show(x)}" for key, x in group.assignment.items())
            name = settings or "the recipe as it is"
            recommendations.append(Recommendation(name, "", command, remark, rows))
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
    scored = len(seen.swept) == 2 and any(group.scores for group in seen.groups)
    return [chart for chart in charts if chart.series] + ([heat_map(seen)] if scored else [])


def _against(seen: StudyView, key: str, values: Sequence[Any]) -> Chart:
    """The best score against a setting: a line for each choice of the other settings. Solid points
    are medians over the seeds, with a hollow one for each seed."""
    names, numbers = short_names(seen.study.keys), numeric(values)
    places = [float(v) if numbers else float(i) for i, v in enumerate(values)]
    others: dict[str, list[SeedGroup]] = {}
    for group in sorted(seen.groups, key=lambda group: values.index(group.assignment[key])):
        rest = {k: v for k, v in group.assignment.items() if k != key}
        others.setdefault(label_of(rest, names), []).append(group)
    many, lower, series = len(others) > FEW, seen.lower, list[Series]()

    def best_of(groups: Sequence[SeedGroup]) -> float:
        scores = [group.median for group in groups if group.median is not None]
        return (min(scores) if lower else -max(scores)) if scores else math.inf

    if many:  # the COLOURED best ones come first, the others are grey
        others = dict(sorted(others.items(), key=lambda item: best_of(item[1])))
    for number, (name, groups) in enumerate(others.items()):
        grey = many and number >= COLOURED
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
                line = Series(scrub(title), y, {"x": x}, points=points, **pattern(number))
                series.append(replace(line, name="", grey=True, minor=True) if grey else line)
    circles = any(one.points == "only" for one in series)
    notes = ["solid: medians over the seeds, hollow: each seed"] * circles
    notes += [f"grey: {len(others) - COLOURED} lines that are not among the best"] * many
    log = numbers and places[0] > 0 and places[-1] / places[0] >= SPREAD
    return Chart(
        f"{seen.study.measure.replace('.', '-')}-against-{names[key].replace('.', '-')}",
        f"{seen.title[0].upper()}{seen.title[1:]} against {key}",
        seen.unit,
        series,
        x=Axis(names[key], places, [show(value) for value in values], log=log),
        y=Axis(log=lower and is_spread(series)),
        note="; ".join(notes),
    )


def heat_map(seen: StudyView) -> Chart:
    """The best score over two swept settings, the one with fewer values in rows."""
    swept = sorted(seen.swept.items(), key=lambda item: len(item[1]))
    (row_key, rows), (column_key, columns) = swept
    table = np.full((len(rows), len(columns)), math.nan)  # NaN: no cell has finished
    for group in seen.groups:
        place = rows.index(group.assignment[row_key]), columns.index(group.assignment[column_key])
        table[place] = math.nan if group.median is None else group.median
    low, high = np.nanmin(table), np.nanmax(table)
    far = (table - low if seen.lower else high - table) / (high - low or 1)
    # by the logarithm of the distance, because one very bad cell must not hide other differences
    shades = 1 - np.log1p(9 * far) / np.log(10)
    names = short_names(seen.study.keys)
    series = []
    for value, row, shade in zip(rows, table, shades.tolist(), strict=True):
        texts = [show(None if math.isnan(x) else x, "loss") for x in row.tolist()]
        series.append(Series(show(value), row, texts=texts, shades=shade))
    return Chart(
        "heat-map",
        f"Best {seen.title}",
        "",
        series,
        "heat",
        x=Axis(names[column_key], names=[show(value) for value in columns]),
        y=Axis(names[row_key], names=[show(value) for value in rows]),
        note=f"columns: {column_key}, rows: {row_key}; the stronger the colour, the better",
    )
