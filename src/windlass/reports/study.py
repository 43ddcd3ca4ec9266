"""What a report adds for a study: its cells, the measure against each swept setting, medians over the seeds.

States of cells, what they are compared by and the winner come from `windlass.study.study`. The measure is the one
that `checkpoint.best` names: the evaluation loss, or a score such as `squad.f1`, of which more is better.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from windlass.checkpoint.retention import LOSS, better
from windlass.reports.charts import Chart, Look, Series
from windlass.reports.measures import MEASURES, measures
from windlass.reports.tables import Column, Table
from windlass.reports.text import show
from windlass.reports.view import RunView, view
from windlass.study.grid import SEED, label
from windlass.study.study import CellResult, Group, Study


@dataclass(frozen=True)
class StudyView:
    """A study with its cells as they stood when it was read, and the runs of those that have begun."""

    study: Study
    results: list[CellResult]
    views: list[RunView]
    """Of the results that have begun, in the order of the grid."""

    @property
    def name(self) -> str:
        """The directory's name."""
        return self.study.path.resolve().name

    @property
    def title(self) -> str:
        """The measure's name for people, as it stands in a sentence."""
        return "evaluation loss" if self.study.measure == LOSS else self.study.measure

    @property
    def groups(self) -> list[Group]:
        """The cells without the seed, in the order of the grid."""
        return self.study.groups(self.results)

    @property
    def winner(self) -> Group | None:
        """The best group of those that have finished."""
        return self.study.winner(self.results)

    @property
    def states(self) -> str:
        """`5 finished, 1 waiting`."""
        counts = Counter(result.state for result in self.results)
        return ", ".join(f"{count} {state}" for state, count in counts.items())

    def swept(self) -> dict[str, list[Any]]:
        """The settings with more than one value, but for the seed, and their values: numbers rising, others as given."""
        swept = {}
        for key in self.study.keys:
            values = unique(r.cell.assignment[key] for r in self.results)
            if key != SEED and len(values) > 1:
                swept[key] = sorted(values) if numeric(values) else values
        return swept


def read_study(path: str | Path) -> StudyView:
    """The study at `path` with its runs; raises UserError where there is none."""
    study = Study.open(path)
    results = study.results()
    return StudyView(study, results, [view(r.run, label(r.cell.assignment)) for r in results if r.begun])


def numeric(values: Sequence[Any]) -> bool:
    """Whether all are numbers."""
    return all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values)


def unique(values: Iterable[Any]) -> list[Any]:
    """The values without repetition, in order; they need not be hashable."""
    seen: list[Any] = []
    for value in values:
        if value not in seen:
            seen.append(value)
    return seen


def short(key: str) -> str:
    """The last part of a dotted key."""
    return key.rsplit(".", 1)[-1]


def winner_text(seen: StudyView, group: Group) -> tuple[str, str]:
    """What the winner sets, and its score with the number of seeds that it is the median of."""
    what = ", ".join(f"{key} = {show(value)}" for key, value in group.assignment.items()) or "the recipe as it is"
    of = f"median of the best {seen.title} over {group.seeds}" if group.seeds else f"best {seen.title}"
    return what, f"{of}: {show(group.median, 'loss')}"


# --- tables ----------------------------------------------------------------------------------------------------------


def cell_table(seen: StudyView) -> Table:
    """A row a cell, in the order of the grid: what it sets, its state, scores, tokens, speed and device-hours."""
    keys, runs = seen.study.keys, {one.run.path: one for one in seen.views}
    names = (
        "state",
        "steps",
        "tokens",
        "train_loss",
        "eval_loss",
        "best_eval_loss",
        "train_tokens_per_s",
        "device_hours",
    )
    columns = [Column(name, *MEASURES[name]) for name in names]
    own = [] if seen.study.measure == LOSS else [Column("score", f"Best {seen.title}", "score")]
    reason = [Column("reason", "Reason")] if any(r.reason for r in seen.results) else []
    rows = []
    for r in seen.results:
        values: dict[str, Any] = measures(runs[r.run.path]) if r.run.path in runs else {}
        values |= {"state": r.state, "score": r.score, "reason": r.reason or None}
        rows.append((*r.cell.assignment.values(), *(values.get(c.name) for c in (*columns, *own, *reason))))
    return Table((*map(Column, keys), *columns, *own, *reason), rows)


def seed_table(seen: StudyView) -> Table | None:
    """Median and spread of the best score over the seeds; None where the seed is no axis."""
    if SEED not in seen.study.keys:
        return None
    rows = []
    for group in seen.groups:
        scores = group.scores
        spread = max(scores) - min(scores) if len(scores) > 1 else None
        numbers = (group.median, min(scores, default=None), max(scores, default=None), spread, final_median(group))
        rows.append((*group.assignment.values(), *numbers, len(group.results), len(scores)))
    columns = [Column("median", f"Best {seen.title}, median", "loss"), Column("low", "Lowest", "loss")]
    columns += [Column("high", "Highest", "loss"), Column("spread", "Spread", "loss")]
    columns += [Column("median_final", "Final, median", "loss"), Column("seeds", "Seeds", "count")]
    keys = (Column(key) for key in seen.study.keys if key != SEED)
    return Table((*keys, *columns, Column("finished", "Finished", "count")), rows)


def final_median(group: Group) -> float | None:
    """The median of the last values of the measure over the finished cells."""
    finals = [r.evaluations[-1].value for r in group.results if r.state == "finished" and r.evaluations]
    finals = [value for value in finals if np.isfinite(value)]
    return statistics.median(finals) if finals else None


# --- charts ----------------------------------------------------------------------------------------------------------


def looks(seen: StudyView) -> list[Look]:
    """For each run its place on the colour ramp, by the first numeric swept setting, and its kind of dash.

    Runs that differ in other settings only share the colour and differ in dash; seeds share both. Empty where no numeric
    setting has more than two values: then each run has a colour of its own.
    """
    key, values = next(((k, v) for k, v in seen.swept().items() if len(v) > 2 and numeric(v)), ("", []))
    if not key:
        return []
    rest = [{k: v for k, v in r.cell.assignment.items() if k not in (key, SEED)} for r in seen.results]
    kinds = unique(rest)
    tones = [values.index(r.cell.assignment[key]) / (len(values) - 1) for r in seen.results]
    placed = zip(seen.results, tones, rest, strict=True)
    return [(tone, kinds.index(others)) for r, tone, others in placed if r.begun]


def sweep_charts(seen: StudyView) -> list[Chart]:
    """For each swept setting the measure against it: a line for each choice of the other settings.

    Lines are medians over the seeds of the best score, with each seed as a circle; dashed where the final one differs.
    """
    charts = []
    slug = seen.study.measure.replace(".", "-")
    for key, values in seen.swept().items():
        numbers = numeric(values)
        at = [float(v) if numbers else float(i) for i, v in enumerate(values)]
        others: dict[str, list[Group]] = {}
        for group in seen.groups:
            others.setdefault(label({k: v for k, v in group.assignment.items() if k != key}), []).append(group)
        series = []
        for colour, (name, groups) in enumerate(others.items()):
            groups.sort(key=lambda group: values.index(group.assignment[key]))
            series += _sweep_series(groups, [at[values.index(g.assignment[key])] for g in groups], name, colour)
        if not series:
            continue
        seeds = any(one.points == "only" for one in series)
        chart = Chart(
            f"{slug}-against-{short(key)}", f"{seen.title[0].upper()}{seen.title[1:]} against {key}",
            "nats per token" if seen.study.measure == LOSS else "", series, x_label=short(key), x_values=at,
            x_names=[show(v) for v in values], x_log=numbers and at[0] > 0 and at[-1] / at[0] >= 8,
            note="lines: medians over the seeds, circles: each seed" if seeds else "",
        )  # fmt: skip
        charts.append(chart)
    return charts


def _sweep_series(groups: Sequence[Group], at: Sequence[float], name: str, colour: int) -> list[Series]:
    """The lines and points of one choice of the other settings; `at`: each group's place on the horizontal axis."""
    best = [(x, g.median) for x, g in zip(at, groups, strict=True) if g.median is not None]
    final = [(x, m) for x, g in zip(at, groups, strict=True) if (m := final_median(g)) is not None]
    every = [(x, score) for x, g in zip(at, groups, strict=True) for score in g.scores]
    seeds, suffix = len(every) > len(best), f", {name}" if name else ""
    series = []
    if best:
        both = "best" if final != best else "best and final"
        series.append(_series(best, both + suffix, colour, points="" if seeds else "line"))
    if final and final != best:
        series.append(_series(final, f"final{suffix}", colour, dash=1, minor=True))
    if seeds:
        series.append(_series(every, "", colour, points="only"))
    return series


def _series(pairs: Sequence[tuple[float, float]], name: str, colour: int, **rest: Any) -> Series:
    x, y = (np.array(values, dtype=np.float64) for values in zip(*pairs, strict=True))
    return Series(run=-1, name=name, step=x, tokens=x, hours=x, y=y, colour=colour, **rest)


@dataclass(frozen=True)
class Heat:
    """A measure over two swept settings: `values[row][column]`, None where nothing has finished."""

    title: str
    unit: str
    row_key: str
    column_key: str
    rows: list[Any]
    columns: list[Any]
    values: list[list[float | None]]
    less_is_better: bool = True

    def share(self, value: float) -> float:
        """How good a value is among the others, from 0 to 1, by the logarithm of its distance from the best.

        So one very bad cell does not hide the differences between the good ones.
        """
        known = [v for row in self.values for v in row if v is not None]
        low, high = min(known), max(known)
        distance = (value - low if self.less_is_better else high - value) / (high - low or 1)
        return float(1 - np.log1p(9 * distance) / np.log(10))


def heats(seen: StudyView) -> list[Heat]:
    """The maps of a study with exactly two swept settings: the best score and, where it differs, the final one."""
    swept = seen.swept()
    if len(swept) != 2:
        return []
    (row_key, rows), (column_key, columns) = sorted(swept.items(), key=lambda item: len(item[1]))
    maps: list[list[list[float | None]]] = []
    for pick in (lambda group: group.median, final_median):
        values: list[list[float | None]] = [[None] * len(columns) for _ in rows]
        for group in seen.groups:
            values[rows.index(group.assignment[row_key])][columns.index(group.assignment[column_key])] = pick(group)
        if values not in maps and any(value is not None for row in values for value in row):
            maps.append(values)
    unit = "nats per token" if seen.study.measure == LOSS else ""
    less = better(0.0, 1.0, seen.study.measure)
    titles = (f"Best {seen.title}", f"Final {seen.title}")
    return [Heat(t, unit, row_key, column_key, rows, columns, m, less) for t, m in zip(titles, maps, strict=False)]
