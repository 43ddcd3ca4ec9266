"""The micro-batch that fits into memory: by prediction on CUDA, and smaller if memory runs out in
the first step of a start. Nothing here was run on a GPU.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Collection
from dataclasses import replace

import torch

from windlass.errors import RunFailed
from windlass.estimate.devices import USABLE, Device
from windlass.estimate.layouts import layout_on
from windlass.parallel.dist import Ranks
from windlass.parallel.parallelize import resolve_precision
from windlass.recipe import BatchPlan, Recipe
from windlass.run import STARTS, Run
from windlass.training.checks import ran_out_of_memory
from windlass.training.record import Recorder
from windlass.training.start import StartPlan, decide_on_rank_0

OUT_OF_MEMORY = "out_of_memory"  # the event: `micro_batch` is the new, smaller one


def smaller_micro_batch(error: RuntimeError, batch: BatchPlan, recorder: Recorder) -> BatchPlan:
    """The same samples in smaller micro-batches, after memory ran out in a step.

    Raises any other error again, and RunFailed with advice if a smaller one is impossible: the user chose `train.micro_batch`, other
    ranks wait in the step's collectives, earlier steps of this start had this micro-batch, or the
    update may have begun.
    """
    if not ran_out_of_memory(error):
        raise error
    recipe, ranks = recorder.plan.recipe, recorder.ranks
    samples = batch.share
    sizes = [size for size in range(1, batch.micro_batch // 2 + 1) if samples % size == 0]
    phase, sharded = ranks.status.phase, ranks.strategy.shards_parameters
    ours = not recipe.train.micro_batch and ranks.world == 1 and not sharded
    if sizes and ours and not recorder.started_up and phase in ("forward", "backward"):
        return replace(batch, micro_batch=sizes[-1])
    advice = []
    if sizes:
        same = "(the same samples and result, but for rounding)"
        advice.append(f"train.micro_batch={sizes[-1]} {same}")
    sizes_of_mesh = ranks.mesh.sizes
    if sizes_of_mesh.data_world * sizes_of_mesh.cp > 1 and not sharded:
        advice.append('parallel.strategy="full_shard"')
    advice.append('parallel.activation_checkpointing="full"')
    size = f"micro-batches of {batch.micro_batch} sequences on each rank"
    raise RunFailed(
        f"memory ran out in step {recorder.state.step + 1} ({phase}), with {size}: write "
        f"{', or '.join(advice)}; `windlass plan` shows what each needs"
    )


def grow_segments(device: torch.device) -> None:
    """Have torch's allocator on CUDA grow its segments, unless the user has configured it.

    Rows of varying length leave gaps between blocks of fixed sizes; segments that grow leave none.
    The allocator may be in use already, so that its environment variable would come too late.
    """
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    if device.type == "cuda" and not any(name in os.environ for name in names):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def free_bytes(device: torch.device) -> int | None:
    """The bytes of a GPU that this process may fill, with a plan's margin; None on a CPU."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free - (1 - USABLE) * total)


def open_micro_batch(
    plan: StartPlan, ranks: Ranks, batch: BatchPlan, vocab: int, free: int | None
) -> BatchPlan:
    """The plan with the micro-batch that the recipe leaves open; all ranks call it.

    A resumed run keeps its own, so that it has equal bits. On CUDA it is the largest that fits into
    the `free` bytes of every rank; on a CPU, where `free` is None, the one by tokens stays.
    `vocab`: 0 for a user's own model.
    """
    recipe, events = plan.recipe, {*STARTS, OUT_OF_MEMORY}
    if free is not None:
        free = min(ranks.all_gather_object("free memory", free))
    elif ranks.world > 1:
        return batch
    else:
        events = {OUT_OF_MEMORY}

    def choose() -> int:
        size = recorded_micro_batch(plan.run, events, ranks.world) if plan.resuming else 0
        if size and batch.share % size == 0:
            return size
        if free is None:
            return batch.micro_batch
        precision = resolve_precision(recipe.train.precision, ranks.device)
        rows, gpu = vocab and (recipe.model.vocab or vocab), Device("", "cuda", None)
        return layout_on(recipe, rows, ranks.world, gpu, precision, free).micro_batch

    return replace(batch, micro_batch=decide_on_rank_0(ranks, "micro-batch", choose))


def recorded_micro_batch(run: Run, events: Collection[str], world: int) -> int:
    """The micro-batch of the last of these events; 0 if there is none, or on other ranks."""
    recorded = [event for event in run.events if event["event"] in events]
    last = recorded[-1] if recorded else {}
    return int(last.get("micro_batch", 0)) if last.get("world", world) == world else 0


def release_memory(compiled: bool) -> None:
    """Free what a failed step held, once its exception is gone."""
    gc.collect()
    if compiled:
        # Otherwise the next graph has a dynamic batch size, which the graph of a resume has not.
        torch.compiler.reset()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
