"""Steps at numbers of ranks that nobody measured: from a scaling study's largest setup and the rates of its machine. No torch.

Computing, host and waiting for data are the probe's, by the FLOPs that a rank would have; the collectives are those of the
projected ranks at the bus bandwidth of the largest group measured. Neither latency nor the network past it is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from windlass.estimate.memory import shard_size
from windlass.estimate.steptime import Tensors, collectives, predict
from windlass.fileio import read_json
from windlass.model.size import count, flops_per_token
from windlass.study.scaling import ScalingRow
from windlass.study.study import Study


class Projection(NamedTuple):
    """What a step would take at a number of ranks, and why that is not known; never a measurement."""

    world: int
    compute_ms: float | None = None  # with the host's part and waiting for data
    communication_ms: float | None = None
    samples_per_s: float | None = None
    efficiency: float | None = None
    reason: str = ""

    @property
    def step_ms(self) -> float | None:
        known = self.compute_ms is not None and self.communication_ms is not None
        return self.compute_ms + self.communication_ms if known else None  # type: ignore[operator]


def projections(study: Study, rows: Sequence[ScalingRow]) -> tuple[list[Projection], str]:
    """The `project`ed numbers of ranks of a study, and a sentence on what they rest on; empty where it projects none."""
    scaling = study.scaling
    if scaling is None or not scaling.project or scaling.mode == "strategies":
        return [], ""
    measured = [row for row in rows if row.measured]
    why = "" if measured else "nothing is measured yet"
    base = max(measured, key=lambda row: row.world) if measured else None
    if base is not None and "compute_ms" not in base.values:
        why = base.missing.get("compute_ms", "")
    if base is None or why:
        return [Projection(world, reason=why) for world in scaling.project], ""
    table = []
    for world in scaling.project:
        past = world > base.world
        table.append(
            _project(study, base, rows[0], world) if past else Projection(world, reason="within those measured")
        )
    hosts = len(base.hosts)
    where = "one host, which says nothing about the network between several" if hosts < 2 else f"{hosts} hosts"
    basis = (
        f"Projected, not measured: the probe's compute time of {base.setup}, by the FLOPs of a rank, and the collectives by ring "
        f"formulas at the bus bandwidth of {base.world} ranks on {where}. Nothing overlaps in it; latency and the topology past "
        "these ranks are not known."
    )
    return table, basis


def _project(study: Study, base: ScalingRow, first: ScalingRow, world: int) -> Projection:
    assert study.scaling is not None
    mode, values, ratio = study.scaling.mode, base.values, world / base.world
    constant_batch = mode == "strong" or study.scaling.grow == "model"
    batch = values["global_batch"] * (1 if constant_batch else ratio)
    if batch < world:
        return Projection(world, reason=f"the {batch:g} samples of a step are fewer than {world} ranks")
    flops, tensors = values["flops_per_device"] * (1 / ratio if constant_batch else 1), base.tensors
    if study.scaling.grow == "model":
        model, vocab = base.recipe.model, base.start["data"]["vocab"]
        grown = model.model_copy(update={"layers": round(model.layers * ratio)})
        flops *= flops_per_token(grown, vocab) / flops_per_token(model, vocab)
        more = count(grown, vocab).total - count(model, vocab).total
        tensors = Tensors(tensors.total + more, tensors.trained + more, tensors.block, grown.layers)
    layout, accumulation = base.layout, max(1, round(base.layout.accumulation * (1 / ratio if constant_batch else 1)))
    shard = shard_size(layout.strategy, world, base.recipe.parallel.shard_size)
    layout = replace(layout, world=world, shard=shard, accumulation=accumulation)
    rates = read_json(study.path / "machine.json").get(f"{values['nodes']}x{base.world}")
    if not rates:
        return Projection(world, reason="the machine's rates were not measured")
    communication = predict(
        rates, flops, layout, collectives(layout, tensors, base.recipe.parallel.bucket_mb)
    ).communication
    if communication is None:
        return Projection(world, reason="the bandwidth of a collective was not measured")
    share = flops / values["flops_per_device"]
    step_ms = values["compute_ms"] * share + values["host_ms"] + values["data_ms"] + 1e3 * communication
    one = Projection(world, step_ms - 1e3 * communication, 1e3 * communication, batch / step_ms * 1e3)
    if not first.measured:
        return one
    faster = first.values["step_ms"] / step_ms if mode == "weak" else None
    strong = one.samples_per_s / first.values["samples_per_s"] * first.world / world if one.samples_per_s else None
    return one._replace(efficiency=faster if mode == "weak" else strong)
