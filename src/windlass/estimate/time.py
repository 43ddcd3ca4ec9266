"""How long a run takes: from speeds measured in past runs' ledgers, or from a device's peak and an assumed MFU.

A speed always says what it rests on (`basis`, `detail`); without a measurement or a peak there is none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import mean, median
from typing import TYPE_CHECKING

from windlass.estimate.milestones import CHECKPOINT, EVALUATION, SAMPLE, milestones, seconds_until
from windlass.recipe import Horizon
from windlass.run import effective, last_start, read_lines
from windlass.telemetry.timing import wall_time

if TYPE_CHECKING:
    from windlass.run import Line, Run

ASSUMED_MFU = 0.4
"""Share of the peak that is assumed where nothing was measured. Published GPU and TPU trainings report 0.3 to 0.55
(0.46 for PaLM, arXiv 2204.02311); a small model or a slow network gives less."""
PREDICTED_AT = 0.05
"""Share of a run's steps after which its time to finish is predicted, to be compared with the actual one."""


@dataclass(frozen=True)
class Speed:
    """Tokens a second over all ranks, and where the number comes from."""

    tokens_per_s: float  # real tokens, padding not counted
    world: int
    basis: str  # `measured`; `at best`: scaled to more ranks as if nothing were lost; `assumed` from a peak
    detail: str  # which run, or which peak
    costs: dict[str, float] = field(
        default_factory=dict
    )  # seconds of an evaluation, checkpoint, sample, if measured
    device: str = ""  # what it was measured on, as the ledger names it


def measured_speed(ledger: Sequence[Line], name: str) -> Speed | None:
    """The speed that the effective lines of the ledger of run `name` show; None where not enough is logged yet.

    Steps are taken from the last start alone, without the first lines (compilation, caches) where there are more than
    four; the mean leaves out the fastest and slowest tenth.
    """
    lines = [
        x for x in ledger if x["kind"] == "train" and x.get("step_ms") and x.get("tokens_per_s")
    ]
    if not lines:
        return None
    lines = [x for x in lines if x.get("attempt", 0) == lines[-1].get("attempt", 0)]
    lines = lines[2:] if len(lines) > 4 else lines[1:] or lines
    began = last_start(ledger)
    world, device = int(began.get("world", 1)), str(began.get("device") or "")
    tokens_per_step = median(x["tokens_per_s"] * x["step_ms"] / 1e3 for x in lines)
    times, cut = sorted(x["step_ms"] for x in lines), len(lines) // 10
    speed = tokens_per_step / (mean(times[cut : len(times) - cut]) / 1e3)
    detail = f"run {name}: {world} x {device or 'unknown device'}, steps {lines[0]['step']:,} to {lines[-1]['step']:,}"
    return Speed(speed, world, "measured", detail, _costs(ledger, speed), device)


def _costs(ledger: Sequence[Line], tokens_per_s: float) -> dict[str, float]:
    evaluations: dict[int, list[Line]] = {}
    for x in ledger:
        if x["kind"] == "eval" and isinstance(x.get("runtime_s"), int | float):
            evaluations.setdefault(x["step"], []).append(x)
    first, *later = [evaluations[step] for step in sorted(evaluations)] or [[]]
    costs: dict[str, float] = {}
    # The first evaluation of a run also pays for compilation, caches and first allocations.
    if later:
        costs[EVALUATION] = median(sum(x["runtime_s"] for x in lines) for lines in later)
    elif (
        first
    ):  # the loss takes at most as long as training's forward passes, a third of a step's FLOPs
        tokens = [
            x.get("suite") == "loss" and x.get("tokens", 0) + x.get("train_tokens", 0)
            for x in first
        ]
        bounds = [n / tokens_per_s / 3 if n else math.inf for n in tokens]
        costs[EVALUATION] = sum(
            min(x["runtime_s"], bound) for x, bound in zip(first, bounds, strict=True)
        )
    saves = sum(x["kind"] == "event" and x.get("event") == "checkpoint" for x in ledger)
    samples = len({x["step"] for x in ledger if x["kind"] == "sample"})
    for what, phase, number in ((CHECKPOINT, "save", saves), (SAMPLE, "sample", samples)):
        spent = max(
            (x["seconds"].get(phase, 0.0) for x in ledger if isinstance(x.get("seconds"), dict)),
            default=0.0,
        )
        if number and spent:
            costs[what] = spent / number
    return costs


def speed_on(speeds: Sequence[Speed], world: int) -> Speed:
    """The median of the speeds measured on `world` ranks, or of those on the nearest number of ranks, scaled."""
    near = min((speed.world for speed in speeds), key=lambda ranks: abs(ranks - world))
    same = [speed for speed in speeds if speed.world == near]
    tokens_per_s = median(speed.tokens_per_s for speed in same)
    nearest = min(same, key=lambda speed: abs(speed.tokens_per_s - tokens_per_s))
    costs = {
        kind: median(s.costs[kind] for s in same if kind in s.costs)
        for s in same
        for kind in s.costs
    }
    basis, detail = nearest.basis, nearest.detail
    if len(same) > 1:
        detail = f"the median of {len(same)} runs; the nearest is {detail}"
    if near != world:
        basis, tokens_per_s = "at best", tokens_per_s * world / near
        detail += f"; scaled by {world}/{near} as if nothing were lost"
    return replace(
        nearest, tokens_per_s=tokens_per_s, world=world, basis=basis, detail=detail, costs=costs
    )


@dataclass(frozen=True)
class PredictedAndActual:
    """For a report: the time a run took beside its prediction, and the memory of its device."""

    predicted_seconds: float | None = (
        None  # from the run's start to its end, from its ledger after 5 % of the steps
    )
    actual_seconds: float | None = (
        None  # without steps that were made twice and without starts after the first
    )
    predicted_at_step: int | None = None
    reason: str = ""  # why there is no prediction
    device_bytes: float | None = None  # memory of the smallest device; None where it is not known


def predicted_and_actual(run: Run) -> PredictedAndActual:
    """The time to finish as predicted after 5 % of the steps beside the actual one, and the device's memory."""
    environment = run.environment
    sizes = [rank["memory_mb"] for rank in environment.get("ranks", []) if rank.get("memory_mb")]
    total = min(sizes) if sizes else environment.get("machine", {}).get("memory_mb")
    outcome = PredictedAndActual(device_bytes=None if total is None else total * 1e6)
    raw = list(read_lines(run.metrics_path))
    ledger = effective(raw)
    started = next(
        (x for x in ledger if x["kind"] == "event" and "world" in x and "steps" in x), None
    )
    if (
        started is None
        or ledger[-1]["step"] < int(started["steps"])
        or not any("seconds" in x for x in raw)
    ):
        return replace(outcome, reason="the run has not finished")
    steps, events = int(started["steps"]), [x for x in raw if x["kind"] == "event"]
    if any(x.get("extended_from") or x.get("steps", steps) != steps for x in events):
        return replace(outcome, reason="the run was extended")
    worlds = dict.fromkeys(x["world"] for x in events if isinstance(x.get("world"), int))
    if len(worlds) > 1:
        return replace(
            outcome, reason=f"the number of ranks changed: {', then '.join(map(str, worlds))}"
        )
    early = (
        x
        for x in ledger
        if x["kind"] == "train" and max(PREDICTED_AT * steps, 2) <= x["step"] < steps
    )
    now = next(early, None)
    speed = measured_speed([x for x in ledger if now and x["step"] <= now["step"]], run.name)
    if now is None or speed is None:
        return replace(
            outcome,
            reason=f"nothing was logged between {100 * PREDICTED_AT:g} % of the steps and the end",
        )
    horizon = Horizon(
        steps, int(started.get("samples_per_epoch", 0)), run.recipe.train.global_batch
    )
    per_step = now["tokens"] / now["step"] / speed.tokens_per_s
    val_samples = started.get("data", {}).get("val", {}).get("samples", 0)
    left = seconds_until(
        milestones(run.recipe, horizon, val_samples), steps, now["step"], per_step, speed.costs
    )
    predicted, actual = (_without_pauses(lines) for lines in (raw[: raw.index(now) + 1], raw))
    outcome = replace(
        outcome, predicted_seconds=predicted + left, predicted_at_step=int(now["step"])
    )
    return replace(outcome, actual_seconds=actual)


def _without_pauses(raw: Sequence[Line]) -> float:
    """Seconds of a raw ledger as if there had been one start: without lost steps and later starts' start-up."""
    whole = wall_time(raw)
    first = next((int(x.get("attempt", 0)) for x in raw if isinstance(x.get("seconds"), dict)), 0)
    one = wall_time([x for x in raw if int(x.get("attempt", 0)) == first])
    again = sum(
        max(0.0, whole.get(phase, 0.0) - one.get(phase, 0.0)) for phase in ("startup", "compile")
    )
    return whole["total"] - whole["lost"] - again
