"""Which strategy, micro-batch and memory savings a run needs on given devices: the cheapest that fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from windlass.estimate.memory import Layout, Memory, Network, memory, shard_size
from windlass.model.size import HfSizes
from windlass.recipe.batch import TOKENS_PER_MICRO_BATCH

BUSY_TOKENS = 2048
"""A micro-batch of fewer tokens than this leaves most devices waiting for memory rather than computing."""


@dataclass(frozen=True)
class Fit:
    """A layout, and what it takes."""

    layout: Layout
    memory: Memory

    def settings(self) -> dict[str, str | int | bool]:
        """The recipe's settings that make this layout."""
        l = self.layout  # noqa: E741
        found: dict[str, str | int | bool] = {
            "parallel.strategy": l.strategy,
            "parallel.activation_checkpointing": l.checkpointing,
            "train.micro_batch": l.micro_batch,
        }
        return found | ({"parallel.offload": True} if l.offload else {})


@dataclass(frozen=True)
class Recommendation:
    """What to use, or what to change where nothing fits."""

    fit: Fit | None
    why: str
    """In words, also what to turn on next."""


def options(base: Layout) -> Iterator[Layout]:
    """Layouts for the same world, device and precision, the cheapest in time first.

    Sharding moves parameters over the network, recomputation costs up to a third more arithmetic, and offload moves
    everything over the host's bus: they are tried in that order. Keeping gathered parameters (`shard_grad_op`) moves less
    than `full_shard`.
    """
    strategies = ["ddp", "shard_grad_op", "full_shard"] if base.world > 1 else ["single"]
    for checkpointing, strategy in product(("none", "selective", "full"), strategies):
        yield _with(base, strategy, checkpointing)
    if base.device == "cuda":
        yield replace(_with(base, "full_shard", "none"), offload=True)
        yield replace(_with(base, "full_shard", "full"), offload=True)


def _with(base: Layout, strategy: str, checkpointing: str) -> Layout:
    shard = shard_size(strategy, base.world)
    return replace(base, strategy=strategy, shard=shard, checkpointing=checkpointing, offload=False)


def micro_batches(share: int) -> list[int]:
    """Micro-batches that a rank's share of a step can be divided into, the largest first."""
    return [size for size in range(share, 0, -1) if share % size == 0]


def largest_micro_batch(
    model: Network, vocab: int, layout: Layout, share: int, room: int, optimizer: str = "adamw"
) -> int:
    """The largest micro-batch with which a layout fits into `room` bytes; 0 where not even one sequence does.

    Args:
        model: the network.
        vocab: rows of its embedding.
        layout: its micro-batch and accumulation are not looked at.
        share: sequences of one rank in a step.
        room: bytes that one rank may take.
        optimizer: `adamw` or `muon`.
    """
    for size in micro_batches(share):
        if memory(model, vocab, sized(layout, size, share), optimizer).total <= room:
            return size
    return 0


def context_of(model: Network) -> int:
    """Tokens in its window."""
    return model.like.context if isinstance(model, HfSizes) else model.context


def shortened(model: Network, context: int) -> Network:
    """The same network with another window."""
    if isinstance(model, HfSizes):
        return replace(model, like=model.like.model_copy(update={"context": context}))
    return model.model_copy(update={"context": context})


def sized(layout: Layout, micro_batch: int, share: int) -> Layout:
    """The layout with a micro-batch, and the accumulation that follows."""
    return replace(layout, micro_batch=micro_batch, accumulation=share // micro_batch)


def recommend(
    model: Network, vocab: int, base: Layout, share: int, room: int | None, optimizer: str = "adamw"
) -> Recommendation:
    """The first option that fits with a micro-batch worth having, or else the first that fits at all.

    Args:
        model: the network.
        vocab: rows of its embedding.
        base: world, device and precision; its micro-batch where the recipe fixes one, else 0.
        share: sequences of one rank in a step.
        room: bytes that one rank may take; None: not known, and nothing is recommended.
        optimizer: `adamw` or `muon`.
    """
    if room is None:
        return Recommendation(None, "the device's memory is not known: give --memory GB")
    context = context_of(model)
    usual = max(1, TOKENS_PER_MICRO_BATCH[base.device] // context)
    fixed = base.micro_batch
    first: Fit | None = None
    for option in options(base):
        for size in [fixed] if fixed else [s for s in micro_batches(share) if s <= usual]:
            found = memory(model, vocab, sized(option, size, share), optimizer)
            if found.total > room:
                continue
            fit = Fit(sized(option, size, share), found)
            if fixed or size * context >= min(BUSY_TOKENS, share * context):
                return Recommendation(fit, "the cheapest that fits")
            first = first or fit
            break
    if first is not None:
        return Recommendation(first, f"fits, but with only {first.layout.micro_batch * context:,} tokens a pass")
    return Recommendation(None, what_next(model, vocab, base, room, optimizer))


def what_next(model: Network, vocab: int, base: Layout, room: int, optimizer: str) -> str:
    """What would make it fit where nothing does: low precision, more ranks, a shorter context, a larger device."""
    ways = []
    micro = max(1, base.micro_batch)
    smallest = min((memory(model, vocab, sized(o, micro, micro), optimizer).total for o in options(base)), default=0)
    if base.precision == "fp32" and base.device == "cuda":
        ways.append('train.precision="bf16"')
    if base.micro_batch > 1:
        ways.append("train.micro_batch=1")
    for world in (2**k for k in range(1, 13)):
        if world <= base.world:
            continue
        wide = replace(base, world=world, micro_batch=1, accumulation=1)
        tries = [_with(wide, "full_shard", how) for how in ("none", "full")]
        fitting = next((t for t in tries if memory(model, vocab, t, optimizer).total <= room), None)
        if fitting:
            with_ = "" if fitting.checkpointing == "none" else ", parallel.activation_checkpointing=full"
            ways.append(f"{world} ranks with parallel.strategy=full_shard{with_}")
            break
    short = replace(_with(base, "full_shard" if base.world > 1 else "single", "full"), micro_batch=1, accumulation=1)
    context = context_of(model) // 2
    while context >= 64:
        if memory(shortened(model, context), vocab, short, optimizer).total <= room:
            ways.append(f"model.context={context} with parallel.activation_checkpointing=full")
            break
        context //= 2
    ways.append(f"a device with more than {smallest / 0.9e9:.3g} GB")
    return f"nothing fits: the least is {smallest / 1e9:.3g} GB. Try " + "; or ".join(ways)
