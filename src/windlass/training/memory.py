"""Memory ran out in a step: the next start of the run has smaller micro-batches.

A rank cannot ask the others for a smaller micro-batch, because they may wait for it in a collective
of the model. So it writes the smaller micro-batch into the run directory and fails. The others end
as after any failure. Launchers start all ranks again, and a single rank starts again by itself.
"""

from __future__ import annotations

import json

import torch

from windlass.errors import OutOfMemory, RunFailed
from windlass.fileio import read_json, write_atomic
from windlass.parallel.dist import Ranks
from windlass.recipe import BatchPlan, Recipe
from windlass.run import STARTS, Run
from windlass.telemetry.profile import save_memory

OUT_OF_MEMORY = "out_of_memory"  # the event: `micro_batch` is the new, smaller one
SMALLER = "micro_batch.json"  # in a run: the micro-batch of later starts with the same world size


def ran_out_of_memory(error: Exception) -> bool:
    """Whether an allocation failed. torch's allocator for a CPU raises a plain RuntimeError."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def out_of_memory(recipe: Recipe, run: Run, ranks: Ranks, batch: BatchPlan, step: int) -> RunFailed:
    """The error after memory ran out in a step.

    OutOfMemory if the next start has a smaller micro-batch. RunFailed with advice if the user chose
    `train.micro_batch`, or the micro-batch is one sequence.
    """
    sizes = [n for n in range(1, batch.micro_batch // 2 + 1) if batch.share % n == 0]
    phase, size = ranks.status.phase, f"micro-batches of {batch.micro_batch} sequences"
    problem = f"memory ran out in step {step} ({phase}), with {size} on each rank"
    if recipe.telemetry.memory_snapshot and ranks.device.type == "cuda":
        path = run.path / f"memory-rank-{ranks.rank}.pickle"
        problem += f" (the largest blocks, of {path}: {save_memory(path)})"
    if sizes and not recipe.train.micro_batch:
        smaller = {"world": ranks.world, "micro_batch": sizes[-1]}
        write_atomic(run.path / SMALLER, json.dumps(smaller))
        return OutOfMemory(f"{problem}: the next start has micro-batches of {sizes[-1]}")
    advice = list[str]()
    if sizes:
        advice.append(
            f"train.micro_batch={sizes[-1]} (equal results, except for rounding and dropout)"
        )
    if recipe.parallel.activation_checkpointing != "full" and phase != "optimizer":
        advice.append("parallel.activation_checkpointing=full")
    remedy = f"write {' or '.join(advice)}" if advice else "use a device with more"
    return RunFailed(f"{problem}: {remedy}; `windlass plan` shows what each setting needs")


def recorded_micro_batch(run: Run, world: int, starts: bool) -> int:
    """The micro-batch recorded after memory ran out with this world size; else 0.

    `starts`: else the micro-batch of the last start, if it had this world size.
    """
    lines = [event for event in run.events if starts and event["event"] in STARTS]
    for recorded in (read_json(run.path / SMALLER), *lines[-1:]):
        if recorded.get("world") == world:
            return int(recorded["micro_batch"])
    return 0


def is_new_size(run: Run, micro_batch: int) -> bool:
    """Whether memory ran out in the start before, which could not write the event."""
    reported = [e["micro_batch"] for e in run.events if e["event"] == OUT_OF_MEMORY]
    recorded = read_json(run.path / SMALLER).get("micro_batch")
    return recorded == micro_batch and micro_batch not in reported
