"""A study in a report: its cells, the score against each swept setting, and the best cell.

The score is the measure that `checkpoint.best` names, as the validation loss or `squad.f1`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from windlass.errors import by_text
from windlass.reports.charts import SPREAD, Axis, Chart, Series, is_spread
from windlass.reports.tables import Column, Table, measure_column, numeric
from windlass.reports.view import RunView
from windlass.study.grid import SEED, label_of, short_names
from windlass.study.results import BITS, SeedGroup, seed_groups
from windlass.study.setups import read_setups
from windlass.study.study import Study
from windlass.telemetry.measures import LOSS, show, title_of
from windlass.variables import scrub


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
        recommendations = []
        for place, group in enumerate(self.winners.groups):
            command = self.study.winner_command(group.assignment)
            settings = ", ".join(f"{key} = {show(x)}" for key, x in group.assignment.items())
            name = settings or "the recipe as it is"
            rows = [i for i, one in enumerate(self.results) if one is self.winners.cell]
            recommendations.append(Recommendation(name, "", command, [] if place else rows))
        return recommendations


def cell_table(seen: StudyView) -> Table:
    names = "state steps tokens train_loss eval_loss best_eval_loss train_tokens_per_s device_hours"
    columns = [measure_column(name) for name in names.split()]
    if seen.study.measure != LOSS:
        columns.append(Column("score", f"Best {seen.title}", "score"))
    columns.append(Column("reason", shown=False))
    begun = {view.run.path: view.values for view in seen.views}
    rows = []
    for result in seen.results:
        own = {"state": result.state, "reason": result.reason or None}
        values = begun.get(result.run.path, {}) | own | {"score": result.numbers.score}
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
    charts = [_against(seen, key, values) for key, values in seen.swept.items()]
    return [chart for chart in charts if chart.series]


def _against(seen: StudyView, key: str, values: Sequence[Any]) -> Chart:
    """The best score against a setting: a line for each choice of the other settings. Solid points
    are medians over the seeds, with a hollow one for each seed."""
    names, numbers = short_names(seen.study.keys), numeric(values)
    places = [float(value) if numbers else float(i) for i, value in enumerate(values)]
    lines: dict[str, list[SeedGroup]] = {}  # the groups with a median, by the other settings
    for group in sorted(seen.groups, key=lambda group: values.index(group.assignment[key])):
        rest = {other: value for other, value in group.assignment.items() if other != key}
        own = lines.setdefault(label_of(rest, names), [])
        if group.scores:
            own.append(group)
    series, circles = list[Series](), False
    for number, (name, groups) in enumerate(lines.items()):
        at = [places[values.index(group.assignment[key])] for group in groups]
        several = any(len(group.scores) > 1 for group in groups)
        if groups:
            medians = np.array([group.median for group in groups], dtype=np.float64)
            points = "median" if several else "line"
            series.append(Series(scrub(name), medians, {"x": np.array(at)}, number, points=points))
        if several:
            counts = [len(group.scores) for group in groups]
            seeds = np.array([score for group in groups for score in group.scores])
            series.append(Series("", seeds, {"x": np.repeat(at, counts)}, number, points="only"))
            circles = True
    log = numbers and places[0] > 0 and places[-1] / places[0] >= SPREAD
    lower = any(result.numbers.lower for result in seen.results)
    return Chart(
        f"{seen.study.measure.replace('.', '-')}-against-{names[key].replace('.', '-')}",
        f"{seen.title[0].upper()}{seen.title[1:]} against {key}",
        seen.unit,
        series,
        x=Axis(names[key], places, [show(value) for value in values], log=log),
        y=Axis(log=lower and is_spread(series)),
        note="solid: medians over the seeds, hollow: each seed" if circles else "",
    )
