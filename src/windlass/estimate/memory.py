"""Memory of one rank at the peak of a training step, for every strategy, precision, checkpointing and micro-batch.

The method: walk through a step event by event (the loss, its backward pass, each block's backward pass from the last to
the first, the update), add up what is allocated at each, and take the largest sum. Only tensors are counted; a device's
driver, libraries and the allocator's rounding come on top (`devices.USABLE`). tests/dist/test_memory_of_a_step.py
compares the sums with real steps on real ranks.

Of a model of `transformers` only weights, gradients and optimizer state are known, from its number of parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from windlass.estimate.activations import (
    Pass,
    backward_bytes,
    logits_bytes,
    recomputed,
    root_bytes,
    saved_by_block,
    weight_copies,
)
from windlass.model.size import HfSizes, block_matrices, block_parameters, count
from windlass.recipe.settings import ModelSettings

if TYPE_CHECKING:
    from windlass.recipe import Recipe

Network = ModelSettings | HfSizes
"""What is trained: our own GPT's settings, or the counted parameters of a model of `transformers`."""

SHARDED = ("full_shard", "shard_grad_op", "hybrid_shard")
COMPUTE_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
PARTS = ("parameters", "gradients", "optimizer", "activations", "logits", "buffers")


@dataclass(frozen=True)
class Layout:
    """How a training is spread over ranks and arranged in memory."""

    strategy: str
    world: int = 1
    shard: int = 1
    """Ranks among which parameters, gradients and optimizer state are divided; 1 where nothing is."""
    precision: str = "fp32"
    checkpointing: str = "none"
    offload: bool = False
    micro_batch: int = 1
    accumulation: int = 1
    device: str = "cpu"
    """`cpu` or `cuda`."""

    @property
    def sharded(self) -> bool:
        """Whether FSDP2 is used."""
        return self.strategy in SHARDED


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank at the peak of a step."""

    parameters: int = 0
    """Master weights; this rank's part where they are sharded."""
    gradients: int = 0
    """As far as they exist at the peak."""
    optimizer: int = 0
    """Optimizer state; this rank's part where it is sharded."""
    activations: int = 0
    """What the forward pass saved, and gradients of activations."""
    logits: int = 0
    """Head and loss."""
    buffers: int = 0
    """Gathered parameters, low-precision copies of weights, communication buffers, tokens."""
    host: int = 0
    """In the host's memory instead, with offload."""
    at: str = ""
    """Where in the step the peak is."""

    @property
    def total(self) -> int:
        """All of it on the device."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.logits + self.buffers


def layout_of(recipe: Recipe, world: int, device: str = "cpu", precision: str = "") -> Layout:
    """The layout that a recipe has on `world` ranks. `precision` replaces `auto`."""
    strategy, batch = recipe.strategy(world), recipe.batch(world, device)
    if not precision:
        precision = recipe.train.precision
        precision = {"cpu": "fp32", "cuda": "bf16"}[device] if precision == "auto" else precision
    return Layout(
        strategy, world, shard_size(strategy, world, recipe.parallel.shard_size), precision,
        recipe.parallel.activation_checkpointing, recipe.parallel.offload, batch.micro_batch, batch.accumulation,
        device,
    )  # fmt: skip


def shard_size(strategy: str, world: int, setting: int = 0) -> int:
    """Ranks in a sharding group; for `hybrid_shard` without `parallel.shard_size` half of all, as on two hosts."""
    if strategy == "hybrid_shard":
        return setting or max(1, world // 2)
    return world if strategy in SHARDED else 1


def memory(model: Network, vocab: int, layout: Layout, optimizer: str = "adamw") -> Memory:
    """The memory of one rank at the peak of a step; of a model of `transformers` without activations.

    Args:
        model: what is trained.
        vocab: rows of its embedding.
        layout: how it is spread.
        optimizer: `adamw` or `muon`.
    """
    if isinstance(model, HfSizes):
        return _states(model, layout)
    compute = COMPUTE_BYTES[layout.precision]
    master, parts = max(4, compute), count(model, vocab)
    p = Pass(model, vocab, layout.micro_batch, compute, master, layout.device)
    step = _Step(p, layout, optimizer, master * (parts.total - model.layers * block_parameters(model)))
    moments = 2 * parts.total - (model.layers * block_matrices(model) if optimizer == "muon" else 0)
    parameters, state, host = -(-step.weights // layout.shard), -(-master * moments // layout.shard), 0
    if layout.offload:  # parameters, optimizer state and reduced gradients
        host, parameters, state = 2 * parameters + state, 0, 0
    always = 16 * p.tokens  # tokens and labels, int64
    if layout.sharded and layout.device == "cpu":
        always += max(step.root, step.block)  # gloo's receive buffer is kept
    peak = max(_fsdp_events(step) if layout.sharded else _plain_events(step), key=lambda event: event.total)
    return replace(peak, parameters=parameters, optimizer=state, host=host, buffers=peak.buffers + always)


def _states(model: HfSizes, layout: Layout) -> Memory:
    """Weights, gradients and two AdamW moments; frozen weights have neither gradients nor moments."""
    master = max(4, COMPUTE_BYTES[layout.precision])
    weights, trained = (-(-master * n // layout.shard) for n in (model.total, model.trained))
    if layout.offload:
        return Memory(host=weights + 3 * trained, at="states alone")
    return Memory(weights, trained, 2 * trained, at="states alone")


@dataclass(frozen=True)
class _Step:
    """What the events of a step are made of, in bytes."""

    p: Pass
    layout: Layout
    optimizer: str
    root: int
    """Embedding, positions, final norm and head, whole, in master precision; so are its gradients."""

    @property
    def block(self) -> int:
        """One block, whole, in master precision; so are its gradients."""
        return self.p.master_bytes * block_parameters(self.p.model)

    @property
    def gathered_block(self) -> int:
        """One block as FSDP2 gathers it: in the lower of the two precisions."""
        return min(self.p.compute_bytes, self.p.master_bytes) * block_parameters(self.p.model)

    @property
    def weights(self) -> int:
        """All weights, whole; so are all gradients."""
        return self.root + self.p.model.layers * self.block

    @property
    def head(self) -> int:
        """The head's matrix, whose gradient is the first of the root; also a tied one."""
        return self.p.master_bytes * self.p.vocab * self.p.model.width

    @property
    def largest(self) -> int:
        """The largest matrix of a block: a gradient that is computed before it is added or copied."""
        model = self.p.model
        return max(model.ff_width_, model.width + 2 * self.p.kv_width) * model.width * self.p.master_bytes

    def saved(self, blocks: int) -> int:
        """Activations that the first so many blocks saved."""
        return blocks * saved_by_block(self.p, self.layout.checkpointing)

    @property
    def inside(self) -> int:
        """What the backward pass of a block adds at its fullest to what the block saved."""
        return recomputed(self.p, self.layout.checkpointing) + backward_bytes(self.p)

    def loss(self) -> Iterator[Memory]:
        """From the last block's end to the first gradient of an activation."""
        p, logits = self.p, logits_bytes(self.p)
        saved = self.saved(p.model.layers) + root_bytes(p) - 16 * p.tokens
        cast = p.stream if p.compute_bytes < p.master_bytes else 0
        yield Memory(activations=saved + cast, logits=logits.forward, at="loss")
        yield Memory(activations=saved, logits=logits.backward, at="backward of the loss")

    def embedding(self, lasting: bool) -> int:
        """Beside all gradients, when the embedding's is computed: a tied head's is added to it in a third tensor."""
        return self.head * (2 + lasting) if self.p.model.tie_head else self.head * lasting

    def update(self) -> int:
        """Beside weights, gradients and state in the update: nothing for fused AdamW, a few matrices for Muon."""
        return 6 * self.largest if self.optimizer == "muon" else 0


def _plain_events(step: _Step) -> Iterator[Memory]:
    """One process, or DDP, which keeps gradients in its buckets all the time."""
    p, layers, whole = step.p, step.p.model.layers, step.weights
    ddp, several = step.layout.strategy == "ddp", step.layout.accumulation > 1
    keeps_copies = step.layout.checkpointing == "none"
    lasting = whole * (ddp + several)  # between micro-batches DDP holds gradients of its own beside its buckets
    copies = weight_copies(p)
    for event in step.loss():
        held = copies * layers if event.at == "loss" or keeps_copies else 0
        yield replace(event, gradients=lasting, buffers=held)
    for left in range(layers, 0, -1):
        pending = (
            step.head if p.model.tie_head or not lasting else 0
        )  # a tied head's gradient waits for the embedding's
        new = pending + (0 if lasting else (layers - left) * step.block)
        yield Memory(
            gradients=lasting + new + step.largest,
            activations=step.saved(left) + step.inside,
            buffers=copies * (left if keeps_copies else 1),
            at=f"backward of block {left}",
        )
    yield Memory(
        gradients=(lasting or whole) + step.embedding(bool(lasting)),
        activations=p.stream,
        at="backward of the embedding",
    )
    yield Memory(gradients=lasting if ddp and not several else max(lasting, whole), buffers=step.update(), at="update")


def _fsdp_events(step: _Step) -> Iterator[Memory]:
    """FSDP2: blocks are gathered one by one, or stay gathered until their backward pass (`shard_grad_op`).

    A block that is gathered is in memory twice for a moment (as it was received, and as parameters), and what was
    received is kept until the next one has arrived; likewise a gradient before and while it is reduced.
    """
    p, layers, shard = step.p, step.p.model.layers, step.layout.shard
    several, keeps = step.layout.accumulation > 1, step.layout.strategy == "shard_grad_op"
    block, root = step.gathered_block, step.root
    on_device = not step.layout.offload  # with offload reduced gradients go to the host
    before = step.weights if several else 0  # whole gradients between micro-batches
    first = 0 if keeps else before  # `shard_grad_op` gathers in the first micro-batch alone, before any gradient

    yield Memory(
        gradients=first, activations=step.saved(layers - 1), buffers=root + (layers + 2 if keeps else 3) * block,
        at=f"gathering of block {layers}",
    )  # fmt: skip
    yield Memory(
        gradients=first, activations=step.saved(layers) + p.stream, buffers=root + (layers + 1 if keeps else 2) * block,
        at=f"forward of block {layers}",
    )  # fmt: skip
    for event in step.loss():
        received = event.at == "loss" and not several
        yield replace(event, gradients=before, buffers=root + (layers + received if keeps else 1) * block)
    for left in range(layers, 0, -1):
        done = layers - left
        pending = step.head if p.model.tie_head or not several else 0
        unreduced = (root + left * step.block if several else 0) + pending
        sharded = on_device * done * step.block // shard
        buffers = root + (left if keeps else min(left, 2)) * block + (step.block if done else 0)
        at, begin, end = f"backward of block {left}", step.largest, 0 if several else block
        yield Memory(
            gradients=unreduced + sharded + begin, activations=step.saved(left) + step.inside, buffers=buffers, at=at
        )
        yield Memory(
            gradients=unreduced + sharded + end, activations=step.saved(left - 1) + p.stream, buffers=buffers, at=at
        )
    yield Memory(
        gradients=root + on_device * layers * step.block // shard + step.embedding(several), activations=p.stream,
        buffers=root, at="backward of the embedding",
    )  # fmt: skip
    yield Memory(
        gradients=root + on_device * step.weights // shard, buffers=2 * root, at="reduction of embedding and head"
    )
    yield Memory(gradients=-(-on_device * step.weights // shard), buffers=step.update(), at="update")
