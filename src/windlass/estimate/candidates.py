"""The layouts that a number of ranks allows: which fit on a device, and how fast they are."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from windlass.errors import UserError, plural
from windlass.estimate.devices import CAREFUL, USABLE, Device, peak_flops
from windlass.estimate.layout import Layout, layout_of
from windlass.estimate.memory import Memory, Network, memory
from windlass.estimate.step import Links, Speeds, published_speeds, slowest
from windlass.model.size import CountedSizes
from windlass.recipe import Recipe
from windlass.recipe.strategies import STRATEGIES

CHECKPOINTING = ("none", "selective", "full")
ROWS = 8  # of the table of layouts, one for each combination of tensor, context and pipeline
PER_HOST = 8  # assumed GPUs of a host
NETWORK = 25e9  # assumed bytes a second between hosts for each GPU: an adapter of 200 Gbit/s
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


@dataclass(frozen=True)
class Machine:
    device: Device
    world: int
    precision: str
    per_host: int = 0  # ranks; 0: PER_HOST GPUs, or all ranks on a CPU

    @property
    def ranks_of_host(self) -> int:
        """Ranks of each of several hosts; 0 if there is one host."""
        per_host = self.per_host or (PER_HOST if self.device.kind == "cuda" else self.world)
        return per_host if per_host < self.world else 0

    @property
    def knows_peak(self) -> bool:
        return peak_flops(self.device.name, self.precision) is not None

    def speeds(self, recipe: Recipe) -> Speeds:
        """The speeds of a rank, by the device's data sheet and the published rates of links."""
        highest = peak_flops(self.device.name, self.precision, recipe.train.tf32)
        peak = peak_flops(self.device.name, "bf16") if self.precision == "float8" else highest
        assert highest and peak, "the caller asks `knows_peak`"
        links = Links(self.device.link, NETWORK, self.ranks_of_host)
        speeds = published_speeds(self.device, peak, links)
        if self.precision == "float8":  # head and attention are in bf16
            return replace(speeds, float8=speeds.products * highest / peak)
        return speeds


def variants(
    base: Layout, checkpointings: Sequence[str] = CHECKPOINTING, groups: int = 0
) -> Iterator[Layout]:
    """A layout with each strategy and activation checkpointing that its ranks allow, the fastest
    first, without offload; `groups`: data ranks that share each of several hosts.

    `shard_grad_op` moves less over the network than `full_shard`. `hybrid_shard` gathers among half
    of the ranks. `shard_optim` moves half as much again as `ddp`, while nothing is computed.
    """
    names = ["ddp" if base.world > 1 else "single"]
    if base.replicas > 1:
        names += ["shard_grad_op", "shard_optim", "hybrid_shard", "full_shard"]
        if base.data_world <= 3:
            names.remove("hybrid_shard")
    plain = replace(base, offload=False)
    for checkpointing, name in product(checkpointings, names):
        yield variant(plain, name, checkpointing, groups)


def variant(base: Layout, strategy: str, checkpointing: str, groups: int = 0) -> Layout:
    """A layout with another strategy; the same strategy keeps its sharding group."""
    how = replace(base, strategy=strategy, checkpointing=checkpointing)
    if strategy == base.strategy:
        return how
    shard = how.policy.sizes(base.data_world, 0, groups).dp_shard
    return replace(how, shard=shard * (base.context if how.policy.shards_optimizer else 1))


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
    layouts = list(variants(base, CHECKPOINTING if ours else [base.checkpointing]))
    if base.device == "cuda" and ours:
        offload = replace(base, offload=True)
        layouts += [variant(offload, "full_shard", each) for each in ("none", "full")]
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
            fitting = with_micro_batch(model, vocab, layout, optimizer, usable)
            largest = fitting.micro_batch if fitting else 0
        rows.append(MemoryRow(layout, needed, fits, largest, layout == base))
    return rows


def layouts(recipe: Recipe, machine: Machine) -> Iterator[Layout]:
    """Every layout of our GPT that the recipe's checks accept, in each variant."""
    world, host = machine.world, machine.ranks_of_host
    numbers = [n for n in range(1, world + 1) if world % n == 0]
    for tensor, context, pipeline in product(numbers, numbers, numbers):
        # Links between hosts are too slow for tensor parallelism.
        apart = host and tensor > host
        if world % (tensor * context * pipeline) or apart:
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
            base = layout_of(
                recipe.replace(division), world, machine.device.kind, machine.precision
            )
        except UserError:  # the checks of `recipe.combinations` and of the batch
            continue
        base = replace(base, workspace=machine.device.workspace_bytes)
        groups = 0 if host % (tensor * context) else host // (tensor * context)
        sizes = [n for n in range(1, base.share // pipeline + 1) if base.share % n == 0]
        for size in [base.micro_batch] if recipe.train.micro_batch else sizes:
            divided = replace(base, micro_batch=size, accumulation=base.share // size)
            for layout in variants(divided, groups=groups):
                if not layout.policy.grouped or 1 < layout.shard // context < layout.data_world:
                    yield layout


def layout_rows(recipe: Recipe, vocab: int, machine: Machine) -> tuple[list[LayoutRow], str]:
    """The fastest layouts that fit, one for each tensor, context and pipeline; or why none fits.

    Among layouts within about ALIKE of each other the simplest is first: the fewest parts, no
    recomputation, the least sharding, and the largest micro-batch.
    """
    if (usable := machine.device.usable_bytes) is None:
        return [], "the device's memory is unknown"
    speeds, kind, bucket = machine.speeds(recipe), recipe.optim.kind, recipe.parallel.bucket_mb
    timed = []
    for layout in layouts(recipe, machine):
        step = slowest(recipe.model, vocab, layout, speeds, kind, bucket_mb=bucket)
        about = round(math.log(step.total) / ALIKE)
        parts = layout.model_ranks, layout.pipeline, layout.context
        cost = CHECKPOINTING.index(layout.checkpointing), [*STRATEGIES].index(layout.strategy)
        timed.append(((about, parts, cost, -layout.micro_batch), layout, step))
    timed.sort(key=lambda one: one[0])
    before, rows = recipe.flat(), dict[tuple[int, ...], LayoutRow]()
    if before["parallel.strategy"] == "auto":
        before["parallel.strategy"] = "ddp" if machine.world > 1 else "single"
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
    ranks = plural(machine.world, "rank")
    why = f"no layout of {ranks} fits: see the memory above, or change ranks or train.global_batch"
    return list(rows.values()), "" if rows else why


def with_micro_batch(
    model: Network, vocab: int, layout: Layout, optimizer: str, usable: int
) -> Layout | None:
    """The layout with the largest micro-batch that fits; None if none does."""
    samples = layout.micro_batch * layout.accumulation  # of the largest step
    share = layout.share or samples
    most = share // layout.pipeline  # each stage needs a micro-batch
    sizes = (n for n in range(most, 0, -1) if share % n == 0)
    tried = (replace(layout, micro_batch=n, accumulation=samples // n) for n in sizes)
    return next((t for t in tried if memory(model, vocab, t, optimizer).total <= usable), None)


def layout_on(
    recipe: Recipe,
    vocab: int,
    world: int,
    device: Device,
    precision: str,
    usable: int | None = None,
    counted: CountedSizes | None = None,
) -> Layout:
    """The layout of a recipe on ranks of a device with `usable` bytes each (default: the plan's).

    On CUDA a micro-batch that the recipe leaves open is the largest that fits. It is the one by
    tokens if the memory, the vocabulary or the activations (`counted`, of a model of
    `transformers`) are unknown, or if nothing fits.
    """
    layout = layout_of(recipe, world, device.kind, precision)
    layout = replace(layout, workspace=device.workspace_bytes)
    usable = device.usable_bytes if usable is None else usable
    is_open = device.kind == "cuda" and not recipe.train.micro_batch
    model: Network | None = recipe.model if recipe.model.kind == "gpt" else counted
    has_peaks = not isinstance(model, CountedSizes) or model.peaks
    if not is_open or usable is None or model is None or not vocab or not has_peaks:
        return layout
    if world > 1 or layout.policy.shards_parameters:
        usable = int(usable * CAREFUL / USABLE)
    return with_micro_batch(model, vocab, layout, recipe.optim.kind, usable) or layout
