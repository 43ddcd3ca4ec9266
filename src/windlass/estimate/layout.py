"""How a recipe divides a training among ranks, and the bytes of its numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from windlass.model.size import MASTER_BYTES, CountedSizes, block_matrices, count, moment_bytes
from windlass.recipe import Recipe
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
        context=p.context,
        pipeline=p.pipeline,
        average=recipe.train.average > 0,
        compile=compiles(recipe, device),
        master=MASTER_BYTES[recipe.train.master],
    )


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
