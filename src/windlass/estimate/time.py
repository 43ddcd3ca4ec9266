"""The speed of a training, measured or predicted, and the time of a whole run. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import mean, median
from typing import TYPE_CHECKING

from windlass.estimate.calendar import CHECKPOINT, EVALUATION, SAMPLE, milestones, seconds_until
from windlass.run import effective, last_start, read_lines
from windlass.telemetry.timing import wall_time

if TYPE_CHECKING:
    from windlass.run import Line, Run

NO_PEAK = "a CPU has no published peak"
UNCALIBRATED = "the model of a step's time is not calibrated for CPUs"
PREDICTED_AT = 0.05
"""The part of a run's steps after which a report predicts its time to finish."""


@dataclass(frozen=True)
class Speed:
    """Tokens a second over all ranks, and the source of the number."""

    tokens_per_s: float  # without padding
    world: int
    # `measured`; `at best`: scaled to more ranks without loss; or `predicted` (step.py)
    basis: str
    detail: str  # which run, or which device and how far off published runs are
    # Measured seconds of an evaluation, a checkpoint and a sample.
    costs: dict[str, float] = field(default_factory=dict)
    device: str = ""  # as the ledger names it
    # Predicted: published runs on the device were between these factors of a fit without them.
    range: tuple[float, float] | None = None


def measured_speed(ledger: Sequence[Line], name: str) -> Speed | None:
    """The speed in the effective ledger of run `name`; None if not enough is logged yet.

    Only steps of the last start count. With more than four `train` lines, the first two do not
    (compilation, caches). The mean leaves out the fastest and slowest tenth.
    """
    train = [x for x in ledger if x["kind"] == "train"]
    lines = [x for x in train if x.get("step_ms") and x.get("tokens_per_s")]
    if not lines:
        return None
    lines = [x for x in lines if x.get("attempt", 0) == lines[-1].get("attempt", 0)]
    lines = lines[2:] if len(lines) > 4 else lines[1:] or lines
    began = last_start(ledger)
    world, device = int(began.get("world", 1)), str(began.get("device") or "")
    tokens_per_step = median(x["tokens_per_s"] * x["step_ms"] / 1e3 for x in lines)
    times, cut = sorted(x["step_ms"] for x in lines), len(lines) // 10
    speed = tokens_per_step / (mean(times[cut : len(times) - cut]) / 1e3)
    steps = f"steps {lines[0]['step']:,} to {lines[-1]['step']:,}"
    detail = f"run {name}: {world} x {device or 'unknown device'}, {steps}"
    return Speed(speed, world, "measured", detail, _costs(ledger, speed), device)


def _costs(ledger: Sequence[Line], tokens_per_s: float) -> dict[str, float]:
    """Seconds of an evaluation, a checkpoint and a sample, as far as they were measured."""
    costs: dict[str, float] = {}
    evaluations: dict[int, list[Line]] = {}
    for x in ledger:
        if x["kind"] == "eval" and isinstance(x.get("runtime_s"), int | float):
            evaluations.setdefault(x["step"], []).append(x)
    # A run's first evaluation also pays for compilation, caches and first allocations.
    first, *later = [evaluations[step] for step in sorted(evaluations)] or [[]]
    if later:
        costs[EVALUATION] = median(sum(x["runtime_s"] for x in lines) for lines in later)
    elif first:
        costs[EVALUATION] = sum(_bounded(x, tokens_per_s) for x in first)
    saves = sum(x["kind"] == "event" and x.get("event") == "checkpoint" for x in ledger)
    samples = len({x["step"] for x in ledger if x["kind"] == "sample"})
    seconds = [x["seconds"] for x in ledger if isinstance(x.get("seconds"), dict)]
    for what, phase, number in ((CHECKPOINT, "save", saves), (SAMPLE, "sample", samples)):
        spent = max((s.get(phase, 0.0) for s in seconds), default=0.0)
        if number and spent:
            costs[what] = spent / number
    return costs


def _bounded(line: Line, tokens_per_s: float) -> float:
    """Seconds of a first evaluation, at most the time of training's forward passes."""
    runtime: float = line["runtime_s"]
    if line.get("suite") != "loss":
        return runtime
    tokens = line.get("tokens", 0) + line.get("train_tokens", 0)
    # A forward pass is a third of a step's FLOPs.
    return min(runtime, tokens / tokens_per_s / 3 if tokens else math.inf)


def speed_on(speeds: Sequence[Speed], world: int) -> Speed:
    """The median of the speeds measured on `world` ranks, or on the nearest number, scaled."""
    near = min((speed.world for speed in speeds), key=lambda ranks: abs(ranks - world))
    same = [speed for speed in speeds if speed.world == near]
    tokens_per_s = median(speed.tokens_per_s for speed in same)
    nearest = min(same, key=lambda speed: abs(speed.tokens_per_s - tokens_per_s))
    kinds = {kind for speed in same for kind in speed.costs}
    costs = {kind: median(s.costs[kind] for s in same if kind in s.costs) for kind in kinds}
    basis, detail = nearest.basis, nearest.detail
    if len(same) > 1:
        detail = f"the median of {len(same)} runs; the nearest is {detail}"
    if near != world:
        basis, tokens_per_s = "at best", tokens_per_s * world / near
        detail += f"; scaled by {world}/{near} without loss"
    return Speed(tokens_per_s, world, basis, detail, costs, nearest.device)


@dataclass(frozen=True)
class PredictedAndActual:
    """The predicted and the actual time of a run, and the memory of its device."""

    predicted_seconds: float | None = None  # from start to end, from the first 5 % of the steps
    # Without repeated steps, and without the start-up of starts after the first.
    actual_seconds: float | None = None
    predicted_at_step: int | None = None
    reason: str = ""  # why there is no prediction
    device_bytes: float | None = None  # memory of the smallest device; None: unknown


def predicted_and_actual(run: Run, raw: Sequence[Line] = ()) -> PredictedAndActual:
    """The time to finish as predicted after 5 % of the steps, and the actual one.

    `raw`: the run's ledger, if it has just been read.
    """
    environment = run.environment
    sizes = [rank["memory_mb"] for rank in environment.get("ranks", []) if rank.get("memory_mb")]
    total = min(sizes) if sizes else environment.get("machine", {}).get("memory_mb")
    outcome = PredictedAndActual(device_bytes=None if total is None else total * 1e6)
    raw = raw or list(read_lines(run.metrics_path))
    ledger, events = effective(raw), [x for x in raw if x["kind"] == "event"]
    starts = [x for x in ledger if x["kind"] == "event" and "world" in x and "steps" in x]
    started = starts[0] if starts else {}
    steps = int(started.get("steps", 0))
    timed = any("seconds" in x for x in raw)
    if not started or ledger[-1]["step"] < steps or not timed:
        return replace(outcome, reason="the run has not finished")
    if any(x.get("extended_from") or x.get("steps", steps) != steps for x in events):
        return replace(outcome, reason="the run was extended")
    worlds = dict.fromkeys(x["world"] for x in events if isinstance(x.get("world"), int))
    if len(worlds) > 1:
        changes = ", then ".join(map(str, worlds))
        return replace(outcome, reason=f"the number of ranks changed: {changes}")
    train = [x for x in ledger if x["kind"] == "train"]
    early = [x for x in train if max(PREDICTED_AT * steps, 2) <= x["step"] < steps]
    now = early[0] if early else {"step": 0}
    speed = measured_speed([x for x in ledger if x["step"] <= now["step"]], run.name)
    if not early or speed is None:
        after = f"{100 * PREDICTED_AT:g} % of the steps"
        return replace(outcome, reason=f"nothing was logged between {after} and the end")
    horizon = run.recipe.horizon(steps, int(started.get("samples_per_epoch", 0)))
    val_samples = started.get("data", {}).get("val", {}).get("samples", 0)
    ahead = milestones(run.recipe, horizon, val_samples)
    per_step = now["tokens"] / now["step"] / speed.tokens_per_s
    left = seconds_until(ahead, steps, now["step"], per_step, speed.costs)
    return replace(
        outcome,
        predicted_seconds=_without_pauses(raw[: raw.index(now) + 1]) + left,
        actual_seconds=_without_pauses(raw),
        predicted_at_step=int(now["step"]),
    )


def _without_pauses(raw: Sequence[Line]) -> float:
    """Seconds of a raw ledger without lost steps and without later starts' start-up."""
    whole = wall_time(raw)
    first = next((int(x.get("attempt", 0)) for x in raw if isinstance(x.get("seconds"), dict)), 0)
    one = wall_time([x for x in raw if int(x.get("attempt", 0)) == first])
    phases = ("startup", "compile")
    again = sum(max(0.0, whole.get(phase, 0.0) - one.get(phase, 0.0)) for phase in phases)
    return whole["total"] - whole["lost"] - again
