"""The plan of a recipe before it runs, or of a run that is under way.

An unknown number is None, and `Plan.unknown` has the reason.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from windlass.errors import UserError, argument
from windlass.estimate.calendar import (
    TIMED,
    MilestoneRow,
    checkpoints_to_come,
    milestone_rows,
    milestones,
    optimal_steps,
    optimal_tokens,
)
from windlass.estimate.devices import Device
from windlass.estimate.layouts import LayoutRow, Machine, MemoryRow, layout_rows, memory_rows
from windlass.estimate.subject import Size, Speed, Subject, past_speed, predicted_speed, subject_of
from windlass.estimate.text import print_plan, recommend
from windlass.model.size import flops_per_token
from windlass.optim.schedule import check_fits
from windlass.recipe import Changes, Horizon, Recipe, as_recipe
from windlass.run import Run, last_start


@dataclass(frozen=True)
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
    steps: int | None
    done: int
    tokens_per_step: float  # over all ranks, without padding; of a step of mean size
    padded_tokens_per_step: float
    taken_as_full: bool  # whether the plan ignores padding because its amount is unknown
    tokens: int | None
    epochs: float | None
    mixture: list[dict[str, Any]] = field(default_factory=list)  # see `mixture.shares_of_run`
    optimal_tokens: int | None = None
    optimal_steps: int | None = None
    flops: int | None = None  # of the whole run, padding included
    memory: list[MemoryRow] = field(default_factory=list)  # the fastest layout first
    recommended: dict[str, str | int | bool] = field(default_factory=dict)  # a layout that fits
    advice: str = ""  # the reason for it, or a remedy if nothing fits
    layouts: list[LayoutRow] = field(default_factory=list)  # that fit a listed device, by time
    layouts_advice: str = ""  # if none fits
    checkpoints: int | None = None  # the most on disk at a time
    speed: Speed | None = None
    seconds_per_step: float | None = None
    seconds: float | None = None  # from now to the end
    device_hours: float | None = None
    not_counted: list[str] = field(default_factory=list)  # milestones without a measured time
    milestones: list[MilestoneRow] = field(default_factory=list)
    unknown: dict[str, str] = field(default_factory=dict)  # the reason for each None

    def __repr__(self) -> str:
        from rich.console import Console

        how: Any = {"color_system": None, "force_jupyter": False}
        console = Console(file=io.StringIO(), width=100, **how)
        print_plan(self, console)
        return console.file.getvalue().rstrip()  # type: ignore[attr-defined]

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
    subject = subject_of(recipe, run, past, world, device, memory_bytes, activations=True)
    speed = past_speed(subject, past or [run or Run(recipe.run_dir)])
    if past and speed is None:
        names = ", ".join(str(run.path) for run in past)
        problem = f"no steps of this model on {subject.device.name} are logged in {names}"
        like = f"name a run of this model (with {argument('device', 'NAME')} for its device)"
        without = f"drop {argument('past', 'RUN')} to predict a speed from the device's data sheet"
        raise UserError(f"{problem}: {like}, or {without}")
    machine = Machine(subject.device, subject.world, subject.precision, per_host)
    if speed is None:
        speed, why = predicted_speed(subject, machine)
        subject = replace(subject, speed_reason=why)
    result = assemble(subject, speed, run)
    vocab = result.size.vocab
    ours = recipe.model.kind == "gpt" and not subject.counted
    if subject.world == 1 or not ours or not vocab or not machine.knows_peak:
        return result
    rows, why = layout_rows(recipe, vocab, machine)
    return replace(result, layouts=rows, layouts_advice=why)


def assemble(subject: Subject, speed: Speed | None, run: Run | None = None) -> Plan:
    """Every part of the plan that subject and speed determine, and the reasons for the others."""
    recipe, size, unknown = subject.recipe, subject.size, dict[str, str]()
    if size.parameters is None:
        vocabulary = f"the vocabulary of {recipe.data.tokenizer!r} is unknown"
        unknown["size"] = subject.hf_reason or f"{vocabulary}: {subject.reason}"
    if subject.activations_reason:
        unknown["activations"] = subject.activations_reason
    if not subject.samples_per_epoch:
        unknown["epochs"] = subject.reason
    if speed is None:
        unknown["time"] = f"no step was measured, and {subject.speed_reason}"
    batch, context, data = recipe.train.global_batch, recipe.model.context, recipe.data
    samples, tokens, steps = subject.samples_per_epoch, subject.tokens_per_sample, None
    try:
        steps = subject.resolve_steps()
    except UserError as error:
        unknown["steps"] = str(error)
    tokens_per_step = batch * (tokens or float(context))
    plan = Plan(
        recipe=recipe.preset,
        config_hash=recipe.config_hash,
        run_dir=str(run.path if run else recipe.run_dir),
        state=run.state if run else "",
        world=subject.world,
        device=subject.device,
        precision=subject.precision,
        size=size,
        steps=steps,
        done=subject.done,
        tokens_per_step=tokens_per_step,
        padded_tokens_per_step=batch * (subject.width or context),
        taken_as_full=tokens is None and data.ragged_,
        tokens=None if steps is None else round(steps * tokens_per_step),
        epochs=steps * batch / samples if steps is not None and samples else None,
        speed=speed,
        seconds_per_step=tokens_per_step / speed.tokens_per_s if speed else None,
        unknown=unknown,
    )
    parts = memory_parts(plan, subject)
    if steps is not None:
        parts["mixture"] = subject.mixture_rows(steps)
        parts |= calendar(plan, recipe, recipe.horizon(steps, samples), subject.val_samples)
        saves = (recipe.checkpoint.every, recipe.checkpoint.keep_every)
        if not samples and any(isinstance(x, str) for x in saves):
            parts["checkpoints"] = None
            unknown["checkpoints"] = f"some are written at epochs: {subject.reason}"
    return replace(plan, **parts)


def memory_parts(plan: Plan, subject: Subject) -> dict[str, Any]:
    """Memory, compute-optimal length and FLOPs; empty if the model's size is unknown."""
    recipe, size, device = subject.recipe, subject.size, subject.device
    if not size.parameters or not size.flops_per_token:
        return {}
    model, vocab = subject.counted or recipe.model, size.vocab or 0
    rows = memory_rows(model, vocab, recipe.optim.kind, subject.layout, device.usable_bytes)
    settings, advice = recommend(rows, subject)
    flops = size.flops_per_token
    if subject.width and not subject.counted:  # attention over the padded row, not the context
        flops = flops_per_token(recipe.model, vocab, subject.width)
    optimal: dict[str, int] = {}
    pretrained = recipe.model.kind == "hf" and not recipe.model.from_scratch
    if not pretrained or recipe.train.steps == "compute-optimal":  # D = 20 N is for new weights
        ratio = recipe.train.tokens_per_parameter
        optimal["optimal_tokens"] = optimal_tokens(size.parameters, ratio)
        optimal["optimal_steps"] = optimal_steps(recipe, size.parameters, subject.tokens_per_sample)
    per_step = flops * plan.padded_tokens_per_step
    total = None if plan.steps is None else round(per_step * plan.steps)
    return {"memory": rows, "recommended": settings, "advice": advice, "flops": total, **optimal}


def calendar(plan: Plan, recipe: Recipe, horizon: Horizon, val_samples: int) -> dict[str, Any]:
    """Milestones of a run of known length, and the time to its end if the speed is known."""
    check_fits(recipe.optim.schedule, horizon)
    costs = plan.speed.costs if plan.speed else {}
    every = milestones(recipe, horizon, val_samples)
    rows = milestone_rows(every, plan.done, plan.seconds_per_step, costs)
    parts = {"milestones": rows, "checkpoints": checkpoints_to_come(recipe, horizon)}
    seconds = rows[-1].last_seconds if rows else 0.0
    if plan.speed is not None and seconds is not None:
        parts |= {"seconds": seconds, "device_hours": seconds * plan.world / 3600}
        parts["not_counted"] = [m.what for m in rows if m.what in TIMED and m.what not in costs]
    return parts
