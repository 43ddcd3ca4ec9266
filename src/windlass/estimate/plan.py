"""The plan of a recipe before it runs, or of a run that is under way.

An unknown number is None, and `Plan.unknown` has the reason.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from windlass.errors import UserError, argument
from windlass.estimate.advice import recommend
from windlass.estimate.calendar import (
    milestones,
    most_checkpoints,
    optimal_steps,
    optimal_tokens,
)
from windlass.estimate.candidates import (
    LayoutRow,
    Machine,
    MemoryRow,
    Settings,
    layout_rows,
    memory_rows,
)
from windlass.estimate.devices import Device
from windlass.estimate.inputs import PlanInputs, Size, read_inputs
from windlass.estimate.speed import Speed, past_speed, predicted_speed
from windlass.estimate.text import print_plan
from windlass.model.size import flops_per_token
from windlass.optim.schedule import check_fits
from windlass.recipe import Changes, Recipe, as_recipe
from windlass.run import Run, last_start


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
        device: A kind of device, as `A100-80GB`; empty: the run's, the past runs', or this
            machine's.
        memory_bytes: The memory of a device that is not in the table.
        past: Past runs to take the speed from; UserError if none has this model and device.
        per_host: Ranks of each host; 0: 8 GPUs, or all ranks on a CPU.
    """
    if isinstance(source, str | Path):
        source = Run(source) if Run(source).exists and not overrides else Recipe.load(source)
    run = source if isinstance(source, Run) and last_start(source.ledger()) else None
    recipe = as_recipe(source).replace(overrides)
    inputs = read_inputs(recipe, run, past, world, device, memory_bytes, activations=True)
    machine = Machine(inputs.device, inputs.world, inputs.precision, per_host)
    speed, why_unknown = past_speed(inputs, past or [run or Run(recipe.run_dir)]), ""
    if past and speed is None:
        names = ", ".join(str(run.path) for run in past)
        problem = f"no steps of this model on {inputs.device.name} are logged in {names}"
        like = f"name a run of this model (with {argument('device', 'NAME')} for its device)"
        without = f"drop {argument('past', 'RUN')} to predict a speed from the device's data sheet"
        raise UserError(f"{problem}: {like}, or {without}")
    if speed is None:
        speed, why_unknown = predicted_speed(inputs, machine)
    result = assemble(inputs, speed, why_unknown, run)
    vocab = result.size.vocab
    ours = recipe.model.kind == "gpt" and not inputs.counted
    if inputs.world == 1 or not ours or not vocab or not machine.knows_peak:
        return result
    result.layouts, result.layouts_advice = layout_rows(recipe, vocab, machine)
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
    try:
        plan.steps = inputs.resolve_steps()
    except UserError as error:
        unknown["steps"] = str(error)
    add_memory(plan, inputs)
    if plan.steps is not None:
        add_calendar(plan, inputs, plan.steps)
    return plan


def add_memory(plan: Plan, inputs: PlanInputs) -> None:
    """Add memory, compute-optimal length and FLOPs, if the model's size is known."""
    recipe, size = inputs.recipe, inputs.size
    if not size.parameters or not size.flops_per_token:
        return
    model, vocab, usable = inputs.counted or recipe.model, size.vocab or 0, plan.device.usable_bytes
    plan.memory = memory_rows(model, vocab, recipe.optim.kind, inputs.layout, usable)
    plan.recommended, plan.advice = recommend(plan.memory, inputs)
    flops = size.flops_per_token
    if inputs.width and not inputs.counted:  # attention over the padded row, not the context
        flops = flops_per_token(recipe.model, vocab, inputs.width)
    if plan.steps is not None:
        plan.flops = round(flops * plan.padded_tokens_per_step * plan.steps)
    pretrained = recipe.model.kind == "hf" and not recipe.model.from_scratch
    if not pretrained or recipe.train.steps == "compute-optimal":  # D = 20 N is for new weights
        ratio = recipe.train.tokens_per_parameter
        plan.optimal_tokens = optimal_tokens(size.parameters, ratio)
        plan.optimal_steps = optimal_steps(recipe, size.parameters, inputs.tokens_per_sample)


def add_calendar(plan: Plan, inputs: PlanInputs, steps: int) -> None:
    """Add the data of a run of known length, and the time to its end."""
    recipe, samples = inputs.recipe, inputs.samples_per_epoch
    horizon = recipe.horizon(steps, samples)
    check_fits(recipe.optim.schedule, horizon)
    plan.tokens = round(steps * plan.tokens_per_step)
    if samples:
        plan.epochs = steps * recipe.train.global_batch / samples
    plan.mixture = inputs.mixture_rows(steps)
    saves = (recipe.checkpoint.every, recipe.checkpoint.keep_every)
    if not samples and any(isinstance(save, str) for save in saves):
        plan.unknown["checkpoints"] = f"some are written at epochs: {inputs.reason}"
    else:
        plan.checkpoints = most_checkpoints(recipe, horizon)
    every = milestones(recipe, horizon, inputs.val_samples)
    ahead = [m for m in every if m.step > plan.done or plan.done == m.step == 0]
    plan.milestones = dict(Counter(m.what for m in ahead))
    if plan.speed is not None and plan.seconds_per_step is not None:
        costs = plan.speed.costs
        extra = sum(costs.get(m.what, 0.0) * m.size for m in ahead)
        plan.seconds = max(0, steps - plan.done) * plan.seconds_per_step + extra
        plan.device_hours = plan.seconds * plan.world / 3600
        plan.not_counted = [what for what in plan.milestones if what not in costs]
