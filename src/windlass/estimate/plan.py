"""The plan of a recipe before it runs, or of a run that is under way.

`plan` collects the inputs (`Subject`: recipe, ranks, device, prepared data or ledger) and a speed; `assemble` computes
everything else. All of it is arithmetic without torch, but for the parameters of a Hugging Face model, which are counted on
the meta device. What is not available yet is None, and `Plan.unknown` has the reason.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from windlass.errors import UserError, argument, first_line
from windlass.estimate.devices import TABLE, Device, find_device, this_device
from windlass.estimate.layout import layout_of
from windlass.estimate.memory import MemoryRow, memory_rows, recommend
from windlass.estimate.milestones import (
    TIMED,
    Evaluations,
    MilestoneRow,
    checkpoints_to_come,
    evaluations,
    milestone_rows,
    milestones,
)
from windlass.estimate.optimum import optimal_steps, optimal_tokens, recipe_vocab, resolve_steps
from windlass.estimate.steptime import Rates, step_time
from windlass.estimate.text import print_plan
from windlass.estimate.time import ASSUMED_MFU, Speed, measured_speed, speed_on
from windlass.hub import missing_package
from windlass.model.convert import export_note
from windlass.model.size import CountedSizes, checkpoint_bytes, count, flops_per_token
from windlass.optim.schedule import schedule_horizon
from windlass.recipe import Changes, Horizon, Recipe, as_recipe
from windlass.run import Run, last_start
from windlass.telemetry.timing import peak_flops

SMALL_WIDTH = 768
"""Narrower models spend their time on launching kernels rather than in them: no usual MFU holds for them."""


@dataclass(frozen=True)
class Size:
    """How large a model is; None without the vocabulary or a Hugging Face model's configuration."""

    vocab: int | None = None
    parameters: int | None = None
    trained: int | None = None  # fewer than all with low-rank adapters or `model.freeze`
    non_embedding: int | None = (
        None  # in blocks and norms; None for a Hugging Face model, which has no parts here
    )
    parts: dict[str, int] = field(default_factory=dict)
    flops_per_token: int | None = (
        None  # with attention over the whole context; of a Hugging Face model by the rule 6 N
    )
    checkpoint_bytes: int | None = None
    network: dict[str, Any] = field(
        default_factory=dict
    )  # of a Hugging Face model: architecture, layers, heads, width


@dataclass(frozen=True)
class Subject:
    """What a plan is made for: who trains what on what, with facts of the prepared data or of a run's ledger."""

    recipe: Recipe
    world: int
    device: Device
    precision: str  # with `auto` resolved
    vocab: int | None = None  # rows of the embedding, where the recipe leaves them to the tokenizer
    samples_per_epoch: int = 0  # 0: not known
    tokens_per_sample: float | None = None  # real tokens on average; None: not known
    val_samples: int = 0  # of the validation set; 0: none, or not known
    reason: str = "unknown until the data is prepared"  # why the four above are not known
    done: int = 0  # steps done
    steps: int | None = None  # of a run that has begun
    counted: CountedSizes | None = (
        None  # of a Hugging Face model whose configuration can be read, or with `freeze`
    )
    hf_reason: str = ""  # why it could not
    activations_reason: str = ""  # why its activations could not be measured

    @property
    def size(self) -> Size:
        """The model's size: all of it, or without the vocabulary its blocks."""
        recipe, model, own = self.recipe, self.recipe.model, self.counted
        if own is not None:
            flops, on_disk = own.flops_per_token(), own.checkpoint_bytes()
            return Size(own.vocab, own.total, own.trained, None, {}, flops, on_disk, own.network)
        if model.kind == "hf":
            return Size()
        vocab = model.vocab or self.vocab or recipe_vocab(recipe)
        sizes, flops = count(model, vocab or 0), flops_per_token(model, vocab or 0)
        names = ("positions", "attention", "feed_forward", "norms")
        parts = {
            name: getattr(sizes, name)
            for name in (("embedding", *names, "head") if vocab else names)
        }
        if not vocab:
            return Size(non_embedding=sizes.non_embedding, parts=parts)
        on_disk = checkpoint_bytes(model, vocab, recipe.optim.kind)
        return Size(vocab, sizes.total, sizes.total, sizes.non_embedding, parts, flops, on_disk)


@dataclass(frozen=True)
class Plan:
    """Numbers of a run before it begins, or of what is left of it while it runs; None: see `unknown`."""

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
    tokens_per_step: float  # real ones, over all ranks
    padded_tokens_per_step: int
    taken_as_full: bool  # samples are padded, and how far is not known: they are counted as full
    tokens: int | None
    epochs: float | None
    schedule_steps: int | None = None  # of the learning rate, where that is not the run's length
    optimal_tokens: int | None = None
    optimal_steps: int | None = None
    flops: int | None = None  # of the run, with padding, which is computed too
    memory: list[MemoryRow] = field(default_factory=list)  # the cheapest in time first
    recommended: dict[str, str | int | bool] = field(
        default_factory=dict
    )  # settings of the first layout that fits
    advice: str = ""  # why these, or what to change where nothing fits
    checkpoints: int | None = None  # on disk at a time, at most
    tokens_bytes: int | None = (
        None  # of the token shards, where `data.max_tokens` says how many tokens there are
    )
    speed: Speed | None = None
    seconds_per_step: float | None = None
    seconds: float | None = None  # from now to the end
    device_hours: float | None = None  # the same, times ranks
    not_counted: list[str] = field(
        default_factory=list
    )  # milestones to come whose time was not measured
    milestones: list[MilestoneRow] = field(default_factory=list)
    evaluations: Evaluations | None = None  # of the loss, and their share of the work
    optimizer: str = ""  # `optim.kind`
    export: str = ""  # why an export needs code of its own; empty if it needs none
    unknown: dict[str, str] = field(default_factory=dict)  # what is None, and why

    def __repr__(self) -> str:
        """The tables of `windlass plan`."""
        from rich.console import Console

        console = Console(file=io.StringIO(), width=100, color_system=None)
        print_plan(self, console)
        return console.file.getvalue().rstrip()  # type: ignore[attr-defined]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, with the totals."""
        plain = asdict(self)
        plain["device"]["usable_bytes"] = self.device.usable_bytes
        for row, source in zip(plain["memory"], self.memory, strict=True):
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
    mfu: float = ASSUMED_MFU,
) -> Plan:
    """The plan of a recipe, or of what is left of a run by its own ledger.

    Args:
        source: a recipe, a run, or what a recipe can be loaded from.
        overrides: settings to change, as typed or as a mapping.
        world: ranks; 0: one, or those of the run.
        device: a kind of device, as `A100-80GB`; empty: that of the run, of the past runs, or this machine's.
        memory_bytes: the device's memory, where it is not in the table.
        past: past runs to take the speed from; UserError where none has that of this model and device.
        mfu: share of the device's peak to assume where nothing was measured.
    """
    if isinstance(source, str | Path):
        is_run = (Path(source) / "recipe.toml").is_file() and not overrides
        source = Run(Path(source)) if is_run else Recipe.load(source)
    run = source if isinstance(source, Run) and last_start(source.ledger()) else None
    recipe = as_recipe(source).replace(overrides)
    subject = with_activations(subject_of(recipe, run, past, world, device, memory_bytes))
    speed = past_speed(subject, past or [run or Run(recipe.run_dir)])
    if past and speed is None:
        names = ", ".join(str(run.path) for run in past)
        problem = f"no steps of this model on {subject.device.name} are logged in {names}"
        device_option, past_option = argument("device", "NAME"), argument("past", "RUN")
        advice = f"name a run of the same model, with {device_option} if that is of another one, or leave {past_option} out"
        raise UserError(f"{problem}: {advice} and have the speed assumed from the device's peak")
    return assemble(subject, speed or assumed_speed(subject, mfu), run)


def subject_of(
    recipe: Recipe,
    run: Run | None,
    past: Sequence[Run],
    world: int,
    device: str,
    memory_bytes: int | None,
) -> Subject:
    """Who trains what on what, from the recipe and from the run's ledger or the prepared data."""
    started: dict[str, Any] = last_start(run.ledger()) if run else {}
    ranks = world or int(started.get("world", 1))
    like = last_start(past[0].ledger()) if past and not run else started
    name = device or str(like.get("device") or "")
    if name and name.lower() != "cpu":
        where = find_device(name, memory_bytes)
        if device and not where.memory_bytes:
            names = ", ".join(short for short, *_ in TABLE)
            advice = f"add its memory ({argument('memory_bytes', 'GB*1e9')}), or write cpu, {names}"
            raise UserError(f"{argument('device', device)} is not in the table; {advice}")
    else:
        where = this_device(ranks, memory_bytes, cpu=bool(name) or recipe.parallel.device == "cpu")
    recipe.batch(
        ranks, where.kind
    )  # raises where the global batch is not divisible by the world size
    recipe.strategy(ranks)  # raises for `single` on several ranks
    precision = str(started.get("precision", "")) if not device else ""
    precision = precision or recipe.train.precision
    if precision == "auto":
        no_bf16 = (
            peak_flops(where.name, "fp16") is not None and peak_flops(where.name, "bf16") is None
        )
        precision = "fp32" if where.kind == "cpu" else "fp16" if no_bf16 else "bf16"
    subject = Subject(recipe, ranks, where, precision)
    if run is None:
        return with_counted_sizes(with_prepared_data(subject))
    train = run.lines("train")
    last, parameters = train[-1] if train else {}, started.get("parameters")
    vocab = None
    if parameters and recipe.model.kind == "gpt":  # linear in the rows of the embedding
        without, with_one = (count(recipe.model, rows).total for rows in (0, 1))
        vocab = (int(parameters) - without) // (with_one - without)
    subject = replace(
        subject,
        vocab=vocab,
        samples_per_epoch=int(started.get("samples_per_epoch", 0)),
        tokens_per_sample=last["tokens"] / last["samples"]
        if last.get("samples") and last.get("tokens")
        else None,
        done=int(last.get("step", started["step"])),
        steps=int(started["steps"]),
        val_samples=started.get("data", {}).get("val", {}).get("samples", 0),
    )
    return with_counted_sizes(subject)


def with_counted_sizes(subject: Subject) -> Subject:
    """The subject with sizes that only the parameters tell: of a Hugging Face model, or with `model.freeze`."""
    recipe, model = subject.recipe, subject.recipe.model
    vocab = 0 if model.kind == "hf" else model.vocab or subject.vocab or recipe_vocab(recipe) or 0
    if model.kind == "gpt" and not (model.freeze and vocab):
        return subject
    try:
        from windlass.model.build import read_sizes  # needs torch

        return replace(subject, counted=read_sizes(recipe, vocab))
    except (ImportError, UserError) as error:
        if model.kind == "gpt":
            raise
        needs = (
            f"counting a Hugging Face model {missing_package(error)}"
            if isinstance(error, ImportError)
            else ""
        )
        return replace(subject, hf_reason=needs or str(error))


def with_activations(subject: Subject) -> Subject:
    """The subject with the activations of counted sizes, which a pass with fake tensors measures in some seconds."""
    recipe, own = subject.recipe, subject.counted
    if own is None:
        return subject
    micro_batch = recipe.batch(subject.world, subject.device.kind).micro_batch
    try:
        from windlass.estimate.activations import measure_peaks  # needs torch

        peaks = measure_peaks(recipe, own.vocab, subject.precision, micro_batch)
        return replace(subject, counted=replace(own, peaks=peaks))
    except (
        Exception
    ) as error:  # of code of `transformers`, or of an operation without a fake kernel
        return replace(subject, activations_reason=f"{type(error).__name__}: {first_line(error)}")


def with_prepared_data(subject: Subject) -> Subject:
    """The subject with vocabulary and samples of the prepared data, or with the reason why there are none."""
    from windlass.data.prepare import find_prepared, open_samples
    from windlass.data.samples import real_tokens

    try:
        if (prepared := find_prepared(subject.recipe)) is None:
            return subject
        samples, val = cast(tuple[Any, Any], open_samples(subject.recipe, prepared))
    except UserError as error:
        return replace(subject, reason=str(error))
    tokens = (real_tokens(samples) or 0) / len(samples)
    return replace(
        subject,
        vocab=prepared.tokenizer.vocab,
        samples_per_epoch=len(samples),
        tokens_per_sample=tokens,
        val_samples=len(val or ()),
    )


def past_speed(subject: Subject, runs: Sequence[Run]) -> Speed | None:
    """The speed of those of the runs that train the same model on the same kind of device; None where there is none."""
    same = [
        run
        for run in runs
        if run.recipe_path.is_file() and run.recipe.model == subject.recipe.model
    ]
    speeds = [speed for run in same if (speed := measured_speed(run.ledger(), run.name))]
    speeds = [
        speed for speed in speeds if speed.device.lower() in ("", subject.device.name.lower())
    ]
    return speed_on(speeds, subject.world) if speeds else None


def assumed_speed(subject: Subject, mfu: float) -> Speed | None:
    """The speed at a part of the device's peak; None without a known peak or the model's FLOPs."""
    name, recipe = subject.device.name, subject.recipe
    model, batch = recipe.model, recipe.train.global_batch
    peak = peak_flops(name, subject.precision, recipe.train.tf32)
    if subject.size.flops_per_token is None or peak is None:
        return None
    assumed = f"an assumed MFU of {100 * mfu:g} %, nothing measured"
    detail = f"{name}: peak {peak / 1e12:.4g} TFLOP/s x {assumed}"
    # Padding is computed, too.
    tokens = min(model.context, subject.tokens_per_sample or model.context)
    if tokens < model.context:
        places = f"{100 * tokens / model.context:.0f} % of the places are tokens"
        detail += f"; {places}, the rest padding"
    if model.kind == "gpt" and model.width < SMALL_WIDTH:
        small = f"matrices of width {model.width} hardly fill such a device"
        detail += f"; {small}, so take it for a bound"
    flops = subject.size.flops_per_token * model.context * batch / subject.world
    seconds = step_time(Rates(peak * mfu), flops).compute
    assert seconds is not None
    return Speed(batch * tokens / seconds, subject.world, "assumed", detail, device=name)


def assemble(subject: Subject, speed: Speed | None, run: Run | None = None) -> Plan:
    """Every part of the plan that these determine, and the reasons for the others."""
    recipe, size, done, unknown = subject.recipe, subject.size, subject.done, {}
    batch, context, samples = (
        recipe.train.global_batch,
        recipe.model.context,
        subject.samples_per_epoch,
    )
    steps = subject.steps
    if steps is None:
        try:
            steps = resolve_steps(
                recipe, size.vocab, subject.tokens_per_sample, samples, size.parameters
            )
        except UserError as error:
            unknown["steps"] = str(error)
    if size.parameters is None:
        unknown["size"] = (
            subject.hf_reason or f"{subject.reason}: the vocabulary of {recipe.data.tokenizer!r}"
        )
    if subject.activations_reason:
        unknown["activations"] = subject.activations_reason
    if not samples:
        unknown["epochs"] = subject.reason
    if speed is None:
        peak = f"the peak of {subject.device.name} in {subject.precision} is not known"
        cause = peak if size.flops_per_token else "the FLOPs of a token are not known"
        unknown["time"] = (
            f"nothing was measured, and {cause}: name a past run of this model, or a device of the table"
        )
    tokens_per_step = batch * (subject.tokens_per_sample or float(context))
    plan = Plan(
        recipe=recipe.preset,
        config_hash=recipe.config_hash,
        run_dir=str(run.path if run else recipe.run_dir),
        state=run.state if run else "",
        world=subject.world,
        device=subject.device,
        precision=subject.precision,
        size=size,
        optimizer=recipe.optim.kind,
        export=export_note(recipe.model),
        steps=steps,
        done=done,
        tokens_per_step=tokens_per_step,
        padded_tokens_per_step=batch * context,
        taken_as_full=subject.tokens_per_sample is None
        and (recipe.data.packing == "documents" or recipe.data.format != "text"),
        tokens=None if steps is None else round(steps * tokens_per_step),
        epochs=steps * batch / samples if steps is not None and samples else None,
        tokens_bytes=recipe.data.max_tokens * (2 if (size.vocab or 0) <= 2**16 else 4)
        or None,  # uint16, uint32
        speed=speed,
        seconds_per_step=tokens_per_step / speed.tokens_per_s if speed else None,
        unknown=unknown,
    )
    if size.parameters and size.flops_per_token:
        network = subject.counted or recipe.model
        layout = layout_of(recipe, subject.world, subject.device.kind, subject.precision)
        layout = replace(layout, workspace=subject.device.workspace_bytes)
        rows = memory_rows(
            network, size.vocab or 0, recipe.optim.kind, layout, subject.device.usable_bytes
        )
        settings, advice = recommend(rows, recipe.train.micro_batch)
        plan = replace(
            plan,
            memory=rows,
            recommended=settings,
            advice=advice,
            optimal_tokens=optimal_tokens(size.parameters, recipe.train.tokens_per_parameter),
            optimal_steps=optimal_steps(recipe, size.parameters, subject.tokens_per_sample),
            flops=None if steps is None else size.flops_per_token * batch * context * steps,
        )
    return (
        plan
        if steps is None
        else with_milestones(plan, recipe, Horizon(steps, samples, batch), subject.val_samples)
    )


def with_milestones(plan: Plan, recipe: Recipe, horizon: Horizon, val_samples: int) -> Plan:
    """The plan of a run of known length with what happens in it, and with the time to its end where a speed is known."""
    costs = plan.speed.costs if plan.speed else {}
    rows = milestone_rows(
        milestones(recipe, horizon, val_samples), plan.done, plan.seconds_per_step, costs
    )
    schedule_steps = schedule_horizon(recipe.optim.schedule, horizon).steps
    plan = replace(
        plan,
        milestones=rows,
        checkpoints=checkpoints_to_come(recipe, horizon),
        schedule_steps=schedule_steps if schedule_steps != horizon.steps else None,
        evaluations=evaluations(recipe, horizon, val_samples),
    )
    if plan.speed is None or (seconds := rows[-1].last_seconds if rows else 0.0) is None:
        return plan
    missing = [m.what for m in rows if m.what in TIMED and m.what not in costs]
    return replace(
        plan, seconds=seconds, device_hours=seconds * plan.world / 3600, not_counted=missing
    )
