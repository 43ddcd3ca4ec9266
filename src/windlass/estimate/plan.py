"""The plan of a recipe before it runs, or of a run that is under way: `plan` assembles it, `Plan` holds it.

All of it is arithmetic, without torch (but for the parameters of a Hugging Face model, which are counted on the meta
device). What cannot be known yet, as a rule because the data is not prepared, is None, and `Plan.unknown` has the
reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from windlass.errors import UserError
from windlass.estimate.devices import Device
from windlass.estimate.layouts import CHECKPOINTING, Recommendation, Task, largest_micro_batch, recommend
from windlass.estimate.memory import Layout, Memory, Network, layout_of, memory, shard_size
from windlass.estimate.milestones import MilestoneRow, kept_checkpoints, milestone_rows, milestones, save_steps
from windlass.estimate.optimum import optimal_steps, optimal_tokens, resolve_steps
from windlass.estimate.speeds import find_speed
from windlass.estimate.subject import Subject, start_event, subject_of
from windlass.estimate.time import ASSUMED_MFU, Speed, TimeLeft, time_left
from windlass.model.size import HfSizes, count
from windlass.recipe import Horizon, Recipe
from windlass.run import Run


@dataclass(frozen=True)
class ModelSize:
    """Parameters, in all and by part."""

    vocab: int | None
    parameters: int | None
    """None, as are the parts that grow with it, while the vocabulary is not known."""
    trained: int | None
    """Fewer than all with low-rank adapters."""
    non_embedding: int | None
    """Of a model of `transformers` neither this nor the parts are known."""
    parts: dict[str, int]


@dataclass(frozen=True)
class Length:
    """Steps and tokens, beside the compute-optimal ones."""

    steps: int | None
    done: int
    tokens_per_step: float
    padded_tokens_per_step: int
    tokens: int | None
    epochs: float | None
    tokens_per_parameter: float | None
    optimal_ratio: float
    optimal_tokens: int | None
    optimal_steps: int | None
    taken_as_full: bool
    """Samples are padded, and how far is not known: they are counted as full."""


@dataclass(frozen=True)
class Flops:
    """FLOPs of a token, forward and backward, and of the run."""

    per_token_6n: int
    """By the rule 6 N."""
    per_token: int
    """With attention over the whole context; of a Hugging Face model the rule again."""
    run: int | None
    """With padding, which is computed too."""


@dataclass(frozen=True)
class MemoryRow:
    """The memory of a rank under one layout."""

    layout: Layout
    memory: Memory
    fits: bool | None
    """None: not known."""
    largest_micro_batch: int | None
    chosen: bool
    """Whether it is the recipe's own layout."""


@dataclass(frozen=True)
class Disk:
    """Bytes on disk."""

    checkpoint_bytes: int
    checkpoints: int | None
    """At the end of the run."""
    peak_bytes: int | None
    """Of all checkpoints, with room for one more while it is written."""
    tokens_bytes: int | None
    """Of the token shards, where `data.max_tokens` says how many tokens there are."""


@dataclass(frozen=True)
class Time:
    """How fast, and how long from now to the end."""

    speed: Speed
    seconds_per_step: float
    left: TimeLeft | None
    """None while the number of steps is not known."""


@dataclass(frozen=True)
class Plan:
    """Everything that can be said of a run before it begins, or while it goes on; None: see `unknown`."""

    recipe: str
    config_hash: str
    run_dir: str
    state: str
    """Of a run that has begun; else empty."""
    world: int
    device: Device
    precision: str
    length: Length
    model: ModelSize | None = None
    flops: Flops | None = None
    memory: list[MemoryRow] | None = None
    recommendation: Recommendation | None = None
    disk: Disk | None = None
    time: Time | None = None
    milestones: list[MilestoneRow] | None = None
    unknown: dict[str, str] = field(default_factory=dict)
    """What is None, and why."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, with the totals."""
        plain = asdict(self)
        plain["device"]["usable_bytes"] = self.device.usable_bytes
        for row, source in zip(plain["memory"] or [], self.memory or [], strict=True):
            row["memory"]["total"] = source.memory.total
        return plain


def plan(
    source: Recipe | Run | str | Path,
    overrides: Sequence[str] = (),
    *,
    world: int = 0,
    device: str = "",
    memory_bytes: int | None = None,
    past: Sequence[Sequence[Run]] = (),
    measure: bool = False,
    mfu: float = ASSUMED_MFU,
    notify: Callable[[str], None] = lambda text: None,
) -> Plan:
    """The plan of a recipe, or of what is left of a run by its own ledger.

    Args:
        source: a recipe, a run, or what a recipe can be loaded from.
        overrides: settings to change, as typed.
        world: ranks; 0: one, or those of the run.
        device: a kind of device, as `A100-80GB`; empty: that of the run, of the past runs, or this machine's.
        memory_bytes: the device's memory, where it is not in the table.
        past: past runs to take the speed from; each sequence is one `--from`.
        measure: make a few real steps on this machine for the speed.
        mfu: share of the device's peak to assume where nothing was measured.
        notify: called with messages for the user.

    Raises:
        UserError: the batch is not divisible by the world size, or a given speed is not one of this model and device.
    """
    if isinstance(source, str | Path):
        is_run = (Path(source) / "recipe.toml").is_file() and not overrides
        source = Run(Path(source)) if is_run else Recipe.load(source)
    run = source if isinstance(source, Run) and start_event(source) else None
    recipe = (source.recipe if isinstance(source, Run) else source).with_overrides(*overrides)
    subject = subject_of(recipe, run, world, device, memory_bytes, past, measure)
    speed = find_speed(subject, run, past, measure, mfu, own=not device, notify=notify)
    return assemble(subject, speed, run)


def assemble(subject: Subject, speed: Speed | None, run: Run | None = None) -> Plan:
    """Every part of the plan that is known, and why the others are not."""
    recipe, facts, network, unknown = subject.recipe, subject.facts, subject.network, {}
    steps = subject.steps
    if steps is None:
        try:
            steps = resolve_steps(
                recipe, subject.vocab, facts.tokens_per_sample, facts.samples_per_epoch, subject.parameters
            )
        except UserError as error:
            unknown["steps"] = (
                str(error) if subject.hf_reason else f'{facts.reason}: train.steps = "{recipe.train.steps}"'
            )
    horizon = None if steps is None else Horizon(steps, facts.samples_per_epoch, recipe.train.global_batch)
    if network is None:
        unknown["size"] = subject.hf_reason or f"{facts.reason}: the vocabulary of {recipe.data.tokenizer!r}"
    if not facts.samples_per_epoch:
        unknown["epochs"] = facts.reason
    events = milestones(recipe, horizon) if horizon else []
    time = None
    if speed is not None:
        left = time_left(events, subject.done, subject.tokens_per_step, speed) if horizon else None
        time = Time(speed, subject.tokens_per_step / speed.tokens_per_s, left)
    else:
        peak = f"the peak of {subject.device.name} in {subject.precision} is not known"
        cause = peak if subject.flops_per_token else "the FLOPs of a token are not known"
        unknown["time"] = f"nothing was measured, and {cause}: give --from RUN, --measure, or a --device of the table"
    return Plan(
        recipe=recipe.preset,
        config_hash=recipe.config_hash,
        run_dir=str(run.path if run else recipe.run_dir),
        state=run.state if run else "",
        world=subject.world,
        device=subject.device,
        precision=subject.precision,
        length=_length(subject, steps),
        model=_model_size(subject),
        flops=_flops(subject, steps),
        memory=memory_rows(subject, network) if network else None,
        recommendation=recommendation(subject),
        disk=_disk(subject, horizon),
        time=time,
        milestones=milestone_rows(
            events, subject.done, time.seconds_per_step if time else None, speed.costs if speed else {}
        ) if horizon else None,
        unknown=unknown,
    )  # fmt: skip


def _model_size(subject: Subject) -> ModelSize | None:
    model, hf, vocab = subject.recipe.model, subject.hf, subject.vocab
    if model.kind == "hf":
        return ModelSize(hf.vocab, hf.total, hf.trained, None, {}) if hf else None
    sizes = count(model, vocab or 0)
    grows = ("embedding", "head")  # with the vocabulary
    names = ("embedding", "positions", "attention", "feed_forward", "norms", "head")
    parts = {name: getattr(sizes, name) for name in names if vocab or name not in grows}
    total = sizes.total if vocab else None
    return ModelSize(vocab, total, total, sizes.non_embedding, parts)


def _length(subject: Subject, steps: int | None) -> Length:
    recipe, samples, parameters = subject.recipe, subject.facts.samples_per_epoch, subject.parameters
    batch, ratio = recipe.train.global_batch, recipe.train.tokens_per_parameter
    tokens = None if steps is None else round(steps * subject.tokens_per_step)
    return Length(
        steps=steps,
        done=subject.done,
        tokens_per_step=subject.tokens_per_step,
        padded_tokens_per_step=batch * recipe.model.context,
        tokens=tokens,
        epochs=steps * batch / samples if steps is not None and samples else None,
        tokens_per_parameter=tokens / parameters if tokens is not None and parameters else None,
        optimal_ratio=ratio,
        optimal_tokens=optimal_tokens(parameters, ratio) if parameters else None,
        optimal_steps=optimal_steps(recipe, parameters, subject.tokens_per_sample) if parameters else None,
        taken_as_full=subject.facts.tokens_per_sample is None
        and (recipe.data.packing == "documents" or recipe.data.format != "text"),
    )


def _flops(subject: Subject, steps: int | None) -> Flops | None:
    network, per_token = subject.network, subject.flops_per_token
    if network is None or per_token is None:
        return None
    padded = subject.recipe.train.global_batch * subject.recipe.model.context
    rule = per_token if isinstance(network, HfSizes) else 6 * (subject.parameters or 0)
    return Flops(rule, per_token, None if steps is None else per_token * padded * steps)


def memory_rows(subject: Subject, network: Network) -> list[MemoryRow]:
    """A row for each strategy that the world allows, with the recipe's precision and micro-batch."""
    recipe, world, usable = subject.recipe, subject.world, subject.device.usable_bytes
    base = layout_of(recipe, world, subject.device.kind, subject.precision)
    strategies = ["ddp", "shard_grad_op", "full_shard"] if world > 1 else ["single"]
    if world > 3 or base.strategy == "hybrid_shard":
        strategies.append("hybrid_shard")
    if base.strategy not in strategies:
        strategies.append(base.strategy)
    ours = not isinstance(network, HfSizes)  # else states alone are known: they may be too large, never surely fit
    rows = []
    for strategy in strategies:
        for checkpointing in CHECKPOINTING if ours else ("none",):
            layout = replace(
                base, strategy=strategy, shard=shard_size(strategy, world, recipe.parallel.shard_size),
                checkpointing=checkpointing, offload=base.offload and strategy not in ("single", "ddp"),
            )  # fmt: skip
            needed = memory(network, subject.vocab or 0, layout, recipe.optim.kind)
            fits = None if usable is None else needed.total <= usable
            largest = None
            if not isinstance(network, HfSizes) and usable is not None:
                largest = largest_micro_batch(_task(subject, network, usable), layout)
            chosen = strategy == base.strategy and checkpointing in (base.checkpointing, "none" if not ours else "")
            rows.append(MemoryRow(layout, needed, fits if ours or fits is False else None, largest, chosen))
    return rows


def _task(subject: Subject, network: Network, usable: int) -> Task:
    share = subject.recipe.train.global_batch // subject.world
    assert not isinstance(network, HfSizes)
    return Task(network, subject.vocab or 0, subject.recipe.optim.kind, share, usable)


def recommendation(subject: Subject) -> Recommendation | None:
    """The cheapest layout that fits, or what to change; None where the memory of activations is not known."""
    recipe, network, usable = subject.recipe, subject.network, subject.device.usable_bytes
    if network is None or isinstance(network, HfSizes):
        return None
    if usable is None:
        return Recommendation(None, "the device's memory is not known: give --memory GB", {})
    base = layout_of(recipe, subject.world, subject.device.kind, subject.precision)
    base = replace(base, micro_batch=recipe.train.micro_batch)
    return recommend(_task(subject, network, usable), base)


def _disk(subject: Subject, horizon: Horizon | None) -> Disk | None:
    recipe, size = subject.recipe, subject.checkpoint_bytes
    if size is None:
        return None
    saves = save_steps(recipe, horizon) if horizon else []
    checkpoints = kept_checkpoints(recipe, horizon, saves) if horizon else None
    peak = None if checkpoints is None else min(checkpoints + 1, len(saves)) * size
    token = 2 if (subject.vocab or 0) <= 2**16 else 4  # uint16 where all ids fit
    return Disk(size, checkpoints, peak, recipe.data.max_tokens * token or None)
