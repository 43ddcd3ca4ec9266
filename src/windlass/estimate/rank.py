"""One rank of a layout: its stage of the layers, and its parts of each matrix and sequence.

`model/share.py` makes the same division of a real model.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from windlass.model.size import (
    MASTER_BYTES,
    Parameters,
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

COMPILED_STEPS = 1000  # in a shorter run, compiling may take more time (a minute) than it saves
COMPUTE_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "float8": 2}


@dataclass(frozen=True)
class Program:
    """Habits of the program that trains, in bytes of a number; 0 is Windlass's.

    Published measurements come from other programs (`benchmarks/published.py`).
    """

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
    """The arrangement of a training over ranks and in memory."""

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
    chunks: int = 1  # stages on each rank
    average: bool = False  # `train.average`
    share: int = 0  # the micro-batch divides it (`BatchPlan.share`); 0: a step's samples of a rank
    compile: bool = False
    documents: float = 0.0  # of a row, each with an attention of its own; 0: whole rows
    master: int = 4  # bytes by `train.master`; see `weight_bytes`
    program: Program = OURS

    @property
    def policy(self) -> Strategy:
        """The tensors that the ranks divide among themselves."""
        return STRATEGIES[self.strategy]

    @property
    def weight_bytes(self) -> int:
        """Bytes of a trained weight."""
        return 8 if self.precision == "fp64" else self.master

    @property
    def reduces_each(self) -> bool:
        """Whether FSDP2 reduces gradients in every micro-batch, or in a step's last one alone."""
        return self.policy.reduces_each if self.reduce_each == "auto" else bool(self.reduce_each)

    @property
    def model_ranks(self) -> int:
        """Ranks that hold one copy of the model, apart from sharding."""
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
        (maximum, sum, gradient) and writes the gradient. Uncompiled, log-softmax, exponential and
        casts each read and write it, in float32.
        """
        compute = COMPUTE_BYTES[self.precision]
        ours = 7 * compute if self.tail else {2: 38, 4: 32, 8: 64}[compute]
        return self.program.logit_traffic or ours

    @property
    def bubble(self) -> float:
        """The share of a step's computation in which a rank waits (arXiv 2104.04473)."""
        return (self.pipeline - 1) / (self.accumulation * self.chunks + self.pipeline - 1)


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
    strategy, batch, parallel = recipe.strategy(world), recipe.batch(world, device), recipe.parallel
    if not precision:
        precision = recipe.train.precision
        precision = {"cpu": "fp32", "cuda": "bf16"}[device] if precision == "auto" else precision
    parts = parallel.context if strategy.shards_optimizer else 1
    return Layout(
        strategy.name,
        world,
        recipe.sizes(world).dp_shard * parts,
        precision,
        parallel.activation_checkpointing,
        parallel.offload,
        batch.micro_batch,
        batch.accumulation,
        device,
        parallel.reduce_each_micro_batch,
        0,
        parallel.tensor,
        parallel.sequence,
        parallel.context,
        parallel.pipeline,
        parallel.pipeline_chunks if parallel.pipeline > 1 else 1,
        recipe.train.average.enabled,
        share=batch.share,
        compile=compiles(recipe, device),
        master=MASTER_BYTES[recipe.train.master],
        program=replace(OURS, stream=2) if recipe.train.stream == "bf16" else OURS,
    )


@dataclass(frozen=True)
class Rank:
    """The part of our GPT that the fullest rank of a pipeline stage holds.

    Each element of a matrix is on one rank of `tensor`. These ranks replicate norms, learned
    positions and the biases of the output projections.
    """

    model: ModelSettings
    vocab: int
    layout: Layout
    stage: int
    layers: int

    @property
    def first(self) -> bool:
        """Whether it has the embedding."""
        return self.stage == 0

    @property
    def last(self) -> bool:
        """Whether it has the head."""
        return self.stage == self.layout.pipeline - 1

    @property
    def tied(self) -> bool:
        """Whether embedding and head are one tensor of this rank; two stages have one each."""
        return self.model.tie_head and self.first and self.last

    @property
    def head_width(self) -> int:
        return self.model.width // self.model.heads

    @property
    def heads(self) -> int:
        return self.model.heads // self.layout.tensor

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values; with fewer of them than ranks, ranks compute the same one."""
        return max(1, self.model.kv_heads_ // self.layout.tensor)

    @property
    def queries(self) -> int:
        """Width of all queries."""
        return self.heads * self.head_width

    @property
    def keys(self) -> int:
        """Width of all keys, and of all values."""
        return self.kv_heads * self.head_width

    @property
    def by_heads(self) -> bool:
        """Whether the ranks of `context` exchange heads; otherwise they gather keys and values."""
        return self.kv_heads % self.layout.context == 0

    @cached_property
    def tokens(self) -> int:
        """Tokens of a micro-batch in attention and feed-forward layers, with padding."""
        parts = self.layout.context * (1 if self.by_heads else 2)  # an early and a late part
        parts = parts if self.layout.context > 1 else 1
        each = -(-self.model.context // parts) * parts // self.layout.context
        return self.layout.micro_batch * each

    @cached_property
    def stream_tokens(self) -> int:
        """Tokens of a micro-batch in the residual stream, with padding."""
        parts = self.layout.tensor if self.layout.sequence else 1
        return self.layout.micro_batch * -(-self.tokens // self.layout.micro_batch // parts)

    @cached_property
    def matrices(self) -> int:
        """Entries of a block's matrices."""
        return block_matrices(self.model) // self.layout.tensor

    @cached_property
    def undivided(self) -> int:
        """Parameters of a block on all ranks of `tensor` together."""
        return block_parameters(self.model)

    @cached_property
    def block_replicated(self) -> int:
        """Parameters of a block that the ranks of `tensor` replicate."""
        m, keys = self.model, self.head_width * self.model.kv_heads_
        ups = 2 if m.activation == "swiglu" else 1
        biases = m.attn_bias * (m.width + 2 * keys) + m.ff_bias * ups * m.ff_width_
        return self.undivided - block_matrices(m) - biases

    @cached_property
    def block(self) -> int:
        """Parameters of a block."""
        cut = self.undivided - self.block_replicated
        return cut // self.layout.tensor + self.block_replicated

    @cached_property
    def unit_blocks(self) -> int:
        """Blocks of one unit of FSDP2."""
        return (
            unit_blocks(self.layers, self.layers * self.block) if self.layout.pipeline == 1 else 1
        )

    @cached_property
    def table(self) -> int:
        """Entries of the embedding's or the head's matrix."""
        return -(-self.vocab // self.layout.tensor) * self.model.width

    @cached_property
    def sizes(self) -> Parameters:
        """All parameters of the model."""
        return count(self.model, self.vocab)

    @cached_property
    def replicated(self) -> int:
        """Parameters that the ranks of `tensor` replicate."""
        sizes, layers = self.sizes, self.model.layers
        norm = sizes.norms // (2 * layers + self.model.final_norm)
        ends = self.first * sizes.positions + self.last * self.model.final_norm * norm
        return ends + self.layers * self.block_replicated

    @cached_property
    def total(self) -> int:
        """All parameters."""
        tables = self.first + self.last * (not self.tied)
        bias = self.last * self.model.head_bias * -(-self.vocab // self.layout.tensor)
        blocks = self.layers * (self.block - self.block_replicated)
        return tables * self.table + bias + blocks + self.replicated

    def moments(self, optimizer: str, master: int) -> int:
        """Bytes of the optimizer's state, for weights of `master` bytes."""
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
    layers = stage_layers(model, vocab, p * layout.chunks)
    ranks = [Rank(model, vocab, layout, stage, sum(layers[stage::p])) for stage in range(p)]
    return list({(r.layers, r.first, r.last): r for r in reversed(ranks)}.values())[::-1]
