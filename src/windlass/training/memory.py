"""A smaller micro-batch if memory runs out in the first step of a start."""

from __future__ import annotations

import gc
from dataclasses import replace

import torch

from windlass.errors import RunFailed
from windlass.recipe import BatchPlan
from windlass.run import Run
from windlass.training.checks import ran_out_of_memory
from windlass.training.record import Recorder

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


def recorded_micro_batch(run: Run, batch: BatchPlan) -> BatchPlan:
    """The plan with the smaller micro-batch of an earlier start, so that a resume has equal bits."""
    sizes = [event["micro_batch"] for event in run.events if event["event"] == OUT_OF_MEMORY]
    samples = batch.share
    if sizes and sizes[-1] < batch.micro_batch and samples % sizes[-1] == 0:
        return replace(batch, micro_batch=sizes[-1])
    return batch


def release_memory(compiled: bool) -> None:
    """Free what a failed step held, once its exception is gone."""
    gc.collect()
    if compiled:
        # Otherwise the next graph has a dynamic batch size, which the graph of a resume has not.
        torch.compiler.reset()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
