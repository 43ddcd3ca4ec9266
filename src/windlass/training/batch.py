"""The length of a run, and the micro-batches of a step: by prediction on CUDA, and smaller ones if
memory runs out.

A rank that runs out of memory cannot ask the others for a smaller micro-batch, because they may
wait for it in a collective of the model. So it writes the smaller micro-batch into the run
directory and fails. The others end as after any failure, and the next start of all ranks reads the
file. A single unsharded rank repeats the step instead.
"""

from __future__ import annotations

import gc
import json
from dataclasses import replace

import torch

from windlass.data.open import Data
from windlass.data.samples import documents_per_row, real_tokens
from windlass.errors import OutOfMemory, RunFailed, UserError
from windlass.estimate.activations import measure_peaks
from windlass.estimate.calendar import resolve_steps
from windlass.estimate.devices import USABLE, Device
from windlass.estimate.layouts import layout_on
from windlass.fileio import read_json, write_atomic
from windlass.model.build import build_model, read_sizes, sizes_of
from windlass.model.size import CountedSizes
from windlass.optim.schedule import check_fits
from windlass.parallel.dist import Ranks
from windlass.parallel.parallelize import resolve_precision
from windlass.recipe import BatchPlan, Horizon, Recipe
from windlass.run import STARTS, Run
from windlass.telemetry.profile import save_memory
from windlass.training.directory import decide_on_rank_0
from windlass.training.record import Recorder
from windlass.training.start import StartPlan

OUT_OF_MEMORY = "out_of_memory"  # the event: `micro_batch` is the new, smaller one
SMALLER = "micro_batch.json"  # in a run: the micro-batch of later starts on as many ranks


def horizon_of(recipe: Recipe, data: Data, own_model: bool) -> Horizon:
    """The length of a run. UserError if the data or the schedule does not allow it."""
    samples, parameters = len(data.train), None
    if samples < 1:
        context = recipe.model.context
        raise UserError(f"the training data has no sample of model.context = {context} tokens")
    if recipe.train.early_stop and data.val is None:
        raise UserError(
            "train.early_stop needs validation data: give data.eval_source=FILE, or "
            "data.val_fraction=0.1"
        )
    if recipe.train.steps == "compute-optimal":
        if own_model:
            raise UserError(
                'train.steps = "compute-optimal" is for a recipe\'s own model; write steps or epochs'
            )
        parameters = read_sizes(recipe).total if recipe.model.kind == "hf" else None
    tokens = real_tokens(data.train)
    per_sample = tokens / samples if tokens else None
    steps = resolve_steps(recipe, data.vocab, per_sample, samples, parameters)
    horizon = recipe.horizon(steps, samples)
    check_fits(recipe.optim.schedule, horizon)
    return horizon


def batch_of(plan: StartPlan, ranks: Ranks, data: Data, own_model: bool) -> BatchPlan:
    """The division of a step's samples over the ranks, with a micro-batch that the memory allows."""
    batch = plan.recipe.batch(ranks.world, ranks.device.type)
    if plan.recipe.train.micro_batch:
        return batch
    vocab, documents = 0 if own_model else data.vocab, documents_per_row(data.train)
    return open_micro_batch(plan, ranks, batch, vocab, free_bytes(ranks.device), documents)


def free_bytes(device: torch.device) -> int | None:
    """The bytes of a GPU that this process may fill, with a plan's margin; None on a CPU."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free - (1 - USABLE) * total)


def open_micro_batch(
    plan: StartPlan,
    ranks: Ranks,
    batch: BatchPlan,
    vocab: int,
    free: int | None,
    documents: float = 0.0,
) -> BatchPlan:
    """The plan with the micro-batch that the recipe leaves open; all ranks call it.

    A resumed run keeps its own, so that it has equal bits, unless memory ran out. On CUDA it is the
    largest that fits into the `free` bytes of every rank; on a CPU, where `free` is None, the one
    by tokens stays. `vocab`: 0 for a user's own model. `documents`: those of a row, if attention
    keeps them apart.
    """
    recipe = plan.recipe
    if free is not None:
        free = min(ranks.all_gather_object("free memory", free))

    def choose() -> int:
        size = recorded_micro_batch(plan.run, ranks.world, free is not None) if plan.resuming else 0
        if size and batch.share % size == 0:
            return size
        if free is None:
            return batch.micro_batch
        precision = resolve_precision(recipe.train.precision, ranks.device)
        rows, counted = vocab and (recipe.model.vocab or vocab), None
        if rows and recipe.model.kind == "hf":
            counted = measured_sizes(recipe, rows, precision, batch.micro_batch)
        layout = layout_on(
            recipe,
            rows,
            ranks.world,
            Device("", "cuda", None),
            precision,
            usable=free,
            counted=counted,
            documents=documents,
        )
        return layout.micro_batch

    return replace(batch, micro_batch=decide_on_rank_0(ranks, "micro-batch", choose))


def measured_sizes(
    recipe: Recipe, vocab: int, precision: str, micro_batch: int
) -> CountedSizes | None:
    """The size of a model of `transformers`, with its activations by a pass with fake tensors.

    None if the pass fails: then the micro-batch by tokens stays.
    """
    try:
        network = build_model(recipe, vocab)
        sizes = sizes_of(network)
        return replace(sizes, peaks=measure_peaks(network, recipe, precision, micro_batch, "cuda"))
    except Exception:  # code of `transformers`, or an operation without a fake kernel
        return None


def recorded_micro_batch(run: Run, world: int, starts: bool) -> int:
    """The micro-batch recorded after memory ran out on as many ranks, else the last start's; or 0."""
    lines = [event for event in run.events if starts and event["event"] in STARTS]
    for recorded in (read_json(run.path / SMALLER), *lines[-1:]):
        if recorded.get("world") == world:
            return int(recorded["micro_batch"])
    return 0


def smaller_micro_batch(batch: BatchPlan, recorder: Recorder) -> BatchPlan:
    """The same samples in smaller micro-batches, after memory ran out in a step of a single rank.

    Raises OutOfMemory if only a new start can have a smaller one: there are other ranks or a
    sharded model, or the update may have begun. Raises RunFailed with advice if the user chose
    `train.micro_batch`, or the micro-batch is one sequence.
    """
    recipe, ranks = recorder.plan.recipe, recorder.ranks
    sizes = [n for n in range(1, batch.micro_batch // 2 + 1) if batch.share % n == 0]
    phase, sharded = ranks.status.phase, ranks.strategy.shards_parameters
    size = f"micro-batches of {batch.micro_batch} sequences on each rank"
    problem = f"memory ran out in step {recorder.state.step + 1} ({phase}), with {size}"
    if recipe.telemetry.memory_snapshot and ranks.device.type == "cuda":
        path = recorder.run.path / f"memory-rank-{ranks.rank}.pickle"
        problem += f" (the largest blocks, of {path}: {save_memory(path)})"
    if sizes and not recipe.train.micro_batch:
        smaller = {"world": ranks.world, "micro_batch": sizes[-1]}
        write_atomic(recorder.run.path / SMALLER, json.dumps(smaller))
        if ranks.world == 1 and not sharded and phase in ("forward", "backward"):
            gc.collect()
            if recorder.network.compiled:
                # Else the next graph has a dynamic batch size, which the graph of a resume has not.
                torch.compiler.reset()
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()
            report_smaller(recorder, sizes[-1])
            return replace(batch, micro_batch=sizes[-1])
        raise OutOfMemory(f"{problem}: the next start of this run has micro-batches of {sizes[-1]}")
    advice = list[str]()
    if sizes:
        advice.append(
            f"train.micro_batch={sizes[-1]} (equal results but for rounding and the masks of dropout)"
        )
    if recipe.parallel.activation_checkpointing != "full" and phase != "optimizer":
        advice.append("parallel.activation_checkpointing=full")
    what = f"write {' or '.join(advice)}" if advice else "use a device with more"
    raise RunFailed(f"{problem}: {what}; `windlass plan` shows what each setting needs")


def report_smaller(recorder: Recorder, micro_batch: int) -> None:
    """An event for the ledger if memory ran out, perhaps in the start before, which could not write
    it."""
    smaller = read_json(recorder.run.path / SMALLER) if recorder.ranks.main else {}
    told = [e["micro_batch"] for e in recorder.run.events if e["event"] == OUT_OF_MEMORY]
    if smaller.get("micro_batch") == micro_batch and micro_batch not in told:
        text = f"memory ran out: train.micro_batch={micro_batch} from here on"
        recorder.emit(OUT_OF_MEMORY, text, warning=True, micro_batch=micro_batch)
