"""The tables of runs: results, evaluations, curves and settings. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from windlass.checkpoint.retention import LOSS
from windlass.recipe import Recipe, settings
from windlass.reports.table import Column, Table
from windlass.reports.tracks import Track
from windlass.reports.view import EPOCH_LOSS, RunView, evaluation_names

MEASURES: dict[str, tuple[str, str]] = {
    "state": ("State", ""),
    "steps": ("Steps", "count"),
    "epochs": ("Epochs", "amount"),
    "tokens": ("Tokens", "count"),
    "label_tokens": ("Tokens that count in the loss", "count"),
    "samples": ("Samples", "count"),
    "parameters": ("Parameters", "count"),
    "trainable": ("Trainable parameters", ""),
    "network": ("Network", ""),
    "world": ("Ranks", "count"),
    "train_loss": ("Final training loss", "loss"),
    "train_loss_mean": ("Training loss, mean of all steps of the run", "loss"),
    "eval_loss": ("Final evaluation loss", "loss"),
    "full_eval_loss": ("Final evaluation loss, all validation data", "loss"),
    "eval_perplexity": ("Final perplexity", "loss"),
    "best_eval_loss": ("Best evaluation loss", "loss"),
    "best_eval_step": ("Step of the best evaluation", "count"),
    "eval_bits_per_byte": ("Final bits per byte", "loss"),
    "best_bits_per_byte": ("Best bits per byte", "loss"),
    "best_measure": ("Best checkpoint by", ""),
    "best_score": ("Best score of that measure", "score"),
    "best_score_step": ("Step of that score", "count"),
    "train_samples_per_s": ("Training speed (samples/s)", "rate"),
    "samples_per_s_whole_run": (
        "Training speed of the whole run, evaluations and saves included (samples/s)",
        "rate",
    ),
    "train_tokens_per_s": ("Training speed (tokens/s)", "rate"),
    "train_steps_per_s": ("Training speed (steps/s)", "rate"),
    "eval_samples_per_s": ("Evaluation speed (samples/s)", "rate"),
    "steps_per_epoch": ("Steps per epoch", "amount"),
    "mem_alloc_mb": ("Memory allocated per rank, mean (MB)", "mb"),
    "mem_reserved_mb": ("Memory reserved per rank, mean (MB)", "mb"),
    "driver_mem_mb": ("Memory in use by the driver's count, per device, mean (MB)", "mb"),
    "peak_mem_mb": ("Peak memory, fullest rank (MB)", "mb"),
    "device_mem_mb": ("Memory of the device (MB)", "mb"),
    "rss_mb": ("Resident memory per rank, mean (MB)", "mb"),
    "util_pct": ("Device utilisation while training, mean (%)", "rate"),
    "util_std_pct": ("Device utilisation while training, deviation (%)", "rate"),
    "mfu": ("Model FLOPs utilisation", "share"),
    "goodput": ("Goodput", "share"),
    "runtime_s": ("Runtime", "duration"),
    "startup_s": ("Start-up (s): from the process's start to its first evaluation or step", "rate"),
    "predicted_s": ("Time to finish, predicted after 5 % of the steps", "duration"),
    "actual_s": ("Time it took, without repeated steps and restarts", "duration"),
    "device_hours": ("Device-hours", "hours"),
    "starts": ("Starts", "count"),
    "ended_early": ("Ended early", ""),
    "changed": ("Settings changed", ""),
}
"""Every measure of a run by its name in CSV: the heading, and the kind of number."""

PRINCIPAL = frozenset(
    [
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
    ]
)
"""The measures that people see in a table of several runs; its CSV has all of them."""

MANY_EVALUATIONS = 12  # have a table of their own only; fewer have a line each among the results
NAMING = ("preset", "run.name", "run.dir", "run.notes", "data.dir")
"""Settings that always differ between runs, and explain nothing."""


def label(name: str) -> tuple[str, str]:
    """A measure's heading and kind of number; other suites' scores are headed by their names."""
    if name.startswith(EPOCH_LOSS):
        return f"Evaluation loss, epoch {name.removeprefix(EPOCH_LOSS)}", "loss"
    return MEASURES.get(name, (name.replace("_", " "), "score"))


def measure_column(name: str, shown: bool = True) -> Column:
    """The column of a measure."""
    return Column(name, *label(name), shown=shown)


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
        text, kind = label(name)
        rows.append((name, text, value))
        if name == "eval_loss":
            rows += [(f"{name} {what}", f"{text}, {what}", loss) for what, loss in each]
        kinds += [kind] * (len(rows) - len(kinds))
    columns = [Column("name", shown=False), Column("measure", "Measure"), Column(view.label)]
    return Table("results", columns, rows, "Results", kinds=kinds)


def comparison(views: Sequence[RunView], rows: Sequence[SettingRow]) -> Table:
    """A row for each run: its name, the settings that differ, and every measure of any run."""
    differ = [s for s in rows if s.differs and s.key not in NAMING]
    every = dict.fromkeys(name for view in views for name in view.values)
    names = [n for n in MEASURES if n in every] + [n for n in every if n not in MEASURES]
    columns = [Column("run", "Run"), *(Column(s.key) for s in differ)]
    columns += [measure_column(n, n in PRINCIPAL or n not in MEASURES) for n in names]
    lines = [
        (v.label, *(s.values[i] for s in differ), *map(v.values.get, names))
        for i, v in enumerate(views)
    ]
    return Table("results", columns, lines, "Results")


def evaluations(view: RunView) -> dict[str, Table]:
    """Every evaluation, in a table for each suite."""
    place = [Column("step", "Step", "count"), Column("epoch", "Epoch", "amount")]
    place += [Column("tokens", "Tokens", "count")]
    special = {
        "samples_per_s": ("Samples/s", "rate"),
        "tokens_per_s": ("Tokens/s", "rate"),
        "runtime_s": ("Time", "duration"),
        "items": ("Items", "count"),
        "examples": ("Examples", "count"),
    }
    tables = {}
    for suite, track in view.evals.items():
        columns = [column for column in place if track.has(column.name)]
        for name in (*track.measures(), *(["runtime_s"] if track.has("runtime_s") else [])):
            heading = (name.replace("_", " ").capitalize(), "loss")
            columns.append(Column(name, *special.get(name, heading)))
        names = evaluation_names(track, view.settings.get("eval.every"))
        numbers = zip(*(track[column.name].tolist() for column in columns), strict=True)
        rows = [(name, *row) for name, row in zip(names, numbers, strict=True)]
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
        differs = any(value != values[0] for value in values)
        changed = any(value != defaults.get(key) for value in values)
        rows.append(SettingRow(key, values, meaning, differs, changed))
    return sorted(rows, key=lambda row: (not row.differs, not row.changed))


def settings_table(views: Sequence[RunView], rows: Sequence[SettingRow]) -> Table:
    """A row for each setting, a column for each run."""
    columns = [Column("setting", "Setting"), *(Column(view.label) for view in views)]
    return Table("settings", columns, [(row.key, *row.values) for row in rows], "Settings")
