"""How long a step would take by the rates of a machine: matrix products, and the strategy's collectives by ring formulas.

Nothing overlaps in it, and neither latency, memory traffic nor the host's work is counted: its error is the difference to a
measured step. The formulas are in docs/scale.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from windlass.estimate.memory import COMPUTE_BYTES, Layout

DTYPES = {
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp64": "float64",
}  # as rates are named
RECOMPUTED = {
    "full": 4 / 3
}  # of forward and backward, with a second forward pass; `selective` repeats no product
Rates = Mapping[
    str, Any
]  # of a machine, by preflight: `matrix_tflops` by dtype, and the rows `collectives`


@dataclass(frozen=True)
class Tensors:
    """How many parameters a model has, as its strategies send them."""

    total: int
    trained: int  # that have gradients
    block: int = 0  # in one of its blocks, the unit of FSDP2
    blocks: int = 0


class Collective(NamedTuple):
    """Equal calls of one collective in a step."""

    name: str  # as preflight has it
    size: float  # bytes of a call: the whole buffer
    calls: float
    ranks: int

    @property
    def bus_bytes(self) -> float:
        """What a ring sends over each link in all calls: 2 (n-1)/n of an all-reduce's buffer, (n-1)/n of the others'."""
        return (
            self.calls
            * self.size
            * (2 if self.name == "all_reduce" else 1)
            * (self.ranks - 1)
            / self.ranks
        )


def collectives(layout: Layout, tensors: Tensors, bucket_mb: float = 25.0) -> list[Collective]:
    """The collectives of a step on parameters and gradients; none on one rank.

    Gradients and master weights have 4 bytes (8 in fp64); FSDP2 gathers in the precision of the step.
    """
    world, shard, strategy = layout.world, layout.shard, layout.policy
    low, master = COMPUTE_BYTES[layout.precision], max(4, COMPUTE_BYTES[layout.precision])
    if world == 1:
        return []
    if not strategy.shards_parameters:
        gradients = master * tensors.trained
        calls = max(1, math.ceil(gradients / (bucket_mb * 2**20)))
        sent = [Collective("all_reduce", gradients / calls, calls, world)]
        # ZeRO-1: each rank updates its share, which then goes to all
        return sent + [Collective("all_gather", gradients, 1, world)] * strategy.shards_optimizer
    share = tensors.trained / tensors.total  # gradients a parameter
    root, steps = tensors.total - tensors.blocks * tensors.block, layout.accumulation
    gathers = (
        1 if strategy.keeps_gathered else 2 * steps
    )  # of a block: for each forward and each backward pass
    reductions = steps if layout.reduces_each else 1
    sent = [Collective("all_gather", low * root, 1 if strategy.keeps_gathered else steps, shard)]
    sent += [Collective("all_gather", low * tensors.block, gathers * tensors.blocks, shard)]
    for unit, number in ((root, 1), (tensors.block, tensors.blocks)):
        size = master * share * unit
        sent.append(Collective("reduce_scatter", size, number * reductions, shard))
        if world > shard:  # over the hosts, each shard with its equals
            sent.append(Collective("all_reduce", size / shard, number, world // shard))
    return [one for one in sent if one.calls and one.size and one.ranks > 1]


def bus_bandwidth_at(rows: Sequence[Mapping[str, Any]], name: str, size: float) -> float | None:
    """Bytes a second over the bus of a collective of this size: between the measured sizes linear in the logarithm of the
    size, beyond them that of the nearest. None where it was not measured."""
    measured = sorted(
        (math.log(float(row["size"])), float(row["busbw"]))
        for row in rows
        if row["collective"] == name
    )
    if not measured:
        return None
    sizes, rates = zip(*measured, strict=True)
    return 1e9 * float(np.interp(math.log(size), sizes, rates))


class StepTime(NamedTuple):
    """Seconds of a step by the machine's rates; None where a rate was not measured, and why."""

    compute: float | None
    communication: float | None
    reason: str = ""


def predict(rates: Rates, flops: float, layout: Layout, sent: Sequence[Collective]) -> StepTime:
    """The step of a rank that computes `flops` (recomputation not counted) and takes part in the collectives `sent`."""
    tflops = rates.get("matrix_tflops", {}).get(DTYPES[layout.precision])
    work = flops * RECOMPUTED.get(layout.checkpointing, 1.0)
    compute = work / (float(tflops) * 1e12) if tflops else None
    seconds = 0.0
    for one in sent:
        rate = bus_bandwidth_at(rates.get("collectives", ()), one.name, one.size)
        if rate is None:
            return StepTime(compute, None, f"the bandwidth of {one.name} was not measured")
        seconds += one.bus_bytes / rate
    reason = (
        ""
        if compute is not None
        else f"the rate of matrix products in {layout.precision} was not measured"
    )
    return StepTime(compute, seconds, reason)
