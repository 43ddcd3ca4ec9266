"""Tables, and the tables of runs: results, evaluations and settings."""

from __future__ import annotations

import csv
import html
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from windlass.recipe import Recipe, presets, settings
from windlass.reports.view import RunView
from windlass.telemetry.measures import PHASES, RUN, of_eval, of_result, show
from windlass.telemetry.terminal import printable, table
from windlass.variables import scrub

if TYPE_CHECKING:
    from rich.console import Group

LATEX = str.maketrans(
    {c: f"\\{c}" for c in "&%$#_{}"}
    | {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
        "–": "--",
        "−": "$-$",
        "∞": r"$\infty$",
        "·": r"$\cdot$",
        "…": r"\dots{}",
    }
)


class Column(NamedTuple):
    """A column: its name in CSV, its heading, and the kind of number (see `measures.show`)."""

    name: str
    heading: str = ""  # empty: the name
    kind: str = ""
    short: str = ""  # the heading in the terminal; empty: the heading
    shown: bool = True  # to people; other columns are only in the CSV


@dataclass(frozen=True)
class Table:
    """Rows of raw values under columns, with a title and the sentences that follow the table."""

    name: str  # of its files
    columns: Sequence[Column]
    rows: Sequence[Sequence[Any]]
    title: str = ""
    notes: Sequence[str] = ()
    kinds: Sequence[str] = ()  # of the numbers in each row, if the rows are of different kinds

    @property
    def shown(self) -> list[int]:
        return [i for i, column in enumerate(self.columns) if column.shown]

    @property
    def headings(self) -> list[str]:
        return [self.columns[i].heading or self.columns[i].name for i in self.shown]

    @property
    def numeric(self) -> list[int]:
        columns = [[row[i] for row in self.rows if row[i] is not None] for i in self.shown]
        return [n for n, cells in enumerate(columns) if cells and numeric(cells)]

    def texts(self) -> list[list[str]]:
        kinds = self.kinds or [""] * len(self.rows)
        return [
            [show(row[i], kind or self.columns[i].kind) for i in self.shown]
            for kind, row in zip(kinds, self.rows, strict=True)
        ]

    def markdown(self) -> str:
        rules = ["---:" if i in self.numeric else "---" for i in range(len(self.headings))]
        lines = [" | ".join(map(markdown_cell, row)) for row in (self.headings, *self.texts())]
        lines.insert(1, " | ".join(rules))
        return "".join(f"| {line} |\n" for line in lines)

    def latex(self) -> str:
        """A LaTeX table that needs the package `booktabs`."""
        lines = []
        for row in (self.headings, *self.texts()):
            cells = (" ".join(printable(scrub(text)).split()).translate(LATEX) for text in row)
            lines.append(" & ".join(cells))
        places = "".join("r" if i in self.numeric else "l" for i in range(len(self.headings)))
        body = "".join(f"{line} \\\\\n" for line in lines[1:])
        return (
            f"\\begin{{tabular}}{{{places}}}\n\\toprule\n{lines[0]} \\\\\n\\midrule\n"
            f"{body}\\bottomrule\n\\end{{tabular}}\n"
        )

    def csv(self) -> str:
        """All columns with Unix line ends; floats in full precision, an empty cell for None."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(column.name for column in self.columns)
        writer.writerows(map(_plain, row) for row in self.rows)
        return out.getvalue()

    def terminal(self, width: int, title: str = "") -> Group:
        columns = [self.columns[i] for i in self.shown]
        heads = [column.short or column.heading or column.name for column in columns]
        text = [head for place, head in enumerate(heads) if place not in self.numeric]
        return table(heads, self.texts(), width, text=text, title=title)


def _plain(value: Any) -> Any:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, (list, tuple)):
        return " ".join(str(_plain(part)) for part in value)
    return scrub(value)


def markdown_cell(text: Any) -> str:
    """Text that is safe in a cell of a Markdown table."""
    cleaned = html.escape(" ".join(printable(scrub(str(text))).split()), quote=False)
    return "".join(f"\\{c}" if c in "|`*_[]\\" else c for c in cleaned)


def numeric(values: Iterable[Any]) -> bool:
    return all(type(value) in (int, float) for value in values)


def slug(text: str) -> str:
    return "".join(c if c.isalnum() and c.isascii() else "-" for c in text)


ELSEWHERE = {  # in the first lines of a run's report, or in its tables of evaluations
    *("state", "steps", "tokens", "parameters", "trainable", "network", "layout", "world"),
    *("best_eval_loss", "best_eval_step", "best_bits_per_byte", "best_measure", "best_score"),
    *("best_score_step", "train_tokens_per_s", "train_steps_per_s", "mfu", "runtime_s"),
    *("device_hours", "energy_kwh", "goodput", "starts"),
    *(name for name, measure in RUN.items() if measure.source.startswith("eval.")),
}
PLACE = ("run.dir", "run.base")
NAMING = ("preset", "run.name", "run.notes", "data.dir")  # always differ and explain nothing


def measure_column(name: str) -> Column:
    measure = of_result(name)
    return Column(name, measure.title, measure.kind, shown=measure.principal)


def results(view: RunView, brief: bool = False) -> Table:
    values = dict(view.values)
    if brief:
        values = {n: x for n, x in values.items() if n in RUN and n not in ELSEWHERE}
    rows = [(name, of_result(name).title, value) for name, value in values.items()]
    columns = [Column("name", shown=False), Column("measure", "Measure"), Column(view.label)]
    kinds = [of_result(name).kind for name in values]
    return Table("results", columns, rows, "Results", kinds=kinds)


def comparison(views: Sequence[RunView], rows: Sequence[SettingRow]) -> Table:
    """A row for each run: its name, the settings that differ, and every measure of any run."""
    differ = [s for s in rows if s.differs and s.key not in NAMING]
    present = dict.fromkeys(name for view in views for name in view.values)
    names = [n for n in RUN if n in present] + [n for n in present if n not in RUN]
    columns = [Column("run", "Run"), *(Column(s.key) for s in differ)]
    columns += map(measure_column, names)
    lines = [
        (view.label, *(s.values[i] for s in differ), *map(view.values.get, names))
        for i, view in enumerate(views)
    ]
    return Table("results", columns, lines, "Results")


def times(views: Sequence[RunView]) -> Table:
    """The wall time of each run by phase, over all its starts."""
    parts = [
        part for part in PHASES.values() if any(view.numbers.wall[part.name] for view in views)
    ]
    columns = [Column("run", "Run"), *(Column(x.name, x.words, x.kind) for x in parts)]
    rows = [(view.label, *(view.numbers.wall[part.name] for part in parts)) for view in views]
    return Table("time", columns, rows, "Where the time went")


def evaluations(view: RunView) -> list[Table]:
    """A table for each suite."""
    place = [Column("step", "Step", "count"), Column("epoch", "Epoch", "amount")]
    place += [Column("tokens", "Tokens", "count")]
    tables = []
    for suite, track in view.evals.items():
        columns = [column for column in place if track.has(column.name)]
        for name in sorted(track.columns, key=lambda name: name == "runtime_s"):
            if of_eval(name).role != "place" and track.has(name):
                columns.append(Column(name, of_eval(name).title, of_eval(name).kind))
        rows = list[list[Any]]()
        for i, line in enumerate(view.numbers.suites[suite]):
            numbers = [(column.name, float(track[column.name][i])) for column in columns]
            # a field that the line lacks is missing; NaN in the line is a score
            rows.append([x if key in line or math.isfinite(x) else None for key, x in numbers])
        name = f"evaluations-{slug(suite)}"
        tables.append(Table(name, columns, rows, f"Evaluations: {suite}"))
    return tables


class SettingRow(NamedTuple):
    """A setting and its value in each run."""

    key: str
    values: tuple[Any, ...]
    meaning: str
    differs: bool  # between the runs
    changed: bool  # in a run, from its preset


def all_settings(views: Sequence[RunView]) -> list[SettingRow]:
    """Every setting, but for the run's place: first if it differs between the runs, then if the
    preset has another value.
    """
    fields, rows = settings(), []
    bases = [base_settings(str(view.settings["preset"])) for view in views]
    for key in dict.fromkeys(key for view in views for key in view.settings if key not in PLACE):
        meaning = " ".join((fields[key].description or "").split()) if key in fields else ""
        values = tuple(view.settings.get(key) for view in views)
        differs = any(value != values[0] for value in values)
        changed = any(x != base.get(key) for x, base in zip(values, bases, strict=True))
        rows.append(SettingRow(key, values, meaning, differs, changed))
    return sorted(rows, key=lambda row: (not row.differs, not row.changed))


@cache
def base_settings(preset: str) -> Mapping[str, Any]:
    """The settings of a preset; the defaults for a recipe without one."""
    path = presets().get(preset)  # a path, because a run here may have the preset's name
    return (Recipe.load(path) if path else Recipe(preset=preset)).flat()


def base_of(views: Sequence[RunView]) -> str:
    """The settings that `SettingRow.changed` compares with, in a sentence."""
    names = {str(view.settings["preset"]) for view in views}
    if not names & {*presets()}:
        return "the defaults"
    return f"the preset {names.pop()}" if len(names) == 1 else "their presets"
