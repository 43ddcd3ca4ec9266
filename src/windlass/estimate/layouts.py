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

    def first_fit(self, base: Layout, micro_batch: int) -> Fit | None:
        """The cheapest layout that fits with this micro-batch."""
        return next((fit for option in options(base) if (fit := self.fit(option, micro_batch))), None)


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

    def words(self) -> str:
        """The settings as they are typed, without the micro-batch and without defaults; and what offload takes of the host."""
        hidden = (
            "train.micro_batch",
            *(["parallel.activation_checkpointing"] if self.layout.checkpointing == "none" else []),
        )
        shown = {k: v for k, v in self.settings().items() if k not in hidden}
        text = " ".join(f"{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in shown.items())
        return text + self.host()

    def host(self) -> str:
        """What offload takes of the host's memory, in words; empty without it."""
        return f"; takes {self.memory.host / 1e9:.3g} GB of the host's memory a rank" if self.memory.host else ""


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
    everything over the host's bus: they come in that order. Keeping gathered parameters (`shard_grad_op`) moves less than
    `full_shard`; from 4 ranks on `hybrid_shard`, which gathers among half of them, comes before gathering among all.
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


def recommend(task: Task, base: Layout, low: str = "bf16") -> Recommendation:
    """The first option that fits with a micro-batch large enough to keep a device busy, else the first that fits at all.

    Args:
        task: what is trained, and the memory for it.
        base: world, device and precision; its micro-batch where the recipe sets one, else 0.
        low: the low precision that the device has in hardware; empty: none.
    """
    context = task.model.context
    usual = max(1, TOKENS_PER_MICRO_BATCH[base.device] // context)
    sizes = [base.micro_batch] if base.micro_batch else [s for s in micro_batches(task.share) if s <= usual]
    small: Fit | None = None
    for option in options(base):
        fit = next((fit for size in sizes if (fit := task.fit(option, size))), None)
        if fit and (base.micro_batch or fit.layout.micro_batch * context >= min(BUSY_TOKENS, task.share * context)):
            return Recommendation(True, f"the cheapest that fits{fit.host()}", fit.settings(), fit.layout, fit.memory)
        small = small or fit
    if small is not None:
        why = f"fits, but with only {small.layout.micro_batch * context:,} tokens a pass{small.host()}"
        return Recommendation(True, why, small.settings(), small.layout, small.memory)
    return Recommendation(False, what_would_fit(task, base, low), {})


def what_would_fit(task: Task, base: Layout, low: str) -> str:
    """What makes it fit where nothing does as it is; each way is tried before it is named.

    Low precision as the device has it, a micro-batch of one, both, more ranks, a shorter context, a larger device.
    """
    micro = max(1, base.micro_batch)
    lowered = replace(base, precision=low) if low and base.precision == "fp32" and base.device == "cuda" else None
    precision, one = f'train.precision="{low}" ', "train.micro_batch=1 " if micro > 1 else ""
    ways = []
    if lowered and (fit := task.first_fit(lowered, micro)):
        ways.append(precision + fit.words())
    if one and (fit := task.first_fit(base, 1)):
        ways.append(one + fit.words())
    if not ways and one and lowered and (fit := task.first_fit(lowered, 1)):
        ways.append(precision + one + fit.words())
    if wider := _more_ranks(task, base) or (_more_ranks(task, lowered) if lowered else None):
        changed = precision if wider.layout.precision != base.precision else ""
        ways.append(f"{wider.layout.world} ranks with {changed}{one}{wider.words()}")
    context = task.model.context // 2
    while context >= 64:
        shorter = replace(task, model=task.model.model_copy(update={"context": context}))
        if fit := shorter.first_fit(base, 1):
            ways.append(f"model.context={context} {one}{fit.words()}")
            break
        context //= 2
    unlimited = replace(task, usable_bytes=2**63)
    fits = [fit for option in options(base) if (fit := unlimited.fit(option, micro))]
    least = min(fits, key=lambda fit: fit.memory.total)
    large = [d for d in map(find_device, device_names()) if (d.usable_bytes or 0) >= least.memory.total]
    name = f" ({min(large, key=lambda d: d.memory_bytes or 0).name})" if large and base.device == "cuda" else ""
    ways.append(f"a device with more than {least.memory.total / USABLE / 1e9:.3g} GB{name}{least.host()}")
    return f"nothing fits: the least is {least.memory.total / 1e9:.3g} GB. Try " + "; or ".join(ways)


def _more_ranks(task: Task, base: Layout) -> Fit | None:
    """What fits with a micro-batch of one on the fewest ranks, doubled and doubled again, without offload."""
    sequences = task.share * base.world
    for world in (base.world * 2**k for k in range(1, 13)):
        if sequences % world:
            return None
        fit = replace(task, share=sequences // world).first_fit(replace(base, world=world), 1)
        if fit and not fit.layout.offload:
            return fit
    return None
