"""How long the steps of a run took after its warm-up, and its other numbers for a scaling study, from its ledger. No torch."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from windlass.run import Line, Run, effective, last_start, read_lines
from windlass.telemetry.timing import BEGINS, wall_time

PHASES = ("data", "forward", "backward", "optimizer")  # of a step that a ledger has


def windows(lines: Iterable[Line], warmup: int) -> list[Line]:
    """The `train` lines whose steps begin after `warmup` steps of their start. A line holds means since the one before it."""
    step, start, chosen = 0, 0, []
    for line in lines:
        if line["kind"] == "event" and line.get("event") in BEGINS:
            step = start = line["step"]
        elif line["kind"] == "train":
            if line.get("step_ms") and step - start >= warmup:
                chosen.append(line)
            step = line["step"]
    return chosen


def times(lines: Iterable[Line]) -> dict[str, float]:
    """Medians of a step's time and its phases over `train` lines; empty without lines."""
    every = list(lines)
    columns = {f"{name}_ms": [x[f"{name}_ms"] for x in every if f"{name}_ms" in x] for name in ("step", *PHASES)}
    return {name: statistics.median(column) for name, column in columns.items() if column}


def measure(run: Run, warmup: int) -> dict[str, float]:
    """The numbers of one run by name, and the medians of its phases, from its ledger."""
    raw = list(read_lines(run.metrics_path))
    lines = effective(raw)
    start, wall, chosen = last_start(lines), wall_time(raw), windows(lines, warmup)
    numbers = times(chosen)
    if chosen:
        for name, rates in (("tokens", "tokens_per_s"), ("padded_tokens", "padded_tokens_per_s")):
            per_step = [x.get(rates, x["tokens_per_s"]) * x["step_ms"] / 1e3 for x in chosen]
            numbers[f"{name}_per_step"] = statistics.median(per_step)
        numbers["samples_per_s"] = start["global_batch"] / numbers["step_ms"] * 1e3
        if all("mfu" in x for x in chosen):
            numbers["mfu"] = statistics.median(x["mfu"] for x in chosen)
    train, step, losses = [x for x in lines if x["kind"] == "train"], 0, []
    for line in train:  # each line's loss stands for the steps since the line before it
        losses.append((line["step"] - step, float(line["loss"])))
        step = line["step"]
    if steps := sum(count for count, _ in losses):
        numbers["train_loss"] = losses[-1][1]
        numbers["train_loss_mean"] = sum(count * loss for count, loss in losses) / steps
    numbers |= {f"{name}_s": wall[name] for name in ("startup", "compile") if wall[name]}
    samples = next((x["samples"] for x in reversed(train) if "samples" in x), 0)
    if (working := wall["total"] - wall["startup"]) > 0 and samples:
        numbers |= {"runtime_s": wall["total"], "samples_per_s_whole_run": samples / working}
    ended = [x for x in lines if x["kind"] == "summary"][-1:]
    exact = {"peak_mem_mb": "memory_mb"} | {x: x for x in ("train_loss_mean", "samples_per_s_whole_run")}
    return numbers | {ours: float(x[name]) for x in ended for name, ours in exact.items() if name in x}
