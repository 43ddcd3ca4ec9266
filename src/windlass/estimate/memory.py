"""Memory of one rank at the peak of a training step: the event with the largest sum of tensors.

torch's `MemTracker` and `FSDPMemTracker` reject gradient accumulation, DDP and our FSDP2 steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from windlass.estimate.rank import COMPUTE_BYTES, Layout, Rank, ranks_of
from windlass.model.size import CountedSizes, loss_chunk, moment_bytes, unit_blocks
from windlass.recipe.network import ModelSettings

Network = ModelSettings | CountedSizes
"""The settings of our GPT, or the counted parameters of a model of `transformers`."""

PARTS = ("parameters", "gradients", "optimizer", "activations", "logits", "buffers", "average")
# Tests keep the first, third and fourth equal to the numbers of `windlass.optim`.
CHUNK = 2**24  # numbers that `adamw` updates in float32 at a time
CHUNK_COPIES = 28  # bytes of each: weight, gradient, moments, random bits, two of the rounding
GATHER_BYTES = 2**25  # parameters that `shard` gathers at a time
STACK_NUMBERS = {"cpu": 2**18, "cuda": 2**25}  # that `muon` orthogonalises at once
RNG_BYTES = {"cpu": 5056, "cuda": 5056 + 16}  # that checkpointing saves for each block


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank at one moment of a step."""

    parameters: int = 0  # this rank's master weights
    gradients: int = 0  # this rank's, as far as they exist then
    optimizer: int = 0  # this rank's state
    activations: int = 0  # saved by the forward pass, and gradients of activations
    logits: int = 0  # head and loss
    buffers: int = 0  # gathered and low-precision weights, communication, cuBLAS, tokens
    average: int = 0  # this rank's averaged weights
    host: int = 0  # in the host's memory, with offload
    at: str = ""  # the moment

    @property
    def total(self) -> int:
        return sum(getattr(self, part) for part in PARTS)


def memory(model: Network, vocab: int, layout: Layout, optimizer: str = "adamw") -> Memory:
    """The memory of the fullest rank at a step's peak.

    Activations of counted sizes need measured peaks.
    """
    if isinstance(model, CountedSizes):
        return _counted(model, layout, optimizer)
    stages = []
    for rank in ranks_of(model, vocab, layout):
        step = Tensors(rank, optimizer)
        ranks = layout.shard if layout.policy.shards_parameters else 1
        moments = rank.moments(optimizer, step.master)
        parameters, state = -(-step.weights // ranks), -(-moments // layout.shard)
        average, host = parameters * layout.average, 0
        if layout.offload:  # parameters, their average, optimizer state and reduced gradients
            host, parameters, average, state = 2 * parameters + average + state, 0, 0, 0
        peak = max(events(step), key=lambda event: event.total)
        tokens = layout.micro_batch * model.context  # and labels, both int64
        buffers = peak.buffers + 16 * tokens + layout.workspace
        peak = replace(peak, parameters=parameters, optimizer=state, average=average)
        stages.append(replace(peak, host=host, buffers=buffers))
    return max(stages, key=lambda peak: peak.total)


def _counted(model: CountedSizes, layout: Layout, optimizer: str) -> Memory:
    """The memory of counted sizes; a sharded model's blocks count as if they had equal sizes.

    4-bit weights are whole on each rank. The activations are an upper bound.
    """
    compute, several = COMPUTE_BYTES[layout.precision], layout.accumulation > 1
    full, sharded = max(4, compute), layout.policy.shards_parameters
    master = layout.weight_bytes
    trained = -(-model.trained // layout.tensor)
    in_4bit = model.bytes_in_4bit
    weights = -(-model.weight_bytes(full) // layout.tensor) - in_4bit
    gradients = master * trained
    state = -(
        -math.ceil(moment_bytes(optimizer, master, model.network.get("width", 64)) * trained)
        // layout.shard
    )
    if sharded:
        weights, gradients = -(-weights // layout.shard), -(-gradients // layout.shard)
    average = gradients * layout.average
    activations, buffers, at = 0, layout.workspace, "states alone"
    if model.peaks:
        (activations, together), at = model.peak(layout.micro_batch), "measured"
        if sharded:
            layers = int(model.network.get("layers") or 1)
            root = model.network.get("vocab", 0) * model.network.get("width", 0)
            block = (model.total - model.in_4bit - root) // layers // layout.tensor
            block *= unit_blocks(layers, layers * block)
            root //= layout.tensor
            # Gathered parameters, and gradients before their reduction.
            buffers += full * (2 * root + block) + 3 * compute * block
            gradients += full * trained if several and not layout.reduces_each else 0
        elif layout.world == 1 and not several:  # gradients come while activations are freed
            gradients = min(gradients, together)
            activations = together - gradients
        elif several and layout.world > 1:  # DDP's buckets have a copy
            gradients *= 2
        if master < full or optimizer == "adamw8bit":  # the update comes after the activations
            activations = max(activations, CHUNK_COPIES * min(CHUNK, trained))
    peak = Memory(activations=activations, buffers=buffers, parameters=in_4bit, at=at)
    if layout.offload:
        return replace(peak, host=weights + gradients + average + state)
    peak = replace(peak, parameters=weights + in_4bit, gradients=gradients)
    return replace(peak, optimizer=state, average=average)


class Tensors:
    """The tensors of a step.

    Legend: N tokens of the micro-batch on this rank, S of them in the residual stream, D width, F
    hidden width, H heads, K width of all keys, T context, V vocabulary; F, H, K and V are the
    rank's. The residual stream and the norms have the master precision; matrix products and their
    results have autocast's.
    """

    def __init__(self, rank: Rank, optimizer: str = "adamw"):
        self.rank = rank
        self.model, self.layout, self.layers = rank.model, rank.layout, rank.layers
        model, layout, parts = rank.model, rank.layout, rank.layout.tensor
        self.compute = COMPUTE_BYTES[layout.precision]  # bytes of a number in matrix products
        # Bytes of a number outside matrix products, and of the weights.
        self.full = layout.program.weight or max(4, self.compute)
        self.master = layout.program.weight or layout.weight_bytes
        self.raised = self.full // self.master  # FSDP2's unreduced gradients are float32
        self.cuda = layout.device == "cuda"
        # Bytes of a number in the input of a block's product, which saves it rounded.
        self.float8 = layout.precision == "float8"
        self.operand = 1 if self.float8 else self.compute
        self.vocab, self.kv = -(-rank.vocab // parts), rank.keys  # V, K
        self.n, self.s = rank.tokens, rank.stream_tokens
        self.queries = rank.queries  # D, or the rank's part of it
        self.stream_width = layout.program.stream or self.full  # bytes of a number
        # A copy of the residual stream [S, D].
        self.stream = self.s * model.width * self.stream_width
        self.wide = self.n * model.width * self.compute  # one copy of a product's input [N, D]
        self.hidden = self.n * (model.ff_width_ // parts) * self.compute  # one hidden copy [N, F]
        self.weights, self.block = self.master * rank.total, self.master * rank.block
        self.root = self.weights - self.layers * self.block  # embedding, positions, norm, head
        # A unit of FSDP2: its gradients, which it reduces in float32, and its gathered parameters
        # in autocast's precision.
        self.unit = self.full * rank.unit_blocks * rank.block
        self.gathered = self.compute * rank.unit_blocks * rank.block
        # The matrix of the head (also a tied one); on earlier stages the embedding, if any.
        self.head = self.master * rank.table * (rank.first or rank.last)
        # The largest matrix of a block, whose gradient exists twice for a moment.
        rows = max(model.ff_width_ // parts, self.queries + 2 * self.kv)
        self.largest = rows * model.width * self.master
        # Beside weights, gradients and state in the update.
        self.update = 6 * self.largest if optimizer == "muon" else 0
        if optimizer == "muon":  # a stack and its products, in bf16 on CUDA
            most, each = STACK_NUMBERS[layout.device], 2 if self.cuda else self.master
            self.update = max(self.update, 6 * each * min(most, self.layers * rank.matrices))
        if self.master < self.full or optimizer == "adamw8bit":
            numbers = min(CHUNK, max(self.head, self.largest) // self.master)
            self.update = max(self.update, CHUNK_COPIES * numbers)
        if not layout.policy.shards_parameters and layout.shard > 1:
            # Rows to send, received rows, and a copy of a part.
            bucket = min(self.weights, max(self.head, GATHER_BYTES))
            self.update = max(self.update, bucket + bucket // layout.shard + self.largest)
        # Autocast's copies of a block's matrices, which the backward pass needs.
        copied = self.compute < self.master and not self.float8
        self.copies = rank.matrices * self.compute if copied else 0

    def norm(self) -> int:
        """A normalisation saves its input (the stream), and a mean and a scale for each token."""
        if self.model.norm == "layernorm":
            return self.stream + 2 * self.s * self.full
        # Without a fused kernel it computes in float32, and also saves the scaled input.
        plain = 2 * self.s * self.model.width * self.full
        return (self.stream if self.cuda else plain) + self.s * self.full

    def dropout(self, width: int) -> int:
        """The mask of a dropout over [S, D] numbers of `width` bytes."""
        fused = self.cuda and self.layout.tensor * self.layout.context == 1
        return self.s * self.model.width * (1 if fused else width) if self.model.dropout else 0

    def attention(self) -> int:
        """The bytes from the input of the projections to the input of the output projection."""
        model, n, c, d, k = self.model, self.n, self.compute, self.queries, self.kv
        heads, kv_heads = self.rank.heads, self.rank.kv_heads
        saved = n * model.width * self.operand  # the input
        saved += n * d * self.float8  # the rounded result
        upcast = model.qk_norm and not self.cuda and c < 4  # fp32 copies of queries and keys
        if model.qk_norm:
            saved += n * (heads + kv_heads) * self.full
            saved += n * (d + k) * 4 if upcast else 0
        if not self.rank.by_heads:  # gathered keys and values
            saved += 2 * n * (self.layout.context - 1) * k * c
        # No kernel takes a part of a dropout mask, fp64 on CUDA, or a mask on a CPU.
        # Then attention saves whole T x T matrices (`model.attention.masked_attention`).
        divided = self.layout.tensor * self.layout.context > 1
        plain = model.dropout > 0 and (divided or not self.cuda)
        plain = plain or (self.cuda and c == 8)
        if not plain or (model.qk_norm and not upcast):
            saved += n * (d + 2 * k) * c  # queries, keys and values, which are one tensor
        if plain:
            squares = max(4, c) if self.cuda else c  # softmax, in fp32 on CUDA
            squares += 2 * c if model.dropout else 0  # the dropout mask and their product
            return saved + n * heads * model.context * squares + 4 * n * d * c
        if self.cuda and kv_heads != heads and self.layout.precision != "bf16":
            saved += 2 * n * d * c  # keys and values for each head (`documents.attend`)
        if model.qk_norm or model.position == "rope":
            saved += n * (d + k) * c  # transformed queries and keys
        return saved + n * d * c + n * heads * max(4, c)  # the result, and a log-sum-exp

    def feed_forward(self) -> int:
        """The bytes from the input of the first matrix to the input of the last one."""
        activation = self.model.activation
        copies = {"gelu": 2, "gelu_tanh": 2, "relu": 1, "relu2": 2, "swiglu": 4}[activation]
        # Autocast casts the input of two matrices twice, unless it is gathered after one cast.
        casts = self.copies and self.stream_width > self.compute
        casts = (casts and self.layout.tensor == 1) or self.float8
        inputs = (2 if activation == "swiglu" and casts else 1) * self.n * self.model.width
        saved = inputs * self.operand + copies * self.hidden
        if self.float8:  # only the derivative of relu needs the last product's input as it was
            saved += self.hidden // self.compute - (activation != "relu") * self.hidden
        return saved

    def block_saved(self) -> int:
        """The bytes that a block saves without checkpointing and copies of its weights."""
        saved = self.attention() + self.feed_forward()
        return 2 * self.norm() + saved + 2 * self.dropout(self.compute)

    def saved(self, blocks: int) -> int:
        """The bytes that `blocks` blocks save with the layout's checkpointing."""
        if self.layout.checkpointing == "none":
            return blocks * self.block_saved()
        saved = self.stream + RNG_BYTES[self.layout.device]
        if self.layout.checkpointing == "selective":  # results of products, attention and sums
            model, n, c, d = self.model, self.n, self.compute, self.queries
            ups = 2 if model.activation == "swiglu" else 1
            products = 2 * self.wide + n * (d + 2 * self.kv) * c + ups * self.hidden
            saved += int((1 - self.layout.program.repeated) * products)
            saved += 2 * self.s * model.width * c * (self.layout.tensor > 1)  # sums over ranks
            saved += 0 if model.dropout else n * d * c + n * self.rank.heads * max(4, c)
        return blocks * saved

    def inside(self) -> int:
        """The recomputed activations and their gradients in a block's backward pass."""
        # A product of two hidden states has two gradients.
        copies = {"swiglu": 2, "relu2": 2}.get(self.model.activation, 1)
        gathered = self.wide if self.layout.tensor > 1 else 0
        recomputed = max(0, self.block_saved() - self.saved(1))
        return recomputed + self.stream + gathered + copies * self.hidden

    def root_saved(self) -> int:
        """The bytes of the embedding's dropout, the final norm and the head's input."""
        model, rank = self.model, self.rank
        saved = self.dropout(self.stream_width) * rank.first + self.wide * rank.last
        tokens = self.n // self.layout.micro_batch
        if model.position == "rope":  # the tables that all blocks share
            saved += 2 * tokens * rank.head_width * self.full
        elif model.position == "learned":  # the places, int64
            saved += 8 * tokens * rank.first
        return saved + (self.norm() if model.final_norm and rank.last else 0)

    def waiting(self, later: bool) -> int:
        """The bytes of passes that wait for their backward pass; `later`: after a micro-batch's."""
        layout, micro = self.layout, self.layout.accumulation - later
        # The events count the passes of one micro-batch.
        others = min(layout.pipeline - self.rank.stage, micro) - 1
        copies = 0 if self.layout.policy.shards_parameters else self.copies
        copies = copies if self.layout.checkpointing == "none" else 0
        # The output, too, waits for its gradient.
        each = self.saved(self.layers) + self.root_saved() + self.layers * copies + self.stream
        return others * each if others > 0 else 0

    def logits(self) -> tuple[int, int, int]:
        """The bytes of head and loss: during the loss, after it, and in their backward pass.

        Small logits exist as a whole, large ones a chunk at a time.
        """
        n, V, d, c, m = self.n, self.vocab, self.model.width, self.compute, self.full
        wide, capped = max(4, c), bool(self.model.logit_cap)
        each = c + 4 * capped if (tail := self.layout.tail) else 4
        head_copy = V * d * c if c < self.master else 0  # in the precision of autocast
        if other := self.layout.program.logits:
            return (n * V * other + head_copy,) * 3
        chunk = loss_chunk(n, V, each, self.layout.device)
        if not chunk and self.layout.tensor == 1:
            one, rest = n * V * wide, capped * n * V * c + head_copy
            return 2 * one + rest, one + rest, 3 * one + rest
        chunk = chunk or n
        # The forward pass computes the gradients of head and input.
        gradient = V * d * m + n * d * (c if c == m else c + m)
        # The logits and their log-probabilities, with the slope of a cap.
        loss = chunk * V * each if tail else (2 + capped) * chunk * V * wide
        # The gradient at the logits, and the head's, which is added in autocast's precision.
        inside = max(loss, chunk * V * c + (V * d * c if c < wide else 0))
        return gradient + head_copy + inside, V * d * m + n * d * m, V * d * m + n * d * m


def events(step: Tensors) -> Iterator[Memory]:
    sharded, several = step.layout.policy.shards_parameters, step.layout.accumulation > 1
    # More passes wait for the first backward pass of a pipeline, before any gradient exists.
    for later in {several, several and (sharded or step.layout.pipeline == 1)}:
        waiting = step.waiting(later and not sharded)
        for event in _fsdp_events(step) if sharded else _plain_events(step, later):
            computes = event.at not in ("update", "sum of the gradients")
            yield replace(event, activations=event.activations + waiting * computes)


def _loss_events(step: Tensors) -> Iterator[Memory]:
    """From the last block's end to the first gradient of an activation."""
    if not step.rank.last:
        return
    forward, _, backward = step.logits()
    saved = step.saved(step.layers) + step.root_saved()
    cast = step.stream if step.compute < step.stream_width else 0
    yield Memory(activations=saved + cast, logits=forward, at="loss")
    yield Memory(activations=saved, logits=backward, at="backward of the loss")


def _plain_events(step: Tensors, several: bool) -> Iterator[Memory]:
    """One process, or DDP, whose buckets hold all gradients all the time."""
    layers, whole, tied = step.layers, step.weights, step.rank.tied
    staged = step.layout.pipeline > 1
    copied_gradients = step.layout.replicas > 1  # for their sum over replicas
    ddp = copied_gradients and not staged
    # Memory is linear between the first two and the last two blocks.
    # With checkpointing the backward pass makes autocast's copies again.
    copied = step.layout.checkpointing == "none"
    # Between micro-batches DDP has gradients beside its buckets.
    lasting = whole * (ddp + several)
    for event in _loss_events(step):
        buffers = step.copies * layers if event.at == "loss" or copied else 0
        yield replace(event, gradients=lasting, buffers=buffers)
    for left in sorted({layers, max(1, layers - 1), min(2, layers), 1}, reverse=True):
        # A tied head's gradient waits for the embedding's.
        new = step.head if step.rank.last and (tied or not lasting) else 0
        new += 0 if lasting else (layers - left) * step.block
        gradients, activations = lasting + new + step.largest, step.saved(left) + step.inside()
        buffers, at = step.copies * (left if copied else 1), f"backward of block {left}"
        yield Memory(gradients=gradients, activations=activations, buffers=buffers, at=at)
    # A tied head's gradient needs two more tensors of the embedding's size.
    gradients = (lasting or whole) + step.head * (bool(lasting) + 2 * tied)
    yield Memory(gradients=gradients, activations=step.stream, at="backward of the embedding")
    if staged and copied_gradients:
        yield Memory(gradients=2 * whole, at="sum of the gradients")
    yield Memory(gradients=whole if ddp else max(lasting, whole), buffers=step.update, at="update")


def _fsdp_events(step: Tensors) -> Iterator[Memory]:
    """FSDP2 gathers units of blocks one by one, or keeps them until their backward pass
    (`shard_grad_op`).

    A gathered unit is in memory twice for a moment, as received bytes and as parameters; the
    arrival of the next unit frees the received bytes. The last unit stays gathered. A gradient also
    exists twice during its reduction. An untied head and the embedding are units of their own.
    """
    layout, tied, low = step.layout, step.rank.tied, step.compute / step.master
    layers, shard, end = step.layers, layout.shard, step.root if tied else step.head
    in_unit, gathered = step.rank.unit_blocks, step.gathered
    units = -(-layers // in_unit)
    stays, keeps = layout.policy.keeps_gathered, layout.pipeline == 1  # the last unit stays
    wide = int(low * end)  # the gathered head
    root = wide if tied or stays else 0  # while blocks compute
    on_device = not layout.offload  # with offload reduced gradients go to the host
    several, each = layout.accumulation > 1, layout.reduces_each
    whole = several and not each  # gradients wait unreduced for the step's last micro-batch
    # Gradients of earlier micro-batches.
    shards = on_device * step.weights // shard if several and each else 0
    before = step.raised * step.weights if whole else shards
    # `shard_grad_op` gathers only in the first micro-batch, before any gradient.
    first = Memory(gradients=0 if stays else before)

    buffers, at = root + (units if stays else 1) * gathered, f"gathering of block {layers}"
    received, saved = min(units, 2) * gathered, step.saved(layers - in_unit)
    yield replace(first, activations=saved, buffers=buffers + received, at=at)
    activations, at = step.saved(layers) + step.stream, f"forward of block {layers}"
    yield replace(first, activations=activations, buffers=buffers + gathered, at=at)
    if keeps and not tied:
        buffers, at = buffers + gathered + 2 * wide, "gathering of the head"
        yield replace(first, activations=activations, buffers=buffers, at=at)
    for event in _loss_events(step):
        received = event.at == "loss" and not several
        again = event.at == "loss" and tied and keeps  # its received bytes, too
        gathers = root + (0 if tied else wide)
        gathers += (units + received if stays else 1 + again) * gathered
        # Nothing is gathered after the head, so its received bytes stay.
        gathers += wide * (event.at == "loss" and not tied and not stays)
        yield replace(event, gradients=before, buffers=gathers)
    ended = end if step.rank.last and not tied else 0  # the head's gradient is reduced
    if ended:
        buffers = root + wide + end + (units if stays else 1) * gathered
        new, at = before + end, "reduction of the head"
        yield Memory(gradients=new, activations=activations, buffers=buffers, at=at)
    for left in sorted({units, max(1, units - 1), min(2, units), 1}, reverse=True):
        blocks = min(left * in_unit, layers)
        gradients = shards or on_device * (ended + (layers - blocks) * step.block) // shard
        gradients += step.raised * (end + blocks * step.block) if whole else 0
        gradients += int(low * step.head) if tied else 0
        others = root + (left if stays else min(left, 2)) * gathered - gathered
        others += int(low * end) * (left == 1 and keeps and not tied and not stays)  # ahead
        yield from _backward_of_unit(step, blocks, gradients, others, whole)
    gradients = end + (shards or on_device * layers * step.block // shard)
    gradients += int(step.head * (1 + low + whole)) if tied else end * whole
    at, wide = "backward of the embedding", int(low * end)
    yield Memory(gradients=gradients, activations=step.stream, buffers=wide, at=at)
    gradients, at = end + on_device * step.weights // shard, "reduction of the embedding"
    yield Memory(gradients=gradients, buffers=end + wide, at=at)
    yield Memory(gradients=-(-on_device * step.weights // shard), buffers=step.update, at="update")


def _backward_of_unit(
    step: Tensors, blocks: int, gradients: int, others: int, whole: bool
) -> Iterator[Memory]:
    """The backward pass of a unit of FSDP2, the last one of `blocks` blocks, and its reduction.

    `gradients` exist before it, with the unit's if they are `whole`; `others`: the bytes of other
    gathered units.
    """
    in_unit, unit = step.rank.unit_blocks, step.unit
    buffers = others + step.gathered + (unit if blocks < step.layers else 0)  # reduced before
    for later in {0, in_unit - 1}:
        new = step.largest + (0 if whole else later * step.block)
        at, inside = f"backward of block {blocks - later}", step.saved(blocks - later)
        inside += step.inside()
        yield Memory(gradients=gradients + new, activations=inside, buffers=buffers, at=at)
    new, activations = 0 if whole else unit, step.saved(blocks - in_unit) + step.stream
    yield Memory(gradients=gradients + new, activations=activations, buffers=buffers, at=at)
    new = unit // step.layout.shard - unit * whole
    buffers = others + (1 if step.cuda else 2) * unit  # gloo copies what it reduces
    at = f"reduction of block {blocks}"
    yield Memory(gradients=gradients + new, activations=activations, buffers=buffers, at=at)
