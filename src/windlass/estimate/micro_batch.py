"""The layout of a recipe on a device, with the largest micro-batch that fits. The plan and a training
on a GPU choose it alike."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from windlass.estimate.devices import CAREFUL, USABLE, Device
from windlass.estimate.memory import Network, memory
from windlass.estimate.rank import Layout, layout_of
from windlass.model.size import CountedSizes
from windlass.recipe import Recipe


def with_largest_micro_batch(
    model: Network, vocab: int, layout: Layout, optimizer: str, usable: int
) -> Layout | None:
    """The layout with the largest micro-batch that fits; None if none does."""
    fitting = (
        tried
        for tried in with_micro_batches(layout)
        if memory(model, vocab, tried, optimizer).total <= usable
    )
    return next(fitting, None)


def with_micro_batches(layout: Layout) -> Iterator[Layout]:
    """The layout with each micro-batch that divides a rank's samples, the largest first."""
    samples = layout.samples
    for size in range(samples // layout.pipeline, 0, -1):  # each stage needs a micro-batch
        if samples % size == 0:
            yield replace(layout, micro_batch=size, accumulation=samples // size)


def layout_on(
    recipe: Recipe,
    vocab: int,
    world: int,
    device: Device,
    precision: str,
    usable: int | None = None,
    counted: CountedSizes | None = None,
) -> Layout:
    """The layout of a recipe on ranks of a device with `usable` bytes each (default: the plan's).

    On CUDA a micro-batch that the recipe leaves open is the largest that fits. It is the one by
    tokens if the memory, the vocabulary or the activations (`counted`, of a model of
    `transformers`) are unknown, or if nothing fits.
    """
    layout = layout_of(recipe, world, device.kind, precision)
    layout = replace(layout, workspace=device.workspace_bytes)
    usable = device.usable_bytes if usable is None else usable
    is_open = device.kind == "cuda" and not recipe.train.micro_batch
    model: Network | None = recipe.model if recipe.model.kind == "gpt" else counted
    has_peaks = not isinstance(model, CountedSizes) or model.peaks
    if not is_open or usable is None or model is None or not vocab or not has_peaks:
        return layout
    if world > 1 or layout.policy.shards_parameters:
        usable = int(usable * CAREFUL / USABLE)
    return with_largest_micro_batch(model, vocab, layout, recipe.optim.kind, usable) or layout
