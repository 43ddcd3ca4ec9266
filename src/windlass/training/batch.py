"""The length of a run and the micro-batch of a step; on CUDA the largest that memory allows."""

from __future__ import annotations

from dataclasses import replace

import torch

from windlass.data.open import Data
from windlass.data.samples import documents_per_row, real_tokens
from windlass.errors import UserError
from windlass.estimate.activations import measure_peaks
from windlass.estimate.calendar import resolve_steps
from windlass.estimate.devices import USABLE, Device
from windlass.estimate.layouts import layout_on
from windlass.model.build import build_model, read_sizes, sizes_of
from windlass.model.size import CountedSizes
from windlass.optim.schedule import check_fits
from windlass.parallel.dist import Ranks
from windlass.parallel.parallelize import resolve_precision
from windlass.recipe import BatchPlan, Horizon, Recipe
from windlass.training.memory import recorded_micro_batch
from windlass.training.start import StartPlan


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
    """The division of a step's samples over the ranks, with a micro-batch that fits into memory."""
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

    A resumed run keeps its micro-batch, for equal bits, unless memory ran out. On CUDA it is the
    largest that fits into the `free` bytes of every rank; on a CPU, where `free` is None, the one
    by tokens stays. `vocab`: 0 for a user's module. `documents`: their number in a row, if
    attention keeps them apart.
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

    return replace(batch, micro_batch=ranks.decide("micro-batch", choose))


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
