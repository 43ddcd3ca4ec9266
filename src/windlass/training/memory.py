"""Memory that runs out in a step. A run whose recipe leaves the micro-batch open starts again with
a smaller one, which the run directory records."""

from __future__ import annotations

import json

import torch

from windlass.errors import OutOfMemory, RunFailed
from windlass.fileio import read_json, write_atomic
from windlass.parallel.ranks import Ranks
from windlass.recipe import BatchPlan, Recipe
from windlass.run import STARTS, Run

OUT_OF_MEMORY = "out_of_memory"  # the event: `micro_batch` is the new, smaller one
SMALLER = "micro_batch.json"  # in a run: the micro-batch of later starts with the same world size


def ran_out_of_memory(error: Exception) -> bool:
    """Whether an allocation failed. torch's allocator for a CPU raises a plain RuntimeError."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def out_of_memory(recipe: Recipe, run: Run, ranks: Ranks, batch: BatchPlan, step: int) -> RunFailed:
    """The error after memory ran out in a step: OutOfMemory if the next start has a smaller
    micro-batch, else RunFailed with advice."""
    phase, size = ranks.status.phase, f"micro-batches of {batch.micro_batch} sequences"
    problem = f"memory ran out in step {step} ({phase}), with {size} on each rank"
    smaller = [n for n in range(1, batch.micro_batch // 2 + 1) if batch.share % n == 0]
    if smaller and not recipe.train.micro_batch:
        recorded = {"world": ranks.world, "micro_batch": smaller[-1]}
        write_atomic(run.path / SMALLER, json.dumps(recorded))
        return OutOfMemory(f"{problem}: the next start has micro-batches of {smaller[-1]}")
    advice = list[str]()
    if smaller:
        advice.append(f"train.micro_batch={smaller[-1]}")
    if recipe.parallel.activation_checkpointing != "full" and phase != "optimizer":
        advice.append("parallel.activation_checkpointing=full")
    remedy = f"write {' or '.join(advice)}" if advice else "use a device with more"
    return RunFailed(f"{problem}: {remedy}; `windlass plan` shows what each setting needs")


def recorded_micro_batch(run: Run, world: int) -> int:
    """The micro-batch recorded after memory ran out with this world size, or the last start's, if
    it had this world size; else 0."""
    starts = [event for event in run.events if event["event"] in STARTS]
    for recorded in (read_json(run.path / SMALLER), *starts[-1:]):
        if recorded.get("world") == world:
            return int(recorded["micro_batch"])
    return 0


def is_new_size(run: Run, micro_batch: int) -> bool:
    """Whether the previous start ran out of memory and could not record the event."""
    reported = [e["micro_batch"] for e in run.events if e["event"] == OUT_OF_MEMORY]
    recorded = read_json(run.path / SMALLER).get("micro_batch")
    return recorded == micro_batch and micro_batch not in reported
