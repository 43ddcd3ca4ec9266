"""The speed that a plan counts on: measured in past runs, or predicted from the device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import mean, median

from windlass.estimate.calendar import CHECKPOINT, EVALUATION, SAMPLE
from windlass.estimate.candidates import Machine
from windlass.estimate.inputs import PlanInputs
from windlass.estimate.memory import memory
from windlass.estimate.step import ShapeUnknown, constants, slowest
from windlass.model.size import CountedSizes
from windlass.run import Line, Run, last_start

NO_PEAK = "a CPU has no published peak"
NARROWEST = 768  # the smallest width of a published run


@dataclass(frozen=True)
class Speed:
    """Tokens a second over all ranks, and the source of the number."""

    tokens_per_s: float  # without padding
    world: int
    basis: str  # `measured`; `at best`: scaled without loss; or `predicted` (step.py)
    detail: str  # which run, or which device and how far off published runs are
    # Measured seconds of an evaluation, a checkpoint and a sample.
    costs: dict[str, float] = field(default_factory=dict)
    device: str = ""  # as the ledger names it
    # Predicted: published runs on the device were between these factors of a fit without them.
    range: tuple[float, float] | None = None


def measured_speed(ledger: Sequence[Line], name: str) -> Speed | None:
    """The speed in the effective ledger of run `name`; None if not enough is logged yet.

    Only steps of the last start count, without the first two of several lines (compilation,
    caches). The mean leaves out the fastest and slowest tenth.
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
    return Speed(speed, world, "measured", detail, measured_costs(ledger), device)


def measured_costs(ledger: Sequence[Line]) -> dict[str, float]:
    """Seconds of an evaluation, a checkpoint and a sample, as far as they were measured."""
    costs = dict[str, float]()
    evaluations = defaultdict[int, float](float)
    for x in ledger:
        if x["kind"] == "eval" and isinstance(x.get("runtime_s"), int | float):
            evaluations[x["step"]] += x["runtime_s"]
    # A run's first evaluation also pays for compilation, caches and first allocations.
    if len(evaluations) > 1:
        costs[EVALUATION] = median(evaluations[step] for step in sorted(evaluations)[1:])
    saves = sum(x["kind"] == "event" and x.get("event") == "checkpoint" for x in ledger)
    samples = len({x["step"] for x in ledger if x["kind"] == "sample"})
    seconds = [x["seconds"] for x in ledger if isinstance(x.get("seconds"), dict)]
    for what, phase, number in ((CHECKPOINT, "save", saves), (SAMPLE, "sample", samples)):
        spent = max((s.get(phase, 0.0) for s in seconds), default=0.0)
        if number and spent:
            costs[what] = spent / number
    return costs


def past_speed(inputs: PlanInputs, runs: Sequence[Run]) -> Speed | None:
    """The lower median of the speeds of runs with this model and device on the nearest ranks,
    scaled."""
    same = [run for run in runs if run.exists and run.recipe.model == inputs.recipe.model]
    speeds = [speed for run in same if (speed := measured_speed(run.ledger(), run.name))]
    devices, world = ("", inputs.device.name.lower()), inputs.world
    speeds = [speed for speed in speeds if speed.device.lower() in devices]
    if not speeds:
        return None
    near = min((speed.world for speed in speeds), key=lambda ranks: abs(ranks - world))
    speeds = [speed for speed in speeds if speed.world == near]
    speeds.sort(key=lambda speed: speed.tokens_per_s)
    speed = speeds[(len(speeds) - 1) // 2]
    if len(speeds) > 1:
        speed = replace(speed, detail=f"{speed.detail}, the lower median of {len(speeds)} runs")
    if near == world:
        return speed
    detail = f"{speed.detail}; scaled by {world}/{near} without loss"
    rate = speed.tokens_per_s * world / near
    return replace(speed, tokens_per_s=rate, world=world, basis="at best", detail=detail)


def predicted_speed(inputs: PlanInputs, machine: Machine) -> tuple[Speed | None, str]:
    """The speed by the model of a step (step.py), or the reason if it is unknown."""
    device, recipe, size = inputs.device, inputs.recipe, inputs.size
    if size.flops_per_token is None:
        return None, "the FLOPs of a token are unknown, because the model's size is"
    if not machine.knows_peak:
        peak = f"the peak of {device.name} in {inputs.precision} is unknown"
        peak = NO_PEAK if device.kind == "cpu" else peak
        advice = "name a past run of this model (--from RUN), or a listed device (--device NAME)"
        return None, f"{peak}: {advice}"
    vocab, layout, counted = size.vocab or 0, inputs.layout, inputs.counted
    needed = memory(counted or recipe.model, vocab, layout, recipe.optim.kind).total
    if device.usable_bytes and needed > device.usable_bytes:
        return None, "the layout does not fit into the device's memory"
    width = inputs.width or float(recipe.model.context)  # a row as training pads it
    model = recipe.model.model_copy(update={"context": round(width)})
    network = counted if counted and model.kind == "hf" else model
    try:
        step = slowest(
            network,
            vocab,
            layout,
            machine.speeds(recipe),
            recipe.optim.kind,
            context=model.context,
            bucket_mb=recipe.parallel.bucket_mb,
            trained=counted.trained / counted.total if counted and counted.total else 1.0,
        )
    except ShapeUnknown as error:
        return None, str(error)
    tokens = min(width, inputs.tokens_per_sample or width)
    samples = layout.micro_batch * layout.accumulation * layout.data_world
    detail = f"predicted for {device.name}, {'compiled' if layout.compile else 'not compiled'}"
    if step.bubble:
        detail += f"; a pipeline's stages wait {100 * layout.bubble:.3g} % of the step"
    if layout.offload:
        detail += "; without the copies of parallel.offload"
    rate = samples * tokens / step.total
    speed = Speed(rate, inputs.world, "predicted", detail, {}, device.name)
    width = network.network["width"] if isinstance(network, CountedSizes) else network.width
    ranges = constants().ranges
    described = width >= NARROWEST and inputs.precision in ("bf16", "fp16")
    if device.family not in ranges or not described:
        published = f"published runs are in bf16, {NARROWEST} or more wide, on {', '.join(ranges)}"
        return replace(speed, detail=f"{detail}; its error is unknown, because {published}"), ""
    rows, _, low, high = ranges[device.family]
    slow, fast = 1 / (1 + high), 1 / (1 + low)
    detail += f"; 8 of 10 of {rows} published runs on {device.family} reached {slow:.2f} to "
    detail += f"{fast:.2f} times a prediction fitted without their project"
    return replace(speed, detail=detail, range=(slow, fast)), ""
