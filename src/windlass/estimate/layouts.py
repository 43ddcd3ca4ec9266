"""The layouts that a number of ranks allows: what fits on a device, and what a job's host needs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import product

from windlass.errors import UserError
from windlass.estimate.devices import CAREFUL, TIGHT, USABLE, Device
from windlass.estimate.memory import Memory, Network, memory
from windlass.estimate.optimum import recipe_vocab
from windlass.estimate.rank import Layout, layout_of
from windlass.model.size import CountedSizes, checkpoint_bytes
from windlass.recipe import Recipe
from windlass.recipe.strategies import STRATEGIES

CHECKPOINTING = ("none", "selective", "full")
GPU_RANK_GB, CPU_RANK_GB = 8, 3  # Python, torch, the driver's maps, token shards, and a margin
LARGE_VOCAB = 2**18  # assumed if the embedding's rows depend on data that are not prepared


@dataclass(frozen=True)
class MemoryRow:
    """The memory of a rank under one layout."""

    layout: Layout
    memory: Memory
    fits: bool | None  # None: unknown
    tight: bool  # whether it may run although it does not fit: below TIGHT of the device's memory
    largest_micro_batch: int | None  # that fits; 0: none does; None: unknown
    chosen: bool  # whether it is the recipe's own layout


def distinct_strategies(base: Layout) -> list[str]:
    """The strategies that differ on the ranks of a layout, the fastest first."""
    if base.replicas == 1:
        return ["ddp" if base.world > 1 else "single"]
    hybrid = ["hybrid_shard"] * (base.data_world > 3)
    return ["ddp", "shard_grad_op", "shard_optim", *hybrid, "full_shard"]


def kinds_of(base: Layout) -> list[tuple[str, bool | str]]:
    """The distinct strategies with a value of `parallel.reduce_each_micro_batch`.

    `full_shard` and `hybrid_shard` reduce in each micro-batch by themselves, `shard_grad_op` may.
    """
    kinds = list[tuple[str, bool | str]]()
    for name in distinct_strategies(base):
        kinds.append((name, "auto"))
        if name == "shard_grad_op" and base.accumulation > 1:
            kinds.append((name, True))
    return kinds


def shard_of(strategy: str, base: Layout, groups_of_host: int = 0) -> int:
    """`Layout.shard` with another strategy; `groups_of_host` data ranks share each of several
    hosts."""
    policy = STRATEGIES[strategy]
    data = policy.sizes(base.data_world, 0, groups_of_host).dp_shard
    return data * (base.context if policy.shards_optimizer else 1)


def memory_rows(
    model: Network, vocab: int, optimizer: str, base: Layout, usable: int | None
) -> list[MemoryRow]:
    """A row for each layout that the world of `base` allows, the fastest first, with its
    micro-batch; only our GPT varies in checkpointing and offload.

    Recomputation adds up to a third of the arithmetic. Sharding moves parameters over the network,
    `shard_grad_op` less than `full_shard`. `hybrid_shard` gathers among half of the ranks.
    `shard_optim` moves half as much again as `ddp`, while nothing is computed. Offload moves
    everything over the host's bus. `shard_grad_op` also has rows that reduce the gradients of each
    micro-batch.
    """
    ours = not isinstance(model, CountedSizes)
    known = not isinstance(model, CountedSizes) or bool(model.peaks)  # its activations
    base = base if known else replace(base, checkpointing="none")
    checkpointings = CHECKPOINTING if ours else [base.checkpointing]
    kinds = [(*k, False) for k in product(checkpointings, kinds_of(base))]
    if base.device == "cuda" and ours:
        kinds += [(c, ("full_shard", "auto"), True) for c in ("none", "full")]
    layouts = []
    for checkpointing, (strategy, reduce_each), offload in kinds:
        same = strategy == base.strategy
        shard = base.shard if same else shard_of(strategy, base)
        layout = replace(base, strategy=strategy, shard=shard, reduce_each=reduce_each)
        if same and layout.reduces_each == base.reduces_each:
            layout = replace(layout, reduce_each=base.reduce_each)
        layouts.append(replace(layout, checkpointing=checkpointing, offload=offload))
    rows = []
    for layout in layouts + [base] * (base not in layouts):
        needed = memory(model, vocab, layout, optimizer)
        fits = None if usable is None else needed.total <= usable
        tight = usable is not None and usable < needed.total <= usable * TIGHT / USABLE
        if not known and fits:
            fits = None  # the unknown activations may be too large
        largest = None
        if known and usable is not None:
            fitting = with_micro_batch(model, vocab, layout, optimizer, usable)
            largest = fitting.micro_batch if fitting else 0
        rows.append(MemoryRow(layout, needed, fits, tight, largest, layout == base))
    return rows


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
    documents: float = 0.0,
) -> Layout:
    """The layout of a recipe on ranks of a device with `usable` bytes each (default: the plan's).

    On CUDA a micro-batch that the recipe leaves open is the largest that fits. It is the one by
    tokens if the memory is unknown, nothing fits, or `counted`, the size of a model of
    `transformers` with its measured activations, is missing.
    """
    layout = layout_of(recipe, world, device.kind, precision)
    layout = replace(layout, workspace=device.workspace_bytes, documents=documents)
    usable = device.usable_bytes if usable is None else usable
    is_open = device.kind == "cuda" and not recipe.train.micro_batch
    model: Network | None = recipe.model if recipe.model.kind == "gpt" else counted
    known = not isinstance(model, CountedSizes) or model.peaks
    if not is_open or usable is None or model is None or not vocab or not known:
        return layout
    if world > 1 or layout.policy.shards_parameters:
        usable = int(usable * CAREFUL / USABLE)
    return with_micro_batch(model, vocab, layout, recipe.optim.kind, usable) or layout


def host_memory_gb(recipe: Recipe, world: int, per_host: int, on_cpu: bool) -> int:
    """The host memory in GB that `per_host` of `world` ranks need, for a batch script.

    It is a base for each rank, the plan's host memory (all of the training on a CPU, the offloaded
    part on a GPU), and twice the host's part of a checkpoint, for the copy of a save and for
    loading. 0 if the model's size cannot be read here.
    """
    network: Network = recipe.model
    vocab = recipe_vocab(recipe) or LARGE_VOCAB
    on_disk = checkpoint_bytes(recipe, vocab)
    if recipe.model.kind == "hf":
        try:
            from windlass.model.build import read_sizes  # needs torch

            network = read_sizes(recipe, 0)
            on_disk = checkpoint_bytes(recipe, vocab, network)
        except (ImportError, UserError):
            return 0
    layout = layout_of(recipe, world, "cpu" if on_cpu else "cuda")
    peak = memory(network, vocab, layout, recipe.optim.kind)
    in_use = peak.host + (peak.total if on_cpu else 0)
    part = min(1.0, per_host / layout.shard)
    base = CPU_RANK_GB if on_cpu else GPU_RANK_GB
    return math.ceil(per_host * (base + in_use / 1e9) + 2 * part * on_disk / 1e9)
