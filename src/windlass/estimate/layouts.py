"""The layouts that a number of ranks allows: which fit on a device, and how fast they are."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from windlass.errors import UserError, plural
from windlass.estimate.inputs import PlanInputs
from windlass.estimate.memory import Memory, Network, memory
from windlass.estimate.micro_batch import with_largest_micro_batch, with_micro_batches
from windlass.estimate.rank import Layout, layout_of
from windlass.estimate.step import slowest
from windlass.model.size import CountedSizes
from windlass.recipe import Recipe
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


def changed_settings(layout: Layout, recipe: Recipe) -> Settings:
    """The settings with which the recipe has this layout, without those that it has already."""
    before = recipe.flat()
    before["parallel.strategy"] = recipe.strategy(layout.world).name
    return {key: value for key, value in settings_of(layout).items() if before[key] != value}


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
        for of_size in [base] if recipe.train.micro_batch else with_micro_batches(base):
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
    rows = dict[tuple[int, ...], LayoutRow]()
    for _, layout, step in timed:
        division = layout.tensor, layout.context, layout.pipeline
        if division in rows:
            continue
        peak = memory(recipe.model, vocab, layout, kind)
        if peak.total <= usable:
            changes = changed_settings(layout, recipe)
            rows[division] = LayoutRow(layout, peak, step.total, changes)
        if len(rows) == ROWS:
            break
    ranks = plural(inputs.world, "rank")
    why = f"no layout of {ranks} fits: see the memory above, or change ranks or train.global_batch"
    return list(rows.values()), "" if rows else why
