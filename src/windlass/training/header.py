"""What a start reports: `environment.json`, the header, warnings, and the event."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

import torch

from windlass.data.describe import Facts, describe, lines
from windlass.data.describe import warnings as data_warnings
from windlass.data.mixture import shares_of_run
from windlass.data.open import Data
from windlass.errors import plural
from windlass.fileio import read_json
from windlass.model.size import describe_sizes
from windlass.optim.build import describe_groups
from windlass.processes import usable_cores
from windlass.recipe import BatchPlan, typed
from windlass.telemetry import environment
from windlass.telemetry.measures import short
from windlass.training.bad_steps import SMALLER
from windlass.training.network import Network
from windlass.training.record import Recorder
from windlass.training.start import Start
from windlass.training.trainer import Trainer

OUT_OF_MEMORY = "out_of_memory"  # the event: `micro_batch` is the new, smaller one


def report_start(
    trainer: Trainer, start: Start, network: Network, data: Data, origin: str, warnings: list[str]
) -> None:
    """Report a start that has succeeded; all ranks call it. `origin`: its checkpoint."""
    recorder, batch, ranks = trainer.recorder, trainer.batch, trainer.ranks
    console, state, horizon = recorder.console, trainer.state, trainer.horizon
    launch, places = record_launch(recorder, network)
    facts = describe(data)
    if trainer.mixture is not None:
        facts["mixture"] = shares_of_run(trainer.mixture, horizon)
    console.header(header(recorder, network, batch, facts, launch), state.step)
    console.log(places)
    for text in filter(None, (*warnings, *data_warnings(facts))):
        console.warning(text)
    event: dict[str, Any] = {
        "world": ranks.world,
        "strategy": ranks.strategy.name,
        "mesh": asdict(ranks.mesh.sizes),
        "precision": network.precision,
        "compiles": network.compiled,
        "device": recorder.device_name,
        "optimizer_groups": network.groups,
        "network": network.sizes.network or None,
        "parameters": network.sizes.total,
        "trained": network.sizes.trained,
        "threads": torch.get_num_threads(),
        "steps": horizon.steps,
        "micro_batch": batch.micro_batch,
        "accumulation": batch.accumulation,
        "global_batch": batch.global_batch,
        "data": facts,
        "samples_per_epoch": horizon.samples_per_epoch,
        "extended_from": start.extends_from or None,
    }
    name = "resumed" if start.resuming and state.step else "started"
    if start.branch_from:
        name, event["branched_from"] = "branched", str(start.branch_from.absolute())
    recorder.emit(name, f"resumed from {origin}" if origin else "", **event)
    # A start that ran out of memory recorded the smaller micro-batch, but could not report it.
    reported = [e["micro_batch"] for e in start.run.events if e["event"] == OUT_OF_MEMORY]
    recorded = read_json(start.run.path / SMALLER).get("micro_batch")
    if ranks.main and recorded == batch.micro_batch and recorded not in reported:
        text = f"memory ran out: train.micro_batch={recorded} from here on"
        recorder.emit(OUT_OF_MEMORY, text, warning=True, micro_batch=recorded)
    if start.changes:
        changed = (f"{k} {typed(old)} -> {typed(new)}" for k, (old, new) in start.changes.items())
        text = f"settings changed: {', '.join(changed)}"
        recorder.emit("settings_changed", text, settings=start.changes)


def record_launch(recorder: Recorder, network: Network) -> tuple[dict[str, str], list[str]]:
    """Write `environment.json`; returns the header's facts about the launch (empty for one rank
    outside a job), and a line a rank."""
    ranks, env = recorder.ranks, recorder.ranks.env
    place = environment.describe_rank(
        ranks.rank, ranks.device, env.local_rank, env.node, ranks.status.place
    )
    places = ranks.all_gather_object("environment", place)
    if not ranks.main:
        return {}, []
    launch = {
        "launcher": env.launcher,
        "world": env.world,
        "nodes": env.nodes,
        "strategy": ranks.strategy.name,
        "backend": torch.distributed.get_backend() if torch.distributed.is_initialized() else "",
        **environment.describe_job(os.environ),
    }
    environment.write_environment(recorder.run.path, places, launch=launch, **network.origin)
    is_alone = ranks.world == 1 and "job" not in launch
    facts = {} if is_alone else environment.describe_launch(launch, places)
    return facts, environment.describe_places(places)


def header(
    recorder: Recorder, network: Network, batch: BatchPlan, facts: Facts, launch: dict[str, str]
) -> dict[str, str]:
    """The facts of a start by name; an empty one is not shown."""
    recipe, ranks, horizon = recorder.recipe, recorder.ranks, recorder.horizon
    layout = [
        f"{plural(ranks.world, 'rank')} x {recorder.device_name}",
        ranks.strategy.name,
        ranks.mesh.sizes.layout,
        network.precision,
        "compiled" if network.compiled else "",
    ]
    data = lines(facts, batch.context)
    epochs = horizon.samples_per_step * horizon.steps / horizon.samples_per_epoch
    count = f"{epochs:.2g}" if epochs < 10 else f"{epochs:,.0f}"
    parts = [
        ": ".join(data[key] for key in ("data", "training") if key in data),
        f"validation {data['validation']}",
        data["tokenizer"],
        f"{count} epoch" if count == "1" else f"{count} epochs",
    ]
    if recipe.data.order == "shards-shuffled":
        parts.append("shards in file order, then in a new order each epoch")
    per_sample = facts["train"].get("tokens_per_sample", batch.context)  # at most the context
    tokens = round(per_sample * horizon.samples_per_step)
    about = "" if per_sample == batch.context else "about "  # rows differ in length
    work = f"{plural(horizon.steps, 'step')} x {about}{tokens:,} tokens"
    work += f" = {short(horizon.steps * tokens)} tokens"
    if recorder.state.step:
        work += f", resumed after step {recorder.state.step:,}"
    threads = f"{torch.get_num_threads()} of {plural(usable_cores(), 'core')}"
    return {
        "run": str(recorder.run.path),
        "recipe": f"{recipe.preset} ({recipe.config_hash})",
        "ranks": ", ".join(filter(None, layout)),
        **launch,
        "threads": threads if ranks.device.type == "cpu" else "",
        "model": describe_sizes(network.sizes),
        "optim": f"{recipe.optim.kind}: {describe_groups(network.groups)}",
        "data": "; ".join(parts),
        **{key: data[key] for key in ("mixture", "template") if key in data},
        "work": work,
    }
