"""Which strategy, micro-batch and memory savings a run needs on given devices: the cheapest that fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from windlass.estimate.devices import USABLE, device_names, find_device
from windlass.estimate.memory import Layout, Memory, Network, memory, shard_size
from windlass.model.size import HfSizes
from windlass.recipe.units import TOKENS_PER_MICRO_BATCH

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
        if l.strategy == "hybrid_shard":
            found["parallel.shard_size"] = l.shard
        return found | ({"parallel.offload": True} if l.offload else {})

    def words(self) -> str:
        """The same as one types it, without what is the recipe's own default."""
        usual = {"parallel.activation_checkpointing": "none"}
        shown = {k: v for k, v in self.settings().items() if usual.get(k) != v and k != "train.micro_batch"}
        return " ".join(f"{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in shown.items())


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
    than `full_shard`; from 4 ranks on `hybrid_shard`, which gathers among half of them, comes before gathering among all.
    """
    strategies = ["ddp", "shard_grad_op", "full_shard"] if base.world > 1 else ["single"]
    if base.world > 3:
        strategies.insert(2, "hybrid_shard")
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
    model: Network, vocab: int, base: Layout, share: int, room: int | None, optimizer: str = "adamw", low: str = "bf16"
) -> Recommendation:
    """The first option that fits with a micro-batch worth having, or else the first that fits at all.

    Args:
        model: the network.
        vocab: rows of its embedding.
        base: world, device and precision; its micro-batch where the recipe fixes one, else 0.
        share: sequences of one rank in a step.
        room: bytes that one rank may take; None: not known, and nothing is recommended.
        optimizer: `adamw` or `muon`.
        low: the low precision that the device does in hardware; empty: none.
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
                return Recommendation(fit, f"the cheapest that fits{_host(fit)}")
            first = first or fit
            break
    if first is not None:
        few = first.layout.micro_batch * context
        return Recommendation(first, f"fits, but with only {few:,} tokens a pass{_host(first)}")
    return Recommendation(None, what_next(model, vocab, base, share, room, optimizer, low))


def _host(fit: Fit) -> str:
    """What offload takes of the host's memory, in words; empty without it."""
    if not fit.memory.host:
        return ""
    return f"; takes {fit.memory.host / 1e9:.3g} GB of the host's memory for each of its ranks"


@dataclass(frozen=True)
class _Try:
    """What a change is tried on."""

    model: Network
    vocab: int
    share: int
    room: int
    optimizer: str

    def first(self, base: Layout, micro: int) -> Fit | None:
        """The cheapest layout that fits with a micro-batch; None where none does."""
        for option in options(base):
            found = Fit(sized(option, micro, max(micro, self.share)), Memory())
            taken = memory(self.model, self.vocab, found.layout, self.optimizer)
            if taken.total <= self.room:
                return replace(found, memory=taken)
        return None


def what_next(model: Network, vocab: int, base: Layout, share: int, room: int, optimizer: str, low: str) -> str:
    """What makes it fit where nothing does as it is: each way is tried before it is said.

    Low precision as the device has it, a micro-batch of one, both, more ranks that the step's sequences can be dealt to, a
    shorter context, a larger device.
    """
    tried, micro = _Try(model, vocab, share, room, optimizer), max(1, base.micro_batch)
    halved = replace(base, precision=low) if low and base.precision == "fp32" and base.device == "cuda" else None
    ways = []
    if halved and (fit := tried.first(halved, micro)):
        ways.append(f'train.precision="{low}" {fit.words()}{_host(fit)}')
    if micro > 1 and (fit := tried.first(base, 1)):
        ways.append(f"train.micro_batch=1 {fit.words()}{_host(fit)}")
    if not ways and micro > 1 and halved and (fit := tried.first(halved, 1)):
        ways.append(f'train.precision="{low}" train.micro_batch=1 {fit.words()}{_host(fit)}')
    ways += _more_ranks(tried, base, halved)
    ways += _shorter(tried, base)
    tries = (memory(model, vocab, sized(o, micro, max(micro, share)), optimizer) for o in options(base))
    tight = min(tries, key=lambda m: m.total)
    least = tight.total
    with_host = f" and {tight.host / 1e9:.3g} GB of the host's memory a rank" if tight.host else ""
    ways.append(f"a device with more than {least / USABLE / 1e9:.3g} GB{with_host}{_named(least, base.device)}")
    return f"nothing fits: the least is {least / 1e9:.3g} GB. Try " + "; or ".join(ways)


def _more_ranks(tried: _Try, base: Layout, halved: Layout | None) -> list[str]:
    """The fewest ranks on which it fits with a micro-batch of one, and with what; also in low precision where it must."""
    sequences = tried.share * base.world
    for start in (base, halved) if halved else (base,):
        for world in (base.world * 2**k for k in range(1, 13)):
            if sequences % world:
                break
            wide = replace(start, world=world)
            fit = replace(tried, share=sequences // world).first(wide, 1)
            if fit and not fit.layout.offload:
                precision = f' train.precision="{start.precision}"' if start is not base else ""
                micro = " train.micro_batch=1" if base.micro_batch > 1 else ""
                return [f"{world} ranks with {fit.words()}{precision}{micro}"]
    return []


def _shorter(tried: _Try, base: Layout) -> list[str]:
    """The longest context, halved and halved again, on which it fits with a micro-batch of one."""
    context = context_of(tried.model) // 2
    while context >= 64:
        fit = replace(tried, model=shortened(tried.model, context)).first(base, 1)
        if fit:
            micro = " train.micro_batch=1" if base.micro_batch > 1 else ""
            return [f"model.context={context}{micro} {fit.words()}{_host(fit)}"]
        context //= 2
    return []


def _named(least: int, kind: str) -> str:
    """The smallest device of the table that has room for so many bytes, in brackets; empty where none has."""
    large = [d for d in map(find_device, device_names()) if (d.usable_bytes or 0) >= least]
    return f" ({min(large, key=lambda d: d.memory_bytes or 0).name})" if large and kind == "cuda" else ""
