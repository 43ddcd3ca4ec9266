"""The subject of a plan: recipe, ranks, device and model size, with facts of the prepared data or a
run's ledger. Torch only counts the parameters of a Hugging Face model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import mean, median
from typing import Any

from windlass.errors import UserError, argument, first_line
from windlass.estimate.calendar import CHECKPOINT, EVALUATION, SAMPLE, recipe_vocab, resolve_steps
from windlass.estimate.devices import Device, find_device, peak_flops, table, this_device
from windlass.estimate.layouts import Machine, layout_on
from windlass.estimate.memory import memory
from windlass.estimate.rank import Layout
from windlass.estimate.step import ShapeUnknown, constants, slowest
from windlass.hub import missing_package
from windlass.model.size import CountedSizes, checkpoint_bytes, count, flops_per_token
from windlass.recipe import Recipe
from windlass.run import Line, Run, last_start


@dataclass(frozen=True)
class Size:
    """The size of a model; None without the vocabulary or a Hugging Face model's configuration."""

    vocab: int | None = None
    parameters: int | None = None
    trained: int | None = None
    non_embedding: int | None = None  # in blocks and norms; None for a Hugging Face model
    flops_per_token: int | None = None  # with attention, but 6 N for a Hugging Face model
    checkpoint_bytes: int | None = None
    network: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Subject:
    recipe: Recipe
    world: int
    device: Device
    precision: str  # with `auto` resolved
    vocab: int | None = None  # rows of the embedding, if the recipe leaves them to the tokenizer
    samples_per_epoch: int = 0  # 0: unknown
    tokens_per_sample: float | None = None  # the average without padding; None: unknown
    width: float = 0.0  # mean positions of a row as training pads it; 0: the context
    val_samples: int = 0  # of the validation set; 0: none, or unknown
    mixture: Any = None  # the samples of a mixture (`MixedSamples`), or a run's facts about it
    reason: str = "the data is not prepared (windlass prepare RECIPE)"  # why they are unknown
    done: int = 0  # steps
    steps: int | None = None  # of a run that has begun
    micro_batch: int = 0  # of a run's last start
    # Counted sizes of a Hugging Face model, or of a GPT with `freeze`.
    counted: CountedSizes | None = None
    hf_reason: str = ""  # why the count failed
    activations_reason: str = ""  # why the activations could not be measured
    speed_reason: str = ""  # why no speed is known

    @property
    def size(self) -> Size:
        recipe, model, counted = self.recipe, self.recipe.model, self.counted
        if counted is not None:
            flops, disk = (
                counted.flops_per_token(),
                checkpoint_bytes(recipe, counted.vocab, counted),
            )
            totals = counted.vocab, counted.total, counted.trained
            return Size(*totals, None, flops, disk, counted.network)
        if model.kind == "hf":
            return Size()
        vocab = model.vocab or self.vocab or recipe_vocab(recipe)
        sizes, flops = count(model, vocab or 0), flops_per_token(model, vocab or 0)
        if not vocab:
            return Size(non_embedding=sizes.non_embedding)
        on_disk = checkpoint_bytes(recipe, vocab)
        return Size(vocab, sizes.total, sizes.total, sizes.non_embedding, flops, on_disk)

    @property
    def layout(self) -> Layout:
        recipe, vocab = self.recipe, self.size.vocab or 0
        if self.micro_batch and not recipe.train.micro_batch:
            recipe = recipe.replace({"train.micro_batch": self.micro_batch})
        of_hf = self.counted if recipe.model.kind == "hf" else None
        return layout_on(recipe, vocab, self.world, self.device, self.precision, counted=of_hf)

    def mixture_rows(self, steps: int) -> list[dict[str, Any]]:
        """The sources of a mixture over the run, if known."""
        if not self.mixture or isinstance(self.mixture, list):
            return self.mixture or []
        from windlass.data.mixture import Mixture, shares_of_run, stages_of

        horizon = self.recipe.horizon(steps, self.samples_per_epoch)
        stages = stages_of(self.recipe.data, horizon)
        mixture = Mixture(self.mixture, stages, self.recipe.run.seed)
        return shares_of_run(mixture, horizon)

    def resolve_steps(self) -> int:
        if self.steps is not None:
            return self.steps
        size, known = self.size, (self.tokens_per_sample, self.samples_per_epoch)
        return resolve_steps(self.recipe, size.vocab, *known, size.parameters)


def subject_of(
    recipe: Recipe,
    run: Run | None = None,
    past: Sequence[Run] = (),
    world: int = 0,
    device: str = "",
    memory_bytes: int | None = None,
    activations: bool = False,
) -> Subject:
    """The subject of a plan, from the recipe and from the run's ledger or the prepared data."""
    started: dict[str, Any] = last_start(run.ledger()) if run else {}
    ranks = world or int(started.get("world", 1))
    like = last_start(past[0].ledger()) if past and not run else started
    name = device or str(like.get("device") or "")
    if name and name.lower() != "cpu":
        target = find_device(name, memory_bytes)
        if device and not target.memory_bytes:
            memory = argument("memory_bytes", "GB*1e9")
            advice = f"add its memory ({memory}), or write cpu, {', '.join(table())}"
            raise UserError(f"{argument('device', device)} is not in the table; {advice}")
    else:
        target = this_device(ranks, memory_bytes, cpu=bool(name) or recipe.parallel.device == "cpu")
    recipe.batch(ranks, target.kind)  # raises if the ranks do not divide the global batch
    recipe.strategy(ranks)  # raises for `single` on several ranks
    precision = str(started.get("precision", "")) if not device else ""
    precision = precision or recipe.train.precision
    if precision == "auto":
        fp16, bf16 = (peak_flops(target.name, kind) for kind in ("fp16", "bf16"))
        low = "fp16" if fp16 is not None and bf16 is None else "bf16"
        precision = "fp32" if target.kind == "cpu" else low
    subject = Subject(recipe, ranks, target, precision)
    if run is None:
        return with_sizes(with_prepared_data(subject), activations)
    train, data = run.lines("train"), started.get("data", {})
    last = train[-1] if train else {}
    counted = last.get("samples") and last.get("tokens")
    per_sample = last["tokens"] / last["samples"] if counted else None
    padded = [x for x in train if x.get("padded_tokens_per_s") and x.get("tokens_per_s")]
    growth = sum(x["padded_tokens_per_s"] / x["tokens_per_s"] for x in padded) / max(1, len(padded))
    subject = replace(
        subject,
        vocab=data.get("vocab"),
        samples_per_epoch=int(started.get("samples_per_epoch", 0)),
        tokens_per_sample=per_sample,
        width=growth * (per_sample or 0.0),
        done=int(last.get("step", started["step"])),
        steps=int(started["steps"]),
        micro_batch=0 if device or world else int(started.get("micro_batch", 0)),
        val_samples=data.get("val", {}).get("samples", 0),
        mixture=data.get("mixture"),
    )
    return with_sizes(subject, activations)


def with_sizes(subject: Subject, activations: bool = False, several: bool = True) -> Subject:
    """The subject with counted parameters, for a Hugging Face model or `model.freeze`.

    With `activations` also with the peaks of a step, by passes with fake tensors (seconds), which
    give the peak of any micro-batch (`several`) or of the recipe's alone.
    """
    recipe, model = subject.recipe, subject.recipe.model
    vocab = 0 if model.kind == "hf" else model.vocab or subject.vocab or recipe_vocab(recipe) or 0
    if model.kind == "gpt" and not (model.freeze and vocab):
        return subject
    try:
        from windlass.model.build import build_model, sizes_of  # needs torch

        network = build_model(recipe, vocab)
        counted = sizes_of(network)
    except (ImportError, UserError) as error:
        if model.kind == "gpt":
            raise
        reason = str(error)
        if isinstance(error, ImportError):
            reason = f"counting a Hugging Face model {missing_package(error)}"
        return replace(subject, counted=None, hf_reason=reason)
    if not activations:
        return replace(subject, counted=counted)
    micro_batch = recipe.batch(subject.world, subject.device.kind).micro_batch
    try:
        from windlass.estimate.activations import measure_peaks

        place = subject.device.kind
        peaks = measure_peaks(network, recipe, subject.precision, micro_batch, place, several)
    except Exception as error:  # code of `transformers`, or an operation without a fake kernel
        reason = f"{type(error).__name__}: {first_line(error)}"
        return replace(subject, counted=counted, activations_reason=reason)
    return replace(subject, counted=replace(counted, peaks=peaks))


def with_prepared_data(subject: Subject) -> Subject:
    from windlass.data.open import open_samples
    from windlass.data.prepare import find_prepared
    from windlass.data.samples import real_tokens

    recipe, width = subject.recipe, 0.0
    try:
        if (prepared := find_prepared(recipe)) is None:
            return subject
        opened = open_samples(recipe, prepared)
    except UserError as error:
        return replace(subject, reason=str(error))
    samples: Any = opened.train
    if hasattr(samples, "mean_width"):
        batch, data = recipe.batch(subject.world, subject.device.kind), recipe.data
        how = (data.order, recipe.run.seed, data.length_buckets)
        width = samples.mean_width(batch.global_batch, batch.micro_batch, *how)
    return replace(
        subject,
        width=width,
        vocab=opened.vocab,
        samples_per_epoch=len(samples),
        tokens_per_sample=(real_tokens(samples) or 0) / len(samples),
        val_samples=len(opened.val or ()),
        mixture=samples if recipe.data.mix else None,
    )


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


def past_speed(subject: Subject, runs: Sequence[Run]) -> Speed | None:
    """The lower median of the speeds of runs with this model and device on the nearest ranks,
    scaled."""
    same = [run for run in runs if run.exists and run.recipe.model == subject.recipe.model]
    speeds = [speed for run in same if (speed := measured_speed(run.ledger(), run.name))]
    devices, world = ("", subject.device.name.lower()), subject.world
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


def predicted_speed(subject: Subject, machine: Machine) -> tuple[Speed | None, str]:
    """The speed by the model of a step (step.py), or the reason if it is unknown."""
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
    if device.usable_bytes and needed > device.usable_bytes:
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
    if step.bubble:
        detail += f"; a pipeline's stages wait {100 * layout.bubble:.3g} % of the step"
    if layout.offload:
        detail += "; without the copies of parallel.offload"
    rate = samples * tokens / step.total
    speed = Speed(rate, subject.world, "predicted", detail, {}, device.name)
    width = network.network["width"] if isinstance(network, CountedSizes) else network.width
    ranges = constants().ranges
    described = width >= NARROWEST and subject.precision in ("bf16", "fp16")
    if device.family not in ranges or not described:
        published = f"published runs are in bf16, {NARROWEST} or more wide, on {', '.join(ranges)}"
        return replace(speed, detail=f"{detail}; its error is unknown, because {published}"), ""
    rows, _, low, high = ranges[device.family]
    slow, fast = 1 / (1 + high), 1 / (1 + low)
    detail += f"; 8 of 10 of {rows} published runs on {device.family} reached {slow:.2f} to "
    detail += f"{fast:.2f} times a prediction fitted without their project"
    return replace(speed, detail=detail, range=(slow, fast)), ""
