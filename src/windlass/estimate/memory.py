"""Memory of one rank at the peak of a training step: the event with the largest sum of tensors.

torch's `MemTracker` and `FSDPMemTracker` reject gradient accumulation, DDP and our FSDP2 steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from windlass.errors import UserError
from windlass.estimate.calendar import recipe_vocab
from windlass.estimate.layout import COMPUTE_BYTES, Layout, checkpoint_bytes, layout_of
from windlass.estimate.rank import ranks_of
from windlass.estimate.tensors import CHUNK, CHUNK_COPIES, Tensors
from windlass.model.size import CountedSizes, moment_bytes, unit_blocks
from windlass.recipe import Recipe
from windlass.recipe.network import ModelSettings

Network = ModelSettings | CountedSizes
"""The settings of our GPT, or the counted parameters of a model of `transformers`."""

GPU_RANK_GB, CPU_RANK_GB = 8, 3  # Python, torch, the driver's maps, token shards, and a margin
LARGE_VOCAB = 2**18  # assumed if the embedding's rows depend on data that are not prepared
PARTS = ("parameters", "gradients", "optimizer", "activations", "logits", "buffers", "average")


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

    4-bit weights are whole on each rank of `tensor`. The activations are an upper bound.
    """
    compute, several = COMPUTE_BYTES[layout.precision], layout.accumulation > 1
    full, sharded = max(4, compute), layout.policy.shards_parameters
    master = layout.weight_bytes
    trained = -(-model.trained // layout.tensor)
    in_4bit = -(-model.bytes_in_4bit // layout.tensor)
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


def host_memory_gb(recipe: Recipe, world: int, per_host: int, on_cpu: bool) -> int:
    """The host memory in GB that `per_host` of `world` ranks need; 0: the model is unreadable here.

    It is a base for each rank, the plan's host memory (all of the training on a CPU, the offloaded
    part on a GPU), and twice the host's part of a checkpoint, for the copy of a save and for
    loading.
    """
    network: Network = recipe.model
    vocab = recipe_vocab(recipe) or LARGE_VOCAB
    on_disk = checkpoint_bytes(recipe, vocab)
    if recipe.model.kind == "hf":
        try:
            from windlass.model.build import read_sizes  # needs torch

            network = read_sizes(recipe, 0)
            on_disk = checkpoint_bytes(recipe, vocab, network)
        except (ImportError, UserError):
            return 0
    layout = layout_of(recipe, world, "cpu" if on_cpu else "cuda")
    peak = memory(network, vocab, layout, recipe.optim.kind)
    in_use = peak.host + (peak.total if on_cpu else 0)
    part = min(1.0, per_host / layout.shard)
    base = CPU_RANK_GB if on_cpu else GPU_RANK_GB
    return math.ceil(per_host * (base + in_use / 1e9) + 2 * part * on_disk / 1e9)


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
    # `shard_grad_op` gathers in the first micro-batch alone, before any gradient.
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
