"""What a report adds for a study: its cells, the measure against each swept setting, medians over the seeds.

States of cells, what they are compared by and the winners come from `windlass.study.study`. The measure is the one
that `checkpoint.best` names: the evaluation loss, or a score such as `squad.f1`, of which more is better.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from windlass.checkpoint.retention import LOSS
from windlass.reports.charts import Chart, Series, pattern
from windlass.reports.tables import Column, Table, label, measures
from windlass.reports.text import show
from windlass.reports.view import Numbers, RunView, view
from windlass.study.compare import BITS
from windlass.study.grid import SEED, short_names
from windlass.study.grid import label as label_of
from windlass.study.results import CellResult, SeedGroup
from windlass.study.study import Study
from windlass.telemetry.measures import lower_is_better
from windlass.variables import scrub


@dataclass(frozen=True)
class StudyView:
    """A study with its cells as they stood when it was read, and the runs of those that have begun."""

    study: Study
    title: str  # the measure's name as it stands in a sentence
    unit: str  # of the measure
    results: list[CellResult]
    views: list[RunView]  # of the results that have begun, in the order of the grid
    groups: list[SeedGroup]  # the cells without the seed, in the order of the grid
    winners: list[SeedGroup]
    remark: str  # by what cells are compared, or why no best is named
    swept: dict[
        str, list[Any]
    ]  # settings with several values, but for the seed: numbers rising, others as given

    @property
    def tones(self) -> list[float]:
        """For each run its place on the colour ramp from 0 to 1, by the first numeric swept setting.

        Empty where no numeric setting has more than two values: then each run has a colour of its own.
        """
        for key, values in self.swept.items():
            if len(values) > 2 and numeric(values):
                return [
                    values.index(r.cell.assignment[key]) / (len(values) - 1)
                    for r in self.results
                    if r.begun
                ]
        return []


def read_study(path: str | Path) -> StudyView:
    """The study at `path` with its runs; raises UserError where there is none."""
    study = Study.open(path)
    results = study.results()
    varied = {
        key: values for key, values in study.values.items() if key != SEED and len(values) > 1
    }
    swept = {key: sorted(values) if numeric(values) else values for key, values in varied.items()}
    winners, remark = study.winners(results) if study.scaling is None else ([], "")
    return StudyView(
        study=study,
        title={LOSS: "evaluation loss", BITS: "bits per byte"}.get(study.measure, study.measure),
        unit="nats per token" if study.measure == LOSS else "",
        results=results,
        views=[view(r.run, label_of(r.cell.assignment)) for r in results if r.begun],
        groups=study.groups(results),
        winners=winners,
        remark=remark,
        swept=swept,
    )


def numeric(values: Sequence[Any]) -> bool:
    return all(type(value) in (int, float) for value in values)


def winner_text(seen: StudyView, group: SeedGroup) -> str:
    """What a winner sets, and its score with the number of seeds that it is the median of."""
    what = (
        ", ".join(f"{key} = {show(value)}" for key, value in group.assignment.items())
        or "the recipe as it is"
    )
    of = (
        f"median of the best {seen.title} over {group.seeds}"
        if group.seeds
        else f"best {seen.title}"
    )
    return f"{what}, {of}: {show(group.median, 'loss')}"


def cell_table(seen: StudyView) -> Table:
    """A row a cell, in the order of the grid: what it sets, its state, scores, tokens, speed and device-hours."""
    names = ["state", "steps", "tokens", "train_loss", "eval_loss", "best_eval_loss"]
    names += ["train_tokens_per_s", "device_hours"]
    columns = [Column(name, *label(name)) for name in names]
    columns += (
        [] if seen.study.measure == LOSS else [Column("score", f"Best {seen.title}", "score")]
    )
    columns += [Column("reason", "Reason")] if any(r.reason for r in seen.results) else []
    runs, rows = {one.run.path: measures(one) for one in seen.views}, []
    for r in seen.results:
        values = runs.get(r.run.path, {}) | {
            "state": r.state,
            "score": r.score,
            "reason": r.reason or None,
        }
        rows.append((*r.cell.assignment.values(), *(values.get(column.name) for column in columns)))
    return Table([*(Column(key) for key in seen.study.keys), *columns], rows)


def seed_table(seen: StudyView) -> Table | None:
    """Median and spread of the best score over the seeds; None where the seed is no axis."""
    if SEED not in seen.study.keys:
        return None
    rows = []
    for group in seen.groups:
        low, high = min(group.scores, default=None), max(group.scores, default=None)
        spread = (
            high - low if low is not None and high is not None and len(group.scores) > 1 else None
        )
        numbers = (group.median, low, high, spread, len(group.results), len(group.scores))
        rows.append((*group.assignment.values(), *numbers))
    columns = [
        Column("median", f"Best {seen.title}, median", "loss"),
        Column("low", "Lowest", "loss"),
    ]
    columns += [Column("high", "Highest", "loss"), Column("spread", "Spread", "loss")]
    columns += [Column("seeds", "Seeds", "count"), Column("finished", "Finished", "count")]
    return Table([*(Column(key) for key in seen.study.keys if key != SEED), *columns], rows)


def sweep_charts(seen: StudyView) -> list[Chart]:
    """For each swept setting the best score against it: a line for each choice of the other settings.

    Lines with diamonds are medians over the seeds, with each seed as a circle.
    """
    charts, names = [], short_names(seen.study.keys)
    for key, values in seen.swept.items():
        numbers = numeric(values)
        at = [float(v) if numbers else float(i) for i, v in enumerate(values)]
        others: dict[str, list[SeedGroup]] = {}
        for group in sorted(seen.groups, key=lambda group: values.index(group.assignment[key])):
            rest = {k: v for k, v in group.assignment.items() if k != key}
            others.setdefault(label_of(rest, names), []).append(group)
        series = []
        for number, (name, groups) in enumerate(others.items()):
            finished = [
                (at[values.index(g.assignment[key])], g) for g in groups if g.median is not None
            ]
            medians = [(x, group.median) for x, group in finished]
            seeds = [(x, score) for x, group in finished for score in group.scores]
            circles = seeds if len(seeds) > len(medians) else []
            for title, points, pairs in (
                (name, "median" if circles else "line", medians),
                ("", "only", circles),
            ):
                if pairs:
                    x, y = np.array(pairs, dtype=np.float64).T
                    colour, dash = pattern(number)
                    series.append(Series(-1, scrub(title), x, x, x, y, colour, dash, points=points))
        chart = Chart(
            f"{seen.study.measure.replace('.', '-')}-against-{names[key].replace('.', '-')}",
            f"{seen.title[0].upper()}{seen.title[1:]} against {key}",
            seen.unit,
            series,
            x_label=names[key],
            x_values=at,
            x_names=[show(v) for v in values],
            x_log=numbers and at[0] > 0 and at[-1] / at[0] >= 8,
            note="diamonds: medians over the seeds, circles: each seed"
            if any(s.points == "only" for s in series)
            else "",
        )
        charts += [chart] if series else []
    return charts


class Heat(NamedTuple):
    """A measure over two swept settings, `cells[row][column]`: None where nothing has finished."""

    title: str
    row_key: str
    column_key: str
    names: tuple[str, str]  # of the two keys, as short as they can be
    rows: list[Any]
    columns: list[Any]
    cells: list[list[float | None]]
    shares: Numbers  # how good each value is among the others, from 0 to 1; NaN where there is none


def heat_map(seen: StudyView) -> Heat | None:
    """The map of the best score, of a study with exactly two swept settings."""
    if len(seen.swept) != 2 or not any(group.scores for group in seen.groups):
        return None
    (row_key, rows), (column_key, columns) = sorted(
        seen.swept.items(), key=lambda item: len(item[1])
    )
    values: list[list[float | None]] = [[None] * len(columns) for _ in rows]
    for group in seen.groups:
        values[rows.index(group.assignment[row_key])][
            columns.index(group.assignment[column_key])
        ] = group.median
    table = np.array(values, dtype=np.float64)
    low, high = np.nanmin(table), np.nanmax(table)
    far = (table - low if lower_is_better(seen.study.measure) else high - table) / (high - low or 1)
    # by the logarithm of the distance from the best: one very bad cell does not hide the differences between good ones
    shares = 1 - np.log1p(9 * far) / np.log(10)
    names = short_names(seen.study.keys)
    return Heat(
        f"Best {seen.title}",
        row_key,
        column_key,
        (names[row_key], names[column_key]),
        rows,
        columns,
        values,
        shares,
    )
