"""Memory of one rank at the peak of a training step, by strategy, precision, checkpointing and
micro-batch. No torch.

A step of our GPT is a sequence of events, each with the bytes of the tensors that exist then; the
peak is the event with the largest sum. The tests compare it with real steps on CPU ranks and with
the tensors that autograd saves. On CUDA norms and dropout have kernels of their own, which save
less. A device's driver, libraries and the allocator's rounding come on top (`devices.USABLE`).

torch's own trackers do not replace the events: under FakeTensorMode `MemTracker` rejects gradient
accumulation, and neither it nor `FSDPMemTracker` runs our DDP and FSDP2 steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from windlass.model.size import CountedSizes, block_matrices, block_parameters, count
from windlass.recipe.network import ModelSettings
from windlass.recipe.strategies import STRATEGIES, Strategy

if TYPE_CHECKING:
    from windlass.recipe import Recipe

Network = ModelSettings | CountedSizes
"""The settings of our GPT, or the counted parameters of a model of `transformers`."""

COMPUTE_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
PARTS = ("parameters", "gradients", "optimizer", "activations", "logits", "buffers")
CHUNK_BYTES = {"cpu": 2**25, "cuda": 2**29}
"""Logits that `windlass.model.loss` holds at a time; that module needs torch, so a test keeps the
two equal."""
GATHER_BYTES = 2**25
"""Parameters that `windlass.optim.shard` gathers at a time; a test keeps the two equal."""
RNG_BYTES = {"cpu": 5056, "cuda": 5056 + 16}
"""The generators' states that activation checkpointing saves for each block."""


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
        """Whether FSDP2 reduces gradients in every micro-batch, or in a step's last one alone."""
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
        recipe.sizes(world).dp_shard,
        precision,
        parallel.activation_checkpointing,
        parallel.offload,
        batch.micro_batch,
        batch.accumulation,
        device,
        parallel.reduce_each_micro_batch,
    )


def memory(model: Network, vocab: int, layout: Layout, optimizer: str = "adamw") -> Memory:
    """The memory of a rank at a step's peak; activations of counted sizes need measured peaks."""
    if isinstance(model, CountedSizes):
        return _counted(model, layout)
    step = Step(model, vocab, layout, optimizer)
    one_moment = model.layers * block_matrices(model) if optimizer == "muon" else 0
    moments = 2 * count(model, vocab).total - one_moment
    ranks = layout.shard if layout.policy.shards_parameters else 1
    parameters, state = -(-step.weights // ranks), -(-step.master * moments // layout.shard)
    host = 0
    if layout.offload:  # parameters, optimizer state and reduced gradients
        host, parameters, state = 2 * parameters + state, 0, 0
    peak = max(events(step), key=lambda event: event.total)
    buffers = peak.buffers + 16 * step.n + layout.workspace  # tokens and labels are int64
    return replace(peak, parameters=parameters, optimizer=state, host=host, buffers=buffers)


def _counted(model: CountedSizes, layout: Layout) -> Memory:
    """The memory with AdamW; a sharded model's blocks count as if they had equal sizes."""
    compute, several = COMPUTE_BYTES[layout.precision], layout.accumulation > 1
    master, sharded = max(4, compute), layout.policy.shards_parameters
    weights, gradients = model.weight_bytes(master), master * model.trained
    state = -(-2 * gradients // layout.shard)
    if sharded:
        weights, gradients = -(-weights // layout.shard), -(-gradients // layout.shard)
    activations, buffers, at = 0, layout.workspace, "states alone"
    if model.peaks:
        (activations, together), at = model.peak(layout.micro_batch), "measured"
        if sharded:
            layers = int(model.network.get("layers") or 1)
            root = model.network.get("vocab", 0) * model.network.get("width", 0)
            block = (model.total - root) // layers
            # Gathered parameters, and gradients before their reduction.
            buffers += master * (2 * root + block) + 3 * compute * block
            gradients += master * model.trained if several and not layout.reduces_each else 0
        elif layout.world == 1 and not several:  # gradients come while activations are freed
            gradients = min(gradients, together)
            activations = together - gradients
        elif several and layout.world > 1:  # DDP's buckets have a copy
            gradients *= 2
    peak = Memory(activations=activations, buffers=buffers, at=at)
    if layout.offload:
        return replace(peak, host=weights + gradients + state)
    return replace(peak, parameters=weights, gradients=gradients, optimizer=state)


class Step:
    """The bytes of the tensors of our GPT in a step under one layout.

    Legend: N tokens of the micro-batch, D width, K width of all keys, F hidden width, H heads, T
    context, V vocabulary. The residual stream and the norms have the master precision; matrix
    products and their results have autocast's.
    """

    def __init__(self, model: ModelSettings, vocab: int, layout: Layout, optimizer: str = "adamw"):
        self.model, self.vocab, self.layout = model, vocab, layout
        self.compute = COMPUTE_BYTES[layout.precision]  # bytes of a number in matrix products
        self.master = max(4, self.compute)  # bytes of a number of the weights
        self.cuda = layout.device == "cuda"
        self.n = layout.micro_batch * model.context  # N
        self.kv = model.width // model.heads * model.kv_heads_  # K
        self.stream = self.n * model.width * self.master  # one copy of the residual stream [N, D]
        self.hidden = self.n * model.ff_width_ * self.compute  # one hidden copy [N, F]
        # All weights. The root is outside the blocks: embedding, positions, final norm, head.
        self.weights = self.master * count(model, vocab).total
        self.block = self.master * block_parameters(model)
        self.root = self.weights - model.layers * self.block
        self.head = self.master * vocab * model.width  # also of a tied one
        # The largest matrix of a block, whose gradient exists twice for a moment.
        self.largest = max(model.ff_width_, model.width + 2 * self.kv) * model.width * self.master
        # Beside weights, gradients and state in the update.
        self.update = 6 * self.largest if optimizer == "muon" else 0
        if not layout.policy.shards_parameters and layout.shard > 1:
            # Rows to send, received rows, and a copy of a part.
            bucket = min(self.weights, max(self.head, GATHER_BYTES))
            self.update = max(self.update, bucket + bucket // layout.shard + self.largest)
        # Autocast's copies of a block's matrices, which the backward pass needs.
        self.copies = block_matrices(model) * self.compute if self.compute < self.master else 0

    def norm(self) -> int:
        """A normalisation saves its input (the stream), and a mean and a scale for each token."""
        if self.model.norm == "layernorm":
            return self.stream + 2 * self.n * self.master
        copies = 1 if self.cuda else 2  # without a fused kernel it also saves the scaled input
        return copies * self.stream + self.n * self.master

    def dropout(self, width: int) -> int:
        """The mask of a dropout over [N, D] numbers of `width` bytes."""
        return self.n * self.model.width * (1 if self.cuda else width) if self.model.dropout else 0

    def attention(self) -> int:
        """The bytes from the input of the projections to the input of the output projection."""
        model, n, c, d, k = self.model, self.n, self.compute, self.model.width, self.kv
        saved = n * d * c  # the input
        upcast = model.qk_norm and not self.cuda and c < 4  # fp32 copies of queries and keys
        if model.qk_norm:
            saved += n * (model.heads + model.kv_heads_) * self.master
            saved += n * (d + k) * 4 if upcast else 0
        # No kernel takes dropout on a CPU, or grouped queries in fp32 on CUDA. Then attention saves
        # whole T x T matrices.
        plain = c >= 4 and model.kv_heads_ != model.heads if self.cuda else model.dropout > 0
        if not plain or (model.qk_norm and not upcast):
            saved += n * (d + 2 * k) * c  # queries, keys and values, which are one tensor
        if plain:  # computes in fp32: the scores and, with dropout, its mask and their product
            squares = n * model.heads * model.context * (3 if model.dropout else 1)
            return saved + (squares + 3 * n * d) * max(4, c) + n * d * c
        if model.qk_norm or model.position == "rope":
            saved += n * (d + k) * c  # transformed queries and keys
        return saved + n * d * c + n * model.heads * max(4, c)  # the result, and a log-sum-exp

    def block_saved(self) -> int:
        """The bytes that a block saves without checkpointing, without copies of its weights."""
        activation = self.model.activation
        copies = {"gelu": 2, "gelu_tanh": 2, "relu": 1, "relu2": 2, "swiglu": 4}[activation]
        # Autocast casts the input of two matrices twice.
        inputs = 2 if activation == "swiglu" and self.copies else 1
        feed_forward = inputs * self.n * self.model.width * self.compute + copies * self.hidden
        return 2 * self.norm() + self.attention() + feed_forward + 2 * self.dropout(self.compute)

    def saved(self, blocks: int) -> int:
        """The bytes that `blocks` blocks save with the layout's checkpointing."""
        if self.layout.checkpointing == "none":
            return blocks * self.block_saved()
        saved = self.stream + RNG_BYTES[self.layout.device]
        if self.layout.checkpointing == "selective":  # results of matrix products and attention
            model, n, c, d = self.model, self.n, self.compute, self.model.width
            ups = 2 if model.activation == "swiglu" else 1
            saved += n * (3 * d + 2 * self.kv) * c + ups * self.hidden
            saved += 0 if model.dropout else n * d * c + n * model.heads * max(4, c)
        return blocks * saved

    def inside(self) -> int:
        """The recomputed activations and their gradients in a block's backward pass."""
        # The derivative of a square takes two more copies.
        copies = {"swiglu": 2, "relu2": 3}.get(self.model.activation, 1)
        return max(0, self.block_saved() - self.saved(1)) + self.stream + copies * self.hidden

    def root_saved(self) -> int:
        """The bytes of the embedding's dropout, the final norm and the head's input."""
        model = self.model
        saved = self.dropout(self.master) + self.n * model.width * self.compute
        if model.position == "rope":  # the tables that all blocks share
            saved += 2 * model.context * (model.width // model.heads) * self.master
        return saved + (self.norm() if model.final_norm else 0)

    def logits(self) -> tuple[int, int, int]:
        """The bytes of head and loss: during the loss, after it, and in their backward pass.

        Small logits exist as a whole, large ones a chunk at a time.
        """
        n, V, d, c, m = self.n, self.vocab, self.model.width, self.compute, self.master
        wide, capped = max(4, c), bool(self.model.logit_cap)
        limit = max(1, CHUNK_BYTES[self.layout.device] // (4 * V))  # tokens
        head_copy = V * d * c if c < m else 0  # the head's matrix in the precision of autocast
        if n <= limit:
            one, rest = n * V * wide, capped * n * V * c + head_copy
            return 2 * one + rest, one + rest, 3 * one + rest
        chunk = -(-n // -(-n // limit))  # equal chunks
        # The forward pass computes the gradients of head and input.
        gradient = V * d * m + n * d * (c if c == m else c + m)
        inside = max(2 * chunk * V * wide, chunk * V * (wide + c) + (V * d * c if c < wide else 0))
        inside += capped * chunk * V * wide  # the cap's slope
        return gradient + head_copy + inside, V * d * m + n * d * m, V * d * m + n * d * m

    def loss(self) -> Iterator[Memory]:
        """The events from the last block's end to the first gradient of an activation."""
        forward, _, backward = self.logits()
        saved = self.saved(self.model.layers) + self.root_saved()
        cast = self.stream if self.compute < self.master else 0
        yield Memory(activations=saved + cast, logits=forward, at="loss")
        yield Memory(activations=saved, logits=backward, at="backward of the loss")


def events(step: Step) -> Iterator[Memory]:
    """The events of a step at which its memory may peak."""
    return _fsdp_events(step) if step.layout.policy.shards_parameters else _plain_events(step)


def _plain_events(step: Step) -> Iterator[Memory]:
    """One process, or DDP, whose buckets hold all gradients all the time."""
    layers, whole = step.model.layers, step.weights
    ddp, several = step.layout.world > 1, step.layout.accumulation > 1
    # With checkpointing the backward pass makes autocast's copies again.
    copied = step.layout.checkpointing == "none"
    # Between micro-batches DDP has gradients beside its buckets.
    lasting = whole * (ddp + several)
    for event in step.loss():
        buffers = step.copies * layers if event.at == "loss" or copied else 0
        yield replace(event, gradients=lasting, buffers=buffers)
    for left in range(layers, 0, -1):
        # A tied head's gradient waits for the embedding's.
        new = step.head if step.model.tie_head or not lasting else 0
        new += 0 if lasting else (layers - left) * step.block
        yield Memory(
            gradients=lasting + new + step.largest,
            activations=step.saved(left) + step.inside(),
            buffers=step.copies * (left if copied else 1),
            at=f"backward of block {left}",
        )
    # A tied head's gradient needs two more tensors of the embedding's size.
    gradients = (lasting or whole) + step.head * (bool(lasting) + 2 * step.model.tie_head)
    yield Memory(gradients=gradients, activations=step.stream, at="backward of the embedding")
    yield Memory(gradients=whole if ddp else max(lasting, whole), buffers=step.update, at="update")


def _fsdp_events(step: Step) -> Iterator[Memory]:
    """FSDP2 gathers blocks one by one, or keeps them gathered until their backward pass
    (`shard_grad_op`).

    A gathered block is in memory twice for a moment, as received bytes and as parameters; the
    arrival of the next block frees the received bytes. A gradient also exists twice during its
    reduction. An untied head and the embedding are units of their own. A tied matrix belongs to the
    root, which stays gathered.
    """
    layout, tied, low = step.layout, step.model.tie_head, step.compute / step.master
    layers, shard, end = step.model.layers, layout.shard, step.root if tied else step.head
    stays = layout.policy.keeps_gathered
    wide = int(low * end)  # the gathered embedding or head
    root = wide if tied or stays else 0  # while blocks compute
    gathered = step.compute * block_parameters(step.model)  # a block in autocast's precision
    on_device = not layout.offload  # with offload reduced gradients go to the host
    several, each = layout.accumulation > 1, layout.reduces_each
    whole = several and not each  # gradients wait unreduced for the step's last micro-batch
    # Reduced gradients of earlier micro-batches.
    shards = on_device * step.weights // shard if several and each else 0
    before = step.weights if whole else shards
    # `shard_grad_op` gathers in the first micro-batch alone, before any gradient.
    first = Memory(gradients=0 if stays else before)

    buffers = root + (layers + 2 if stays else 3) * gathered
    at = f"gathering of block {layers}"
    yield replace(first, activations=step.saved(layers - 1), buffers=buffers, at=at)
    activations, at = step.saved(layers) + step.stream, f"forward of block {layers}"
    yield replace(first, activations=activations, buffers=buffers - gathered, at=at)
    for event in step.loss():
        received = event.at == "loss" and not several
        gathers = root + (0 if tied else wide) + (layers + received if stays else 1) * gathered
        yield replace(event, gradients=before, buffers=gathers)
    if not tied:
        buffers = root + wide + end + (layers + 1 if stays else min(layers, 2)) * gathered
        yield Memory(
            gradients=before + end,
            activations=activations,
            buffers=buffers,
            at="reduction of the head",
        )
    for left in range(layers, 0, -1):
        done = layers - left
        gradients = shards or on_device * done * step.block // shard
        gradients += end + left * step.block if whole else 0
        gradients += int(low * step.head) if tied else 0
        buffers = root + (left if stays else min(left, 2)) * gathered + (step.block if done else 0)
        event = Memory(buffers=buffers, at=f"backward of block {left}")
        inside = step.saved(left) + step.inside()
        yield replace(event, gradients=gradients + step.largest, activations=inside)
        gradients += 0 if whole else step.block
        yield replace(event, gradients=gradients, activations=step.saved(left - 1) + step.stream)
    gradients = end + (shards or on_device * layers * step.block // shard)
    gradients += int(step.head * (1 + low + whole)) if tied else step.head * whole
    at = "backward of the embedding"
    yield Memory(gradients=gradients, activations=step.stream, buffers=wide, at=at)
    reduced = on_device * step.weights // shard
    yield Memory(gradients=end + reduced, buffers=end + wide, at="reduction of the embedding")
    yield Memory(gradients=-(-on_device * step.weights // shard), buffers=step.update, at="update")
