"""The plan of a recipe before it runs, or of a run that is under way.

An unknown number is None, and `Plan.unknown` has the reason.
"""

from __future__ import annotations

import io
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

from windlass.errors import UserError, argument
from windlass.estimate.advice import recommend
from windlass.estimate.calendar import (
    CHECKPOINT,
    EVALUATION,
    SAMPLE,
    milestones,
    most_checkpoints,
    optimal_steps,
    optimal_tokens,
    resolve_steps,
)
from windlass.estimate.devices import NO_PEAK, Device
from windlass.estimate.inputs import PlanInputs, Size, read_inputs
from windlass.estimate.layouts import (
    LayoutRow,
    MemoryRow,
    Settings,
    layout_rows,
    memory_rows,
)
from windlass.estimate.memory import memory
from windlass.estimate.step import constants, slowest
from windlass.estimate.text import print_plan
from windlass.ledger import Line, last_start
from windlass.model.size import CountedSizes, flops_per_token
from windlass.optim.schedule import check_fits
from windlass.recipe import Changes, Recipe, as_recipe
from windlass.run import Run

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


@dataclass
class Plan:
    """Numbers of a run before it begins, or of its remaining steps."""

    recipe: str
    config_hash: str
    run_dir: str
    state: str  # of a run that has begun; else empty
    world: int
    device: Device
    precision: str
    size: Size
    done: int  # steps
    tokens_per_step: float  # over all ranks, without padding; of a step of mean size
    padded_tokens_per_step: float
    speed: Speed | None
    seconds_per_step: float | None
    unknown: dict[str, str]  # the reason for each None
    steps: int | None = None
    tokens: int | None = None
    epochs: float | None = None
    mixture: list[dict[str, Any]] = field(default_factory=list)  # see `mixture.shares_of_run`
    optimal_tokens: int | None = None
    optimal_steps: int | None = None
    flops: int | None = None  # of the whole run, padding included
    memory: list[MemoryRow] = field(default_factory=list)  # the fastest layout first
    recommended: Settings = field(default_factory=dict)  # a layout that fits
    advice: str = ""  # the reason for it, or a remedy if nothing fits
    layouts: list[LayoutRow] = field(default_factory=list)  # that fit a listed device, by time
    layouts_advice: str = ""  # if none fits
    checkpoints: int | None = None  # the most on disk at a time
    seconds: float | None = None  # from now to the end
    device_hours: float | None = None
    not_counted: list[str] = field(default_factory=list)  # milestones without a measured time
    milestones: dict[str, int] = field(default_factory=dict)  # those ahead, by kind

    def __repr__(self) -> str:
        from rich.console import Console

        text = io.StringIO()
        print_plan(self, Console(file=text, width=100, color_system=None, force_jupyter=False))
        return text.getvalue().rstrip()

    def as_dict(self) -> dict[str, Any]:
        plain = asdict(self)
        plain["device"]["usable_bytes"] = self.device.usable_bytes
        rows: list[Any] = [*self.memory, *self.layouts]
        for row, source in zip([*plain["memory"], *plain["layouts"]], rows, strict=True):
            row["memory"]["total"] = source.memory.total
        return plain


def plan(
    source: Recipe | Run | str | Path,
    overrides: Changes = (),
    *,
    world: int = 0,
    device: str = "",
    memory_bytes: int | None = None,
    past: Sequence[Run] = (),
    per_host: int = 0,
) -> Plan:
    """The plan of a recipe, or of a run's remaining steps by its own ledger.

    Args:
        source: A recipe, a run, or anything that `Recipe.load` takes.
        overrides: Settings to change, as typed or as a mapping.
        world: Ranks; 0: one, or the ranks of the run.
        device: A kind of device, such as `A100-80GB`; empty: the run's, the past runs', or this
            machine's.
        memory_bytes: The memory of a device that is not in the table.
        past: Past runs to take the speed from; UserError if none has this model and device.
        per_host: Ranks of each host; 0: 8 GPUs, or all ranks on a CPU.
    """
    if isinstance(source, str | Path):
        source = Run(source) if Run(source).exists and not overrides else Recipe.load(source)
    run = source if isinstance(source, Run) and last_start(source.ledger()) else None
    recipe = as_recipe(source).replace(overrides)
    inputs = read_inputs(recipe, run, past, world, device, memory_bytes, True, per_host)
    speed, why_unknown = past_speed(inputs, past or [run or Run(recipe.run_dir)]), ""
    if past and speed is None:
        names = ", ".join(str(run.path) for run in past)
        problem = f"no steps of this model on {inputs.device.name} are logged in {names}"
        like = f"name a run of this model (with {argument('device', 'NAME')} for its device)"
        without = f"drop {argument('past', 'RUN')} to predict a speed from the device's data sheet"
        raise UserError(f"{problem}: {like}, or {without}")
    if speed is None:
        speed, why_unknown = predicted_speed(inputs)
    result = assemble(inputs, speed, why_unknown, run)
    result.layouts, result.layouts_advice = layout_rows(inputs)
    return result


def assemble(
    inputs: PlanInputs, speed: Speed | None, why_unknown: str = "", run: Run | None = None
) -> Plan:
    """The plan but for its layouts; `why_unknown`: the reason if the speed is unknown."""
    recipe, size, unknown = inputs.recipe, inputs.size, dict[str, str]()
    if size.parameters is None:
        vocabulary = f"the vocabulary of {recipe.data.tokenizer!r} is unknown"
        unknown["size"] = inputs.hf_reason or f"{vocabulary}: {inputs.reason}"
    if inputs.activations_reason:
        unknown["activations"] = inputs.activations_reason
    if not inputs.samples_per_epoch:
        unknown["epochs"] = inputs.reason
    if speed is None:
        unknown["time"] = f"no step was measured, and {why_unknown}"
    batch, context = recipe.train.global_batch, recipe.model.context
    tokens_per_step = batch * (inputs.tokens_per_sample or float(context))
    plan = Plan(
        recipe=recipe.preset,
        config_hash=recipe.config_hash,
        run_dir=str(run.path if run else recipe.run_dir),
        state=run.state if run else "",
        world=inputs.world,
        device=inputs.device,
        precision=inputs.precision,
        size=size,
        done=inputs.done,
        tokens_per_step=tokens_per_step,
        padded_tokens_per_step=batch * (inputs.width or context),
        speed=speed,
        seconds_per_step=tokens_per_step / speed.tokens_per_s if speed else None,
        unknown=unknown,
    )
    plan.steps = inputs.steps
    if plan.steps is None:
        known = (inputs.tokens_per_sample, inputs.samples_per_epoch, size.parameters)
        try:
            plan.steps = resolve_steps(recipe, size.vocab, *known)
        except UserError as error:
            unknown["steps"] = str(error)
    if size.parameters and size.flops_per_token:
        _add_memory(plan, inputs, size.parameters, size.flops_per_token)
    if plan.steps is not None:
        _add_calendar(plan, inputs, plan.steps)
    return plan


def _add_memory(plan: Plan, inputs: PlanInputs, parameters: int, flops: int) -> None:
    """Add memory, compute-optimal length and FLOPs."""
    recipe, usable = inputs.recipe, plan.device.usable_bytes
    model, vocab = inputs.counted or recipe.model, inputs.size.vocab or 0
    plan.memory = memory_rows(model, vocab, recipe.optim.kind, inputs.layout, usable)
    plan.recommended, plan.advice = recommend(plan.memory, inputs)
    if inputs.width and not inputs.counted:  # attention over the padded row, not the context
        flops = flops_per_token(recipe.model, vocab, inputs.width)
    if plan.steps is not None:
        plan.flops = round(flops * plan.padded_tokens_per_step * plan.steps)
    pretrained = recipe.model.kind == "hf" and not recipe.model.from_scratch
    if not pretrained or recipe.train.steps == "compute-optimal":  # D = 20 N is for new weights
        plan.optimal_tokens = optimal_tokens(parameters, recipe.train.tokens_per_parameter)
        plan.optimal_steps = optimal_steps(recipe, parameters, inputs.tokens_per_sample)


def _add_calendar(plan: Plan, inputs: PlanInputs, steps: int) -> None:
    """Add the data of a run of known length, and the time to its end."""
    recipe, samples = inputs.recipe, inputs.samples_per_epoch
    horizon = recipe.horizon(steps, samples)
    check_fits(recipe.optim.schedule, horizon)
    plan.tokens = round(steps * plan.tokens_per_step)
    if samples:
        plan.epochs = steps * recipe.train.global_batch / samples
    if isinstance(inputs.mixture, list):
        plan.mixture = inputs.mixture
    elif inputs.mixture:
        from windlass.data.mixture import Mixture, shares_of_run, stages_of

        stages = stages_of(recipe.data, horizon)
        plan.mixture = shares_of_run(Mixture(inputs.mixture, stages, recipe.run.seed), horizon)
    saves = (recipe.checkpoint.every, recipe.checkpoint.keep_every)
    if not samples and any(isinstance(save, str) for save in saves):
        plan.unknown["checkpoints"] = f"some are written at epochs: {inputs.reason}"
    else:
        plan.checkpoints = most_checkpoints(recipe, horizon)
    all_milestones = milestones(recipe, horizon, inputs.val_samples)
    ahead = [m for m in all_milestones if m.step > plan.done or plan.done == m.step == 0]
    plan.milestones = dict(Counter(m.what for m in ahead))
    if plan.speed is not None and plan.seconds_per_step is not None:
        costs = plan.speed.costs
        extra = sum(costs.get(m.what, 0.0) * m.size for m in ahead)
        plan.seconds = max(0, steps - plan.done) * plan.seconds_per_step + extra
        plan.device_hours = plan.seconds * plan.world / 3600
        plan.not_counted = [what for what in plan.milestones if what not in costs]


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
    timed = (x for x in ledger if isinstance(x.get("seconds"), dict))
    seconds = {x.get("attempt", 0): x["seconds"] for x in timed}  # at the end of each start
    for what, phase, number in ((CHECKPOINT, "save", saves), (SAMPLE, "sample", samples)):
        spent = sum(s.get(phase, 0.0) for s in seconds.values())
        if number and spent:
            costs[what] = spent / number
    return Speed(speed, world, "measured", detail, costs, device)


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
    speed = sorted(speeds, key=lambda speed: speed.tokens_per_s)[(len(speeds) - 1) // 2]
    detail, rate = speed.detail, speed.tokens_per_s
    if len(speeds) > 1:
        detail += f", the lower median of {len(speeds)} runs"
    if near == world:
        return replace(speed, detail=detail)
    detail, rate = f"{detail}; scaled by {world}/{near} without loss", rate * world / near
    return replace(speed, tokens_per_s=rate, world=world, basis="at best", detail=detail)


def predicted_speed(inputs: PlanInputs) -> tuple[Speed | None, str]:
    """The speed by the model of a step (step.py), or the reason if it is unknown."""
    device, recipe, size = inputs.device, inputs.recipe, inputs.size
    if size.flops_per_token is None:
        return None, "the FLOPs of a token are unknown, because the model's size is"
    if (speeds := inputs.speeds) is None:
        peak = f"the peak of {device.name} in {inputs.precision} is unknown"
        peak = NO_PEAK if device.kind == "cpu" else peak
        advice = "name a past run of this model (--from RUN), or a listed device (--device NAME)"
        return None, f"{peak}: {advice}"
    vocab, layout, counted = size.vocab or 0, inputs.layout, inputs.counted
    needed = memory(counted or recipe.model, vocab, layout, recipe.optim.kind).total
    if device.usable_bytes and needed > device.usable_bytes:
        return None, "the layout does not fit into the device's memory"
    row = inputs.width or float(recipe.model.context)  # tokens, as training pads it
    model = recipe.model.model_copy(update={"context": round(row)})
    network = counted if counted and model.kind == "hf" else model
    try:
        step = slowest(
            network,
            vocab,
            layout,
            speeds,
            recipe.optim.kind,
            context=model.context,
            bucket_mb=recipe.parallel.bucket_mb,
            trained=counted.trained / counted.total if counted and counted.total else 1.0,
        )
    except UserError as error:
        return None, str(error)
    tokens = min(row, inputs.tokens_per_sample or row)
    detail = f"predicted for {device.name}, {'compiled' if layout.compile else 'not compiled'}"
    if step.bubble:
        detail += f"; a pipeline's stages wait {100 * layout.bubble:.3g} % of the step"
    if layout.offload:
        detail += "; without the copies of parallel.offload"
    if recipe.model.lora.base == "4bit":
        detail += "; without the unpacking of 4-bit weights"
    width = network.network["width"] if isinstance(network, CountedSizes) else network.width
    ranges, reached = constants().ranges, None
    described = width >= NARROWEST and inputs.precision in ("bf16", "fp16")
    if device.family in ranges and described:
        rows, _, low, high = ranges[device.family]
        slow, fast = reached = 1 / (1 + high), 1 / (1 + low)
        detail += f"; 8 of 10 of {rows} published runs on {device.family} reached {slow:.2f} to "
        detail += f"{fast:.2f} times a prediction fitted without their project"
    else:
        detail += "; its error is unknown, because published runs are in bf16, "
        detail += f"{NARROWEST} or more wide, on {', '.join(ranges)}"
    rate = layout.samples * layout.data_world * tokens / step.total
    return Speed(rate, inputs.world, "predicted", detail, {}, device.name, reached), ""
