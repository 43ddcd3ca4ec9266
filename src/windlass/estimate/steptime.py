"""The one analytic model of a training step's time: computing, updating, communicating.

`step_time` adds up a rank's FLOPs, its optimizer update and the strategy's collectives by ring
formulas (docs/scale.md). Nothing overlaps, and latency and memory traffic do not count. `Rates` say
how fast each part is. Three callers calibrate them:

- `windlass plan`: a device's published peak times an assumed MFU, which includes communication
- the predicted step of a scaling study: measured matrix products and collectives
- its projection to more ranks: the measured step of the largest setup, and the same collectives
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from windlass.estimate.layout import COMPUTE_BYTES, Layout, layout_of
from windlass.model.size import CountedSizes, block_parameters, flops_per_token

if TYPE_CHECKING:
    from windlass.recipe import Recipe
    from windlass.run import Line

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}
# Activation checkpointing repeats the forward pass; `selective` repeats no matrix product.
RECOMPUTED = {"full": 4 / 3}


@dataclass(frozen=True)
class Tensors:
    """Numbers of parameters, in the units that the strategies send."""

    total: int
    trained: int  # with gradients
    block: int = 0  # of one block, the unit of FSDP2
    blocks: int = 0


@dataclass(frozen=True)
class Work:
    """The model and layout of a run, which determine a step's FLOPs and collectives."""

    layout: Layout
    tensors: Tensors
    flops_per_token: float  # forward and backward, without recomputation
    bucket_mb: float = 25.0

    @staticmethod
    def of_run(recipe: Recipe, start: Line) -> Work:
        """From a run's recipe and its last start (`run.last_start`).

        In a model of `transformers`, everything but one token table counts as blocks.
        """
        device = "cpu" if on_cpu(start) else "cuda"
        layout = layout_of(recipe, int(start["world"]), device, start["precision"])
        layout = replace(layout, strategy=start["strategy"], accumulation=start["accumulation"])
        total, trained, network = start["parameters"], start["trained"], start.get("network")
        if network:
            blocks = int(network.get("layers") or 0)
            table = int(network.get("vocab", 0)) * int(network.get("width", 0))
            tensors = Tensors(total, trained, (total - table) // blocks if blocks else 0, blocks)
        else:
            tensors = Tensors(total, trained, block_parameters(recipe.model), recipe.model.layers)
        if network or recipe.model.freeze:
            flops = CountedSizes(total, trained, 0).flops_per_token()
        else:
            flops = flops_per_token(recipe.model, start["data"]["vocab"])
        return Work(layout, tensors, flops, recipe.parallel.bucket_mb)

    @property
    def sent(self) -> list[Collective]:
        return collectives(self.layout, self.tensors, self.bucket_mb)


def on_cpu(start: Line) -> bool:
    """Whether a run's last start was on a CPU."""
    return str(start.get("device")).upper() == "CPU"


class Collective(NamedTuple):
    """Equal calls of one collective in a step."""

    name: str  # as preflight measures it
    size: float  # bytes of a call: the whole buffer
    calls: float
    ranks: int

    @property
    def bus_bytes(self) -> float:
        """Bytes over each link of a ring in all calls.

        2 (n-1)/n of the buffer for an all-reduce, (n-1)/n for the others.
        """
        passes = 2 if self.name == "all_reduce" else 1
        return self.calls * self.size * passes * (self.ranks - 1) / self.ranks


def collectives(layout: Layout, tensors: Tensors, bucket_mb: float = 25.0) -> list[Collective]:
    """The collectives of a step on parameters and gradients; none on one rank.

    Gradients and master weights have 4 bytes (8 in fp64); FSDP2 gathers in the step's precision.
    """
    world, shard, strategy = layout.world, layout.shard, layout.policy
    low = COMPUTE_BYTES[layout.precision]
    master = max(4, low)
    if world == 1:
        return []
    if not strategy.shards_parameters:
        gradients = master * tensors.trained
        calls = max(1, math.ceil(gradients / (bucket_mb * 2**20)))
        sent = [Collective("all_reduce", gradients / calls, calls, world)]
        # ZeRO-1: each rank updates its part, which then goes to all.
        return sent + [Collective("all_gather", gradients, 1, world)] * strategy.shards_optimizer
    gradients_per_parameter = tensors.trained / tensors.total
    root, steps = tensors.total - tensors.blocks * tensors.block, layout.accumulation
    once = strategy.keeps_gathered
    # A block is gathered for each forward and each backward pass, the rest for each forward pass.
    sent = [
        Collective("all_gather", low * root, 1 if once else steps, shard),
        Collective(
            "all_gather", low * tensors.block, tensors.blocks * (1 if once else 2 * steps), shard
        ),
    ]
    reductions = steps if layout.reduces_each else 1
    for unit, number in ((root, 1), (tensors.block, tensors.blocks)):
        size = master * gradients_per_parameter * unit
        sent.append(Collective("reduce_scatter", size, number * reductions, shard))
        if world > shard:  # between the groups, each shard with its equals
            sent.append(Collective("all_reduce", size / shard, number, world // shard))
    return [one for one in sent if one.calls and one.size and one.ranks > 1]


def bus_bandwidth_at(rows: Sequence[Mapping[str, Any]], name: str, size: float) -> float | None:
    """Bytes a second over the bus for a collective of `size` bytes; None if it was not measured.

    Linear in the logarithm of the size between measured sizes, constant beyond them.
    """
    own = [row for row in rows if row["collective"] == name]
    measured = sorted((math.log(float(row["size"])), float(row["busbw"])) for row in own)
    if not measured:
        return None
    sizes, rates = zip(*measured, strict=True)
    return 1e9 * float(np.interp(math.log(size), sizes, rates))


@dataclass(frozen=True)
class Rates:
    """How fast a rank works through the parts of a step."""

    flops_per_s: float | None  # of forward and backward; None: not measured
    per_parameter_s: float = 0.0  # the update of one parameter; 0: not counted
    fixed_s: float = 0.0  # of every step: the host, waiting for data
    collectives: Sequence[Mapping[str, Any]] = ()  # `collective`, `size` and `busbw` (GB/s)
    products: str = "matrix products"  # that flops_per_s was to be measured on


def measured_rates(machine: Mapping[str, Any], layout: Layout) -> Rates:
    """The rates that `windlass check` measured (an entry of `machine.json`)."""
    tflops = machine.get("matrix_tflops", {}).get(DTYPES[layout.precision])
    slower = RECOMPUTED.get(layout.checkpointing, 1.0)
    flops_per_s = float(tflops) * 1e12 / slower if tflops else None
    products = f"matrix products in {layout.precision}"
    return Rates(flops_per_s, collectives=machine.get("collectives", ()), products=products)


class StepTime(NamedTuple):
    """Seconds of a step; None if a rate was not measured, with the reason."""

    compute: float | None
    communication: float | None
    reason: str = ""


def step_time(
    rates: Rates, flops: float, sent: Sequence[Collective] = (), updated: float = 0.0
) -> StepTime:
    """The step of one rank.

    Args:
        flops: of forward and backward; `rates` include recomputation.
        sent: the collectives in which the rank takes part.
        updated: parameters that the rank updates.
    """
    compute = None
    if rates.flops_per_s:
        compute = flops / rates.flops_per_s + updated * rates.per_parameter_s + rates.fixed_s
    seconds = 0.0
    for one in sent:
        bandwidth = bus_bandwidth_at(rates.collectives, one.name, one.size)
        if bandwidth is None:
            return StepTime(compute, None, f"the bandwidth of {one.name} was not measured")
        seconds += one.bus_bytes / bandwidth
    reason = f"the rate of {rates.products} was not measured" if compute is None else ""
    return StepTime(compute, seconds, reason)
