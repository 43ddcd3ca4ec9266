"""Every number of a run that a report shows, each by one name; the CSV tables have them under these names. Pure.

Speeds are work divided by time, over the whole run. What the ranks measured of their devices comes from the `summary`
line where there is one, else from the samples in `devices/`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from windlass.checkpoint.retention import LOSS
from windlass.reports.view import STARTS, RunView, Track

Value = float | int | str | None

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
    "best_measure": ("Best checkpoint by", ""),
    "best_score": ("Best score of that measure", "score"),
    "best_score_step": ("Step of that score", "count"),
    "train_samples_per_s": ("Training speed (samples/s)", "rate"),
    "train_tokens_per_s": ("Training speed (tokens/s)", "rate"),
    "train_steps_per_s": ("Training speed (steps/s)", "rate"),
    "eval_samples_per_s": ("Evaluation speed (samples/s)", "rate"),
    "steps_per_epoch": ("Steps per epoch", "amount"),
    "mem_alloc_mb": ("Memory allocated per rank, mean (MB)", "mb"),
    "mem_reserved_mb": ("Memory reserved per rank, mean (MB)", "mb"),
    "peak_mem_mb": ("Peak memory, fullest rank (MB)", "mb"),
    "device_mem_mb": ("Memory of the device (MB)", "mb"),
    "rss_mb": ("Resident memory per rank, mean (MB)", "mb"),
    "util_pct": ("Device utilisation while training, mean (%)", "rate"),
    "util_std_pct": ("Device utilisation while training, deviation (%)", "rate"),
    "mfu": ("Model FLOPs utilisation", "share"),
    "goodput": ("Goodput", "share"),
    "runtime_s": ("Runtime", "duration"),
    "predicted_s": ("Time to finish, predicted after 5 % of the steps", "duration"),
    "actual_s": ("Time it took, without repeated steps and restarts", "duration"),
    "device_hours": ("Device-hours", "hours"),
    "starts": ("Starts", "count"),
}
"""Every measure of a run by its name in CSV: the label for people, and the kind of number (see `text.show`)."""

NO_SCORES = ("samples_per_s", "tokens_per_s", "runtime_s", "items", "examples", "perplexity", "batches")
"""Fields of an evaluation that are no score."""

PARTS = {
    "train": ("training steps", 0), "data": ("waiting for data", 5), "eval": ("evaluation", 1), "save": ("saving", 2),
    "sample": ("generating samples", 7), "compile": ("compiling", 3), "startup": ("start-up", 4),
    "lost": ("steps done again after a failure", 6),
}  # fmt: skip
"""What wall time is spent on, in the order it is shown: the name for people, and a place in the palette."""


def label(name: str) -> tuple[str, str]:
    """A measure's label and kind of number; a suite's own scores are named as they are."""
    return MEASURES.get(name, (name.replace("_", " "), "score"))


def measures(view: RunView) -> dict[str, Value]:
    """Every measure that is known of the run, by its name: those of MEASURES, and `SUITE_SCORE` of other suites."""
    train, summary, loss, speed = view.train, view.summary, view.evals.get("loss"), view.speed
    start: dict[str, Any] = {}
    for event in view.events:
        if event.get("event") in STARTS:
            start |= event
    util, util_std = rank_mean(view, "util_pct")
    peaks = [float(np.nanmax(t["peak_alloc_mb"])) for t in view.ranks if t.has("peak_alloc_mb")]
    values: dict[str, Value] = {
        "state": view.state,
        "steps": view.step,
        "epochs": train.last("epoch"),
        "tokens": first(summary.get("tokens"), train.last("tokens")),
        "samples": first(summary.get("samples"), train.last("samples")),
        "parameters": first(summary.get("parameters"), start.get("parameters")),
        "world": first(summary.get("world"), start.get("world"), len(view.ranks) or None),
        "train_loss": last_value(train, "loss"),
        "train_loss_tail": tail_mean(train, "loss"),
        "eval_loss": last_value(loss, "loss"),
        "eval_perplexity": last_value(loss, "perplexity"),
        "train_samples_per_s": first((speed and speed.samples_per_s) or None),
        "train_tokens_per_s": first(speed and speed.tokens_per_s),
        "train_steps_per_s": first(speed and speed.steps_per_s),
        "eval_samples_per_s": evaluation_speed(loss),
        "steps_per_epoch": steps_per_epoch(start, train),
        "mem_alloc_mb": first(summary.get("avg_mem_alloc_mb"), rank_mean(view, "mem_alloc_mb")[0]),
        "mem_reserved_mb": first(summary.get("avg_mem_reserved_mb"), rank_mean(view, "mem_reserved_mb")[0]),
        "peak_mem_mb": first(summary.get("peak_mem_mb"), max(peaks, default=None)),
        "device_mem_mb": view.outcome.device_bytes / 1e6 if view.outcome.device_bytes else None,
        "rss_mb": first(summary.get("avg_rss_mb"), rank_mean(view, "rss_mb")[0]),
        "util_pct": first(summary.get("avg_gpu_util_pct"), summary.get("avg_cpu_util_pct"), util),
        "util_std_pct": first(summary.get("std_gpu_util_pct"), summary.get("std_cpu_util_pct"), util_std),
        "mfu": first(speed and speed.mfu),
        "goodput": view.wall["train"] / view.wall["total"] if view.wall else None,
        "runtime_s": first(view.wall.get("total"), view.hours * 3600 or None),
        "predicted_s": view.outcome.predicted_seconds,
        "actual_s": view.outcome.actual_seconds,
        "device_hours": view.device_hours,
        "starts": 1 + len(view.restarts),
        **best_scores(view),
    }
    for suite, track in view.evals.items():
        if suite != "loss":
            values |= {f"{suite}_{x}": last_value(track, x) for x in track.measures() if x not in NO_SCORES}
    return {name: value for name, value in values.items() if value is not None}


def best_scores(view: RunView) -> dict[str, Value]:
    """The lowest evaluation loss and its step; and the best score of `checkpoint.best` where that is another measure."""
    values: dict[str, Value] = {}
    if (track := view.evals.get(LOSS)) is not None and track.has(LOSS):
        place = int(np.nanargmin(np.where(np.isfinite(track[LOSS]), track[LOSS], np.nan)))
        values |= {"best_eval_loss": float(track[LOSS][place]), "best_eval_step": int(track["step"][place])}
    suite, _, name = str(view.settings.get("checkpoint.best") or LOSS).partition(".")
    if name and (track := view.evals.get(suite)) is not None and track.has(name):
        place = int(np.nanargmax(np.where(np.isfinite(track[name]), track[name], np.nan)))
        score, step = float(track[name][place]), int(track["step"][place])
        values |= {"best_measure": f"{suite}.{name}", "best_score": score, "best_score_step": step}
    return values


def goodput(view: RunView) -> dict[str, float]:
    """Seconds of wall time over all starts by what they were spent on, without those that took none."""
    return {name: view.wall[name] for name in PARTS if view.wall.get(name, 0) > 0}


def first(*values: Any) -> float | None:
    """The first that is a finite number."""
    for value in values:
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            return value
    return None


def last_value(track: Track | None, name: str) -> float | None:
    """What the last line says, NaN included: a bad end is not hidden behind an earlier good value."""
    return float(track[name][-1]) if track is not None and len(track) and name in track.columns else None


def tail_mean(track: Track, name: str, share: float = 0.1) -> float | None:
    """The mean over the lines of the run's last `share` of steps; NaN if one of them was no number."""
    if not len(track) or name not in track.columns:
        return None
    return float(np.mean(track[name][track["step"] > track["step"][-1] * (1 - share)]))


def evaluation_speed(track: Track | None) -> float | None:
    """Samples of all evaluations divided by their time."""
    if track is None:
        return None
    samples, seconds = track["samples"], track["runtime_s"]
    timed = np.isfinite(samples) & np.isfinite(seconds) & (seconds > 0)
    return float(samples[timed].sum() / seconds[timed].sum()) if timed.any() else None


def steps_per_epoch(start: Mapping[str, Any], train: Track) -> float | None:
    """From the sizes in the event of starting, else from the last line's step and epoch."""
    samples, batch = first(start.get("samples_per_epoch")), first(start.get("global_batch"))
    if samples and batch:
        return samples / batch
    epoch, step = train.last("epoch"), train.last("step")
    return step / epoch if epoch and step else None


def rank_mean(view: RunView, name: str) -> tuple[float | None, float | None]:
    """Mean and standard deviation of a device field over all samples of all ranks that were taken in training steps."""
    parts = [track[name][np.isfinite(track[name]) & (track["training"] > 0)] for track in view.ranks]
    values = np.concatenate(parts) if parts else np.array([])
    return (float(values.mean()), float(values.std())) if len(values) else (None, None)
