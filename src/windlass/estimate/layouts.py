"""Which strategy, micro-batch and memory savings a run needs on a given device: the cheapest that fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from windlass.estimate.devices import USABLE, device_names, find_device
from windlass.estimate.memory import Layout, Memory, memory, shard_size
from windlass.recipe import ModelSettings
from windlass.recipe.units import TOKENS_PER_MICRO_BATCH

BUSY_TOKENS = 2048
"""A micro-batch of fewer tokens than this leaves most devices waiting for memory rather than computing."""
CHECKPOINTING = ("none", "selective", "full")


@dataclass(frozen=True)
class Task:
    """What is to be trained on every rank, and the memory there is for it."""

    model: ModelSettings
    vocab: int
    optimizer: str
    share: int
    """Sequences of one rank in a step."""
    usable_bytes: int

    def fit(self, layout: Layout, micro_batch: int) -> Fit | None:
        """The layout with this micro-batch, where it fits."""
        layout = sized(layout, micro_batch, max(micro_batch, self.share))
        needed = memory(self.model, self.vocab, layout, self.optimizer)
        return Fit(layout, needed) if needed.total <= self.usable_bytes else None


@dataclass(frozen=True)
class Fit:
    """A layout that fits, and what it takes."""

    layout: Layout
    memory: Memory

    def settings(self) -> dict[str, str | int | bool]:
        """The recipe's settings that make this layout."""
        settings: dict[str, str | int | bool] = {
            "parallel.strategy": self.layout.strategy,
            "parallel.activation_checkpointing": self.layout.checkpointing,
            "train.micro_batch": self.layout.micro_batch,
        }
        if self.layout.strategy == "hybrid_shard":
            settings["parallel.shard_size"] = self.layout.shard
        return settings | ({"parallel.offload": True} if self.layout.offload else {})


@dataclass(frozen=True)
class Recommendation:
    """The cheapest layout that fits, or what to change where none does."""

    fits: bool | None
    """None: the device's memory is not known."""
    why: str
    settings: dict[str, str | int | bool]
    """Empty where nothing fits."""
    layout: Layout | None = None
    memory: Memory | None = None


def options(base: Layout) -> Iterator[Layout]:
    """Layouts for the same world, device and precision, the cheapest in time first.

    Sharding moves parameters over the network, recomputation costs up to a third more arithmetic, and offload moves
    everything over the host's bus: they come in that order. Keeping gathered parameters (`shard_grad_op`) moves less
    than `full_shard`; from 4 ranks on `hybrid_shard`, which gathers among half of them, comes before all.
    """
    strategies = ["ddp", "shard_grad_op", "full_shard"] if base.world > 1 else ["single"]
    if base.world > 3:
        strategies.insert(2, "hybrid_shard")
    for checkpointing, strategy in product(CHECKPOINTING, strategies):
        shard = shard_size(strategy, base.world)
        yield replace(base, strategy=strategy, shard=shard, checkpointing=checkpointing, offload=False)
    if base.device == "cuda":
        for checkpointing in ("none", "full"):
            yield replace(base, strategy="full_shard", shard=base.world, checkpointing=checkpointing, offload=True)


def micro_batches(share: int) -> list[int]:
    """Micro-batches that a rank's share of a step is divisible by, the largest first."""
    return [size for size in range(share, 0, -1) if share % size == 0]


def sized(layout: Layout, micro_batch: int, share: int) -> Layout:
    """The layout with a micro-batch, and the accumulation that follows."""
    return replace(layout, micro_batch=micro_batch, accumulation=share // micro_batch)


def largest_micro_batch(task: Task, layout: Layout) -> int:
    """The largest micro-batch with which a layout fits; 0 where not even one sequence does."""
    return next((size for size in micro_batches(task.share) if task.fit(layout, size)), 0)


def recommend(task: Task, base: Layout) -> Recommendation:
    """The first option that fits with a micro-batch that keeps a device busy, else the first that fits at all.

    `base` has world, device and precision; its micro-batch where the recipe sets one, else 0.
    """
    context = task.model.context
    usual = max(1, TOKENS_PER_MICRO_BATCH[base.device] // context)
    sizes = [base.micro_batch] if base.micro_batch else [s for s in micro_batches(task.share) if s <= usual]
    small: Fit | None = None
    for option in options(base):
        fit = next((fit for size in sizes if (fit := task.fit(option, size))), None)
        if fit and (base.micro_batch or fit.layout.micro_batch * context >= min(BUSY_TOKENS, task.share * context)):
            return _recommendation(fit, "the cheapest that fits")
        small = small or fit
    if small is not None:
        return _recommendation(small, f"fits, but with only {small.layout.micro_batch * context:,} tokens a pass")
    unlimited = replace(task, usable_bytes=2**63)
    fits = [fit for option in options(base) if (fit := unlimited.fit(option, base.micro_batch or 1))]
    least = min(fit.memory.total for fit in fits)
    large = [d for d in map(find_device, device_names()) if (d.usable_bytes or 0) >= least]
    name = f" ({min(large, key=lambda d: d.memory_bytes or 0).name})" if large and base.device == "cuda" else ""
    enough = f"a device with more than {least / USABLE / 1e9:.3g} GB{name}"
    why = (
        f"nothing fits: the least is {least / 1e9:.3g} GB. Use {enough}, more ranks (--world), a lower train.precision, "
        "or a smaller train.micro_batch or model.context"
    )
    return Recommendation(False, why, {})


def _recommendation(fit: Fit, why: str) -> Recommendation:
    host = f"; takes {fit.memory.host / 1e9:.3g} GB of the host's memory a rank" if fit.memory.host else ""
    return Recommendation(True, why + host, fit.settings(), fit.layout, fit.memory)
