"""From a run to the tables that people fill by hand today. Pure: a view of a run in, rows out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from windlass.recipe import Recipe, settings
from windlass.recipe.durations import epochs_in
from windlass.report.text import csv_text, markdown_table, show
from windlass.report.view import STARTS, RunView, Track

Value = float | int | str | None

TRIVIAL = ("preset", "run.name", "run.dir", "run.notes", "data.dir")
"""Settings that tell runs apart without telling what is different about them."""

MANY_EVALUATIONS = 12
"""Up to so many evaluations stand in the results table, one a line; more have a table of their own only."""

MEASURES: dict[str, tuple[str, str]] = {
    "state": ("State", ""),
    "steps": ("Steps", "count"),
    "epochs": ("Epochs", "amount"),
    "tokens": ("Tokens", "count"),
    "samples": ("Samples", "count"),
    "parameters": ("Parameters", "count"),
    "world": ("Ranks", "count"),
    "train_loss": ("Final training loss", "loss"),
    "train_loss_tail": ("Training loss, mean of the last tenth", "loss"),
    "eval_loss": ("Final evaluation loss", "loss"),
    "eval_perplexity": ("Final perplexity", "loss"),
    "best_eval_loss": ("Best evaluation loss", "loss"),
    "best_eval_step": ("Step of the best evaluation", "count"),
    "train_samples_per_s": ("Training speed (samples/s)", "rate"),
    "train_tokens_per_s": ("Training speed (tokens/s)", "rate"),
    "train_steps_per_s": ("Training speed (steps/s)", "rate"),
    "eval_samples_per_s": ("Evaluation speed (samples/s)", "rate"),
    "steps_per_epoch": ("Steps per epoch", "amount"),
    "mem_alloc_mb": ("Memory allocated per rank, mean (MB)", "mb"),
    "mem_reserved_mb": ("Memory reserved per rank, mean (MB)", "mb"),
    "peak_mem_mb": ("Peak memory, fullest rank (MB)", "mb"),
    "rss_mb": ("Resident memory per rank, mean (MB)", "mb"),
    "util_pct": ("Device utilisation while training, mean (%)", "rate"),
    "util_std_pct": ("Device utilisation while training, deviation (%)", "rate"),
    "mfu": ("Model FLOPs utilisation", "share"),
    "goodput": ("Goodput", "share"),
    "runtime_s": ("Runtime", "duration"),
    "device_hours": ("Device-hours", "hours"),
    "starts": ("Starts", "count"),
}
"""Every measure of a run by its name in CSV: the label for people, and the kind of number."""


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


# ---------------------------------------------------------------- one run


def first(*values: Any) -> float | None:
    """The first that is a finite number."""
    for value in values:
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            return value
    return None


def started(view: RunView) -> Mapping[str, Any]:
    """The fields of the latest `started` or `resumed` event, later ones over earlier ones."""
    merged: dict[str, Any] = {}
    for line in view.events:
        if line.get("event") in STARTS:
            merged |= line
    return merged


def harmonic_mean(track: Track, name: str) -> float | None:
    """The mean rate over lines that each stand for equally much work; None where there is no line."""
    rates = track[name]
    rates = rates[np.isfinite(rates) & (rates > 0)]
    return float(len(rates) / np.sum(1 / rates)) if len(rates) else None


def tail_mean(track: Track, name: str, share: float = 0.1) -> float | None:
    """The mean over the lines of the run's last `share` of steps; NaN if one of them was no number."""
    if not len(track) or name not in track.columns:
        return None
    steps = track["step"]
    return float(np.mean(track[name][steps > steps[-1] * (1 - share)]))


def last_value(track: Track, name: str) -> float | None:
    """What the last line says, NaN included: a bad end is not hidden behind an earlier good value."""
    return float(track[name][-1]) if len(track) and name in track.columns else None


def rank_mean(view: RunView, name: str, training_only: bool = True) -> tuple[float | None, float | None]:
    """Mean and standard deviation of a device field over all samples of all ranks (in training, where so marked)."""
    parts = []
    for track in view.ranks:
        values = track[name]
        keep = np.isfinite(values) & ((track["training"] > 0) | (not training_only))
        parts.append(values[keep])
    values = np.concatenate(parts) if parts else np.array([])
    return (float(values.mean()), float(values.std())) if len(values) else (None, None)


def measures(view: RunView) -> dict[str, Value]:
    """Every measure of MEASURES that is known of the run, by its name; the summary's own numbers come first."""
    train, summary, loss = view.train, view.summary, view.evals.get("loss")
    begun = started(view)
    util, util_std = rank_mean(view, "util_pct")
    peaks = [float(np.nanmax(t["peak_alloc_mb"])) for t in view.ranks if t.has("peak_alloc_mb")]
    best = best_evaluation(view)
    epochs = train.last("epoch")
    found: dict[str, Value] = {
        "state": view.state,
        "steps": view.step,
        "epochs": epochs,
        "tokens": first(summary.get("tokens"), train.last("tokens")),
        "samples": first(summary.get("samples"), train.last("samples")),
        "parameters": first(summary.get("parameters"), begun.get("parameters")),
        "world": first(summary.get("world"), begun.get("world"), len(view.ranks) or None),
        "train_loss": last_value(train, "loss"),
        "train_loss_tail": tail_mean(train, "loss"),
        "eval_loss": last_value(loss, "loss") if loss else None,
        "eval_perplexity": last_value(loss, "perplexity") if loss else None,
        "best_eval_loss": best[1] if best else None,
        "best_eval_step": best[0] if best else None,
        "train_samples_per_s": first(summary.get("samples_per_s_mean"), harmonic_mean(train, "samples_per_s")),
        "train_tokens_per_s": first(summary.get("tokens_per_s_mean"), harmonic_mean(train, "tokens_per_s")),
        "train_steps_per_s": first(summary.get("steps_per_s_mean"), steps_per_second(train)),
        "eval_samples_per_s": harmonic_mean(loss, "samples_per_s") if loss else None,
        "steps_per_epoch": steps_per_epoch(begun, train),
        "mem_alloc_mb": first(summary.get("avg_mem_alloc_mb"), rank_mean(view, "mem_alloc_mb")[0]),
        "mem_reserved_mb": first(summary.get("avg_mem_reserved_mb"), rank_mean(view, "mem_reserved_mb")[0]),
        "peak_mem_mb": first(summary.get("peak_mem_mb"), max(peaks, default=None)),
        "rss_mb": first(summary.get("avg_rss_mb"), rank_mean(view, "rss_mb")[0]),
        "util_pct": first(summary.get("avg_gpu_util_pct"), summary.get("avg_cpu_util_pct"), util),
        "util_std_pct": first(summary.get("std_gpu_util_pct"), summary.get("std_cpu_util_pct"), util_std),
        "mfu": first(summary.get("mfu_mean"), summary.get("mfu"), train.mean("mfu")),
        "goodput": goodput_share(view),
        "runtime_s": first(view.wall.get("total"), view.hours * 3600 if view.hours else None),
        "device_hours": view.device_hours,
        "starts": 1 + len(view.seams),
    }
    for suite, track in view.evals.items():
        if suite != "loss":
            found |= {f"{suite}_{name}": last_value(track, name) for name in track.measures() if name not in SPEED}
    return {name: value for name, value in found.items() if value is not None}


SPEED = ("samples_per_s", "tokens_per_s", "runtime_s", "items", "examples", "perplexity", "batches")
"""Fields of an evaluation that are no score."""


def label(name: str) -> tuple[str, str]:
    """A measure's label and kind of number; a suite's own scores are named as they are."""
    return MEASURES.get(name, (name.replace("_", " "), "score"))


def steps_per_second(train: Track) -> float | None:
    """From the mean of `step_ms`."""
    mean = train.mean("step_ms")
    return 1000 / mean if mean else None


def steps_per_epoch(begun: Mapping[str, Any], train: Track) -> float | None:
    """From the sizes that the start wrote down, or else from the last line's step and epoch."""
    samples, batch = first(begun.get("samples_per_epoch")), first(begun.get("global_batch"))
    if samples and batch:
        return samples / batch
    epoch, step = train.last("epoch"), train.last("step")
    return step / epoch if epoch and step else None


PARTS = ("train", "data", "eval", "save", "sample", "compile", "startup", "lost")
"""The order in which parts of the wall time are told."""


def goodput(view: RunView) -> dict[str, float]:
    """Seconds of wall time over all starts by what they were spent on, without those that took none."""
    order = [*(name for name in PARTS if name in view.wall), *(n for n in view.wall if n not in PARTS and n != "total")]
    return {name: view.wall[name] for name in order if view.wall[name] > 0}


def goodput_share(view: RunView) -> float | None:
    """The share of wall time spent in training steps that count."""
    return view.wall["train"] / view.wall["total"] if view.wall else None


def best_evaluation(view: RunView) -> tuple[int, float] | None:
    """Step and value of the lowest evaluation loss; None where there is none."""
    track = view.evals.get("loss")
    if track is None or not track.has("loss"):
        return None
    place = int(np.nanargmin(np.where(np.isfinite(track["loss"]), track["loss"], np.nan)))
    return int(track["step"][place]), float(track["loss"][place])


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
    "state", "steps", "tokens", "train_loss", "eval_loss", "best_eval_loss", "train_tokens_per_s", "mfu", "peak_mem_mb",
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
