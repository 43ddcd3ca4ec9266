"""The tables that people fill by hand today, of one run or several. Pure: views of runs in, rows out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from windlass.recipe import Recipe, settings
from windlass.recipe.units import epochs_in
from windlass.reports.measures import MEASURES, Value, label, measures
from windlass.reports.text import csv_text, markdown_table, show
from windlass.reports.view import RunView, Track

TRIVIAL = ("preset", "run.name", "run.dir", "run.notes", "data.dir")
"""Settings that tell runs apart without telling what is different about them."""

MANY_EVALUATIONS = 12
"""Up to so many evaluations stand in the results table, one a line; more have a table of their own only."""


@dataclass(frozen=True)
class Table:
    """Rows of raw values under named columns, with each column's label and kind of number for people."""

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    labels: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()

    def shown(self) -> list[list[str]]:
        """The cells as people read them."""
        kinds = self.kinds or ("",) * len(self.columns)
        return [[show(cell, kind) for cell, kind in zip(row, kinds, strict=True)] for row in self.rows]

    @property
    def heads(self) -> tuple[str, ...]:
        """The columns' labels."""
        return self.labels or self.columns

    @property
    def numeric(self) -> list[int]:
        """The columns that hold numbers."""
        found = []
        for i in range(len(self.columns)):
            cells = [row[i] for row in self.rows if row[i] is not None]
            if cells and all(isinstance(c, (int, float)) and not isinstance(c, bool) for c in cells):
                found.append(i)
        return found

    def markdown(self) -> str:
        """As a Markdown table."""
        return markdown_table(self.heads, self.shown(), self.numeric)

    def csv(self) -> str:
        """As CSV, in full precision."""
        return csv_text(self.columns, self.rows)


def evaluation_names(track: Track, every: Any, steps: int | None = None) -> list[str]:
    """What to call each evaluation: `epoch 2` where evaluations follow the epochs, else `step 250`."""
    period = float(epochs_in(every)) if isinstance(every, str) else 0.0
    names = []
    for step, epoch in zip(track["step"], track["epoch"], strict=True):
        nearest = round(epoch / period) * period if period and math.isfinite(epoch) else 0.0
        per_step = epoch / step if step else 0.0
        if step == 0:
            names.append("before training")
        elif nearest and 0 <= epoch - nearest <= per_step * (1 + 1e-6):
            names.append(f"epoch {nearest:g}")
        else:
            names.append(f"step {step:,.0f}")
    return names


def evaluations(view: RunView) -> list[tuple[Table, str]]:
    """A table of every evaluation of each suite, with the suite's name."""
    tables = []
    for suite, track in view.evals.items():
        names = [n for n in (*track.measures(), "runtime_s") if track.has(n)]
        rows = []
        for i, what in enumerate(evaluation_names(track, view.settings.get("eval.every"))):
            numbers = [_plain(track[n][i]) for n in names]
            rows.append((what, int(track["step"][i]), _plain(track["epoch"][i]), _plain(track["tokens"][i]), *numbers))
        kinds = ["count", "amount", "count", *("duration" if n == "runtime_s" else _kind(n) for n in names)]
        columns = ("evaluation", "step", "epoch", "tokens", *names)
        heads = (
            "Evaluation",
            "Step",
            "Epoch",
            "Tokens",
            *(HEADS.get(n, n.replace("_", " ").capitalize()) for n in names),
        )
        tables.append((Table(columns, rows, heads, ("", *kinds)), suite))
    return tables


HEADS = {"samples_per_s": "Samples/s", "tokens_per_s": "Tokens/s", "runtime_s": "Time"}


def _kind(name: str) -> str:
    return "rate" if name.endswith("_per_s") else "count" if name in ("items", "examples", "batches") else "loss"


def _plain(value: float) -> float | int | None:
    """A float of a column as a value of a table: NaN is what was never written."""
    number = float(value)
    if math.isnan(number):
        return None
    return int(number) if number.is_integer() and abs(number) < 2**53 else number


def results(views: Sequence[RunView], each_evaluation: bool = True) -> Table:
    """The results table: a row a measure, a column a run; with the evaluation loss of each epoch or evaluation."""
    found = [measures(view) for view in views]
    each = [_each_evaluation(view) if each_evaluation else {} for view in views]
    rows: list[tuple[Any, ...]] = []
    for name in in_order(found):
        rows.append((name, *label(name), *(one.get(name) for one in found)))
        if name == "eval_loss":
            kind = label(name)[1]
            places = sorted({place for one in each for place in one})
            rows += [
                (f"eval_loss {p[1]}", f"Evaluation loss, {p[1]}", kind, *(one.get(p) for one in each)) for p in places
            ]
    return Table(("name", "measure", "kind", *(view.label for view in views)), rows)


def results_shown(views: Sequence[RunView], each_evaluation: bool = True) -> Table:
    """The results table as people read it: label, then each run's value as text."""
    rows = [(row[1], *(show(value, row[2]) for value in row[3:])) for row in results(views, each_evaluation).rows]
    return Table(("Measure", *(view.label for view in views)), rows)


def in_order(found: Sequence[Mapping[str, Value]]) -> list[str]:
    """The names of all measures that any of the runs has, those of MEASURES first."""
    names = [name for name in MEASURES if any(name in one for one in found)]
    return names + list(dict.fromkeys(name for one in found for name in one if name not in MEASURES))


def _each_evaluation(view: RunView) -> dict[tuple[int, str], float]:
    track = view.evals.get("loss")
    if track is None or not 1 < len(track) <= MANY_EVALUATIONS:
        return {}
    names = evaluation_names(track, view.settings.get("eval.every"))
    return {(int(step), n): float(v) for step, n, v in zip(track["step"], names, track["loss"], strict=True)}


# ---------------------------------------------------------------- several runs


@dataclass(frozen=True)
class Setting:
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


def all_settings(views: Sequence[RunView]) -> list[Setting]:
    """Every setting: those that differ between the runs, then those changed from the default, then the rest."""
    defaults, fields = Recipe(preset="custom").flat(), settings()
    keys = list(dict.fromkeys(key for view in views for key in view.settings))
    found = []
    for key in keys:
        meaning = " ".join((fields[key].description or "").split()) if key in fields else ""
        found.append(Setting(key, tuple(view.settings.get(key) for view in views), defaults.get(key), meaning))
    return sorted(found, key=lambda s: (not s.differs, not s.changed))


def differing(views: Sequence[RunView]) -> list[Setting]:
    """The settings in which the runs differ, without those that only name them."""
    return [s for s in all_settings(views) if s.differs and s.key not in TRIVIAL]


PRINCIPAL = (
    "state", "steps", "tokens", "train_loss", "eval_loss", "best_eval_loss", "best_measure", "best_score", "train_tokens_per_s", "mfu", "peak_mem_mb",
    "util_pct", "goodput", "runtime_s", "device_hours",
)  # fmt: skip
"""The measures that a table of many runs shows to people; its CSV has all of them."""


def comparison(views: Sequence[RunView], only: Sequence[str] = ()) -> Table:
    """A row a run: its name, the settings that differ, then every measure that any of the runs has (or those of `only`)."""
    apart = differing(views)
    found = [measures(view) for view in views]
    names = [name for name in in_order(found) if not only or name in only or name not in MEASURES]
    rows = [
        (view.label, *(s.values[i] for s in apart), *(found[i].get(name) for name in names))
        for i, view in enumerate(views)
    ]
    shown = [label(name) for name in names]
    return Table(
        ("run", *(s.key for s in apart), *names),
        rows,
        ("Run", *(s.key for s in apart), *(text for text, _ in shown)),
        ("", *("" for _ in apart), *(kind for _, kind in shown)),
    )


def settings_table(views: Sequence[RunView]) -> Table:
    """A row a setting, those that differ first, a column a run."""
    rows = [(s.key, *s.values) for s in all_settings(views)]
    return Table(("setting", *(view.label for view in views)), rows)


def curves(view: RunView) -> Table:
    """The train lines as a table, in full precision: what the plots are drawn from."""
    names = ["step", *(name for name in view.train.columns if name not in ("step", "hours")), "hours"]
    columns = [view.train[name] for name in names]
    return Table(tuple(names), [tuple(_plain(v) for v in row) for row in zip(*columns, strict=True)])
