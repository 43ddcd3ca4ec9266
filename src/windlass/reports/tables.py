"""The measures of a run and the tables of a report: raw values, with how each is shown to people. Pure.

Speeds are work divided by time, over the whole run. What the ranks measured of their devices comes from the `summary`
line where there is one, else from the samples in `devices/`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from windlass.checkpoint.retention import LOSS
from windlass.model.size import describe_network, trainable
from windlass.recipe import Recipe, settings
from windlass.recipe.units import epochs_in
from windlass.reports.text import csv_text, latex_table, markdown_table, show
from windlass.reports.view import RunView, Track

Value = float | int | str | None

MEASURES: dict[str, tuple[str, str, Callable[[RunView], Value]]] = {
    "state": ("State", "", lambda v: v.state),
    "steps": ("Steps", "count", lambda v: v.step),
    "epochs": ("Epochs", "amount", lambda v: first(last_value(v.train, "epoch"))),
    "tokens": (
        "Tokens",
        "count",
        lambda v: first(v.summary.get("tokens"), last_value(v.train, "tokens")),
    ),
    "label_tokens": (
        "Tokens that count in the loss",
        "count",
        lambda v: first(v.summary.get("label_tokens"), last_value(v.train, "label_tokens")),
    ),
    "samples": (
        "Samples",
        "count",
        lambda v: first(v.summary.get("samples"), last_value(v.train, "samples")),
    ),
    "parameters": (
        "Parameters",
        "count",
        lambda v: first(v.summary.get("parameters"), v.start.get("parameters")),
    ),
    "trainable": ("Trainable parameters", "", lambda v: trained_part(v.start)),
    "network": (
        "Network",
        "",
        lambda v: describe_network(v.start["network"]) if v.start.get("network") else None,
    ),
    "world": (
        "Ranks",
        "count",
        lambda v: first(v.summary.get("world"), v.start.get("world"), len(v.ranks) or None),
    ),
    "train_loss": ("Final training loss", "loss", lambda v: last_value(v.train, "loss")),
    "train_loss_mean": (
        "Training loss, mean of all steps of the run",
        "loss",
        lambda v: first(v.summary.get("train_loss_mean")),
    ),
    "eval_loss": (
        "Final evaluation loss",
        "loss",
        lambda v: last_value(v.evals.get("loss"), "loss"),
    ),
    "full_eval_loss": (
        "Final evaluation loss, all validation data",
        "loss",
        lambda v: last_value(v.evals.get("loss"), "full_loss"),
    ),
    "eval_perplexity": (
        "Final perplexity",
        "loss",
        lambda v: last_value(v.evals.get("loss"), "perplexity"),
    ),
    "best_eval_loss": ("Best evaluation loss", "loss", lambda v: best(v, LOSS, LOSS)[0]),
    "best_eval_step": ("Step of the best evaluation", "count", lambda v: best(v, LOSS, LOSS)[1]),
    "eval_bits_per_byte": (
        "Final bits per byte",
        "loss",
        lambda v: last_value(v.evals.get(LOSS), "bits_per_byte"),
    ),
    "best_bits_per_byte": (
        "Best bits per byte",
        "loss",
        lambda v: best(v, LOSS, "bits_per_byte")[0],
    ),
    "best_measure": ("Best checkpoint by", "", lambda v: best_score(v)[0]),
    "best_score": ("Best score of that measure", "score", lambda v: best_score(v)[1]),
    "best_score_step": ("Step of that score", "count", lambda v: best_score(v)[2]),
    "train_samples_per_s": (
        "Training speed (samples/s)",
        "rate",
        lambda v: getattr(v.speed, "samples_per_s", 0) or None,
    ),
    "samples_per_s_whole_run": (
        "Training speed of the whole run, evaluations and saves included (samples/s)",
        "rate",
        lambda v: first(v.summary.get("samples_per_s_whole_run")),
    ),
    "train_tokens_per_s": (
        "Training speed (tokens/s)",
        "rate",
        lambda v: getattr(v.speed, "tokens_per_s", None),
    ),
    "train_steps_per_s": (
        "Training speed (steps/s)",
        "rate",
        lambda v: getattr(v.speed, "steps_per_s", None),
    ),
    "eval_samples_per_s": (
        "Evaluation speed (samples/s)",
        "rate",
        lambda v: v.evaluation.get("eval_samples_per_s"),
    ),
    "steps_per_epoch": (
        "Steps per epoch",
        "amount",
        lambda v: (
            v.start["samples_per_epoch"] / v.start["global_batch"]
            if "samples_per_epoch" in v.start
            else None
        ),
    ),
    "mem_alloc_mb": (
        "Memory allocated per rank, mean (MB)",
        "mb",
        lambda v: on_ranks(v, "mem_alloc_mb"),
    ),
    "mem_reserved_mb": (
        "Memory reserved per rank, mean (MB)",
        "mb",
        lambda v: on_ranks(v, "mem_reserved_mb"),
    ),
    "driver_mem_mb": (
        "Memory in use by the driver's count, per device, mean (MB)",
        "mb",
        lambda v: on_ranks(v, "mem_used_mb"),
    ),
    "peak_mem_mb": (
        "Peak memory, fullest rank (MB)",
        "mb",
        lambda v: first(
            v.summary.get("peak_mem_mb"),
            max(
                (float(np.nanmax(t["peak_alloc_mb"])) for t in v.ranks if t.has("peak_alloc_mb")),
                default=None,
            ),
        ),
    ),
    "device_mem_mb": (
        "Memory of the device (MB)",
        "mb",
        lambda v: first((v.outcome.device_bytes or math.nan) / 1e6),
    ),
    "rss_mb": ("Resident memory per rank, mean (MB)", "mb", lambda v: on_ranks(v, "rss_mb")),
    "util_pct": (
        "Device utilisation while training, mean (%)",
        "rate",
        lambda v: on_ranks(v, "util_pct"),
    ),
    "util_std_pct": (
        "Device utilisation while training, deviation (%)",
        "rate",
        lambda v: on_ranks(v, "util_pct", "std"),
    ),
    "mfu": ("Model FLOPs utilisation", "share", lambda v: getattr(v.speed, "mfu", None)),
    "goodput": (
        "Goodput",
        "share",
        lambda v: v.wall["train"] / v.wall["total"] if v.wall["total"] else None,
    ),
    "runtime_s": ("Runtime", "duration", lambda v: v.wall["total"] or None),
    "startup_s": (
        "Start-up (s): from the process's start to its first evaluation or step",
        "rate",
        lambda v: next((e["startup_s"] for e in v.events if e["event"] == "first_step"), None),
    ),
    "predicted_s": (
        "Time to finish, predicted after 5 % of the steps",
        "duration",
        lambda v: v.outcome.predicted_seconds,
    ),
    "actual_s": (
        "Time it took, without repeated steps and restarts",
        "duration",
        lambda v: v.outcome.actual_seconds,
    ),
    "device_hours": ("Device-hours", "hours", lambda v: v.device_hours),
    "starts": ("Starts", "count", lambda v: 1 + len(v.restarts)),
    "ended_early": (
        "Ended early",
        "",
        lambda v: next(
            (e.get("reason") for e in reversed(v.events) if e["event"] == "finished"), None
        ),
    ),
    "changed": ("Settings changed", "", lambda v: "; ".join(changed_settings(v)) or None),
}
"""Every measure of a run by its name in CSV: the label for people, the kind of number (see `text.show`), its value."""

EPOCH_LOSS = "eval_loss_epoch_"  # and the number of the epoch: see `losses_by_epoch`

PRINCIPAL = (
    "state",
    "steps",
    "tokens",
    "train_loss",
    "eval_loss",
    "best_eval_loss",
    "best_bits_per_byte",
    "best_measure",
    "best_score",
    "train_tokens_per_s",
    "mfu",
    "peak_mem_mb",
    "util_pct",
    "goodput",
    "runtime_s",
    "device_hours",
)
"""The measures that a table of several runs shows on the page; its CSV has all of them."""

# fields of an evaluation that are no score
NO_SCORES = (
    "samples_per_s",
    "tokens_per_s",
    "runtime_s",
    "items",
    "examples",
    "perplexity",
    "batches",
)

PARTS = {
    "train": ("training steps", 0),
    "data": ("waiting for data", 5),
    "eval": ("evaluation", 1),
    "save": ("saving", 2),
    "sample": ("generating samples", 7),
    "compile": ("compiling", 3),
    "startup": ("start-up", 4),
    "lost": ("steps done again after a failure", 6),
}
"""What wall time is spent on, in the order it is shown: the name for people, and a place in the palette."""

MANY_EVALUATIONS = 12  # have a line each in the results table; more have a table of their own only
NAMING = (
    "preset",
    "run.name",
    "run.dir",
    "run.notes",
    "data.dir",
)  # always tell runs apart, and explain nothing


def measures(view: RunView) -> dict[str, Value]:
    """What was measured of the run, by name: those of MEASURES, and `SUITE_SCORE` of other suites."""
    values = {name: value(view) for name, (_, _, value) in MEASURES.items()}
    values |= {f"{EPOCH_LOSS}{epoch}": loss for epoch, loss in losses_by_epoch(view).items()}
    for suite, track in view.evals.items():
        if suite != LOSS:
            values |= {
                f"{suite}_{x}": last_value(track, x) for x in track.measures() if x not in NO_SCORES
            }
    return {name: value for name, value in values.items() if value is not None}


def losses_by_epoch(view: RunView) -> dict[int, float]:
    """The evaluation loss at the end of each whole epoch: of the first step at or past it, or of a run's last step that is
    less than a step before it."""
    track, losses = view.evals.get(LOSS), dict[int, float]()
    steps = MEASURES["steps_per_epoch"][2](view)
    if track is None or not isinstance(steps, float):
        return losses
    for epoch, loss in zip(track["epoch"].tolist(), track["loss"].tolist(), strict=True):
        if epoch >= 1 and epoch % 1 < 1 / steps:
            losses.setdefault(int(epoch), loss)
    if len(track) and -epoch % 1 < 1 / steps:
        losses.setdefault(math.ceil(epoch), loss)
    return losses


def best(view: RunView, suite: str, column: str) -> tuple[float | None, int | None]:
    """The best value of an evaluation, and its step: the lowest of the loss, or the highest of anything else.

    Where a resume changed what is evaluated on, only the evaluations since then compare.
    """
    track = view.evals.get(suite)
    if track is None:
        return None, None
    finite = np.where(np.isfinite(track[column]) & (track["comparable"] > 0), track[column], np.nan)
    if np.isnan(finite).all():
        return None, None
    place = int(np.nanargmin(finite) if suite == LOSS else np.nanargmax(finite))
    return float(finite[place]), int(track["step"][place])


def best_score(view: RunView) -> tuple[str | None, float | None, int | None]:
    """`checkpoint.best`, its best value and the step of it, where it names a score and not the loss."""
    measure = str(view.settings["checkpoint.best"])
    suite, _, name = measure.partition(".")
    score, step = best(view, suite, name)
    return None if score is None else measure, score, step


def trained_part(start: Mapping[str, Any]) -> str | None:
    """What is trained of a model where a part of it is frozen."""
    total, trained = (start.get(name) for name in ("parameters", "trained"))
    return trainable(trained, total) if total and trained and trained != total else None


def changed_settings(view: RunView) -> list[str]:
    """What resumes changed, and after which step."""
    pairs = (
        (x["step"], key, old, new)
        for x in view.changed
        for key, (old, new) in x["settings"].items()
    )
    return [
        f"{key} {show(old)} -> {show(new)} after step {step:,}" for step, key, old, new in pairs
    ]


def first(*values: Any) -> float | None:
    """The first that is a finite number."""
    return next((x for x in values if isinstance(x, (int, float)) and math.isfinite(x)), None)


def last_value(track: Track | None, name: str) -> float | None:
    """The value in the last line, NaN included: a bad end is not hidden behind an earlier good value."""
    return (
        float(track[name][-1])
        if track is not None and len(track) and name in track.columns
        else None
    )


def on_ranks(view: RunView, name: str, statistic: str = "avg") -> float | None:
    """Mean or deviation (`std`) of a device field over the samples of all ranks that were taken in training steps."""
    names = ("gpu_util_pct", "cpu_util_pct") if name == "util_pct" else (name,)
    parts = [
        track[name][np.isfinite(track[name]) & (track["training"] > 0)] for track in view.ranks
    ]
    values = np.concatenate([[], *parts])
    measured = (values.mean() if statistic == "avg" else values.std()) if len(values) else None
    return first(*(view.summary.get(f"{statistic}_{name}") for name in names), measured)


class Column(NamedTuple):
    """A column: its name in CSV, its heading, and the kind of number (see `text.show`)."""

    name: str
    heading: str = ""
    kind: str = ""


@dataclass(frozen=True)
class Table:
    """Rows of raw values under columns."""

    columns: Sequence[Column]
    rows: list[tuple[Any, ...]]

    @property
    def headings(self) -> list[str]:
        return [column.heading or column.name for column in self.columns]

    @property
    def numeric(self) -> list[int]:
        """The columns that hold nothing but numbers."""
        cells = [
            [row[i] for row in self.rows if row[i] is not None] for i in range(len(self.columns))
        ]
        return [
            i
            for i, column in enumerate(cells)
            if column and all(type(cell) in (int, float) for cell in column)
        ]

    def shown(self) -> list[list[str]]:
        return [
            [show(cell, c.kind) for cell, c in zip(row, self.columns, strict=True)]
            for row in self.rows
        ]

    def markdown(self) -> str:
        return markdown_table(self.headings, self.shown(), self.numeric)

    def latex(self) -> str:
        return latex_table(self.headings, self.shown(), self.numeric)

    def csv(self) -> str:
        return csv_text([column.name for column in self.columns], self.rows)


def results(view: RunView, for_people: bool = False) -> Table:
    """A row a measure, with the loss of each evaluation where these are few; `for_people`: as text, without CSV names."""
    track, each = view.evals.get("loss"), []
    if track is not None and 1 < len(track) <= MANY_EVALUATIONS:
        each = list(
            zip(
                evaluation_names(track, view.settings.get("eval.every")), track["loss"], strict=True
            )
        )
    rows: list[tuple[Any, ...]] = []
    for name, value in measures(view).items():
        if each and name.startswith(EPOCH_LOSS):
            continue  # it is among them
        text, kind = label(name)
        rows.append((name, text, value, kind))
        if name == "eval_loss":
            rows += [
                (f"{name} {what}", f"{text}, {what}", float(loss), kind) for what, loss in each
            ]
    if for_people:
        return Table(
            [Column("Measure"), Column(view.label)], [(row[1], show(*row[2:])) for row in rows]
        )
    return Table([Column("name"), Column("measure"), Column(view.label)], [row[:3] for row in rows])


def comparison(views: Sequence[RunView], only: Sequence[str] = ()) -> Table:
    """A row a run: its name, the settings that differ, then every measure that a run has (or those of `only`)."""
    differ = [s for s in all_settings(views) if s.differs and s.key not in NAMING]
    values = [measures(view) for view in views]
    every = dict.fromkeys(name for one in values for name in one)
    wanted = [name for name in MEASURES if name in every and (not only or name in only)]
    names = [*wanted, *(name for name in every if name not in MEASURES)]
    rows = []
    for i, one in enumerate(views):
        rows.append(
            (one.label, *(s.values[i] for s in differ), *(values[i].get(name) for name in names))
        )
    columns = [*(Column(s.key) for s in differ), *(Column(name, *label(name)) for name in names)]
    return Table([Column("run", "Run"), *columns], rows)


def label(name: str) -> tuple[str, str]:
    """A measure's label and kind of number; a suite's own scores are named as they are."""
    if name.startswith(EPOCH_LOSS):
        return f"Evaluation loss, epoch {name.removeprefix(EPOCH_LOSS)}", "loss"
    return MEASURES[name][:2] if name in MEASURES else (name.replace("_", " "), "score")


def evaluations(view: RunView) -> dict[str, Table]:
    """A table of every evaluation, by suite."""
    place = (
        Column("step", "Step", "count"),
        Column("epoch", "Epoch", "amount"),
        Column("tokens", "Tokens", "count"),
    )
    special = {
        "samples_per_s": ("Samples/s", "rate"),
        "tokens_per_s": ("Tokens/s", "rate"),
        "runtime_s": ("Time", "duration"),
        "items": ("Items", "count"),
        "examples": ("Examples", "count"),
    }
    tables = {}
    for suite, track in view.evals.items():
        names = [name for name in (*track.measures(), "runtime_s") if track.has(name)]
        measured = [
            Column(x, *special.get(x, (x.replace("_", " ").capitalize(), "loss"))) for x in names
        ]
        columns = [*(column for column in place if track.has(column.name)), *measured]
        titles = evaluation_names(track, view.settings.get("eval.every"))
        rows = [
            (title, *(float(track[c.name][i]) for c in columns)) for i, title in enumerate(titles)
        ]
        tables[suite] = Table([Column("evaluation", "Evaluation"), *columns], rows)
    return tables


def evaluation_names(track: Track, every: Any) -> list[str]:
    """What to call each evaluation: `epoch 2` where `eval.every` is given in epochs, else `step 250`."""
    period = float(epochs_in(every)) if isinstance(every, str) else 0.0
    names = []
    for step, epoch in zip(track["step"], track["epoch"], strict=True):
        nearest = round(epoch / period) * period if period and math.isfinite(epoch) else 0.0
        if step == 0:
            names.append("before training")
        elif nearest and 0 <= epoch - nearest <= epoch / step * (
            1 + 1e-6
        ):  # the first step at or past the epoch
            names.append(f"epoch {nearest:g}")
        else:
            names.append(f"step {step:,.0f}")
    return names


def curves(view: RunView) -> Table:
    """The `train` lines in full precision: what the charts are drawn from."""
    names = [
        "step",
        *(name for name in view.train.columns if name not in ("step", "hours")),
        "hours",
    ]
    rows = list(zip(*(view.train[name].tolist() for name in names), strict=True))
    return Table([Column(name) for name in names], rows)


def stacked(parts: Sequence[tuple[tuple[str, ...], Table]], names: Iterable[str]) -> Table:
    """Tables under each other, with what each is of in columns `names` in front."""
    columns = {column.name: column for _, table in parts for column in table.columns}
    rows = []
    for what, table in parts:
        own = [column.name for column in table.columns]
        rows += [(*what, *map(dict(zip(own, row, strict=True)).get, columns)) for row in table.rows]
    return Table([*(Column(name) for name in names), *columns.values()], rows)


class SettingRow(NamedTuple):
    """A setting and its value in each run."""

    key: str
    values: tuple[Any, ...]
    meaning: str
    differs: bool  # between the runs
    changed: bool  # from the default, in a run


def all_settings(views: Sequence[RunView]) -> list[SettingRow]:
    """Every setting: those that differ between the runs, then those changed from the default, then the rest."""
    defaults, fields = Recipe(preset="custom").flat(), settings()
    rows = []
    for key in dict.fromkeys(key for view in views for key in view.settings):
        meaning = " ".join((fields[key].description or "").split()) if key in fields else ""
        values = tuple(view.settings.get(key) for view in views)
        differs = any(value != values[0] for value in values)
        rows.append(
            SettingRow(
                key, values, meaning, differs, any(value != defaults.get(key) for value in values)
            )
        )
    return sorted(rows, key=lambda row: (not row.differs, not row.changed))


def settings_table(views: Sequence[RunView], rows: Sequence[SettingRow]) -> Table:
    """A row a setting, a column a run."""
    columns = [Column("setting", "Setting"), *(Column(view.label) for view in views)]
    return Table(columns, [(row.key, *row.values) for row in rows])
