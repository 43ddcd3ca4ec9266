"""The layouts that a number of ranks allows: which fit on a device, how fast they are, and the
settings with which a recipe fits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from windlass.errors import UserError, plural
from windlass.estimate.devices import USABLE
from windlass.estimate.inputs import PlanInputs, with_largest_micro_batch, with_sizes
from windlass.estimate.memory import Memory, Network, memory
from windlass.estimate.rank import Layout, layout_of
from windlass.estimate.step import slowest
from windlass.model.size import CountedSizes
from windlass.recipe import Recipe, typed
from windlass.recipe.strategies import STRATEGIES

CHECKPOINTING = ("none", "selective", "full")
ROWS = 8  # of the table of layouts, one for each combination of tensor, context and pipeline
ALIKE = 0.02  # predicted steps that differ by less than this part count as equal

Settings = dict[str, str | int | bool]


@dataclass(frozen=True)
class MemoryRow:
    layout: Layout
    memory: Memory  # of the fullest rank
    fits: bool | None  # None: unknown
    largest_micro_batch: int | None  # that fits; 0: none does; None: unknown
    chosen: bool  # whether it is the recipe's own layout


@dataclass(frozen=True)
class LayoutRow:
    """A layout that fits, with the step of its slowest rank."""

    layout: Layout
    memory: Memory  # of the fullest rank
    seconds: float  # of a step, predicted
    settings: Settings  # that differ from the recipe's


def variants(
    base: Layout,
    checkpointings: Sequence[str] = CHECKPOINTING,
    groups: int = 0,
    offload: bool = False,
) -> Iterator[Layout]:
    """A layout with each strategy and activation checkpointing that its ranks allow, the fastest
    first. `groups`: data ranks on each of several hosts; `offload`: also the layouts with it.

    `shard_grad_op` moves less over the network than `full_shard`. `hybrid_shard` gathers among half
    of the ranks. `shard_optim` moves half as much again as `ddp`, while nothing is computed.
    """
    names = ["ddp" if base.world > 1 else "single"]
    if base.replicas > 1:
        names += ["shard_grad_op", "shard_optim", "hybrid_shard", "full_shard"]
        if base.data_world <= 3:
            names.remove("hybrid_shard")
    every = [(checkpointing, name, False) for checkpointing, name in product(checkpointings, names)]
    if offload:
        every += [(checkpointing, "full_shard", True) for checkpointing in ("none", "full")]
    for checkpointing, name, to_host in every:
        layout = replace(base, strategy=name, checkpointing=checkpointing, offload=to_host)
        if name != base.strategy:  # the same strategy keeps its sharding group
            shard = layout.policy.sizes(base.data_world, 0, groups).dp_shard
            shard *= base.context if layout.policy.shards_optimizer else 1
            layout = replace(layout, shard=shard)
        yield layout


def settings_of(layout: Layout) -> Settings:
    return {
        "parallel.tensor": layout.tensor,
        "parallel.context": layout.context,
        "parallel.pipeline": layout.pipeline,
        "parallel.strategy": layout.strategy,
        "parallel.activation_checkpointing": layout.checkpointing,
        "train.micro_batch": layout.micro_batch,
        "parallel.shard_size": layout.shard // layout.context if layout.policy.grouped else 0,
        "parallel.offload": layout.offload,
    }


def memory_rows(
    model: Network, vocab: int, optimizer: str, base: Layout, usable: int | None
) -> list[MemoryRow]:
    """A row for each variant of `base`; only our GPT varies in checkpointing and offload."""
    ours = not isinstance(model, CountedSizes)
    has_peaks = not isinstance(model, CountedSizes) or bool(model.peaks)
    base = base if has_peaks else replace(base, checkpointing="none")
    checkpointings = CHECKPOINTING if ours else [base.checkpointing]
    layouts = list(variants(base, checkpointings, offload=ours and base.device == "cuda"))
    if base not in layouts:
        layouts.append(base)
    rows = []
    for layout in layouts:
        needed = memory(model, vocab, layout, optimizer)
        fits = None if usable is None else needed.total <= usable
        if not has_peaks and fits:
            fits = None  # the unknown activations may be too large
        largest = None
        if has_peaks and usable is not None:
            fitting = with_largest_micro_batch(model, vocab, layout, optimizer, usable)
            largest = fitting.micro_batch if fitting else 0
        rows.append(MemoryRow(layout, needed, fits, largest, layout == base))
    return rows


def layouts(inputs: PlanInputs) -> Iterator[Layout]:
    """Every layout of our GPT that the recipe's checks accept, in each variant."""
    recipe, world, host = inputs.recipe, inputs.world, inputs.ranks_of_host
    numbers = [n for n in range(1, world + 1) if world % n == 0]
    for tensor, context, pipeline in product(numbers, numbers, numbers):
        # Links between hosts are too slow for tensor parallelism.
        if world % (tensor * context * pipeline) or (host and tensor > host):
            continue
        division: Settings = {
            "parallel.tensor": tensor,
            "parallel.context": context,
            "parallel.pipeline": pipeline,
            "parallel.strategy": "auto",
            "parallel.offload": False,
            "parallel.shard_size": 0,
            "train.micro_batch": recipe.train.micro_batch or 1,
        }
        try:
            divided = recipe.replace(division)
            base = layout_of(divided, world, inputs.device.kind, inputs.precision)
        except UserError:  # the checks of `recipe.combinations` and of the batch
            continue
        base = replace(base, workspace=inputs.device.workspace_bytes)
        groups = 0 if host % (tensor * context) else host // (tensor * context)
        sizes = [n for n in range(1, base.share // pipeline + 1) if base.share % n == 0]
        for size in [base.micro_batch] if recipe.train.micro_batch else sizes:
            of_size = replace(base, micro_batch=size, accumulation=base.share // size)
            for layout in variants(of_size, groups=groups):
                if not layout.policy.grouped or 1 < layout.shard // context < layout.data_world:
                    yield layout


def layout_rows(inputs: PlanInputs) -> tuple[list[LayoutRow], str]:
    """The fastest layouts that fit, one for each tensor, context and pipeline; or why none fits.

    Among layouts within about ALIKE of each other the simplest is first: the fewest parts, no
    recomputation, the least sharding, and the largest micro-batch. None without a known speed of
    several ranks that train our GPT.
    """
    recipe, vocab, speeds = inputs.recipe, inputs.size.vocab, inputs.speeds
    ours = recipe.model.kind == "gpt" and not inputs.counted
    if inputs.world == 1 or not ours or not vocab or speeds is None:
        return [], ""
    if (usable := inputs.device.usable_bytes) is None:
        return [], "the device's memory is unknown"
    kind, bucket = recipe.optim.kind, recipe.parallel.bucket_mb
    timed = []
    for layout in layouts(inputs):
        step = slowest(recipe.model, vocab, layout, speeds, kind, bucket_mb=bucket)
        duration = round(math.log(step.total) / ALIKE)  # equal for steps that are alike
        parts = layout.model_ranks, layout.pipeline, layout.context
        cost = CHECKPOINTING.index(layout.checkpointing), [*STRATEGIES].index(layout.strategy)
        timed.append(((duration, parts, cost, -layout.micro_batch), layout, step))
    timed.sort(key=lambda one: one[0])
    before, rows = recipe.flat(), dict[tuple[int, ...], LayoutRow]()
    if before["parallel.strategy"] == "auto":
        before["parallel.strategy"] = "ddp"
    for _, layout, step in timed:
        division = layout.tensor, layout.context, layout.pipeline
        if division in rows:
            continue
        peak = memory(recipe.model, vocab, layout, kind)
        if peak.total <= usable:
            changes = {k: v for k, v in settings_of(layout).items() if before[k] != v}
            rows[division] = LayoutRow(layout, peak, step.total, changes)
        if len(rows) == ROWS:
            break
    ranks = plural(inputs.world, "rank")
    why = f"no layout of {ranks} fits: see the memory above, or change ranks or train.global_batch"
    return list(rows.values()), "" if rows else why


def recommend(rows: Sequence[MemoryRow], inputs: PlanInputs) -> tuple[Settings, str]:
    """The settings of the cheapest layout that fits, and the reason; empty if nothing is known."""
    usable, micro_batch = inputs.device.usable_bytes, inputs.recipe.train.micro_batch
    if usable is None:
        return {}, "the device's memory is unknown: give --memory GB"
    if rows[0].largest_micro_batch is None:  # the activations are unknown
        return {}, ""
    with_own = [row for row in rows if row.fits and micro_batch]
    fitting = with_own + [row for row in rows if row.largest_micro_batch]
    if not fitting:
        return advise(PlannedMemory(inputs), usable)
    size = micro_batch if with_own else fitting[0].largest_micro_batch or 0
    layout = replace(fitting[0].layout, micro_batch=size)
    given = ("parallel.tensor", "parallel.context", "parallel.pipeline")
    settings = {k: v for k, v in settings_of(layout).items() if v and k not in given}
    reason = "the cheapest that fits"
    if layout.offload:
        reason += f"; {fitting[0].memory.host / 1e9:.3g} GB of the host's memory"
    return settings, reason


class PlannedMemory:
    """The memory of the fullest rank with changed settings; models are counted once."""

    def __init__(self, inputs: PlanInputs):
        # By the settings of `network` and the micro-batch; 0: of any micro-batch.
        self.inputs, self.counted = inputs, {(self.network(inputs.recipe), 0): inputs.counted}

    @staticmethod
    def network(recipe: Recipe) -> str:
        """The settings that determine a model's weights and activations."""
        return f"{recipe.model!r} {recipe.parallel.activation_checkpointing} {recipe.train.master}"

    def of(self, settings: Settings) -> Memory | None:
        """The fullest rank's memory; None if these settings are not valid, or it is unknown."""
        try:
            recipe = self.inputs.recipe.replace(settings)
            recipe.batch(self.inputs.world, self.inputs.device.kind)
            inputs = replace(self.inputs, recipe=recipe)
            network, micro_batch = self.network(recipe), recipe.train.micro_batch
            measured = (network, 0 if (network, 0) in self.counted else micro_batch)
            if measured not in self.counted:
                sized = with_sizes(inputs, activations=True, several=not micro_batch)
                self.counted[measured] = sized.counted
        except UserError:
            return None
        counted = self.counted[measured]
        inputs = replace(inputs, counted=counted)
        if (not counted and recipe.model.kind == "hf") or (counted and not counted.peaks):
            return None  # it cannot be built, or its activations could not be measured
        vocab = inputs.size.vocab or 0
        return memory(counted or recipe.model, vocab, inputs.layout, recipe.optim.kind)


def advise(planned: PlannedMemory, usable: int) -> tuple[Settings, str]:
    """Changes with which a recipe fits into `usable` bytes, and the memory of a rank then.

    Each change stays that lowers the memory, until the recipe fits; then the unnecessary ones go.
    """
    inputs, recipe = planned.inputs, planned.inputs.recipe
    settings: Settings = {}
    least = planned.of(settings)
    changes = savings(recipe, inputs.world, inputs.device.kind == "cuda", inputs.counted)
    smallest: Settings = {"train.micro_batch": recipe.parallel.pipeline}
    for change in (smallest, *changes):
        peak = planned.of(settings | change)
        if peak is not None and (least is None or peak.total < least.total):
            least, settings = peak, settings | change
        if least is not None and least.total <= usable:
            break
    if least is None:
        return {}, ""
    if least.total > usable:
        changed = f" with {pasted(settings)}" if settings else ""
        problem = f"nothing fits: the least is {least.total / 1e9:.3g} GB{changed}"
        device = f"a device with more than {least.total / USABLE / 1e9:.3g} GB"
        return {}, f"{problem}; use {device}, or more ranks with parallel.strategy=full_shard"
    for key in list(settings):
        fewer = {other: value for other, value in settings.items() if other != key}
        peak = planned.of(fewer)
        if peak is not None and peak.total <= usable:
            least, settings = peak, fewer
    size = f"{least.total / 1e9:.3g} GB"
    host = f" and {least.host / 1e9:.3g} GB of the host's memory" if least.host else ""
    return settings, f"nothing fits as it is; with these a rank takes {size}{host}"


def savings(
    recipe: Recipe, world: int, on_gpu: bool, sizes: CountedSizes | None = None
) -> Iterator[Settings]:
    """The changes of a recipe that may lower a rank's memory, the cheapest one first."""
    parallel, model, train, optim = recipe.parallel, recipe.model, recipe.train, recipe.optim
    if parallel.activation_checkpointing != "full":
        yield {"parallel.activation_checkpointing": "full"}
    replicas = recipe.sizes(world).data_world * parallel.context
    if replicas > 1 and not recipe.strategy(world).shards_parameters:
        yield {"parallel.strategy": "full_shard"}
    total, trained = (sizes.total, sizes.trained) if sizes else (1, 1)
    if sizes and model.kind == "hf" and total > trained and not sizes.in_bf16:
        yield {"model.frozen_precision": "bf16"}
    if model.lora.rank and model.lora.base != "4bit":
        yield {"model.lora.base": "4bit"}
    trains_most = 2 * trained > total
    if trains_most and optim.kind == "adamw" and parallel.tensor == 1:
        yield {"optim.kind": "adamw8bit"}
    low = train.precision == "bf16" or (train.precision == "auto" and on_gpu)
    if trains_most and low and train.master == "fp32":
        yield {"train.master": "bf16"}
    if on_gpu and not parallel.offload:
        yield {"parallel.strategy": "full_shard", "parallel.offload": True}
    if trains_most and model.kind == "hf" and not model.from_scratch:
        yield {"model.lora.rank": 16}
        yield {"model.lora.rank": 16, "model.lora.base": "4bit"}


def pasted(settings: Settings) -> str:
    return " ".join(f"{key}={typed(value)}" for key, value in settings.items())
