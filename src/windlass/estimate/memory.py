"""Memory of one rank at the peak of a training step, for every strategy, precision, checkpointing and micro-batch.

A step is walked through from event to event (the loss is made, its backward pass begins, each block's backward pass from
the last to the first, the update), what lies in memory at each is added up, and the largest sum is the peak. What is
counted are tensors; a device's driver, libraries and the allocator's rounding come on top (`devices.USABLE`).

A model of `transformers` has its own weights, gradients and moments in it, and the activations of our GPT of the nearest
shape: an estimate. Frozen weights have neither gradients nor moments.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from windlass.estimate.activations import (
    Pass,
    backward_bytes,
    kept_by_block,
    logits_bytes,
    recomputed,
    root_bytes,
    weight_copies,
)
from windlass.model.size import HfSizes, block_matrices, block_parameters, count
from windlass.recipe.settings import ModelSettings

if TYPE_CHECKING:
    from windlass.recipe import Recipe

Network = ModelSettings | HfSizes
"""What is trained: our own GPT's settings, or the counted sizes of a model of `transformers`."""

SHARDED = ("full_shard", "shard_grad_op", "hybrid_shard")
COMPUTE_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class Layout:
    """How a training is spread over ranks and arranged in memory."""

    strategy: str
    world: int = 1
    shard: int = 1
    """Ranks among which parameters, gradients and moments are divided; 1 where nothing is."""
    precision: str = "fp32"
    checkpointing: str = "none"
    offload: bool = False
    micro_batch: int = 1
    accumulation: int = 1
    device: str = "cpu"
    """`cpu` or `cuda`."""

    @property
    def sharded(self) -> bool:
        """Whether FSDP2 is at work."""
        return self.strategy in SHARDED


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank at the peak of a step."""

    parameters: int = 0
    """Master weights; this rank's part where they are sharded."""
    gradients: int = 0
    """As far as they exist at the peak."""
    moments: int = 0
    """The optimizer's state; this rank's part where it is sharded."""
    activations: int = 0
    """What the forward pass kept, and the gradients that pass through."""
    logits: int = 0
    """Head and loss."""
    buffers: int = 0
    """Gathered parameters, low-precision copies of weights, communication buffers, tokens."""
    host: int = 0
    """In the host's memory instead, with offload."""
    at: str = ""
    """Where in the step the peak lies."""

    @property
    def total(self) -> int:
        """All of it on the device."""
        return self.parameters + self.gradients + self.moments + self.activations + self.logits + self.buffers


def layout_of(recipe: Recipe, world: int, device: str = "cpu", precision: str = "") -> Layout:
    """The layout that a recipe has on `world` ranks. `precision` replaces `auto`."""
    strategy, batch = recipe.strategy(world), recipe.batch(world, device)
    if not precision:
        precision = recipe.train.precision
        precision = {"cpu": "fp32", "cuda": "bf16"}[device] if precision == "auto" else precision
    return Layout(
        strategy, world, shard_size(strategy, world, recipe.parallel.shard_size), precision,
        recipe.parallel.activation_checkpointing, recipe.parallel.offload, batch.micro_batch, batch.accumulation, device,
    )  # fmt: skip


def shard_size(strategy: str, world: int, wished: int = 0) -> int:
    """Ranks in a sharding group; for `hybrid_shard` without a wish half of them, as on one host."""
    if strategy == "hybrid_shard":
        return wished or max(1, world // 2)
    return world if strategy in SHARDED else 1


@dataclass(frozen=True)
class _Sizes:
    """Bytes of the parts of a model under a layout."""

    root: int
    """Embedding, positions, final norm and head, whole, in master precision."""
    block: int
    """One block, whole, in master precision."""
    gathered_block: int
    """One block as FSDP2 gathers it: blocks in the low precision."""
    head: int
    """The part of the root whose gradient comes first: the head's matrix, also a tied one."""
    moments: int
    """Of all, whole."""
    root_gradient: int
    """Gradients of the root; less than `root` where weights are frozen."""
    block_gradient: int
    """Gradients of one block."""


def _sizes(model: Network, vocab: int, layout: Layout, optimizer: str) -> _Sizes:
    c = COMPUTE_BYTES[layout.precision]
    m = max(4, c)
    if isinstance(model, HfSizes):
        layers, frozen = model.like.layers, model.trained < model.total
        moments = 2 * model.trained - (layers * model.block_matrices if optimizer == "muon" else 0)
        return _Sizes(
            root=m * (model.total - layers * model.block),
            block=m * model.block,
            gathered_block=min(c, m) * model.block,
            head=0 if frozen else m * model.head,
            moments=m * moments,
            root_gradient=m * max(0, model.trained - layers * model.trained_block),
            block_gradient=m * model.trained_block,
        )
    parts, block = count(model, vocab), block_parameters(model)
    moments = 2 * parts.total - (model.layers * block_matrices(model) if optimizer == "muon" else 0)
    return _Sizes(
        root=m * (parts.total - model.layers * block),
        block=m * block,
        gathered_block=min(c, m) * block,
        head=m * vocab * model.width,
        moments=m * moments,
        root_gradient=m * (parts.total - model.layers * block),
        block_gradient=m * block,
    )


def memory(model: Network, vocab: int, layout: Layout, optimizer: str = "adamw") -> Memory:
    """The memory of one rank at the peak of a step.

    Args:
        model: our own GPT's settings, or the sizes of a model of `transformers`.
        vocab: rows of its embedding.
        layout: how it is spread.
        optimizer: `adamw` or `muon`.
    """
    c = COMPUTE_BYTES[layout.precision]
    like = model.like if isinstance(model, HfSizes) else model
    p = Pass(like, vocab, layout.micro_batch, c, max(4, c), layout.device)
    if isinstance(model, HfSizes):
        frozen = model.trained < model.total
        p = replace(
            p,
            squares=model.squares,
            whole_logits=model.whole_logits,
            extra_hidden=model.extra_hidden,
            frozen_head=frozen,
        )
    sizes = _sizes(model, vocab, layout, optimizer)
    resident = -(-(sizes.root + like.layers * sizes.block) // layout.shard)
    moments = -(-sizes.moments // layout.shard)
    step = _Step(p, layout, sizes, optimizer)
    events = _fsdp_events(step) if layout.sharded else _plain_events(step)
    host = 0
    if layout.offload:
        gradients = -(-(sizes.root_gradient + like.layers * sizes.block_gradient) // layout.shard)
        host, resident, moments = resident + moments + gradients, 0, 0
    always = 16 * p.tokens  # tokens and labels
    if layout.sharded and layout.device == "cpu":
        always += max(sizes.root, sizes.block)  # what `parallel.gloo` receives into is kept
    peak = max(events, key=lambda e: e.total)
    return replace(peak, parameters=resident, moments=moments, host=host, buffers=peak.buffers + always)


@dataclass(frozen=True)
class _Step:
    """What the events of a step are made of."""

    p: Pass
    layout: Layout
    sizes: _Sizes
    optimizer: str

    @property
    def whole(self) -> int:
        """All gradients, whole."""
        return self.sizes.root_gradient + self.p.model.layers * self.sizes.block_gradient

    @cached_property
    def largest(self) -> int:
        """The largest matrix of a block, in master precision: a gradient that is made before it is added or copied."""
        m = self.p.model
        found = max(m.ff_width_, m.width + 2 * m.width // m.heads * m.kv_heads_) * m.width * self.p.master_bytes
        return min(found, self.sizes.block_gradient)

    @property
    def tied(self) -> bool:
        """Whether the head's gradient waits for the embedding's."""
        return self.p.model.tie_head

    @cached_property
    def kept_by_one(self) -> int:
        """Activations of one block."""
        return kept_by_block(self.p, self.layout.checkpointing)

    def kept(self, blocks: int) -> int:
        """Activations of the first so many blocks."""
        return blocks * self.kept_by_one

    def loss(self) -> Iterator[Memory]:
        """From the last block's end to the first gradient of an activation."""
        p, logits = self.p, logits_bytes(self.p)
        outside = root_bytes(p) - 16 * p.tokens
        stream = p.stream if p.compute_bytes < p.master_bytes else 0
        yield Memory(activations=self.kept(p.model.layers) + outside + stream, logits=logits.forward, at="loss")
        yield Memory(activations=self.kept(p.model.layers) + outside, logits=logits.backward, at="backward of the loss")

    @cached_property
    def inside(self) -> int:
        """What the backward pass of a block adds at its fullest to what the block kept."""
        return recomputed(self.p, self.layout.checkpointing) + backward_bytes(self.p)

    def embedding(self, lasting: bool) -> int:
        """Beside all gradients, when the embedding's is made: for a tied head it is added to the head's in a third tensor."""
        return self.sizes.head * (2 + lasting) if self.tied else self.sizes.head * lasting

    def update(self) -> int:
        """Beside weights, gradients and moments in the update: nothing for fused AdamW, a few matrices for Muon."""
        return 6 * self.largest if self.optimizer == "muon" else 0


def _plain_events(step: _Step) -> Iterator[Memory]:
    """One process, or DDP, which keeps gradients in its buckets all the time."""
    p, sizes, layers, whole = step.p, step.sizes, step.p.model.layers, step.whole
    ddp, several = step.layout.strategy == "ddp", step.layout.accumulation > 1
    lasting = whole * (ddp + several)  # between micro-batches DDP holds gradients of its own beside its buckets
    copies = weight_copies(p)
    for event in step.loss():
        held = copies * layers if event.at == "loss" or step.layout.checkpointing == "none" else 0
        yield replace(event, gradients=lasting, buffers=held)
    for left in range(layers, 0, -1):
        pending = sizes.head if step.tied or not lasting else 0
        new = pending + (0 if lasting else (layers - left) * sizes.block_gradient)
        held = copies * (left if step.layout.checkpointing == "none" else 1)
        yield Memory(
            gradients=lasting + new + step.largest,
            activations=step.kept(left) + step.inside,
            buffers=held,
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

    A block that is gathered lies in memory twice for a moment (as it was received, and as parameters), and what was
    received is kept until the next one has arrived; likewise a gradient before and while it is reduced.
    """
    p, sizes, layers, shard = step.p, step.sizes, step.p.model.layers, step.layout.shard
    several, keeps = step.layout.accumulation > 1, step.layout.strategy == "shard_grad_op"
    block, root = sizes.gathered_block, sizes.root
    reduced, made = sizes.block_gradient, sizes.gathered_block * sizes.block_gradient // max(1, sizes.block)
    here = not step.layout.offload  # with offload reduced gradients go to the host
    before = step.whole if several else 0  # whole gradients lie between micro-batches
    last = 0 if keeps else before  # `shard_grad_op` gathers in the first micro-batch alone, before any gradient

    yield Memory(
        gradients=last,
        activations=step.kept(layers - 1),
        buffers=root + (layers + 2 if keeps else 3) * block,
        at=f"gathering of block {layers}",
    )
    yield Memory(
        gradients=last,
        activations=step.kept(layers) + p.stream,
        buffers=root + (layers + 1 if keeps else 2) * block,
        at=f"forward of block {layers}",
    )
    for event in step.loss():
        received = event.at == "loss" and not several
        gathered = layers + received if keeps else 1
        yield replace(event, gradients=before, buffers=root + gathered * block)
    for left in range(layers, 0, -1):
        done = layers - left
        gathered = left if keeps else min(left, 2)
        reducing = reduced if done else 0
        pending = sizes.head if step.tied or not several else 0
        unreduced = (sizes.root_gradient + left * reduced if several else 0) + pending
        shards = here * done * reduced // shard
        buffers, at = root + gathered * block + reducing, f"backward of block {left}"
        begins, ends = unreduced + shards + step.largest, unreduced + shards + (0 if several else made)
        yield Memory(gradients=begins, activations=step.kept(left) + step.inside, buffers=buffers, at=at)
        yield Memory(gradients=ends, activations=step.kept(left - 1) + p.stream, buffers=buffers, at=at)
    yield Memory(
        gradients=sizes.root_gradient + here * layers * reduced // shard + step.embedding(several),
        activations=p.stream,
        buffers=root,
        at="backward of the embedding",
    )
    yield Memory(
        gradients=sizes.root_gradient + here * step.whole // shard,
        buffers=root + sizes.root_gradient,
        at="reduction of embedding and head",
    )
    yield Memory(gradients=-(-here * step.whole // shard), buffers=step.update(), at="update")
