"""The tables of runs: results, evaluations, curves and settings. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from windlass.checkpoint.retention import LOSS
from windlass.recipe import Recipe, settings
from windlass.reports.table import Column, Table
from windlass.reports.tracks import Track
from windlass.reports.view import RunView, evaluation_names
from windlass.telemetry.measures import EPOCH_LOSS, RUN, of_eval, of_result

MANY_EVALUATIONS = 12  # have a table of their own only; fewer have a line each among the results
NAMING = ("preset", "run.name", "run.dir", "run.notes", "data.dir")
"""Settings that always differ between runs, and explain nothing."""


def measure_column(name: str) -> Column:
    measure = of_result(name)
    return Column(name, measure.title, measure.kind, shown=measure.principal)


def results(view: RunView) -> Table:
    """A row for each measure, with the loss of each evaluation if there are only a few."""
    track, each = view.evals.get(LOSS), []
    if track is not None and 1 < len(track) <= MANY_EVALUATIONS:
        names = evaluation_names(track, view.settings.get("eval.every"))
        each = list(zip(names, track["loss"].tolist(), strict=True))
    rows, kinds = list[tuple[Any, ...]](), list[str]()
    for name, value in view.values.items():
        if each and name.startswith(EPOCH_LOSS):
            continue  # one of `each`
        text, kind = of_result(name).title, of_result(name).kind
        rows.append((name, text, value))
        if name == "eval_loss":
            rows += [(f"{name} {what}", f"Validation loss, {what}", loss) for what, loss in each]
        kinds += [kind] * (len(rows) - len(kinds))
    columns = [Column("name", shown=False), Column("measure", "Measure"), Column(view.label)]
    return Table("results", columns, rows, "Results", kinds=kinds)


def comparison(views: Sequence[RunView], rows: Sequence[SettingRow]) -> Table:
    """A row for each run: its name, the settings that differ, and every measure of any run."""
    differ = [s for s in rows if s.differs and s.key not in NAMING]
    every = dict.fromkeys(name for view in views for name in view.values)
    names = [n for n in RUN if n in every] + [n for n in every if n not in RUN]
    columns = [Column("run", "Run"), *(Column(s.key) for s in differ)]
    columns += map(measure_column, names)
    lines = []
    for i, view in enumerate(views):
        lines.append((view.label, *(s.values[i] for s in differ), *map(view.values.get, names)))
    return Table("results", columns, lines, "Results")


def evaluations(view: RunView) -> dict[str, Table]:
    """Every evaluation, in a table for each suite."""
    place = [Column("step", "Step", "count"), Column("epoch", "Epoch", "amount")]
    place += [Column("tokens", "Tokens", "count")]
    tables = {}
    for suite, track in view.evals.items():
        columns = [column for column in place if track.has(column.name)]
        for name in sorted(track.measures(), key=lambda name: name == "runtime_s"):
            columns.append(Column(name, of_eval(name).title, of_eval(name).kind))
        names = evaluation_names(track, view.settings.get("eval.every"))
        lines = [x for x in view.lines("eval") if x.get("suite", LOSS) == suite]
        rows = list[tuple[Any, ...]]()
        for i, (name, line) in enumerate(zip(names, lines, strict=True)):
            numbers = [(column.name, float(track[column.name][i])) for column in columns]
            # a field that the line lacks is missing; NaN in the line is a score
            known = (x if key in line or math.isfinite(x) else None for key, x in numbers)
            rows.append((name, *known))
        columns.insert(0, Column("evaluation", "Evaluation"))
        tables[suite] = Table(suite, columns, rows, f"Evaluations: {suite}")
    return tables


def curves(track: Track) -> Table:
    """The `train` lines in full precision: the points of the charts."""
    names = ["step", *(name for name in track.columns if name not in ("step", "hours")), "hours"]
    rows = list(zip(*(track[name].tolist() for name in names), strict=True))
    return Table("train", list(map(Column, names)), rows)


class SettingRow(NamedTuple):
    """A setting and its value in each run."""

    key: str
    values: tuple[Any, ...]
    meaning: str
    differs: bool  # between the runs
    changed: bool  # from the default, in a run


def all_settings(views: Sequence[RunView]) -> list[SettingRow]:
    """Every setting: first if it differs between the runs, then if it is not the default."""
    defaults, fields = Recipe(preset="custom").flat(), settings()
    rows = []
    for key in dict.fromkeys(key for view in views for key in view.settings):
        meaning = " ".join((fields[key].description or "").split()) if key in fields else ""
        values = tuple(view.settings.get(key) for view in views)
        differs, changed = (any(x != y for x in values) for y in (values[0], defaults.get(key)))
        rows.append(SettingRow(key, values, meaning, differs, changed))
    return sorted(rows, key=lambda row: (not row.differs, not row.changed))


def settings_table(views: Sequence[RunView], rows: Sequence[SettingRow]) -> Table:
    columns = [Column("setting", "Setting"), *(Column(view.label) for view in views)]
    return Table("settings", columns, [(row.key, *row.values) for row in rows], "Settings")
