"""How a recipe divides a training among ranks, and the part of our GPT that one rank holds."""

from __future__ import annotations

import math
from dataclasses import dataclass

from windlass.ledger import Line
from windlass.model.size import (
    MASTER_BYTES,
    CountedSizes,
    block_matrices,
    count,
    flops_per_token,
    moment_bytes,
    stage_layers,
    unit_blocks,
)
from windlass.recipe import Recipe
from windlass.recipe.network import ModelSettings
from windlass.recipe.strategies import STRATEGIES, Strategy

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
    context: int = 1
    pipeline: int = 1
    average: bool = False  # `train.average`
    compile: bool = False
    master: int = 4  # bytes by `train.master`; see `weight_bytes`
    program: Program = Program()

    @property
    def policy(self) -> Strategy:
        return STRATEGIES[self.strategy]

    @property
    def samples(self) -> int:
        """Samples of a rank in a step."""
        return self.micro_batch * self.accumulation

    @property
    def weight_bytes(self) -> int:
        return 8 if self.precision == "fp64" else self.master

    @property
    def reduces_each(self) -> bool:
        """Whether FSDP2 reduces gradients in every micro-batch, or only in the last of a step."""
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
    return Layout(
        strategy.name,
        world,
        recipe.sizes(world).dp_shard * (p.context if strategy.shards_optimizer else 1),
        precision,
        p.activation_checkpointing,
        p.offload,
        device=device,
        micro_batch=batch.micro_batch,
        accumulation=batch.accumulation,
        reduce_each=p.reduce_each_micro_batch,
        tensor=p.tensor,
        context=p.context,
        pipeline=p.pipeline,
        average=recipe.train.average > 0,
        compile=compiles(recipe, device),
        master=MASTER_BYTES[recipe.train.master],
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
        self.stream_tokens = micro_batch * -(-each // t)

        # Entries of a block's matrices, and of the embedding's or the head's matrix.
        self.matrices = block_matrices(model) // t
        self.table = -(-vocab // t) * model.width
        self.sizes = count(model, vocab)
        ups = 2 if model.activation == "swiglu" else 1
        keys = self.head_width * model.kv_heads_
        biases = model.attn_bias * (model.width + 2 * keys) + model.ff_bias * ups * model.ff_width_
        whole = self.sizes.block - block_matrices(model) - biases  # of a block, replicated
        cut = (self.sizes.block - whole) // t
        self.block = cut + whole
        # Blocks of one unit of FSDP2.
        self.unit_blocks = unit_blocks(layers, layers * self.block) if layout.pipeline == 1 else 1
        ends = self.first * self.sizes.positions + self.last * self.sizes.norm
        self.replicated = ends + layers * whole  # parameters that the ranks of `tensor` replicate
        tables = (self.first + self.last * (not self.tied)) * self.table
        self.total = tables + layers * cut + self.replicated

    def moments(self, optimizer: str, master: int) -> int:
        """The bytes of the optimizer's moments, of weights of `master` bytes."""
        matrices = self.layers * self.matrices
        if optimizer != "adamw8bit":
            return master * (2 * self.total - matrices * (optimizer == "muon"))
        model, tables = self.model, 1 if self.tied else self.first + self.last
        down = self.layers * model.width * model.ff_width_ // self.layout.tensor
        others = matrices - down + tables * self.table + self.first * self.sizes.positions
        rest = 2 * master * (self.total - down - others)
        eight_bit = down * moment_bytes(optimizer, master, model.ff_width_)
        eight_bit += others * moment_bytes(optimizer, master, model.width)
        return rest + round(eight_bit)


def ranks_of(model: ModelSettings, vocab: int, layout: Layout) -> list[Rank]:
    """The stages that differ in memory or work; of equal stages the first, which holds most."""
    p = layout.pipeline
    layers = stage_layers(model, vocab, p)
    ranks = [Rank(model, vocab, layout, stage, layers[stage]) for stage in range(p)]
    return list({(r.layers, r.first, r.last): r for r in reversed(ranks)}.values())[::-1]


def flops_of_run(recipe: Recipe, start: Line) -> float:
    """FLOPs of a token in a run's last start."""
    model = recipe.model
    if start.get("network") or model.freeze:
        return CountedSizes(start["parameters"], start["trained"], 0).flops_per_token()
    return flops_per_token(model, model.vocab or start["data"]["vocab"])


def checkpoint_bytes(recipe: Recipe, vocab: int, counted: CountedSizes | None = None) -> int:
    """Bytes of weights, optimizer state and average; `counted`: of a model that is not our GPT."""
    master = MASTER_BYTES[recipe.train.master]
    state = moment_bytes(recipe.optim.kind, master) + master * (recipe.train.average > 0)
    if counted is None:
        model, total = recipe.model, count(recipe.model, vocab).total
        # Muon has one moment for a block's matrix.
        one_moment = model.layers * block_matrices(model) if recipe.optim.kind == "muon" else 0
        return math.ceil((master + state) * total) - master * one_moment
    weights = master * counted.trained if recipe.refers_to_base else counted.weight_bytes()
    return weights + math.ceil(state * counted.trained)
