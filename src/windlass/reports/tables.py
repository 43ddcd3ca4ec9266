"""The tables of a report, of one run or several: raw values in rows, with how each column is shown to people. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from windlass.recipe import Recipe, settings
from windlass.recipe.units import epochs_in
from windlass.reports.measures import MEASURES, Value, label, measures
from windlass.reports.text import csv_text, markdown_table, show
from windlass.reports.view import RunView, Track

NAMING = ("preset", "run.name", "run.dir", "run.notes", "data.dir")
"""Settings that always tell runs apart, and say nothing about what is different."""

MANY_EVALUATIONS = 12
"""Up to this many evaluations have a line each in the results table; more have a table of their own only."""

PRINCIPAL = (
    "state", "steps", "tokens", "train_loss", "eval_loss", "best_eval_loss", "best_measure", "best_score",
    "train_tokens_per_s", "mfu", "peak_mem_mb", "util_pct", "goodput", "runtime_s", "device_hours",
)  # fmt: skip
"""The measures that a table of several runs shows on the page; its CSV has all of them."""


@dataclass(frozen=True)
class Column:
    """A column: its name in CSV, its heading, and the kind of number (see `text.show`)."""

    name: str
    heading: str = ""
    kind: str = ""


@dataclass(frozen=True)
class Table:
    """Rows of raw values under columns. `kinds`: of each row, where the rows and not the columns differ in kind."""

    columns: tuple[Column, ...]
    rows: list[tuple[Any, ...]]
    kinds: tuple[str, ...] = ()

    @property
    def headings(self) -> list[str]:
        """The columns' headings for people."""
        return [column.heading or column.name for column in self.columns]

    @property
    def numeric(self) -> list[int]:
        """The columns that hold nothing but numbers."""

        def is_numeric(cells: list[Any]) -> bool:
            return bool(cells) and all(isinstance(c, (int, float)) and not isinstance(c, bool) for c in cells)

        count = range(len(self.columns))
        return [i for i in count if is_numeric([row[i] for row in self.rows if row[i] is not None])]

    def shown(self) -> list[list[str]]:
        """The cells as people read them."""
        by_row = self.kinds or ("",) * len(self.rows)
        columns = [column.kind for column in self.columns]
        return [
            [show(cell, columns[i] or (kind if i else "")) for i, cell in enumerate(row)]
            for row, kind in zip(self.rows, by_row, strict=True)
        ]

    def markdown(self) -> str:
        """As a Markdown table."""
        return markdown_table(self.headings, self.shown(), self.numeric)

    def csv(self) -> str:
        """As CSV, in full precision."""
        return csv_text([column.name for column in self.columns], self.rows)


def results(views: Sequence[RunView], each_evaluation: bool = True) -> Table:
    """A row a measure, a column a run; with `each_evaluation` the loss of each evaluation too."""
    values = [measures(view) for view in views]
    each = [_losses_by_evaluation(view) if each_evaluation else {} for view in views]
    rows: list[tuple[Any, ...]] = []
    kinds: list[str] = []
    for name in in_order(values):
        text, kind = label(name)
        rows.append((name, text, *(one.get(name) for one in values)))
        if name == "eval_loss":
            for place in sorted({place for one in each for place in one}):
                rows.append((f"eval_loss {place[1]}", f"{text}, {place[1]}", *(one.get(place) for one in each)))
        kinds += [kind] * (len(rows) - len(kinds))
    columns = (Column("name"), Column("measure"), *(Column(view.label) for view in views))
    return Table(columns, rows, tuple(kinds))


def results_for_people(views: Sequence[RunView], each_evaluation: bool = True) -> Table:
    """`results` without the names of CSV."""
    full = results(views, each_evaluation)
    return Table((Column("Measure"), *full.columns[2:]), [row[1:] for row in full.rows], full.kinds)


def comparison(views: Sequence[RunView], only: Sequence[str] = ()) -> Table:
    """A row a run: its name, the settings that differ, then every measure that a run has (or those of `only`)."""
    differ = [s for s in all_settings(views) if s.differs and s.key not in NAMING]
    values = [measures(view) for view in views]
    names = [name for name in in_order(values) if not only or name in only or name not in MEASURES]
    rows = [
        (view.label, *(s.values[i] for s in differ), *(values[i].get(name) for name in names))
        for i, view in enumerate(views)
    ]
    of_measures = (Column(name, *label(name)) for name in names)
    return Table((Column("run", "Run"), *(Column(s.key) for s in differ), *of_measures), rows)


def in_order(values: Sequence[Mapping[str, Value]]) -> list[str]:
    """The names of all measures that any of the runs has, those of MEASURES first."""
    names = [name for name in MEASURES if any(name in one for one in values)]
    return names + list(dict.fromkeys(name for one in values for name in one if name not in MEASURES))


# --- evaluations and curves ------------------------------------------------------------------------------------------


def evaluations(view: RunView) -> dict[str, Table]:
    """A table of every evaluation, by suite."""
    headings = {"samples_per_s": "Samples/s", "tokens_per_s": "Tokens/s", "runtime_s": "Time"}
    tables = {}
    for suite, track in view.evals.items():
        names = [name for name in (*track.measures(), "runtime_s") if track.has(name)]
        rows = []
        for i, what in enumerate(evaluation_names(track, view.settings.get("eval.every"))):
            rows.append((what, *(plain(track[name][i]) for name in ("step", "epoch", "tokens", *names))))
        columns = [
            Column("evaluation", "Evaluation"),
            Column("step", "Step", "count"),
            Column("epoch", "Epoch", "amount"),
        ]
        columns.append(Column("tokens", "Tokens", "count"))
        for name in names:
            kind = "duration" if name == "runtime_s" else "rate" if name.endswith("_per_s") else "loss"
            kind = "count" if name in ("items", "examples", "batches") else kind
            columns.append(Column(name, headings.get(name, name.replace("_", " ").capitalize()), kind))
        tables[suite] = Table(tuple(columns), rows)
    return tables


def evaluation_names(track: Track, every: Any) -> list[str]:
    """What to call each evaluation: `epoch 2` where `eval.every` is given in epochs, else `step 250`."""
    period = float(epochs_in(every)) if isinstance(every, str) else 0.0
    names = []
    for step, epoch in zip(track["step"], track["epoch"], strict=True):
        nearest = round(epoch / period) * period if period and math.isfinite(epoch) else 0.0
        if step == 0:
            names.append("before training")
        elif nearest and 0 <= epoch - nearest <= epoch / step * (1 + 1e-6):  # the first step at or past the epoch
            names.append(f"epoch {nearest:g}")
        else:
            names.append(f"step {step:,.0f}")
    return names


def _losses_by_evaluation(view: RunView) -> dict[tuple[int, str], float]:
    track = view.evals.get("loss")
    if track is None or not 1 < len(track) <= MANY_EVALUATIONS:
        return {}
    names = evaluation_names(track, view.settings.get("eval.every"))
    return {(int(step), name): float(x) for step, name, x in zip(track["step"], names, track["loss"], strict=True)}


def curves(view: RunView) -> Table:
    """The `train` lines in full precision: what the charts are drawn from."""
    names = ["step", *(name for name in view.train.columns if name not in ("step", "hours")), "hours"]
    rows = [tuple(map(plain, row)) for row in zip(*(view.train[name] for name in names), strict=True)]
    return Table(tuple(map(Column, names)), rows)


def stacked(parts: Sequence[tuple[tuple[str, ...], Table]], names: Iterable[str]) -> Table:
    """Tables under each other, with what each is of in columns `names` in front."""
    columns = {column.name: column for _, table in parts for column in table.columns}
    rows = []
    for what, table in parts:
        place = {column.name: i for i, column in enumerate(table.columns)}
        rows += [(*what, *(row[place[x]] if x in place else None for x in columns)) for row in table.rows]
    return Table((*map(Column, names), *columns.values()), rows)


def plain(value: float) -> float | int | None:
    """A float of a track as a value of a table: None for NaN, an integer where it is one."""
    number = float(value)
    if math.isnan(number):
        return None
    return int(number) if number.is_integer() and abs(number) < 2**53 else number


# --- settings --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SettingRow:
    """A setting and its value in each run."""

    key: str
    values: tuple[Any, ...]
    default: Any
    meaning: str

    @property
    def differs(self) -> bool:
        """Whether the runs disagree."""
        return any(value != self.values[0] for value in self.values[1:])

    @property
    def changed(self) -> bool:
        """Whether a run has another value than the default."""
        return any(value != self.default for value in self.values)


def all_settings(views: Sequence[RunView]) -> list[SettingRow]:
    """Every setting: those that differ between the runs, then those changed from the default, then the rest."""
    defaults, fields = Recipe(preset="custom").flat(), settings()
    rows = []
    for key in dict.fromkeys(key for view in views for key in view.settings):
        meaning = " ".join((fields[key].description or "").split()) if key in fields else ""
        rows.append(SettingRow(key, tuple(view.settings.get(key) for view in views), defaults.get(key), meaning))
    return sorted(rows, key=lambda row: (not row.differs, not row.changed))


def settings_table(views: Sequence[RunView], rows: Sequence[SettingRow] | None = None) -> Table:
    """A row a setting, a column a run; of all settings, or of `rows`."""
    chosen = all_settings(views) if rows is None else rows
    columns = (Column("setting", "Setting"), *(Column(view.label) for view in views))
    return Table(columns, [(row.key, *row.values) for row in chosen])
