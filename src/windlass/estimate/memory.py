"""Memory of one rank at the peak of a training step, for every strategy, precision, checkpointing
and micro-batch.

`walk.py` has the events of a step; the peak is the event with the largest sum. A device's driver,
libraries and the allocator's rounding come on top (`devices.USABLE`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

from windlass.estimate.devices import USABLE
from windlass.estimate.layout import CHECKPOINTING, COMPUTE_BYTES, Layout, Memory, Network
from windlass.estimate.walk import Step, events
from windlass.model.size import CountedSizes, block_matrices, count
from windlass.recipe.strategies import STRATEGIES


def memory(model: Network, vocab: int, layout: Layout, optimizer: str = "adamw") -> Memory:
    """The memory of one rank at the peak of a step; activations of counted sizes need measured
    peaks."""
    if isinstance(model, CountedSizes):
        return _counted(model, layout)
    step = Step(model, vocab, layout, optimizer)
    one_moment = model.layers * block_matrices(model) if optimizer == "muon" else 0
    moments = 2 * count(model, vocab).total - one_moment
    ranks = layout.shard if layout.policy.shards_parameters else 1
    parameters, state = -(-step.weights // ranks), -(-step.master * moments // layout.shard)
    host = 0
    if layout.offload:  # parameters, optimizer state and reduced gradients
        host, parameters, state = 2 * parameters + state, 0, 0
    peak = max(events(step), key=lambda event: event.total)
    buffers = peak.buffers + 16 * step.n + layout.workspace  # tokens and labels are int64
    return replace(peak, parameters=parameters, optimizer=state, host=host, buffers=buffers)


def _counted(model: CountedSizes, layout: Layout) -> Memory:
    """The memory with AdamW; frozen weights have neither gradients nor optimizer state."""
    master = max(4, COMPUTE_BYTES[layout.precision])
    weights, trained = model.weight_bytes(master), master * model.trained
    state = -(-2 * trained // layout.shard)
    if layout.policy.shards_parameters:
        weights, trained = -(-weights // layout.shard), -(-trained // layout.shard)
    if model.peaks:
        return _measured(model, layout, Memory(weights, trained, state))
    kept = Memory(buffers=layout.workspace, at="states alone")
    if layout.offload:
        return replace(kept, host=weights + trained + state)
    return replace(kept, parameters=weights, gradients=trained, optimizer=state)


def _measured(model: CountedSizes, layout: Layout, states: Memory) -> Memory:
    """The memory with measured activations, as if the blocks of a sharded model had equal sizes."""
    without, together = model.peak(layout.micro_batch)
    parameters, gradients, state = states.parameters, states.gradients, states.optimizer
    compute, several = COMPUTE_BYTES[layout.precision], layout.accumulation > 1
    master, buffers = max(4, compute), layout.workspace
    if layout.policy.shards_parameters:
        layers = int(model.network.get("layers") or 1)
        root = model.network.get("vocab", 0) * model.network.get("width", 0)
        block = (model.total - root) // layers
        # Gathered parameters, and gradients before their reduction.
        buffers += master * (2 * root + block) + 3 * compute * block
        gradients += master * model.trained if several and not layout.reduces_each else 0
    elif layout.world == 1 and not several:  # gradients come while activations are freed
        gradients = min(gradients, together)
        without = together - gradients
    else:
        gradients *= 2 if several and layout.world > 1 else 1  # DDP's buckets have a copy
    peak = Memory(activations=without, buffers=buffers, at="measured")
    if layout.offload:
        return replace(peak, host=parameters + gradients + state)
    return replace(peak, parameters=parameters, gradients=gradients, optimizer=state)


@dataclass(frozen=True)
class MemoryRow:
    """The memory of a rank under one layout."""

    layout: Layout
    memory: Memory
    fits: bool | None  # None: unknown
    largest_micro_batch: int | None  # that fits; 0: none does; None: unknown
    chosen: bool  # whether it is the recipe's own layout


def memory_rows(
    model: Network, vocab: int, optimizer: str, base: Layout, usable: int | None
) -> list[MemoryRow]:
    """A row for each layout that the world of `base` allows, the fastest first, with its
    micro-batch.

    Recomputation adds up to a third of the arithmetic. Sharding moves parameters over the network,
    `shard_grad_op` less than `full_shard`. `hybrid_shard` gathers among half of the ranks.
    `shard_optim` moves half as much again as `ddp`, while nothing is computed. Offload moves
    everything over the host's bus.
    """
    ours = not isinstance(model, CountedSizes)
    known = not isinstance(model, CountedSizes) or bool(model.peaks)  # its activations
    base = base if known else replace(base, checkpointing="none")
    rows = []
    for layout in layouts(base, ours):
        needed = memory(model, vocab, layout, optimizer)
        fits = None if usable is None else needed.total <= usable
        largest, share = None, base.micro_batch * base.accumulation
        if known and usable is not None:
            sizes = (n for n in range(share, 0, -1) if share % n == 0)
            each = ((n, replace(layout, micro_batch=n, accumulation=share // n)) for n in sizes)
            totals = ((n, memory(model, vocab, x, optimizer).total) for n, x in each)
            largest = next((n for n, total in totals if total <= usable), 0)
        sure = fits if known or fits is False else None  # unknown activations may be too large
        rows.append(MemoryRow(layout, needed, sure, largest, layout == base))
    return rows


def layouts(base: Layout, ours: bool) -> list[Layout]:
    """The layouts that the world of `base` allows, the fastest first; only our GPT varies in
    checkpointing and offload."""
    hybrid = ["hybrid_shard"] * (base.world > 3)
    several = ["ddp", "shard_grad_op", "shard_optim", *hybrid, "full_shard"]
    checkpointing = CHECKPOINTING if ours else (base.checkpointing,)
    kinds = [(*k, False) for k in product(checkpointing, several if base.world > 1 else ["single"])]
    if base.device == "cuda" and ours:
        kinds += [(c, "full_shard", True) for c in ("none", "full")]
    every = []
    for c, strategy, offload in kinds:
        shard = STRATEGIES[strategy].sizes(base.world).dp_shard
        shard = base.shard if strategy == base.strategy else shard
        layout = replace(base, strategy=strategy, shard=shard)
        every.append(replace(layout, checkpointing=c, offload=offload))
    return every + [base] * (base not in every)


def recommend(rows: list[MemoryRow], micro_batch: int) -> tuple[dict[str, str | int | bool], str]:
    """The settings of the first layout that fits, and the reason; `micro_batch` 0 takes the largest
    that fits."""
    if rows[0].largest_micro_batch is None:
        unknown = rows[0].fits is None
        return {}, "the device's memory is unknown: give --memory GB" if unknown else ""
    fitting = [row for row in rows if (row.fits if micro_batch else row.largest_micro_batch)]
    if not fitting:
        size = min(row.memory.total for row in rows) / 1e9
        least = f"with micro-batch {rows[0].layout.micro_batch} the least is {size:.3g} GB"
        device = f"Use a device with more than {size / USABLE:.3g} GB"
        advice = "a lower train.precision, or a smaller train.micro_batch or model.context"
        return {}, f"nothing fits: {least}. {device}, more ranks, {advice}"
    row = fitting[0]
    layout = row.layout
    settings: dict[str, str | int | bool] = {"parallel.strategy": layout.strategy}
    settings["parallel.activation_checkpointing"] = layout.checkpointing
    settings["train.micro_batch"] = micro_batch or row.largest_micro_batch or 0
    settings |= {"parallel.shard_size": layout.shard} if layout.policy.grouped else {}
    settings |= {"parallel.offload": True} if layout.offload else {}
    host = f"; {row.memory.host / 1e9:.3g} GB of the host's memory" if layout.offload else ""
    return settings, f"the cheapest that fits{host}"
