"""The collectives of a rank in a training step: their bytes, ranks and links.

Scalars do not count, for example losses, token counts and the gradient norm.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from windlass.estimate.layout import COMPUTE_BYTES, Layout
from windlass.estimate.rank import Rank
from windlass.model.size import CountedSizes, unit_blocks


class Collective(NamedTuple):
    """Equal calls of one collective in a step.

    `size` is the whole buffer: the result of an all-gather, the input of a reduce-scatter or an
    all-to-all, the buffer of an all-reduce, and a message at its sender.
    """

    name: str  # as preflight measures it
    size: float  # bytes of a call: the whole buffer
    calls: float
    ranks: int
    # Or tp, cp, pp: the dimension of the mesh. `dp` also sums the gradients over `cp`.
    link: str = "dp"
    stride: int = 1  # the difference between the numbers of neighbouring ranks

    @property
    def bus_bytes(self) -> float:
        """Bytes over each link of a ring in all calls, as nccl-tests counts them."""
        part = (self.ranks - 1) / self.ranks
        passes = {"all_reduce": 2 * part, "send_recv": 1.0}.get(self.name, part)
        return self.calls * self.size * passes


@dataclass(frozen=True)
class Work:
    """The model and layout that determine a step's collectives; parameters are the rank's."""

    layout: Layout
    total: int  # parameters
    trained: int  # parameters with gradients
    block: int = 0  # parameters of one block, the unit of FSDP2
    blocks: int = 0
    bucket_mb: float = 25.0  # `parallel.bucket_mb`
    exchanges: tuple[Collective, ...] = ()  # inside a copy of the model
    embedding: int = 0  # parameters of an embedding that is a unit of FSDP2

    @staticmethod
    def of_counted(sizes: CountedSizes, layout: Layout, bucket_mb: float = 25.0) -> Work:
        """Of a model of `transformers`; everything but one token table counts as blocks."""
        blocks, parts = int(sizes.network.get("layers") or 0), layout.tensor
        table = sizes.vocab * int(sizes.network.get("width", 0))
        block = (sizes.total - table) // blocks if blocks else 0
        total, trained, block = (n // parts for n in (sizes.total, sizes.trained, block))
        return Work(layout, total, trained, block, blocks, bucket_mb)

    @cached_property
    def collectives(self) -> list[Collective]:
        sent = [*self._of_parameters(), *self.exchanges]
        return [one for one in sent if one.calls and one.size and one.ranks > 1]

    def _of_parameters(self) -> list[Collective]:
        """FSDP2 gathers in the step's precision, and reduces in 4 bytes (8 in fp64)."""
        layout, strategy = self.layout, self.layout.policy
        world, shard, stride = layout.replicas, layout.shard, layout.tensor
        low = COMPUTE_BYTES[layout.precision]
        master = layout.program.reduced or max(4, low)
        if not strategy.shards_parameters:
            gradients = (layout.program.reduced or layout.weight_bytes) * self.trained
            calls = max(1, math.ceil(gradients / (self.bucket_mb * 2**20)))
            sent = [Collective("all_reduce", gradients / calls, calls, world, "dp", stride)]
            if strategy.shards_optimizer:  # each rank updates its part, which then goes to all
                sent.append(Collective("all_gather", gradients, 1, world, "dp", stride))
            return sent
        gradients_per_parameter = self.trained / self.total
        root, steps = self.total - self.blocks * self.block - self.embedding, layout.accumulation
        once = strategy.keeps_gathered
        # All are gathered for each forward pass, embedding and blocks also for each backward pass.
        # Without a pipeline the blocks' last unit stays gathered.
        passes, blocks, each = 1 if once else steps, self.blocks, 1
        if layout.pipeline == 1:
            each = unit_blocks(blocks, blocks * self.block)
        units = -(-blocks // max(1, each))
        unit, every = blocks * self.block / max(1, units), layout.program.gathers_all
        both = passes if once else 2 * passes
        again = 0 if once else steps * (units - (layout.pipeline == 1 and not every))
        sent = [
            Collective("all_gather", low * root, passes, shard, "dp", stride),
            Collective("all_gather", low * self.embedding, both, shard, "dp", stride),
            Collective("all_gather", low * unit, units * passes + again, shard, "dp", stride),
        ]
        reductions, groups = steps if layout.reduces_each else 1, world // shard
        for parameters, number in ((root, 1), (self.embedding, 1), (unit, units)):
            size = master * gradients_per_parameter * parameters
            calls = number * reductions
            sent.append(Collective("reduce_scatter", size, calls, shard, "dp", stride))
            # Between the groups, each shard with its equals.
            between = Collective("all_reduce", size / shard, number, groups, "dp", stride * shard)
            sent.append(between)
        return sent


def work_of(rank: Rank, bucket_mb: float = 25.0) -> Work:
    exchanges = (*_of_tensor(rank), *_of_context(rank), *_of_pipeline(rank))
    table = 0 if rank.model.tie_head or not rank.first else rank.table
    sizes = (rank.total, rank.total, rank.block, rank.layers)
    return Work(rank.layout, *sizes, bucket_mb, exchanges, table)


def _of_tensor(rank: Rank) -> list[Collective]:
    """Sums over the ranks of `tp` after a matrix that is cut by columns, and their mirror.

    Autocast rounds the input of a matrix before it is gathered, but not the embedding's sum.
    """
    layout, m, t = rank.layout, rank.model, rank.layout.tensor
    if t == 1:
        return []
    low = COMPUTE_BYTES[layout.precision]
    master, steps, blocks = max(4, low), layout.accumulation, rank.layers

    def calls(name: str, size: float, number: float) -> Collective:
        return Collective(name, size, number, t, "tp")

    # The recomputation of a block ends at the last matrix, or at the dropout after its sum;
    # `selective` saves the sums.
    again, whole_again = layout.checkpointing != "none", layout.checkpointing == "full"
    enters, leaves = 2 * again, whole_again * (2 if m.dropout else 1)
    whole = rank.stream_tokens * t * m.width
    # Each rank has seen other tokens of the stream.
    shard = layout.shard if layout.policy.shards_parameters else 1
    sent = [
        calls("all_gather", low * whole, steps * (blocks * (4 + enters) + rank.last)),
        calls("reduce_scatter", low * whole, steps * (blocks * (4 + leaves) + rank.last)),
        calls("reduce_scatter", master * whole, steps * rank.first),
        calls("all_gather", master * whole, steps * rank.first),
        calls("all_reduce", master * rank.replicated / shard, 1),
    ]
    if rank.last:  # the largest logit of each token, and the sum of the exponentials
        sent.append(calls("all_reduce", max(4, low) * rank.tokens, 2 * steps))
    return sent


def _of_context(rank: Rank) -> list[Collective]:
    layout, c = rank.layout, rank.layout.context
    low, each = COMPUTE_BYTES[layout.precision], rank.layers * layout.accumulation
    forward = 1 if layout.checkpointing == "none" else 2
    passes = each * (1 + forward)  # forward, again, and backward
    how = (c, "cp", layout.tensor)
    if rank.by_heads:  # queries, keys and values there, and the result back
        size = low * rank.tokens
        return [
            Collective("all_to_all", size * (rank.queries + 2 * rank.keys), passes, *how),
            Collective("all_to_all", size * rank.queries, passes, *how),
        ]
    size = low * 2 * rank.keys * rank.tokens * c
    return [
        Collective("all_gather", size, each * forward, *how),
        Collective("reduce_scatter", size, each, *how),
    ]


def _of_pipeline(rank: Rank) -> list[Collective]:
    """Messages between stages, and the gradient of a tied head, which two stages have."""
    layout, p = rank.layout, rank.layout.pipeline
    if p == 1:
        return []
    master = max(4, COMPUTE_BYTES[layout.precision])
    size, stride = master * rank.stream_tokens * rank.model.width, layout.world // p
    messages = layout.accumulation * (2 - rank.first - rank.last)
    sent = [Collective("send_recv", size, messages, p, "pp", stride)]
    if rank.model.tie_head and (rank.first or rank.last):
        shard = layout.shard if layout.policy.shards_parameters else 1
        table = master * rank.table / shard
        sent.append(Collective("all_reduce", table, 1, 2, "pp", stride * (p - 1)))
    return sent
