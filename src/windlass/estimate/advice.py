"""The settings with which a recipe fits into the memory of a device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from windlass.errors import UserError
from windlass.estimate.candidates import MemoryRow, Settings, settings_of
from windlass.estimate.devices import USABLE
from windlass.estimate.inputs import PlanInputs, with_sizes
from windlass.estimate.memory import Memory, memory
from windlass.model.size import CountedSizes
from windlass.recipe import Recipe, typed


def recommend(rows: Sequence[MemoryRow], inputs: PlanInputs) -> tuple[Settings, str]:
    """The settings of the cheapest layout that fits, and the reason; empty if nothing is known."""
    usable, micro_batch = inputs.device.usable_bytes, inputs.recipe.train.micro_batch
    if usable is None:
        return {}, "the device's memory is unknown: give --memory GB"
    if rows[0].largest_micro_batch is None:  # the activations are unknown
        return {}, ""
    with_own = [row for row in rows if row.fits and micro_batch]
    fitting = with_own + [row for row in rows if row.largest_micro_batch]
    if not fitting:
        return advise(PlannedMemory(inputs), usable)
    row = fitting[0]
    size = micro_batch if with_own else row.largest_micro_batch or 0
    layout = replace(row.layout, micro_batch=size)
    given = ("parallel.tensor", "parallel.context", "parallel.pipeline")
    settings = {k: v for k, v in settings_of(layout).items() if v and k not in given}
    host = f"; {row.memory.host / 1e9:.3g} GB of the host's memory" if layout.offload else ""
    return settings, f"the cheapest that fits{host}"


class PlannedMemory:
    """The memory of the fullest rank with changed settings; models are counted once."""

    def __init__(self, inputs: PlanInputs):
        self.inputs = inputs
        # By network and micro-batch; 0: of any micro-batch.
        self.counted = {(self._network(inputs.recipe), 0): inputs.counted}

    @staticmethod
    def _network(recipe: Recipe) -> str:
        """The settings that determine a model's weights and activations."""
        checkpointing = recipe.parallel.activation_checkpointing
        return f"{recipe.model!r} {checkpointing} {recipe.train.master}"

    def of(self, settings: Settings) -> Memory | None:
        """The fullest rank's memory; None if these settings are not valid, or it is unknown."""
        try:
            recipe = self.inputs.recipe.replace(settings)
            recipe.batch(self.inputs.world, self.inputs.device.kind)
            inputs = replace(self.inputs, recipe=recipe)
            network, micro_batch = self._network(recipe), recipe.train.micro_batch
            measured = (network, 0 if (network, 0) in self.counted else micro_batch)
            if measured not in self.counted:
                sized = with_sizes(inputs, activations=True, several=not micro_batch)
                self.counted[measured] = sized.counted
        except UserError:
            return None
        inputs = replace(inputs, counted=self.counted[measured])
        counted, vocab = inputs.counted, inputs.size.vocab or 0
        if counted is None and recipe.model.kind == "hf":  # it cannot be built
            return None
        if counted is not None and not counted.peaks:
            return None
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
        problem = f"nothing fits: the least is {least.total / 1e9:.3g} GB{changed}"
        device = f"a device with more than {least.total / USABLE / 1e9:.3g} GB"
        return {}, f"{problem}; use {device}, or more ranks with parallel.strategy=full_shard"
    for key in list(settings):
        fewer = {other: value for other, value in settings.items() if other != key}
        peak = planned.of(fewer)
        if peak is not None and peak.total <= usable:
            least, settings = peak, fewer
    size = f"{least.total / 1e9:.3g} GB"
    host = f" and {least.host / 1e9:.3g} GB of the host's memory" if least.host else ""
    return settings, f"nothing fits as it is; with these a rank takes {size}{host}"


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


def pasted(settings: Settings) -> str:
    return " ".join(f"{key}={typed(value)}" for key, value in settings.items())
