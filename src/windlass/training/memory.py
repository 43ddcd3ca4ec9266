"""When memory runs out: the first step once more with a smaller micro-batch, or a message that says
what to write."""

from __future__ import annotations

import gc
from dataclasses import replace

import torch
from torch.optim import Optimizer

from windlass.errors import RunFailed
from windlass.evaluation.suites import Suites
from windlass.recipe import BatchPlan
from windlass.run import Run
from windlass.training.record import Recorder

OUT_OF_MEMORY = "out_of_memory"  # the event: `micro_batch` is the one that was taken instead


def smaller_micro_batch(batch: BatchPlan, recorder: Recorder) -> BatchPlan:
    """The same samples in smaller micro-batches, after memory ran out in a step.

    RunFailed, with what to write, where there is no such plan: `train.micro_batch` is the user's,
    there are several ranks (which wait for each other in the collectives of that step), the step is
    not the first of a start (those before it were done with this micro-batch), or its update may
    have begun.
    """
    recipe, ranks, share = (
        recorder.plan.recipe,
        recorder.ranks,
        batch.global_batch // batch.data_world,
    )
    less = max(
        (size for size in range(1, batch.micro_batch // 2 + 1) if share % size == 0), default=0
    )
    phase = ranks.status.phase
    alone = ranks.world == 1 and not ranks.strategy.shards_parameters
    if (
        less
        and alone
        and not recipe.train.micro_batch
        and not recorder.started_up
        and phase in ("forward", "backward")
    ):
        return replace(batch, micro_batch=less)
    size = f"micro-batches of {batch.micro_batch} sequences on each rank"
    where = f"memory ran out in step {recorder.state.step + 1} ({phase}), with {size}"
    advice = ['parallel.activation_checkpointing="full"']
    advice += (
        ['parallel.strategy="full_shard"']
        if ranks.world > 1 and not ranks.strategy.shards_parameters
        else []
    )
    advice += (
        [f"train.micro_batch={less} (the same samples and result, but for rounding)"]
        if less
        else []
    )
    raise RunFailed(
        f"{where}: write {', or '.join(reversed(advice))}; `windlass plan` shows what each needs"
    )


def micro_batch_of(run: Run, batch: BatchPlan) -> BatchPlan:
    """The plan with the micro-batch to which an earlier start of the run was reduced: a resume is
    bit for bit the same."""
    sizes = [event["micro_batch"] for event in run.events if event["event"] == OUT_OF_MEMORY]
    fits = (
        sizes
        and sizes[-1] < batch.micro_batch
        and batch.global_batch // batch.data_world % sizes[-1] == 0
    )
    return replace(batch, micro_batch=sizes[-1]) if fits else batch


def prepare_retry(
    batch: BatchPlan, optimizer: Optimizer, recorder: Recorder, suites: Suites
) -> None:
    """Forget the step that failed, after its exception is gone, and measure and record with the new
    micro-batch."""
    size = batch.micro_batch
    optimizer.zero_grad(set_to_none=True)
    gc.collect()
    if recorder.plan.recipe.train.compile:
        # else the blocks' next graph has a batch that varies, and a resume's has not
        torch.compiler.reset()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    suites.batch = size
    recorder.event(OUT_OF_MEMORY, micro_batch=size)
    recorder.console.warning(
        f"memory ran out: the step again with micro-batches of {size} sequences (train.micro_batch={size})"
    )
    recorder.restart_counts()
