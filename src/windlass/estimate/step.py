"""The time of a training step: one model for the plan and its layouts.

A step is a sum of parts that a reader can check (docs/evidence/plan.md):

- products: each matrix takes `max(FLOPs / rate, bytes / bandwidth)`, three times a micro-batch
- attention: FLOPs of the causal half at a rate of its own
- traffic: what norms, activations, sums, the loss and the weights read and write
- launch: the host's time to start kernels, as far as the device would wait for it
- update: the optimizer's traffic, and Muon's products
- communication: ring bytes over the link, as far as computation cannot hide them
- bubble: a pipeline stage waits for the others
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import NamedTuple

from windlass.estimate.collectives import Collective, Work, work_of
from windlass.estimate.devices import Device, device_table
from windlass.estimate.layout import COMPUTE_BYTES, Layout
from windlass.estimate.rank import Rank, ranks_of
from windlass.model.size import CountedSizes
from windlass.recipe.network import ModelSettings

# FLOPs for each query, key and number of a head's width, in a causal forward and backward pass of
# flash attention (arXiv 2307.08691): half of 4, and 2.5 times that.
ATTENTION = (2, 5)
UPDATE_BYTES = 40  # of AdamW for a parameter: 28 of weight, gradient and moments, 12 to clip
WEIGHT_BYTES = 18  # of a weight in each micro-batch: autocast's copy, and the gradient's sum
KERNELS = {True: (12, 24), False: (30, 60)}  # of a block's passes, compiled and not
NEWTON_SCHULZ = 5  # iterations of Muon
# Of a number of a product's input, output or (twice) weight in float8: it is read for the scale and
# for rounding, written, and transposed. Counted, not fitted.
ROUNDING_BYTES = 7


@dataclass(frozen=True)
class Constants:
    """The speeds of the table of devices (`devices.toml`), which documents them."""

    memory: float
    launch: float
    small: float
    eager: float
    exposed: float
    latency: float
    products: tuple[float, float]  # of an A100 and an H100
    attention: tuple[float, float]
    ranges: dict[str, tuple[int, int, float, float]] = field(default_factory=dict)


@cache
def constants() -> Constants:
    values = dict(device_table()["speeds"])
    for name in ("products", "attention"):
        values[name] = values[name]["A100"], values[name]["H100"]
    values["ranges"] = {name: tuple(row) for name, row in values["ranges"].items()}
    return Constants(**values)


@dataclass(frozen=True)
class Links:
    inside: float  # of a host
    network: float  # between hosts, for each rank
    per_host: int = 0  # ranks; 0: there is one host

    def bandwidth(self, one: Collective) -> float:
        """Bytes a second over the bus; the ranks of a host send to other hosts together."""
        if self.per_host % (one.stride * one.ranks) == 0:
            return self.inside
        together = 1 if one.name == "send_recv" else max(1, self.per_host // one.stride)
        return min(self.inside, together * self.network)


@dataclass(frozen=True)
class Speeds:
    products: float  # FLOP/s of large matrix products
    attention: float  # FLOP/s
    traffic: float  # bytes a second of memory
    bandwidth: Callable[[Collective], float]  # bytes a second over the bus
    eager: float = 1.0
    small: float = 0.0
    launch: float = 0.0
    exposed: float = 1.0
    latency: float = 0.0
    float8: float = 0.0  # FLOP/s of the blocks' products; 0: they are not in float8


RATIOS = 312 / 2.039, 989 / 3.35  # peak FLOP for a byte of memory, of A100-80GB and H100


def nearness(device: Device, peak: float) -> float:
    """0 for an A100, 1 for an H100; other devices lie between them by peak and bandwidth."""
    if "A100" in device.name or not device.bandwidth:
        return 0.0
    low, high = map(math.log, RATIOS)
    return min(1.0, max(0.0, (math.log(peak / device.bandwidth) - low) / (high - low)))


def published_speeds(
    device: Device, peak: float, links: Links, fitted: Constants | None = None
) -> Speeds:
    """The speeds of a device by its data sheet; without a bandwidth it has an A100's ratio."""
    c, at = fitted or constants(), nearness(device, peak)
    memory = c.memory * (device.bandwidth or peak / RATIOS[0])
    products, attention = (low + at * (high - low) for low, high in (c.products, c.attention))
    rates = (peak * products, peak * attention, memory)
    return Speeds(*rates, links.bandwidth, c.eager, c.small, c.launch, c.exposed, c.latency)


class ShapeUnknown(Exception):
    """The configuration of a model of `transformers` lacks a number that a step's time needs."""


class StepTime(NamedTuple):
    products: float = 0.0
    attention: float = 0.0
    traffic: float = 0.0
    launch: float = 0.0
    update: float = 0.0
    communication: float = 0.0  # that computation does not hide
    bubble: float = 0.0

    @property
    def compute(self) -> float:
        return sum(self[:5])

    @property
    def total(self) -> float:
        return sum(self)


def step_time(rank: Rank, work: Work, speeds: Speeds, optimizer: str = "adamw") -> StepTime:
    """The step of a rank.

    Legend: N tokens of the micro-batch, S of them in the residual stream, D width, Q width of the
    rank's heads, K of its keys, F hidden width, V vocabulary.
    """
    layout, model, micro = rank.layout, rank.model, rank.layout.accumulation
    c = COMPUTE_BYTES[layout.precision]
    wide = layout.program.stream or layout.program.weight or max(4, c)
    n, s, d = rank.tokens, rank.stream_tokens, model.width
    q, k = rank.queries, rank.keys
    f, v = model.ff_width_ // layout.tensor, rank.table // d
    ups = 2 if model.activation == "swiglu" else 1
    again = {"none": 0.0, "selective": layout.program.repeated, "full": 1.0}[layout.checkpointing]

    def product(rows: int, inner: int, columns: int, peak: float) -> float:
        flops, numbers = 2 * rows * inner * columns, rows * inner + inner * columns + rows * columns
        rate = peak / (1 + speeds.small / min(inner, columns))
        return max(flops / rate, c * numbers / speeds.traffic)

    # Forward, gradients of the inputs, gradients of the trained weights, forward again.
    repeats = 2 + work.trained / work.total + again
    shapes = (n, d, q + 2 * k), (n, q, d), (n, d, ups * f), (n, f, d)
    block = sum(product(*shape, speeds.float8 or speeds.products) for shape in shapes)
    products = rank.layers * repeats * block + rank.last * 3 * product(n, d, v, speeds.products)
    forward, backward = ATTENTION
    calls = backward + forward * (2 if layout.checkpointing == "full" else 1)
    attention = rank.layers * n * model.context * q * calls / speeds.attention

    # Two norms, two sums of the stream, the activation, and rotations, each in its own pass.
    rotated = (model.position == "rope") + model.qk_norm
    once = 2 * s * d * (3 * wide + c) + n * f * c * (ups + 1) + 2 * n * (q + k) * c * rotated
    fused = 1.0 if layout.compile else 1 / speeds.eager
    passes = 3 if layout.checkpointing == "none" else 4
    moved = rank.layers * passes * once / fused + WEIGHT_BYTES * work.total
    moved += rank.last * n * v * layout.logit_traffic
    if speeds.float8:
        numbers = sum(rows * (a + b) + 2 * a * b for rows, a, b in shapes)
        moved += rank.layers * ROUNDING_BYTES * numbers / fused
    traffic = moved / speeds.traffic

    first, second = KERNELS[layout.compile]
    kernels = rank.layers * (first * (passes - 2) + second)
    launch = max(0.0, kernels * speeds.launch - products - attention - traffic)
    alone = micro * (products + attention + traffic + launch)

    update = UPDATE_BYTES * work.trained / layout.shard / speeds.traffic
    if optimizer == "muon":
        short, long = sorted((d, f))
        flops = NEWTON_SCHULZ * (4 * 6 * d**3 + (1 + ups) * (4 * short**2 * long + 2 * short**3))
        update += rank.layers * flops / layout.tensor / layout.shard / speeds.products
    inner, outer = exposed(work, speeds, alone)
    bubble = (alone + inner) * layout.bubble / (1 - layout.bubble)
    busy = micro * products, micro * attention, micro * traffic, micro * launch
    return StepTime(*busy, update, inner + outer, bubble)


def exposed(work: Work, speeds: Speeds, alone: float) -> tuple[float, float]:
    """Seconds of communication inside a copy of the model and between copies that nothing hides.

    FSDP2 gathers and reduces beside all passes, which take `alone` seconds; DDP reduces beside the
    backward pass of the last micro-batch. Nothing hides the other exchanges.
    """
    layout, inner, outer, last = work.layout, 0.0, 0.0, 0.0
    sharded = layout.policy.shards_parameters
    for one in work.collectives:
        seconds = one.bus_bytes / speeds.bandwidth(one) + one.calls * one.ranks * speeds.latency
        if one.link == "dp" and one.name == "all_gather" and not sharded:
            last += seconds
        elif one.link == "dp":
            outer += seconds
        else:
            inner += seconds
    room = alone if sharded else 2 / 3 * alone / layout.accumulation
    return inner, last + speeds.exposed * outer + max(0.0, (1 - speeds.exposed) * outer - room)


def slowest(
    model: ModelSettings | CountedSizes,
    vocab: int,
    layout: Layout,
    speeds: Speeds,
    optimizer: str = "adamw",
    *,
    context: int = 0,
    bucket_mb: float = 25.0,
    trained: float = 1.0,
) -> StepTime:
    """The step of the slowest rank of our GPT, or of a model of `transformers` (with `context`).

    `trained`: the part of our GPT's parameters that `model.freeze` leaves trainable.
    """
    if isinstance(model, CountedSizes):
        rank = Rank(as_gpt(model, context), model.vocab, layout, 0, model.network["layers"])
        return step_time(rank, Work.of_counted(model, layout, bucket_mb), speeds)
    steps = []
    for rank in ranks_of(model, vocab, layout):
        work = work_of(rank, bucket_mb)
        work = replace(work, trained=int(trained * work.total)) if trained < 1 else work
        steps.append(step_time(rank, work, speeds, optimizer))
    return max(steps, key=lambda step: step.total)


def as_gpt(counted: CountedSizes, context: int) -> ModelSettings:
    """A GPT that multiplies all parameters of a model of `transformers` by each token."""
    network = counted.network
    if missing := [name for name in ("layers", "heads", "width") if not network.get(name)]:
        raise ShapeUnknown(f"the model's configuration has no {' and '.join(missing)}")
    layers, heads, width = (int(network[name]) for name in ("layers", "heads", "width"))
    block = (counted.total - counted.positions - counted.vocab * width) // layers
    ff_width = max(1, (block // width - 4 * width) // 2)
    shape = {"layers": layers, "heads": heads, "width": width, "ff_width": ff_width}
    return ModelSettings(**shape, context=context, position="none")
