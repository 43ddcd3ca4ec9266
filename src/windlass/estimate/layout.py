"""The arrangement of a training over ranks and in memory, and the memory of a rank in parts. No
torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from windlass.model.size import CountedSizes
from windlass.recipe.network import ModelSettings
from windlass.recipe.strategies import STRATEGIES, Strategy

if TYPE_CHECKING:
    from windlass.recipe import Recipe

Network = ModelSettings | CountedSizes
"""The settings of our GPT, or the counted parameters of a model of `transformers`."""

COMPUTE_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
CHECKPOINTING = ("none", "selective", "full")
PARTS = ("parameters", "gradients", "optimizer", "activations", "logits", "buffers")


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

    @property
    def policy(self) -> Strategy:
        """The tensors that the ranks divide among themselves."""
        return STRATEGIES[self.strategy]

    @property
    def reduces_each(self) -> bool:
        """Whether FSDP2 reduces the gradients of every micro-batch instead of the step's last one
        alone."""
        return self.policy.reduces_each if self.reduce_each == "auto" else bool(self.reduce_each)


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank at one moment of a step."""

    parameters: int = 0  # this rank's master weights
    gradients: int = 0  # this rank's, as far as they exist then
    optimizer: int = 0  # this rank's state
    activations: int = 0  # saved by the forward pass, and gradients of activations
    logits: int = 0  # head and loss
    buffers: int = 0  # gathered and low-precision weights, communication, cuBLAS, tokens
    host: int = 0  # in the host's memory, with offload
    at: str = ""  # the moment

    @property
    def total(self) -> int:
        """All bytes on the device."""
        return sum(getattr(self, part) for part in PARTS)


def layout_of(recipe: Recipe, world: int, device: str = "cpu", precision: str = "") -> Layout:
    """The layout of a recipe on `world` ranks; `precision` replaces `auto`."""
    strategy, batch, parallel = recipe.strategy(world), recipe.batch(world, device), recipe.parallel
    if not precision:
        precision = recipe.train.precision
        precision = {"cpu": "fp32", "cuda": "bf16"}[device] if precision == "auto" else precision
    return Layout(
        strategy.name,
        world,
        strategy.sizes(world, parallel.shard_size).dp_shard,
        precision,
        parallel.activation_checkpointing,
        parallel.offload,
        batch.micro_batch,
        batch.accumulation,
        device,
        parallel.reduce_each_micro_batch,
    )
