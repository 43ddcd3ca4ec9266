"""The launch and the start of a training, in numbers and in words."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

import torch

from windlass.checkpoint.format import Checkpoint
from windlass.data.describe import Facts, describe, lines
from windlass.data.describe import warnings as data_warnings
from windlass.data.mixture import Mixture, shares_of_run
from windlass.data.open import Data
from windlass.errors import plural
from windlass.estimate.calendar import evaluations
from windlass.model.convert import export_note
from windlass.model.size import describe_sizes
from windlass.optim.build import describe_groups
from windlass.parallel.dist import Ranks
from windlass.processes import usable_cores
from windlass.recipe import BatchPlan
from windlass.recipe.load import MEASURED_ON
from windlass.run import Run
from windlass.telemetry import environment
from windlass.telemetry.measures import short
from windlass.training.network import Network
from windlass.training.nonfinite import OUT_OF_MEMORY, is_new_size
from windlass.training.record import Recorder
from windlass.training.start import StartPlan

MORE_DATA = ("sources", "mixture", "template", "lengths", "attention", "packing", "cut")
"""Facts of the data that have a line each in the header."""


def record_launch(run: Run, ranks: Ranks, network: Network) -> tuple[dict[str, str], list[str]]:
    """Write `environment.json`; returns the header's facts about the launch (empty for one rank
    outside a job), and a line a rank."""
    env = ranks.env
    place = environment.describe_rank(
        ranks.rank, ranks.device, env.local_rank, env.node, ranks.status.place
    )
    places = ranks.all_gather_object("environment", place)
    if not ranks.main:
        return {}, []
    backend = torch.distributed.get_backend() if torch.distributed.is_initialized() else ""
    launch = {"launcher": env.launcher, "world": env.world, "nodes": env.nodes}
    launch |= {"strategy": ranks.strategy.name, "backend": backend}
    launch |= {"versions": environment.versions(places), **environment.describe_job(os.environ)}
    environment.write_environment(run.path, places, launch=launch, **network.origin)
    alone = ranks.world == 1 and "job" not in launch
    facts = {} if alone else environment.describe_launch(launch, places)
    return facts, environment.describe_places(places)


def report_start(
    recorder: Recorder,
    plan: StartPlan,
    network: Network,
    data: Data,
    batch: BatchPlan,
    mixture: Mixture | None,
    checkpoint: Checkpoint | None,
    warnings: list[str],
) -> None:
    """`environment.json`, the header, warnings, and the event of the start; all ranks call it."""
    ranks, console = recorder.ranks, recorder.console
    state, horizon = recorder.state, recorder.horizon
    launch, places = record_launch(plan.run, ranks, network)
    facts = describe(data)
    if mixture is not None:
        facts["mixture"] = shares_of_run(mixture, horizon, state.skipped)
    measured = evaluations(plan.recipe, horizon, facts.get("val", {}).get("samples", 0))
    shown = header(recorder, network, batch, facts, launch)
    console.header(shown | {"eval": str(measured or "")}, state.step)
    console.log(places)
    export = "" if network.own else export_note(plan.recipe.model)
    for text in (*warnings, export, *data_warnings(facts), measured and measured.warning):
        if text:
            console.warning(text)
    sizes, branched = network.sizes, plan.branch_from
    event: dict[str, Any] = {"world": ranks.world, "strategy": ranks.strategy.name}
    event |= {"mesh": asdict(ranks.mesh.sizes), "precision": network.precision}
    event |= {"compiles": network.compiled, "device": recorder.device_name}
    event |= {"optimizer_groups": network.groups, "network": sizes.network or None}
    event |= {"parameters": sizes.total, "trained": sizes.trained}
    event |= {"threads": torch.get_num_threads(), "steps": horizon.steps}
    event |= {"micro_batch": batch.micro_batch, "accumulation": batch.accumulation}
    event |= {"global_batch": batch.global_batch, "data": facts}
    event |= {"samples_per_epoch": horizon.samples_per_epoch}
    event |= {"extended_from": plan.extends_from or None}
    event |= {"branched_from": str(branched.absolute())} if branched else {}
    name = "branched" if branched else "resumed" if plan.resuming and state.step else "started"
    recorder.emit(name, f"resumed from {checkpoint.path}" if checkpoint else "", **event)
    if ranks.main and is_new_size(plan.run, batch.micro_batch):
        text = f"memory ran out: train.micro_batch={batch.micro_batch} from here on"
        recorder.emit(OUT_OF_MEMORY, text, warning=True, micro_batch=batch.micro_batch)
    if plan.changes:
        text = f"settings changed: {plan.changed}"
        recorder.emit("settings_changed", text, settings=plan.changes)
    if any(key.startswith(MEASURED_ON) for key in plan.changes):
        why = "later evaluations have other items"
        console.warning(f"{why}, so the best checkpoint is chosen from them alone")


def header(
    recorder: Recorder, network: Network, batch: BatchPlan, facts: Facts, launch: dict[str, str]
) -> dict[str, str]:
    """The facts of a start by name; an empty one is not shown."""
    recipe, ranks, horizon = recorder.recipe, recorder.ranks, recorder.horizon
    layout = [f"{plural(ranks.world, 'rank')} x {recorder.device_name}", ranks.strategy.name]
    layout += [ranks.mesh.sizes.layout, network.precision, "compiled" * network.compiled]
    threads = f"{torch.get_num_threads()} of {plural(usable_cores(), 'core')}"
    data = lines(facts, batch.context)
    epochs = horizon.samples_per_step * horizon.steps / horizon.samples_per_epoch
    count = f"{epochs:.2g}" if epochs < 10 else f"{epochs:,.0f}"
    parts = [": ".join(data[key] for key in ("data", "training") if key in data)]
    parts += [f"validation {data['validation']}", data["tokenizer"]]
    parts += [f"{count} epoch{'s' * (count != '1')}"]
    per_sample = facts["train"].get("tokens_per_sample", batch.context)
    tokens = round(per_sample * horizon.samples_per_step)
    about = "about " * ("lengths" in data)  # rows differ in length
    work = f"{plural(horizon.steps, 'step')} x {about}{tokens:,} tokens"
    work += f" = {short(horizon.steps * tokens)} tokens"
    done = f", resumed after step {recorder.state.step:,}" if recorder.state.step else ""
    return {
        "run": str(recorder.run.path),
        "recipe": f"{recipe.preset} ({recipe.config_hash})",
        "ranks": ", ".join(filter(None, layout)),
        **launch,
        "threads": threads if ranks.device.type == "cpu" else "",
        "model": describe_sizes(network.sizes),
        "optim": f"{recipe.optim.kind}: {describe_groups(network.groups)}",
        "data": "; ".join(parts),
        **{key: data[key] for key in MORE_DATA if key in data},
        "work": work + done,
    }
