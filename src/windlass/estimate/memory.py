"""Memory of one rank at the peak of a training step, for every strategy, precision, checkpointing and micro-batch.

The method: walk through a step event by event, add up the tensors that are allocated at each, and take the largest sum.
A device's driver, libraries and the allocator's rounding come on top (`devices.USABLE`). The tests compare the sums with
real steps on CPU ranks and with what autograd saves; on CUDA norms and dropout have kernels of their own, which save less.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING

from windlass.estimate.devices import USABLE
from windlass.model.size import CountedSizes, block_matrices, block_parameters, count
from windlass.recipe.network import ModelSettings
from windlass.recipe.strategies import STRATEGIES, Strategy

if TYPE_CHECKING:
    from windlass.recipe import Recipe

Network = ModelSettings | CountedSizes
"""What is trained: our own GPT's settings, or the counted parameters of a model of `transformers`."""

COMPUTE_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
CHECKPOINTING = ("none", "selective", "full")
PARTS = ("parameters", "gradients", "optimizer", "activations", "logits", "buffers")
CHUNK_BYTES = {"cpu": 2**25, "cuda": 2**29}
"""Logits that `windlass.model.loss` holds at a time; that module needs torch, so a test keeps the two equal."""
GATHER_BYTES = 2**25
"""Parameters that `windlass.optim.shard` gathers at a time; likewise."""
RNG_BYTES = {"cpu": 5056, "cuda": 5056 + 16}
"""The generators' states that activation checkpointing saves for each block."""


@dataclass(frozen=True)
class Layout:
    """How a training is spread over ranks and arranged in memory."""

    strategy: str
    world: int = 1
    shard: int = 1  # ranks among which the optimizer state is divided; with FSDP2 also parameters and gradients
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
        """What the ranks divide among themselves."""
        return STRATEGIES[self.strategy]

    @property
    def reduces_each(self) -> bool:
        """Whether FSDP2 reduces the gradients of every micro-batch, not only of the step's last one."""
        return self.policy.reduces_each if self.reduce_each == "auto" else bool(self.reduce_each)


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank at the peak of a step; parameters, gradients and optimizer state where they are this rank's."""

    parameters: int = 0  # master weights
    gradients: int = 0  # as far as they exist at the peak
    optimizer: int = 0
    activations: int = 0  # what the forward pass saved, and gradients of activations
    logits: int = 0  # head and loss
    buffers: int = (
        0  # gathered parameters, low-precision copies of weights, communication, cuBLAS, tokens
    )
    host: int = 0  # in the host's memory instead, with offload
    at: str = ""  # where in the step the peak is

    @property
    def total(self) -> int:
        """All of it on the device."""
        return sum(getattr(self, part) for part in PARTS)


def layout_of(recipe: Recipe, world: int, device: str = "cpu", precision: str = "") -> Layout:
    """The layout that a recipe has on `world` ranks. `precision` replaces `auto`."""
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


def memory(model: Network, vocab: int, layout: Layout, optimizer: str = "adamw") -> Memory:
    """The memory of one rank at the peak of a step; of a model of `transformers` without activations."""
    if isinstance(
        model, CountedSizes
    ):  # AdamW; frozen weights have neither gradients nor optimizer state
        master = max(4, COMPUTE_BYTES[layout.precision])
        weights, trained, state = (
            model.weight_bytes(master),
            master * model.trained,
            2 * master * model.trained,
        )
        if layout.policy.shards_parameters:
            weights, trained = -(-weights // layout.shard), -(-trained // layout.shard)
        state = -(-state // layout.shard)
        if model.peaks:
            return _measured(model, layout, Memory(weights, trained, state))
        if layout.offload:
            return Memory(
                host=weights + trained + state, buffers=layout.workspace, at="states alone"
            )
        return Memory(weights, trained, state, buffers=layout.workspace, at="states alone")
    step = Step(model, vocab, layout, optimizer)
    moments = 2 * count(model, vocab).total - (
        model.layers * block_matrices(model) if optimizer == "muon" else 0
    )
    sharded = layout.policy.shards_parameters
    parameters, host = -(-step.weights // (layout.shard if sharded else 1)), 0
    state = -(-step.master * moments // layout.shard)
    if layout.offload:  # parameters, optimizer state and reduced gradients
        host, parameters, state = 2 * parameters + state, 0, 0
    always = 16 * step.n + layout.workspace  # tokens and labels, int64
    peak = max(
        _fsdp_events(step) if sharded else _plain_events(step), key=lambda event: event.total
    )
    return replace(
        peak, parameters=parameters, optimizer=state, host=host, buffers=peak.buffers + always
    )


def _measured(model: CountedSizes, layout: Layout, states: Memory) -> Memory:
    """The memory with the activations that were measured; the blocks of a sharded model are taken to be equally large."""
    without, together = model.peak(layout.micro_batch)
    parameters, gradients, state = states.parameters, states.gradients, states.optimizer
    compute, several = COMPUTE_BYTES[layout.precision], layout.accumulation > 1
    master, buffers = max(4, compute), layout.workspace
    if layout.policy.shards_parameters:
        layers = int(model.network.get("layers") or 1)
        root = model.network.get("vocab", 0) * model.network.get("width", 0)
        block = (model.total - root) // layers
        buffers += (
            master * (2 * root + block) + 3 * compute * block
        )  # gathered, and gradients that are not yet reduced
        gradients += master * model.trained if several and not layout.reduces_each else 0
    elif layout.world == 1 and not several:  # the first gradients come while activations are freed
        gradients = min(gradients, together)
        without = together - gradients
    else:
        gradients *= 2 if several and layout.world > 1 else 1  # beside those in the buckets
    if layout.offload:
        return Memory(
            0, 0, 0, without, buffers=buffers, host=parameters + gradients + state, at="measured"
        )
    return Memory(parameters, gradients, state, without, buffers=buffers, at="measured")


@dataclass(frozen=True)
class MemoryRow:
    """The memory of a rank under one layout."""

    layout: Layout
    memory: Memory
    fits: bool | None  # None: not known
    largest_micro_batch: int | None  # that fits; 0: none
    chosen: bool  # whether it is the recipe's own layout


def memory_rows(
    model: Network, vocab: int, optimizer: str, base: Layout, usable: int | None
) -> list[MemoryRow]:
    """A row for each layout that the world of `base` allows, the cheapest in time first, with its micro-batch.

    Recomputation costs up to a third more arithmetic. Sharding moves parameters over the network: `shard_grad_op` less than
    `full_shard`; `hybrid_shard` gathers among half of the ranks; `shard_optim` moves half as much again as `ddp`, the parameters
    while nothing is computed. Offload moves everything over the host's bus.
    """
    # The activations of other models may be unknown: they may be too large, and never surely fit.
    ours = not isinstance(model, CountedSizes)
    known = not isinstance(model, CountedSizes) or bool(model.peaks)
    base = base if known else replace(base, checkpointing="none")
    several = [
        "ddp",
        "shard_grad_op",
        "shard_optim",
        *["hybrid_shard"] * (base.world > 3),
        "full_shard",
    ]
    strategies = several if base.world > 1 else ["single"]
    kinds = [
        (c, s, False)
        for c, s in product(CHECKPOINTING if ours else (base.checkpointing,), strategies)
    ]
    if base.device == "cuda" and ours:
        kinds += [(c, "full_shard", True) for c in ("none", "full")]
    layouts = []
    for checkpointing, strategy, offload in kinds:
        other = STRATEGIES[strategy].sizes(base.world).dp_shard
        shard = base.shard if strategy == base.strategy else other
        layouts.append(
            replace(
                base, strategy=strategy, shard=shard, checkpointing=checkpointing, offload=offload
            )
        )
    rows = []
    for layout in layouts + [base] * (base not in layouts):
        needed = memory(model, vocab, layout, optimizer)
        fits = None if usable is None else needed.total <= usable
        largest, share = None, base.micro_batch * base.accumulation
        if known and usable is not None:
            sizes = (n for n in range(share, 0, -1) if share % n == 0)
            each = ((n, replace(layout, micro_batch=n, accumulation=share // n)) for n in sizes)
            largest = next(
                (n for n, x in each if memory(model, vocab, x, optimizer).total <= usable), 0
            )
        rows.append(
            MemoryRow(
                layout, needed, fits if known or fits is False else None, largest, layout == base
            )
        )
    return rows


def recommend(rows: list[MemoryRow], micro_batch: int) -> tuple[dict[str, str | int | bool], str]:
    """The settings of the first layout that fits, with the recipe's micro-batch or for 0 the largest; and the reason."""
    if rows[0].largest_micro_batch is None:
        return {}, "the device's memory is not known: give --memory GB" if rows[
            0
        ].fits is None else ""
    row = next(
        (row for row in rows if (row.fits if micro_batch else row.largest_micro_batch)), None
    )
    if row is None:
        size = min(row.memory.total for row in rows) / 1e9
        problem = f"nothing fits: with micro-batch {rows[0].layout.micro_batch} the least is {size:.3g} GB"
        advice = (
            "more ranks, a lower train.precision, or a smaller train.micro_batch or model.context"
        )
        return {}, f"{problem}. Use a device with more than {size / USABLE:.3g} GB, {advice}"
    layout, size_of_batch = row.layout, micro_batch or row.largest_micro_batch or 0
    settings: dict[str, str | int | bool] = {"parallel.strategy": layout.strategy}
    settings |= {
        "parallel.activation_checkpointing": layout.checkpointing,
        "train.micro_batch": size_of_batch,
    }
    settings |= {"parallel.shard_size": layout.shard} if layout.policy.grouped else {}
    settings |= {"parallel.offload": True} if layout.offload else {}
    host = f"; {row.memory.host / 1e9:.3g} GB of the host's memory" if layout.offload else ""
    return settings, f"the cheapest that fits{host}"


class Step:
    """What the events of a step are the sums of: bytes of tensors of our GPT under one layout.

    Legend: N tokens of the micro-batch, D width, K width of all keys, F hidden width, H heads, T context, V vocabulary. The
    residual stream and the norms are in the master precision; matrix products and what follows them in that of autocast.
    """

    def __init__(self, model: ModelSettings, vocab: int, layout: Layout, optimizer: str = "adamw"):
        self.model, self.vocab, self.layout = model, vocab, layout
        self.compute = COMPUTE_BYTES[layout.precision]  # bytes of a number in matrix products
        self.master = max(4, self.compute)  # bytes of a number of the weights
        self.cuda = layout.device == "cuda"
        self.n, self.kv = (
            layout.micro_batch * model.context,
            model.width // model.heads * model.kv_heads_,
        )  # N, K
        self.stream = self.n * model.width * self.master  # one copy of the residual stream [N, D]
        self.hidden = (
            self.n * model.ff_width_ * self.compute
        )  # one copy inside the feed-forward layer [N, F]
        # Weights, whole; so are their gradients. The root is what is in no block: embedding, positions, final norm, head.
        self.weights = self.master * count(model, vocab).total
        self.block = self.master * block_parameters(model)
        self.root = self.weights - model.layers * self.block
        self.head = self.master * vocab * model.width  # also of a tied one
        # The largest matrix of a block: a gradient that is computed before it is added or copied.
        self.largest = max(model.ff_width_, model.width + 2 * self.kv) * model.width * self.master
        # Beside weights, gradients and state in the update.
        self.update = 6 * self.largest if optimizer == "muon" else 0
        if (
            not layout.policy.shards_parameters and layout.shard > 1
        ):  # rows to send, what is received, and a copy of a part
            bucket = min(self.weights, max(self.head, GATHER_BYTES))
            self.update = max(self.update, bucket + bucket // layout.shard + self.largest)
        # Autocast's copies of a block's matrices, which the backward pass needs.
        self.copies = block_matrices(model) * self.compute if self.compute < self.master else 0

    def norm(self) -> int:
        """A normalisation saves its input (the stream), and a mean and a scale a token."""
        if self.model.norm == "layernorm":
            return self.stream + 2 * self.n * self.master
        copies = 1 if self.cuda else 2  # without a kernel of its own it also saves the scaled input
        return copies * self.stream + self.n * self.master

    def dropout(self, width: int) -> int:
        """The mask of a dropout over [N, D] numbers of `width` bytes."""
        return self.n * self.model.width * (1 if self.cuda else width) if self.model.dropout else 0

    def attention(self) -> int:
        """From the input of the projections to the input of the output projection."""
        model, n, c, d, k = self.model, self.n, self.compute, self.model.width, self.kv
        saved = n * d * c  # the input
        upcast = (
            model.qk_norm and not self.cuda and c < 4
        )  # queries and keys are cast to fp32 to be normalised
        if model.qk_norm:
            saved += n * (model.heads + model.kv_heads_) * self.master + (
                n * (d + k) * 4 if upcast else 0
            )
        # No kernel takes dropout on a CPU, or grouped queries in fp32 on CUDA: whole T x T matrices are saved then.
        plain = c >= 4 and model.kv_heads_ != model.heads if self.cuda else model.dropout > 0
        if not plain or (model.qk_norm and not upcast):
            saved += n * (d + 2 * k) * c  # queries, keys and values, which are one tensor
        if plain:  # computes in fp32: the scores and, with dropout, its mask and their product
            squares = n * model.heads * model.context * (3 if model.dropout else 1)
            return saved + (squares + 3 * n * d) * max(4, c) + n * d * c
        if model.qk_norm or model.position == "rope":
            saved += n * (d + k) * c  # queries and keys again, after what was done to them
        return (
            saved + n * d * c + n * model.heads * max(4, c)
        )  # the result, and a log-sum-exp for each head

    def block_saved(self) -> int:
        """What a block saves without activation checkpointing, copies of its weights left out."""
        swiglu = self.model.activation == "swiglu"
        copies = {"gelu": 2, "gelu_tanh": 2, "relu": 1, "relu2": 2, "swiglu": 4}[
            self.model.activation
        ]
        inputs = (
            2 if swiglu and self.copies else 1
        )  # autocast casts the input of two matrices twice
        feed_forward = inputs * self.n * self.model.width * self.compute + copies * self.hidden
        return 2 * self.norm() + self.attention() + feed_forward + 2 * self.dropout(self.compute)

    def saved(self, blocks: int) -> int:
        """Activations that the first so many blocks save until the backward pass, with the layout's checkpointing."""
        if self.layout.checkpointing == "none":
            return blocks * self.block_saved()
        saved = self.stream + RNG_BYTES[self.layout.device]
        if self.layout.checkpointing == "selective":  # what matrix products and attention gave
            model, n, c, d = self.model, self.n, self.compute, self.model.width
            saved += (
                n * (3 * d + 2 * self.kv) * c
                + (2 if model.activation == "swiglu" else 1) * self.hidden
            )
            saved += 0 if model.dropout else n * d * c + n * model.heads * max(4, c)
        return blocks * saved

    def inside(self) -> int:
        """What the backward pass of a block adds to what the block saved: recomputed activations, and gradients of them."""
        # The derivative of a square takes two copies more.
        copies = {"swiglu": 2, "relu2": 3}.get(self.model.activation, 1)
        return max(0, self.block_saved() - self.saved(1)) + self.stream + copies * self.hidden

    def root_saved(self) -> int:
        """Outside the blocks and the loss: dropout of the embedding, final norm, the head's input."""
        model = self.model
        saved = self.dropout(self.master) + self.n * model.width * self.compute
        if model.position == "rope":  # the tables that all blocks share
            saved += 2 * model.context * (model.width // model.heads) * self.master
        return saved + (self.norm() if model.final_norm else 0)

    def logits(self) -> tuple[int, int, int]:
        """Head and loss beside the rest: while the loss is computed, from then on, in their backward pass.

        Whole logits where they are small, a chunk at a time where they are not.
        """
        n, V, d, c, m = self.n, self.vocab, self.model.width, self.compute, self.master
        wide, capped = max(4, c), bool(self.model.logit_cap)
        limit = max(1, CHUNK_BYTES[self.layout.device] // (4 * V))  # tokens
        head_copy = V * d * c if c < m else 0  # the head's matrix in the precision of autocast
        if n <= limit:
            first, lasting, last = (
                copies * n * V * wide + capped * n * V * c + head_copy for copies in (2, 1, 3)
            )
            return first, lasting, last
        chunk = -(-n // -(-n // limit))  # equal chunks
        gradient = V * d * m + n * d * (
            c if c == m else c + m
        )  # of head and input, computed in the forward pass
        inside = max(2 * chunk * V * wide, chunk * V * (wide + c) + (V * d * c if c < wide else 0))
        inside += capped * chunk * V * wide  # the cap's slope
        return gradient + head_copy + inside, V * d * m + n * d * m, V * d * m + n * d * m

    def loss(self) -> Iterator[Memory]:
        """From the last block's end to the first gradient of an activation."""
        (forward, _, backward), saved = (
            self.logits(),
            self.saved(self.model.layers) + self.root_saved(),
        )
        cast = self.stream if self.compute < self.master else 0
        yield Memory(activations=saved + cast, logits=forward, at="loss")
        yield Memory(activations=saved, logits=backward, at="backward of the loss")

    def embedding(self, lasting: bool) -> int:
        """Beside all gradients, when the embedding's is computed: a tied head's is added to it in a third tensor."""
        return self.head * (2 + lasting) if self.model.tie_head else self.head * lasting


def _plain_events(step: Step) -> Iterator[Memory]:
    """One process, or DDP, which has the gradients in its buckets all the time."""
    layers, whole = step.model.layers, step.weights
    ddp = step.layout.world > 1
    several = step.layout.accumulation > 1
    copied = (
        step.layout.checkpointing == "none"
    )  # else autocast's copies are made again in the backward pass
    lasting = whole * (
        ddp + several
    )  # between micro-batches DDP has gradients of its own beside its buckets
    for event in step.loss():
        yield replace(
            event,
            gradients=lasting,
            buffers=step.copies * layers if event.at == "loss" or copied else 0,
        )
    for left in range(layers, 0, -1):
        new = (
            step.head if step.model.tie_head or not lasting else 0
        )  # a tied head's gradient waits for the embedding's
        new += 0 if lasting else (layers - left) * step.block
        activations, buffers = (
            step.saved(left) + step.inside(),
            step.copies * (left if copied else 1),
        )
        yield Memory(
            0,
            lasting + new + step.largest,
            0,
            activations,
            buffers=buffers,
            at=f"backward of block {left}",
        )
    gradients = (lasting or whole) + step.embedding(bool(lasting))
    yield Memory(gradients=gradients, activations=step.stream, at="backward of the embedding")
    yield Memory(gradients=whole if ddp else max(lasting, whole), buffers=step.update, at="update")


def _fsdp_events(step: Step) -> Iterator[Memory]:
    """FSDP2: blocks are gathered one by one, or stay gathered until their backward pass (`shard_grad_op`).

    A block that is gathered is in memory twice for a moment (as it was received, and as parameters), and what was
    received is freed when the next one has arrived; likewise a gradient before and while it is reduced. An untied head and
    the embedding are units of their own; a tied matrix is the root's, and gathered all the time.
    """
    tied, low = step.model.tie_head, step.compute / step.master
    layers, shard, end = step.model.layers, step.layout.shard, step.root if tied else step.head
    wide = int(low * end)  # what is gathered of the embedding or of the head
    root = wide if tied or step.layout.policy.keeps_gathered else 0  # while blocks compute
    gathered = step.compute * block_parameters(step.model)  # a block, in the precision of autocast
    stays = step.layout.policy.keeps_gathered
    on_device = not step.layout.offload  # with offload reduced gradients go to the host
    several, each = step.layout.accumulation > 1, step.layout.reduces_each
    whole = several and not each  # gradients wait unreduced for the step's last micro-batch
    shards = (
        on_device * step.weights // shard if several and each else 0
    )  # of the micro-batches before
    before = step.weights if whole else shards
    first = (
        0 if stays else before
    )  # `shard_grad_op` gathers in the first micro-batch alone, before any gradient

    buffers = root + (layers + 2 if stays else 3) * gathered
    yield Memory(
        0, first, 0, step.saved(layers - 1), buffers=buffers, at=f"gathering of block {layers}"
    )
    activations = step.saved(layers) + step.stream
    yield Memory(
        0, first, 0, activations, buffers=buffers - gathered, at=f"forward of block {layers}"
    )
    for event in step.loss():
        received = event.at == "loss" and not several
        gathers = root + (0 if tied else wide) + (layers + received if stays else 1) * gathered
        yield replace(event, gradients=before, buffers=gathers)
    if not tied:
        buffers = root + wide + end + (layers + 1 if stays else min(layers, 2)) * gathered
        activations = step.saved(layers) + step.stream
        yield Memory(0, before + end, 0, activations, buffers=buffers, at="reduction of the head")
    for left in range(layers, 0, -1):
        done = layers - left
        gradients = (shards or on_device * done * step.block // shard) + (
            end + left * step.block if whole else 0
        )
        gradients += int(low * step.head) if tied else 0
        buffers = root + (left if stays else min(left, 2)) * gathered + (step.block if done else 0)
        at = f"backward of block {left}"
        yield Memory(
            0, gradients + step.largest, 0, step.saved(left) + step.inside(), buffers=buffers, at=at
        )
        gradients += 0 if whole else step.block
        yield Memory(0, gradients, 0, step.saved(left - 1) + step.stream, buffers=buffers, at=at)
    gradients = end + (shards or on_device * layers * step.block // shard)
    gradients += int(step.head * (1 + low + whole)) if tied else step.head * whole
    yield Memory(
        gradients=gradients, activations=step.stream, buffers=wide, at="backward of the embedding"
    )
    reduced = on_device * step.weights // shard
    yield Memory(gradients=end + reduced, buffers=end + wide, at="reduction of the embedding")
    yield Memory(gradients=-(-on_device * step.weights // shard), buffers=step.update, at="update")
