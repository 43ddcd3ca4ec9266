"""One rank of a layout: its part of the model, and its FLOPs and collectives in a step.

Scalars do not count, for example losses, token counts and the gradient norm.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from windlass.model.size import (
    MASTER_BYTES,
    CountedSizes,
    block_matrices,
    block_parameters,
    count,
    moment_bytes,
    stage_layers,
    unit_blocks,
)
from windlass.recipe.network import ModelSettings
from windlass.recipe.strategies import STRATEGIES, Strategy

if TYPE_CHECKING:
    from windlass.recipe import Recipe
    from windlass.run import Line

COMPILED_STEPS = 1000  # in a shorter run, compiling may take more time (a minute) than it saves
COMPUTE_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "float8": 2}


@dataclass(frozen=True)
class Program:
    """Habits of a program that trains, in bytes of a number; 0 is Windlass's."""

    weight: int = 0  # of weights and optimizer state; 0: 4, in fp64 8
    stream: int = 0  # of the residual stream; 0: as a weight
    reduced: int = 0  # of a gradient in a reduction; 0: as a weight
    logits: int = 0  # held for each logit of a micro-batch; 0: a chunk of logits exists at a time
    repeated: float = 0.0  # the part of the products that `selective` repeats
    logit_traffic: int = 0  # bytes that head and loss read and write for a logit; 0: Windlass's
    gathers_all: bool = False  # the last block, too, for the backward pass


OURS = Program()


@dataclass(frozen=True)
class Layout:
    strategy: str
    world: int = 1
    shard: int = 1  # ranks that divide the optimizer state, and with FSDP2 parameters and gradients
    precision: str = "fp32"
    checkpointing: str = "none"
    offload: bool = False
    micro_batch: int = 1
    accumulation: int = 1
    device: str = "cpu"  # or cuda
    reduce_each: bool | str = "auto"  # `parallel.reduce_each_micro_batch`
    workspace: int = 0  # bytes of cuBLAS
    tensor: int = 1
    sequence: bool = True
    context: int = 1
    pipeline: int = 1
    average: bool = False  # `train.average`
    share: int = 0  # the micro-batch divides it (`BatchPlan.share`); 0: a step's samples of a rank
    compile: bool = False
    master: int = 4  # bytes by `train.master`; see `weight_bytes`
    program: Program = OURS

    @property
    def policy(self) -> Strategy:
        return STRATEGIES[self.strategy]

    @property
    def weight_bytes(self) -> int:
        return 8 if self.precision == "fp64" else self.master

    @property
    def reduces_each(self) -> bool:
        """Whether FSDP2 reduces gradients in every micro-batch, or in a step's last one alone."""
        return self.policy.reduces_each if self.reduce_each == "auto" else bool(self.reduce_each)

    @property
    def model_ranks(self) -> int:
        return self.tensor * self.context * self.pipeline

    @property
    def data_world(self) -> int:
        """Ranks that read different samples."""
        return self.world // self.model_ranks

    @property
    def replicas(self) -> int:
        """Ranks that add up the gradients of the same parameters."""
        return self.data_world * self.context

    @property
    def tail(self) -> bool:
        """Whether one compiled function computes the loss from logits (`model.loss.loss_tail`)."""
        return self.compile and self.tensor == 1 and not self.program.logits

    @property
    def logit_traffic(self) -> int:
        """Bytes that head and loss read and write for a logit.

        Three products write it, read it and read its gradient. A compiled tail reads it three times
        and writes the gradient. Uncompiled operations also cast it, in float32.
        """
        compute = COMPUTE_BYTES[self.precision]
        ours = 7 * compute if self.tail else {2: 38, 4: 32, 8: 64}[compute]
        return self.program.logit_traffic or ours

    @property
    def bubble(self) -> float:
        """The share of a step's computation in which a rank waits (arXiv 2104.04473)."""
        return (self.pipeline - 1) / (self.accumulation + self.pipeline - 1)


def compiles(recipe: Recipe, device: str, steps: int = COMPILED_STEPS) -> bool:
    """`train.compile` with `auto` resolved; `steps`: of the run, for a recipe without a number."""
    train = recipe.train
    if train.compile != "auto":
        return train.compile
    steps = train.steps if isinstance(train.steps, int) else steps
    may = recipe.model.kind == "gpt" and not train.deterministic
    return device == "cuda" and may and steps >= COMPILED_STEPS


def layout_of(recipe: Recipe, world: int, device: str = "cpu", precision: str = "") -> Layout:
    """The layout of a recipe on `world` ranks; `precision` replaces `auto`."""
    strategy, batch, p = recipe.strategy(world), recipe.batch(world, device), recipe.parallel
    if not precision:
        precision = recipe.train.precision
        precision = {"cpu": "fp32", "cuda": "bf16"}[device] if precision == "auto" else precision
    shard = recipe.sizes(world).dp_shard * (p.context if strategy.shards_optimizer else 1)
    return Layout(
        strategy.name,
        world,
        shard,
        precision,
        p.activation_checkpointing,
        p.offload,
        device=device,
        micro_batch=batch.micro_batch,
        accumulation=batch.accumulation,
        share=batch.share,
        reduce_each=p.reduce_each_micro_batch,
        tensor=p.tensor,
        sequence=p.sequence,
        context=p.context,
        pipeline=p.pipeline,
        average=recipe.train.average > 0,
        compile=compiles(recipe, device),
        master=MASTER_BYTES[recipe.train.master],
        program=replace(OURS, stream=2) if recipe.train.stream == "bf16" else OURS,
    )


class Rank:
    """The part of our GPT that the fullest rank of a pipeline stage holds.

    Each element of a matrix is on one rank of `tensor`. These ranks replicate norms, learned
    positions and the biases of the output projections.
    """

    def __init__(self, model: ModelSettings, vocab: int, layout: Layout, stage: int, layers: int):
        self.model, self.vocab, self.layout = model, vocab, layout
        self.stage, self.layers = stage, layers
        t, context, micro_batch = layout.tensor, layout.context, layout.micro_batch
        # The first stage has the embedding, the last one the head.
        self.first, self.last = stage == 0, stage == layout.pipeline - 1
        self.tied = model.tie_head and self.first and self.last  # two stages have a tensor each
        self.head_width, self.heads = model.width // model.heads, model.heads // t
        self.kv_heads = model.kv_heads_ // t
        # The widths of all queries, and of all keys or values.
        self.queries, self.keys = self.heads * self.head_width, self.kv_heads * self.head_width
        # The ranks of `context` exchange heads; otherwise they gather keys and values.
        self.by_heads = self.kv_heads % context == 0
        # Tokens of a micro-batch with padding: in attention and feed-forward layers, and in the
        # residual stream. Without `by_heads` a rank has an early and a late part of a sequence.
        parts = 1 if context == 1 else context * (1 if self.by_heads else 2)
        each = -(-model.context // parts) * parts // context
        self.tokens = micro_batch * each
        self.stream_tokens = micro_batch * -(-each // (t if layout.sequence else 1))

        # Entries of a block's matrices, and of the embedding's or the head's matrix.
        self.matrices = block_matrices(model) // t
        self.table = -(-vocab // t) * model.width
        self.undivided = block_parameters(model)  # of a block on all ranks of `tensor` together
        ups = 2 if model.activation == "swiglu" else 1
        keys = self.head_width * model.kv_heads_
        biases = model.attn_bias * (model.width + 2 * keys) + model.ff_bias * ups * model.ff_width_
        whole = self.undivided - block_matrices(model) - biases  # of a block, replicated
        cut = (self.undivided - whole) // t
        self.block = cut + whole
        # Blocks of one unit of FSDP2.
        self.unit_blocks = unit_blocks(layers, layers * self.block) if layout.pipeline == 1 else 1
        self.sizes = count(model, vocab)
        norm = model.final_norm * self.sizes.norms // (2 * model.layers + model.final_norm)
        ends = self.first * self.sizes.positions + self.last * norm
        self.replicated = ends + layers * whole  # parameters that the ranks of `tensor` replicate
        tables = (self.first + self.last * (not self.tied)) * self.table
        self.total = tables + layers * cut + self.replicated

    def moments(self, optimizer: str, master: int) -> int:
        matrices = self.layers * self.matrices
        if optimizer != "adamw8bit":
            return master * (2 * self.total - matrices * (optimizer == "muon"))
        model, tables = self.model, 1 if self.tied else self.first + self.last
        down = self.layers * model.width * model.ff_width_ // self.layout.tensor
        others = matrices - down + tables * self.table + self.first * self.sizes.positions
        rest = 2 * master * (self.total - down - others)
        each = (moment_bytes(optimizer, master, row) for row in (model.ff_width_, model.width))
        return rest + round(sum(map(operator.mul, each, (down, others))))

    @property
    def flops_per_token(self) -> int:
        """FLOPs of the stage for a token, on all ranks, as `model.size.flops_per_token`."""
        m, block = self.model, self.undivided
        multiplied = self.layers * block
        if self.last:
            multiplied += self.sizes.multiplied - m.layers * block
        return 6 * multiplied + 12 * self.layers * m.width * m.context


def ranks_of(model: ModelSettings, vocab: int, layout: Layout) -> list[Rank]:
    """The stages that differ in memory or work; of equal stages the first, which holds most."""
    p = layout.pipeline
    layers = stage_layers(model, vocab, p)
    ranks = [Rank(model, vocab, layout, stage, layers[stage]) for stage in range(p)]
    return list({(r.layers, r.first, r.last): r for r in reversed(ranks)}.values())[::-1]


def flops_of_run(recipe: Recipe, start: Line) -> float:
    """FLOPs of a token in a run's last start; the slowest pipeline stage counts for all."""
    if start.get("network") or recipe.model.freeze:
        return CountedSizes(start["parameters"], start["trained"], 0).flops_per_token()
    layout = layout_of(recipe, int(start["world"]), precision=start["precision"])
    stages = ranks_of(recipe.model, recipe.model.vocab or start["data"]["vocab"], layout)
    return max(rank.flops_per_token for rank in stages) * layout.pipeline


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
class Work:
    """The model and layout that determine a step's collectives; parameters are the rank's."""

    layout: Layout
    total: int  # parameters
    trained: int  # parameters with gradients
    block: int = 0  # parameters of one block, the unit of FSDP2
    blocks: int = 0
    bucket_mb: float = 25.0  # `parallel.bucket_mb`
    exchanges: tuple[Collective, ...] = ()  # inside a copy of the model
    embedding: int = 0  # parameters of an embedding that is a unit of FSDP2

    @staticmethod
    def of_counted(sizes: CountedSizes, layout: Layout, bucket_mb: float = 25.0) -> Work:
        """Of a model of `transformers`; everything but one token table counts as blocks."""
        blocks, parts = int(sizes.network.get("layers") or 0), layout.tensor
        table = sizes.vocab * int(sizes.network.get("width", 0))
        block = (sizes.total - table) // blocks if blocks else 0
        total, trained, block = (n // parts for n in (sizes.total, sizes.trained, block))
        return Work(layout, total, trained, block, blocks, bucket_mb)

    @cached_property
    def collectives(self) -> list[Collective]:
        sent = [*self._of_parameters(), *self.exchanges]
        return [one for one in sent if one.calls and one.size and one.ranks > 1]

    def _of_parameters(self) -> list[Collective]:
        """FSDP2 gathers in the step's precision, and reduces in 4 bytes (8 in fp64)."""
        layout, strategy = self.layout, self.layout.policy
        world, shard, stride = layout.replicas, layout.shard, layout.tensor
        low = COMPUTE_BYTES[layout.precision]
        master = layout.program.reduced or max(4, low)
        if not strategy.shards_parameters:
            gradients = (layout.program.reduced or layout.weight_bytes) * self.trained
            calls = max(1, math.ceil(gradients / (self.bucket_mb * 2**20)))
            sent = [Collective("all_reduce", gradients / calls, calls, world, "dp", stride)]
            if strategy.shards_optimizer:  # each rank updates its part, which then goes to all
                sent.append(Collective("all_gather", gradients, 1, world, "dp", stride))
            return sent
        gradients_per_parameter = self.trained / self.total
        root, steps = self.total - self.blocks * self.block - self.embedding, layout.accumulation
        once = strategy.keeps_gathered
        # All are gathered for each forward pass, embedding and blocks also for each backward pass.
        # Without a pipeline the blocks' last unit stays gathered.
        passes, blocks, each = 1 if once else steps, self.blocks, 1
        if layout.pipeline == 1:
            each = unit_blocks(blocks, blocks * self.block)
        units = -(-blocks // max(1, each))
        unit, every = blocks * self.block / max(1, units), layout.program.gathers_all
        both = passes if once else 2 * passes
        again = 0 if once else steps * (units - (layout.pipeline == 1 and not every))
        sent = [
            Collective("all_gather", low * root, passes, shard, "dp", stride),
            Collective("all_gather", low * self.embedding, both, shard, "dp", stride),
            Collective("all_gather", low * unit, units * passes + again, shard, "dp", stride),
        ]
        reductions, groups = steps if layout.reduces_each else 1, world // shard
        for parameters, number in ((root, 1), (self.embedding, 1), (unit, units)):
            size = master * gradients_per_parameter * parameters
            calls = number * reductions
            sent.append(Collective("reduce_scatter", size, calls, shard, "dp", stride))
            # Between the groups, each shard with its equals.
            between = Collective("all_reduce", size / shard, number, groups, "dp", stride * shard)
            sent.append(between)
        return sent


def work_of(rank: Rank, bucket_mb: float = 25.0) -> Work:
    exchanges = (*_of_tensor(rank), *_of_context(rank), *_of_pipeline(rank))
    table = 0 if rank.model.tie_head or not rank.first else rank.table
    sizes = (rank.total, rank.total, rank.block, rank.layers)
    return Work(rank.layout, *sizes, bucket_mb, exchanges, table)


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
    if layout.sequence:
        whole = rank.stream_tokens * t * m.width
        sent = [
            calls("all_gather", low * whole, steps * (blocks * (4 + enters) + rank.last)),
            calls("reduce_scatter", low * whole, steps * (blocks * (4 + leaves) + rank.last)),
            calls("reduce_scatter", master * whole, steps * rank.first),
            calls("all_gather", master * whole, steps * rank.first),
        ]
        # Each rank has seen other tokens of the stream.
        shard = layout.shard if layout.policy.shards_parameters else 1
        sent.append(calls("all_reduce", master * rank.replicated / shard, 1))
    else:
        whole = rank.tokens * m.width
        sent = [
            calls("all_reduce", low * whole, steps * (blocks * (4 + leaves) + rank.last)),
            calls("all_reduce", master * whole, steps * rank.first),
        ]
    if rank.last:  # the largest logit of each token, and the sum of the exponentials
        sent.append(calls("all_reduce", max(4, low) * rank.tokens, 2 * steps))
    return sent


def _of_context(rank: Rank) -> list[Collective]:
    layout, c = rank.layout, rank.layout.context
    low, each = COMPUTE_BYTES[layout.precision], rank.layers * layout.accumulation
    forward = 1 if layout.checkpointing == "none" else 2
    passes = each * (1 + forward)  # forward, again, and backward
    how = (c, "cp", layout.tensor)
    if rank.by_heads:  # queries, keys and values there, and the result back
        size = low * rank.tokens
        return [
            Collective("all_to_all", size * (rank.queries + 2 * rank.keys), passes, *how),
            Collective("all_to_all", size * rank.queries, passes, *how),
        ]
    size = low * 2 * rank.keys * rank.tokens * c
    return [
        Collective("all_gather", size, each * forward, *how),
        Collective("reduce_scatter", size, each, *how),
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
