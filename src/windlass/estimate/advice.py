"""The settings with which a recipe fits into a device, and the host memory that its ranks need."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from windlass.errors import UserError
from windlass.estimate.calendar import recipe_vocab
from windlass.estimate.devices import USABLE, Device
from windlass.estimate.inputs import PlanInputs, with_sizes
from windlass.estimate.layouts import MemoryRow, Settings, changed_settings, settings_of
from windlass.estimate.memory import Memory, memory
from windlass.estimate.rank import layout_of
from windlass.model.size import CountedSizes
from windlass.recipe import Recipe, typed
from windlass.telemetry.measures import show

GPU_RANK_GB, CPU_RANK_GB = 8, 3  # Python, torch, the driver's maps, token shards, and a margin
LARGE_VOCAB = 2**18  # assumed if the embedding's rows depend on data that are not prepared


def recommend(rows: Sequence[MemoryRow], inputs: PlanInputs) -> tuple[Settings, str]:
    """The changes to the cheapest layout that fits, and the reason; empty if nothing is known."""
    usable, micro_batch = inputs.device.usable_bytes, inputs.recipe.train.micro_batch
    if usable is None:
        return {}, "the device's memory is unknown: give --memory GB"
    if rows[0].largest_micro_batch is None:  # the activations are unknown
        return {}, ""
    with_own = [row for row in rows if row.fits and micro_batch]
    fitting = with_own + [row for row in rows if row.largest_micro_batch]
    if not fitting:
        return advise(PlannedMemory(inputs), usable)
    size = micro_batch if with_own else fitting[0].largest_micro_batch or 0
    layout = replace(fitting[0].layout, micro_batch=size)
    own = next(row.layout for row in rows if row.chosen)
    if settings_of(layout) == settings_of(own):
        return {}, "The recipe's own layout is the cheapest that fits."
    reason = "the cheapest that fits"
    if layout.offload:
        reason += f"; {amount(fitting[0].memory.host)} of the host's memory"
    return changed_settings(layout, inputs.recipe), reason


class PlannedMemory:
    """The memory of the fullest rank with changed settings; models are counted once."""

    def __init__(self, inputs: PlanInputs):
        # By the settings of `network` and the micro-batch; 0: of any micro-batch.
        self.inputs, self.counted = inputs, {(self.network(inputs.recipe), 0): inputs.counted}

    @staticmethod
    def network(recipe: Recipe) -> str:
        """The settings that determine a model's weights and activations."""
        return f"{recipe.model!r} {recipe.parallel.activation_checkpointing} {recipe.train.master}"

    def of(self, settings: Settings) -> Memory | None:
        """The fullest rank's memory; None if these settings are not valid, or it is unknown."""
        try:
            recipe = self.inputs.recipe.replace(settings)
            recipe.batch(self.inputs.world, self.inputs.device.kind)
            inputs = replace(self.inputs, recipe=recipe)
            network, micro_batch = self.network(recipe), recipe.train.micro_batch
            measured = (network, 0 if (network, 0) in self.counted else micro_batch)
            if measured not in self.counted:
                sized = with_sizes(inputs, activations=True, several=not micro_batch)
                self.counted[measured] = sized.counted
        except UserError:
            return None
        counted = self.counted[measured]
        inputs = replace(inputs, counted=counted)
        if (not counted and recipe.model.kind == "hf") or (counted and not counted.peaks):
            return None  # it cannot be built, or its activations could not be measured
        vocab = inputs.size.vocab or 0
        return memory(counted or recipe.model, vocab, inputs.layout, recipe.optim.kind)


def advise(planned: PlannedMemory, usable: int) -> tuple[Settings, str]:
    """Changes with which a recipe fits into `usable` bytes, and the memory of a rank then.

    Each change stays that lowers the memory, until the recipe fits; then the unnecessary ones go.
    """
    inputs, recipe = planned.inputs, planned.inputs.recipe
    settings: Settings = {}
    least = planned.of(settings)
    changes = savings(recipe, inputs.world, inputs.device.kind == "cuda", inputs.counted)
    smallest: Settings = {"train.micro_batch": recipe.parallel.pipeline}
    for change in (smallest, *changes):
        peak = planned.of(settings | change)
        if peak is not None and (least is None or peak.total < least.total):
            least, settings = peak, settings | change
        if least is not None and least.total <= usable:
            break
    if least is None:
        return {}, ""
    if least.total > usable:
        changed = f" with {pasted(settings)}" if settings else ""
        problem = f"nothing fits: the least is {amount(least.total)}{changed}"
        device = f"a device with more than {amount(least.total / USABLE)}"
        return {}, f"{problem}; use {device}, or more ranks with parallel.strategy=full_shard"
    for key in list(settings):
        fewer = {other: value for other, value in settings.items() if other != key}
        peak = planned.of(fewer)
        if peak is not None and peak.total <= usable:
            least, settings = peak, fewer
    host = f" and {amount(least.host)} of the host's memory" if least.host else ""
    return settings, f"nothing fits as it is; with these a rank takes {amount(least.total)}{host}"


def savings(
    recipe: Recipe, world: int, on_gpu: bool, sizes: CountedSizes | None = None
) -> Iterator[Settings]:
    """The changes of a recipe that may lower a rank's memory, the cheapest one first."""
    parallel, model, train, optim = recipe.parallel, recipe.model, recipe.train, recipe.optim
    if parallel.activation_checkpointing != "full":
        yield {"parallel.activation_checkpointing": "full"}
    replicas = recipe.sizes(world).data_world * parallel.context
    if replicas > 1 and not recipe.strategy(world).shards_parameters:
        yield {"parallel.strategy": "full_shard"}
    total, trained = (sizes.total, sizes.trained) if sizes else (1, 1)
    if sizes and model.kind == "hf" and total > trained and not sizes.in_bf16:
        yield {"model.frozen_precision": "bf16"}
    if model.lora.rank and model.lora.base != "4bit":
        yield {"model.lora.base": "4bit"}
    trains_most = 2 * trained > total
    if trains_most and optim.kind == "adamw" and parallel.tensor == 1:
        yield {"optim.kind": "adamw8bit"}
    low = train.precision == "bf16" or (train.precision == "auto" and on_gpu)
    if trains_most and low and train.master == "fp32":
        yield {"train.master": "bf16"}
    if on_gpu and not parallel.offload:
        yield {"parallel.strategy": "full_shard", "parallel.offload": True}
    if trains_most and model.kind == "hf" and not model.from_scratch:
        yield {"model.lora.rank": 16}
        yield {"model.lora.rank": 16, "model.lora.base": "4bit"}


def amount(size: float) -> str:
    """Bytes in GB, or in MB if they are few."""
    number, unit = (size / 1e9, "GB") if size >= 1e8 else (size / 1e6, "MB")
    return f"{show(number, 'digits')} {unit}"


def pasted(settings: Settings) -> str:
    return " ".join(f"{key}={typed(value)}" for key, value in settings.items())


def host_memory_gb(recipe: Recipe, world: int, per_host: int, on_cpu: bool) -> int:
    """The host memory in GB that `per_host` of `world` ranks need; 0: the model is unreadable here.

    It is a base for each rank, the plan's host memory (all of the training on a CPU, the offloaded
    part on a GPU), and twice the host's part of a checkpoint, for the copy of a save and for
    loading.
    """
    vocab = recipe_vocab(recipe) or LARGE_VOCAB
    inputs = PlanInputs(recipe, world, Device("", "cpu" if on_cpu else "cuda", None), "", vocab)
    if recipe.model.kind == "hf":
        inputs = with_sizes(inputs)
    if (on_disk := inputs.size.checkpoint_bytes) is None:
        return 0
    layout = layout_of(recipe, world, inputs.device.kind)
    peak = memory(inputs.counted or recipe.model, vocab, layout, recipe.optim.kind)
    in_use = peak.host + (peak.total if on_cpu else 0)
    part = min(1.0, per_host / layout.shard)
    base = CPU_RANK_GB if on_cpu else GPU_RANK_GB
    return math.ceil(per_host * (base + in_use / 1e9) + 2 * part * on_disk / 1e9)
