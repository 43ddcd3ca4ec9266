"""Steps at numbers of ranks that were not measured: from a scaling study's largest setup and the rates of its machine. No torch.

Computing, host and waiting for data are those of the probe: forward and backward pass by the FLOPs that a rank would have, the
optimizer's update by the parameters that a rank would update. The collectives are those of the projected ranks at the bus
bandwidth of the largest group measured. Neither latency nor the network past it is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from windlass.estimate.steptime import Tensors, collectives, predict
from windlass.fileio import read_json
from windlass.model.size import count, flops_per_token
from windlass.study.scaling import ScalingRow, baseline, oversubscribed
from windlass.study.study import Study


class Projection(NamedTuple):
    """What a step would take at a number of ranks, or why that is not known."""

    world: int
    compute_ms: float | None = None  # with the host's part and waiting for data
    communication_ms: float | None = None
    step_ms: float | None = None
    samples_per_s: float | None = None
    efficiency: float | None = None
    reason: str = ""


def projections(study: Study, rows: Sequence[ScalingRow]) -> tuple[list[Projection], str]:
    """The `project`ed numbers of ranks of a study, and a sentence on what they rest on; empty where it projects none."""
    scaling, measured = study.scaling, [row for row in rows if row.measured]
    if scaling is None or not scaling.project or scaling.mode == "strategies":
        return [], ""
    # ranks that take turns on too few cores say nothing about more ranks
    alone = [row for row in measured if not oversubscribed(row)] or measured
    base = max(alone, key=lambda row: row.world) if alone else None
    if base is None or base.world == 1 or "compute_ms" not in base.values:
        why = "nothing is measured yet" if base is None else base.missing.get("compute_ms", ALONE)
        return [Projection(world, reason=why) for world in scaling.project], ""
    hosts = len(base.hosts)
    where = (
        "one host, which says nothing about the network between several"
        if hosts < 2
        else f"{hosts} hosts"
    )
    basis = (
        f"Projected, not measured: the probe's compute time of {base.setup}, by the FLOPs of a rank and the parameters that it "
        f"updates, and the collectives by ring formulas at the bus bandwidth of {base.world} ranks on {where}. Nothing overlaps in it; latency and the topology past "
        "these ranks are not known."
    )
    largest, within = max(row.world for row in measured), "within those measured"
    worlds = scaling.project
    return [
        _project(study, base, baseline(rows), n) if n > largest else Projection(n, reason=within)
        for n in worlds
    ], basis


ALONE = "only one rank was measured, which does not communicate"


def _project(study: Study, base: ScalingRow, first: ScalingRow, world: int) -> Projection:
    assert study.scaling is not None
    mode, grow, values, ratio = (
        study.scaling.mode,
        study.scaling.grow,
        base.values,
        world / base.world,
    )
    # what a rank has of the step that the largest setup has, and how much larger the step is
    share, growth = (1 / ratio, 1.0) if mode == "strong" or grow == "model" else (1.0, ratio)
    batch = values["global_batch"] * growth
    if batch < world:
        return Projection(
            world, reason=f"the {batch:g} samples of a step are fewer than {world} ranks"
        )
    accumulation, tensors = max(1, round(base.layout.accumulation * share)), base.tensors
    if grow == "model":
        model, vocab = base.recipe.model, base.start["data"]["vocab"]
        grown = model.model_copy(update={"layers": round(model.layers * ratio)})
        share *= flops_per_token(grown, vocab) / flops_per_token(model, vocab)
        more = count(grown, vocab).total - count(model, vocab).total
        tensors = Tensors(tensors.total + more, tensors.trained + more, tensors.block, grown.layers)
    shard = base.layout.policy.sizes(world, base.recipe.parallel.shard_size).dp_shard
    layout = replace(base.layout, world=world, shard=shard, accumulation=accumulation)
    rates = read_json(study.path / "machine.json").get(f"{values['nodes']}x{base.world}")
    if not rates:
        return Projection(world, reason="the machine's rates were not measured")
    sent = collectives(layout, tensors, base.recipe.parallel.bucket_mb)
    communication = predict(rates, values["flops_per_device"] * share, layout, sent).communication
    if communication is None:
        return Projection(world, reason="the bandwidth of a collective was not measured")
    updated = (
        tensors.trained / layout.shard / (base.tensors.trained / base.layout.shard)
    )  # parameters of a rank
    passes_ms = values["compute_ms"] - values["update_ms"]
    compute_ms = (
        passes_ms * share + values["update_ms"] * updated + values["host_ms"] + values["data_ms"]
    )
    step_ms = compute_ms + 1e3 * communication
    speed, efficiency = batch / step_ms * 1e3, None
    if first.measured and mode == "weak":
        efficiency = first.values["step_ms"] / step_ms
    elif first.measured:
        efficiency = speed / first.values["samples_per_s"] * first.world / world
    return Projection(world, compute_ms, 1e3 * communication, step_ms, speed, efficiency)
