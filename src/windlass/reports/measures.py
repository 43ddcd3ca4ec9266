"""Every number of a run that a report tells, from a view of the run; the summary's own numbers come first. Pure."""

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
    found |= best_score(view)
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


def best_score(view: RunView) -> dict[str, Value]:
    """What `checkpoint.best` names, its best score and the step of it: the summary's, or of the evaluations so far.

    Empty where it is the validation loss, which has its own place, and where it was never measured.
    """
    summary = view.summary
    measure = str(summary.get("best_measure") or view.settings.get("checkpoint.best") or LOSS)
    if measure == LOSS:
        return {}
    value, step = first(summary.get("best_score")), first(summary.get("best_step"))
    suite, _, name = measure.partition(".")
    track = view.evals.get(suite)
    if value is None and track is not None and track.has(name):
        place = int(np.nanargmax(np.where(np.isfinite(track[name]), track[name], np.nan)))
        value, step = float(track[name][place]), int(track["step"][place])
    return {} if value is None else {"best_measure": measure, "best_score": value, "best_score_step": step}
