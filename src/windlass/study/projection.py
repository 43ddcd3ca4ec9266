"""Step times at numbers of ranks that a scaling study did not measure. No torch.

A projection calibrates `estimate.time` on the largest measured setup. Forward and backward pass
follow the FLOPs of a rank, and the update follows the parameters that a rank updates. Host time and
waiting for data stay. The collectives of the projected ranks run at the bandwidth of the largest
measured group. Latency and the network beyond that group are unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from windlass.estimate.time import Rates, Tensors, Work, step_time
from windlass.fileio import read_json
from windlass.model.size import count, flops_per_token
from windlass.study.setups import Setup, baseline, shared_cores
from windlass.study.study import Study

ONE_RANK = "only one rank was measured, which does not communicate"


class Projection(NamedTuple):
    """The step at a number of ranks, or why it is unknown."""

    world: int
    compute_ms: float | None = None  # with the host's part and waiting for data
    communication_ms: float | None = None
    step_ms: float | None = None
    samples_per_s: float | None = None
    efficiency: float | None = None
    reason: str = ""


def projections(study: Study, table: Sequence[Setup]) -> tuple[list[Projection], str]:
    """The step at each number of `Scaling.project`, and a sentence on the basis.

    Both are empty if the study projects nothing.
    """
    scaling, measured = study.scaling, [setup for setup in table if setup.measured]
    if scaling is None or not scaling.project or scaling.mode == "strategies":
        return [], ""
    # Ranks that take turns on too few cores say nothing about more ranks.
    alone = [setup for setup in measured if not shared_cores(setup)] or measured
    base = max(alone, key=lambda setup: setup.world, default=None)
    if base is None or base.world == 1 or "compute_ms" not in base.values:
        why = base.missing.get("compute_ms", ONE_RANK) if base else "nothing is measured yet"
        return [Projection(world, reason=why) for world in scaling.project], ""
    hosts = len(base.hosts)
    one_host = "one host, which says nothing about the network between several"
    basis = (
        f"Projected, not measured: the compute time of {base.name} scaled to a rank's FLOPs and "
        "updated parameters, and the collectives by ring formulas at the bus bandwidth of "
        f"{base.world} ranks on {one_host if hosts < 2 else f'{hosts} hosts'}. Nothing overlaps; "
        "latency and the topology beyond these ranks are unknown."
    )
    largest, first = max(setup.world for setup in measured), baseline(table)
    within = "within the measured numbers of ranks"
    return [
        _project(study, base, first, n) if n > largest else Projection(n, reason=within)
        for n in scaling.project
    ], basis


def _project(study: Study, base: Setup, first: Setup, world: int) -> Projection:
    assert study.scaling is not None
    scaling, values, ratio = study.scaling, base.values, world / base.world
    # A rank's part of the largest measured step, and the growth of that step.
    fixed = scaling.mode == "strong" or scaling.grow == "model"
    fraction, growth = (1 / ratio, 1.0) if fixed else (1.0, ratio)
    batch = values["global_batch"] * growth
    if batch < world:
        fewer = f"a step's {batch:g} samples are fewer than {world} ranks"
        return Projection(world, reason=fewer)
    machine = read_json(study.path / "machine.json").get(f"{values['nodes']}x{base.world}")
    if not machine:
        return Projection(world, reason="the machine's rates were not measured")
    work = _work(base, world, fraction, ratio if scaling.grow == "model" else 1.0)
    flops = values["flops_per_device"]
    rates = Rates(
        flops / (values["compute_ms"] - values["update_ms"]) * 1e3,
        values["update_ms"] / 1e3 / _updated(base.work),
        (values["host_ms"] + values["data_ms"]) / 1e3,
        machine.get("collectives", ()),
    )
    flops *= fraction * work.flops_per_token / base.work.flops_per_token
    step = step_time(rates, flops, work.sent, _updated(work))
    if step.communication is None or step.compute is None:
        return Projection(world, reason="the bandwidth of a collective was not measured")
    compute_ms, communication_ms = 1e3 * step.compute, 1e3 * step.communication
    step_ms = compute_ms + communication_ms
    speed, efficiency = batch / step_ms * 1e3, None
    if first.measured and scaling.mode == "weak":
        efficiency = first.values["step_ms"] / step_ms
    elif first.measured:
        efficiency = speed / first.values["samples_per_s"] * first.world / world
    return Projection(world, compute_ms, communication_ms, step_ms, speed, efficiency)


def _updated(work: Work) -> float:
    """Parameters that a rank updates."""
    return work.tensors.trained / work.layout.shard


def _work(base: Setup, world: int, fraction: float, more_layers: float) -> Work:
    """The work of `base` on `world` ranks, with `more_layers` times the layers."""
    work, recipe = base.work, base.recipe
    layout = replace(
        work.layout,
        world=world,
        shard=work.layout.policy.sizes(world, recipe.parallel.shard_size).dp_shard,
        accumulation=max(1, round(work.layout.accumulation * fraction)),
    )
    if more_layers == 1.0:
        return replace(work, layout=layout)
    model, vocab, tensors = recipe.model, base.start["data"]["vocab"], work.tensors
    grown = model.model_copy(update={"layers": round(model.layers * more_layers)})
    more = count(grown, vocab).total - count(model, vocab).total
    tensors = Tensors(tensors.total + more, tensors.trained + more, tensors.block, grown.layers)
    growth = flops_per_token(grown, vocab) / flops_per_token(model, vocab)
    flops = work.flops_per_token * growth
    return Work(layout, tensors, flops, work.bucket_mb)
