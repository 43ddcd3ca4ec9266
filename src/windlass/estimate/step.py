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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from windlass.errors import UserError
from windlass.estimate.devices import Device, device_table
from windlass.estimate.rank import COMPUTE_BYTES, Layout, Rank, ranks_of
from windlass.model.size import CountedSizes, unit_blocks
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


class Collective(NamedTuple):
    """Equal calls of one collective in a step.

    `size` is the whole buffer: the result of an all-gather, the input of a reduce-scatter or an
    all-to-all, the buffer of an all-reduce, and a message at its sender.
    """

    name: str  # as preflight measures it
    size: float  # bytes of a call: the whole buffer
    calls: float
    ranks: int
    # Or tp, cp, pp: the dimension of the mesh. `dp` also sums the gradients over `cp`.
    link: str = "dp"
    stride: int = 1  # the difference between the numbers of neighbouring ranks

    @property
    def bus_bytes(self) -> float:
        """Bytes over each link of a ring in all calls, as nccl-tests counts them."""
        part = (self.ranks - 1) / self.ranks
        passes = {"all_reduce": 2 * part, "send_recv": 1.0}.get(self.name, part)
        return self.calls * self.size * passes


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


class Work(NamedTuple):
    """The parameters that a rank updates in a step, and its collectives.

    Scalars do not count, for example losses, token counts and the gradient norm.
    """

    total: int  # parameters of the rank
    trained: int  # parameters with gradients
    sent: list[Collective]  # some of them empty, or among one rank

    @property
    def collectives(self) -> list[Collective]:
        return [one for one in self.sent if one.calls and one.size and one.ranks > 1]


def work_of(rank: Rank, bucket_mb: float = 25.0, part: float = 1.0) -> Work:
    """`bucket_mb`: `parallel.bucket_mb`; `part`: of the parameters, which is trained."""
    trained = int(part * rank.total) if part < 1 else rank.total
    embedding = 0 if rank.model.tie_head or not rank.first else rank.table
    blocks = rank.layers * rank.block
    sent = _of_parameters(rank, bucket_mb, rank.total, trained, blocks, embedding)
    sent += [*_of_tensor(rank), *_of_context(rank), *_of_pipeline(rank)]
    return Work(rank.total, trained, sent)


def _of_parameters(
    rank: Rank, bucket_mb: float, total: int, trained: int, in_blocks: int, embedding: int = 0
) -> list[Collective]:
    """FSDP2 gathers in the step's precision, and reduces in 4 bytes (8 in fp64).

    `embedding`: parameters of an embedding that is a unit of FSDP2.
    """
    layout, strategy = rank.layout, rank.layout.policy
    world, shard, stride = layout.replicas, layout.shard, layout.tensor
    low = COMPUTE_BYTES[layout.precision]
    master = layout.program.reduced or max(4, low)
    if not strategy.shards_parameters:
        gradients = (layout.program.reduced or layout.weight_bytes) * trained
        calls = max(1, math.ceil(gradients / (bucket_mb * 2**20)))
        sent = [Collective("all_reduce", gradients / calls, calls, world, "dp", stride)]
        if strategy.shards_optimizer:  # each rank updates its part, which then goes to all
            sent.append(Collective("all_gather", gradients, 1, world, "dp", stride))
        return sent
    root, steps = total - in_blocks - embedding, layout.accumulation
    once = strategy.keeps_gathered
    # All are gathered for each forward pass, embedding and blocks also for each backward pass.
    # Without a pipeline the blocks' last unit stays gathered.
    passes = 1 if once else steps
    each = unit_blocks(rank.layers, in_blocks) if layout.pipeline == 1 else 1
    units = -(-rank.layers // max(1, each))
    unit, gathers_all = in_blocks / max(1, units), layout.program.gathers_all
    both = passes if once else 2 * passes
    again = 0 if once else steps * (units - (layout.pipeline == 1 and not gathers_all))
    sent = [
        Collective("all_gather", low * root, passes, shard, "dp", stride),
        Collective("all_gather", low * embedding, both, shard, "dp", stride),
        Collective("all_gather", low * unit, units * passes + again, shard, "dp", stride),
    ]
    reductions, groups = steps if layout.reduces_each else 1, world // shard
    for unit_parameters, number in ((root, 1), (embedding, 1), (unit, units)):
        size = master * (trained / total) * unit_parameters
        sent.append(Collective("reduce_scatter", size, number * reductions, shard, "dp", stride))
        # Between the groups, each shard with its equals.
        between = Collective("all_reduce", size / shard, number, groups, "dp", stride * shard)
        sent.append(between)
    return sent


def _of_tensor(rank: Rank) -> list[Collective]:
    """Sums over the ranks of `tp` after a matrix that is cut by columns, and their mirror.

    Autocast rounds the input of a matrix before it is gathered, but not the embedding's sum.
    """
    layout, m, t = rank.layout, rank.model, rank.layout.tensor
    if t == 1:
        return []
    low = COMPUTE_BYTES[layout.precision]
    master, steps, blocks = max(4, low), layout.accumulation, rank.layers

    def calls(name: str, size: float, number: float) -> Collective:
        return Collective(name, size, number, t, "tp")

    # The recomputation of a block ends at the last matrix, or at the dropout after its sum;
    # `selective` saves the sums.
    again, whole_again = layout.checkpointing != "none", layout.checkpointing == "full"
    enters, leaves = 2 * again, whole_again * (2 if m.dropout else 1)
    whole = rank.stream_tokens * t * m.width
    # Each rank has seen other tokens of the stream.
    shard = layout.shard if layout.policy.shards_parameters else 1
    sent = [
        calls("all_gather", low * whole, steps * (blocks * (4 + enters) + rank.last)),
        calls("reduce_scatter", low * whole, steps * (blocks * (4 + leaves) + rank.last)),
        calls("reduce_scatter", master * whole, steps * rank.first),
        calls("all_gather", master * whole, steps * rank.first),
        calls("all_reduce", master * rank.replicated / shard, 1),
    ]
    if rank.last:  # the largest logit of each token, and the sum of the exponentials
        sent.append(calls("all_reduce", max(4, low) * rank.tokens, 2 * steps))
    return sent


def _of_context(rank: Rank) -> list[Collective]:
    layout, c = rank.layout, rank.layout.context
    low, each = COMPUTE_BYTES[layout.precision], rank.layers * layout.accumulation
    forward = 1 if layout.checkpointing == "none" else 2
    passes = each * (1 + forward)  # forward, again, and backward
    group = (c, "cp", layout.tensor)
    if rank.by_heads:  # queries, keys and values there, and the result back
        size = low * rank.tokens
        return [
            Collective("all_to_all", size * (rank.queries + 2 * rank.keys), passes, *group),
            Collective("all_to_all", size * rank.queries, passes, *group),
        ]
    size = low * 2 * rank.keys * rank.tokens * c
    return [
        Collective("all_gather", size, each * forward, *group),
        Collective("reduce_scatter", size, each, *group),
    ]


def _of_pipeline(rank: Rank) -> list[Collective]:
    """Messages between stages, and the gradient of a tied head, which two stages have."""
    layout, p = rank.layout, rank.layout.pipeline
    if p == 1:
        return []
    master = max(4, COMPUTE_BYTES[layout.precision])
    size, stride = master * rank.stream_tokens * rank.model.width, layout.world // p
    messages = layout.accumulation * (2 - rank.first - rank.last)
    sent = [Collective("send_recv", size, messages, p, "pp", stride)]
    if rank.model.tie_head and (rank.first or rank.last):
        shard = layout.shard if layout.policy.shards_parameters else 1
        table = master * rank.table / shard
        sent.append(Collective("all_reduce", table, 1, 2, "pp", stride * (p - 1)))
    return sent


class StepTime(NamedTuple):
    products: float = 0.0
    attention: float = 0.0
    traffic: float = 0.0
    launch: float = 0.0
    update: float = 0.0
    communication: float = 0.0  # that computation does not hide
    bubble: float = 0.0

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
    # Head and loss: three products write a logit, read it and read its gradient. A compiled tail
    # reads it three times and writes the gradient. Uncompiled operations also cast it, in float32.
    a_logit = 7 * c if layout.tail else {2: 38, 4: 32, 8: 64}[c]
    moved += rank.last * n * v * (layout.program.logit_traffic or a_logit)
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
    inner, outer = exposed(layout, work.collectives, speeds, alone)
    bubble = (alone + inner) * layout.bubble / (1 - layout.bubble)
    busy = micro * products, micro * attention, micro * traffic, micro * launch
    return StepTime(*busy, update, inner + outer, bubble)


def exposed(
    layout: Layout, sent: Sequence[Collective], speeds: Speeds, alone: float
) -> tuple[float, float]:
    """Seconds of communication inside a copy of the model and between copies that nothing hides.

    FSDP2 gathers and reduces beside all passes, which take `alone` seconds; DDP reduces beside the
    backward pass of the last micro-batch. Nothing hides the other exchanges.
    """
    inner, outer, last, sharded = 0.0, 0.0, 0.0, layout.policy.shards_parameters
    for one in sent:
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
    if not isinstance(model, CountedSizes):
        ranks = ranks_of(model, vocab, layout)
        steps = [step_time(r, work_of(r, bucket_mb, trained), speeds, optimizer) for r in ranks]
        return max(steps, key=lambda step: step.total)
    # A GPT that multiplies all parameters by each token. Everything but one token table counts as
    # blocks, and the exchanges of its tensor ranks do not count.
    network = model.network
    if missing := [name for name in ("layers", "heads", "width") if not network.get(name)]:
        raise UserError(f"the model's configuration has no {' and '.join(missing)}")
    layers, heads, width = (int(network[name]) for name in ("layers", "heads", "width"))
    table = model.vocab * width
    ff_width = ((model.total - model.positions - table) // layers // width - 4 * width) // 2
    shape = {"layers": layers, "heads": heads, "width": width, "ff_width": max(1, ff_width)}
    gpt = ModelSettings(**shape, context=context, position="none")
    sizes = (model.total, model.trained, (model.total - table) // layers)
    total, own, block = (n // layout.tensor for n in sizes)
    rank = Rank(gpt, model.vocab, layout, 0, layers)
    sent = _of_parameters(rank, bucket_mb, total, own, layers * block)
    return step_time(rank, Work(total, own, sent), speeds)
