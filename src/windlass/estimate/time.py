"""The speed of a training, measured or predicted. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import mean, median
from typing import TYPE_CHECKING, Any

from windlass.estimate.calendar import CHECKPOINT, EVALUATION, SAMPLE
from windlass.estimate.devices import TIGHT
from windlass.estimate.layouts import Machine
from windlass.estimate.memory import memory
from windlass.estimate.step import MANY, ShapeUnknown, constants, slowest
from windlass.estimate.subject import Subject
from windlass.model.size import CountedSizes
from windlass.run import last_start

if TYPE_CHECKING:
    from windlass.run import Line, Run

NO_PEAK = "a CPU has no published peak"
NARROWEST = 768
"""The smallest width of a published run; the errors of narrower models are unknown."""


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


def past_speed(subject: Subject, runs: Sequence[Run]) -> Speed | None:
    """The speed of the runs with the same model and kind of device, if any."""
    begun = [run for run in runs if run.exists]
    same = [run for run in begun if run.recipe.model == subject.recipe.model]
    speeds = [speed for run in same if (speed := measured_speed(run.ledger(), run.name))]
    devices = ("", subject.device.name.lower())
    speeds = [speed for speed in speeds if speed.device.lower() in devices]
    return speed_on(speeds, subject.world) if speeds else None


def predicted_speed(subject: Subject, machine: Machine) -> tuple[Speed | None, str]:
    """The speed by the model of a step (step.py), or why there is none."""
    device, recipe, size = subject.device, subject.recipe, subject.size
    if size.flops_per_token is None:
        return None, "the FLOPs of a token are unknown, because the model's size is"
    if not machine.knows_peak:
        peak = f"the peak of {device.name} in {subject.precision} is unknown"
        peak = NO_PEAK if device.kind == "cpu" else peak
        advice = "name a past run of this model (--from RUN), or a listed device (--device NAME)"
        return None, f"{peak}: {advice}"
    model, layout = recipe.model, subject.layout
    width = subject.width or float(model.context)  # a row as training pads it
    model = model.model_copy(update={"context": round(width)})
    how: dict[str, Any] = {"context": model.context, "bucket_mb": recipe.parallel.bucket_mb}
    counted, speeds = subject.counted, machine.speeds(recipe)
    network = counted if counted and model.kind == "hf" else model
    needed = memory(counted or recipe.model, size.vocab or 0, layout, recipe.optim.kind).total
    if device.memory_bytes and needed > TIGHT * device.memory_bytes:
        return None, "the layout does not fit into the device's memory"
    if counted and counted.total:
        how["trained"] = counted.trained / counted.total
    try:
        step = slowest(network, size.vocab or 0, layout, speeds, recipe.optim.kind, **how)
    except ShapeUnknown as error:
        return None, str(error)
    tokens = min(width, subject.tokens_per_sample or width)
    samples = layout.micro_batch * layout.accumulation * layout.data_world
    detail = f"predicted for {device.name}, {'compiled' if layout.compile else 'not compiled'}"
    if tokens < width:  # padding is computed, too
        share = 100 * tokens / width
        detail += f"; {share:.0f} % of the places are tokens, the rest padding"
    if step.bubble:
        detail += f"; a pipeline's stages wait {100 * layout.bubble:.3g} % of the step"
    if layout.offload:
        detail += "; without the copies of parallel.offload"
    speed = Speed(
        samples * tokens / step.total, subject.world, "predicted", detail, {}, device.name
    )
    if device.family not in constants().ranges:
        detail += f"; no published run on {device.name}, so its error is unknown"
        return replace(speed, detail=detail), ""
    model_width = network.network["width"] if isinstance(network, CountedSizes) else network.width
    if model_width < NARROWEST or subject.precision not in ("bf16", "fp16"):
        beyond = f"published runs have bf16 and a width of {NARROWEST} or more"
        return replace(speed, detail=f"{detail}; {beyond}, so its error is unknown"), ""
    rows, _, low, high = constants().ranges[device.family]
    slow, fast = 1 / (1 + high), 1 / (1 + low)
    if rows == 1:
        detail += (
            f"; the only published run on {device.family} reached {fast:.2f} times its prediction"
        )
        return replace(speed, detail=detail), ""
    which = "8 of 10" if rows >= MANY else "all"
    detail += f"; {which} of {rows} published runs on {device.family} reached {slow:.2f} to "
    detail += f"{fast:.2f} times a prediction fitted without their project"
    return replace(speed, detail=detail, range=(slow, fast)), ""
