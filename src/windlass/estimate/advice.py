"""The settings with which a training fits into memory, by the plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from windlass.errors import UserError
from windlass.estimate.devices import USABLE
from windlass.estimate.layouts import MemoryRow, Settings, settings_of
from windlass.estimate.memory import Memory, memory
from windlass.estimate.subject import Subject, with_sizes
from windlass.model.size import CountedSizes
from windlass.recipe import Recipe, typed

MOST_RANKS = 64  # that the advice tries


def recommend(rows: list[MemoryRow], subject: Subject) -> tuple[Settings, str]:
    """The settings of the cheapest layout that fits, and the reason; empty if nothing is known.

    If the recipe's micro-batch fits in no row, a smaller one may. If none does, other settings may.
    """
    usable, micro_batch = subject.device.usable_bytes, subject.recipe.train.micro_batch
    if usable is None:
        return {}, "the device's memory is unknown: give --memory GB"
    if rows[0].largest_micro_batch is None:  # the activations are unknown
        return {}, ""
    fitting = [row for row in rows if row.fits] if micro_batch else []
    smaller = micro_batch > 0 and not fitting
    fitting = fitting or [row for row in rows if row.largest_micro_batch]
    if not fitting:
        return advise(Planned(subject), usable)
    row = fitting[0]
    layout, largest = row.layout, row.largest_micro_batch or 0
    size = largest if smaller else micro_batch or largest
    layout = replace(layout, micro_batch=size)
    given = ("parallel.tensor", "parallel.context", "parallel.pipeline")
    settings = {key: value for key, value in settings_of(layout).items() if key not in given}
    settings = {key: value for key, value in settings.items() if value not in (False, "auto")}
    host = f"; {row.memory.host / 1e9:.3g} GB of the host's memory" if layout.offload else ""
    return settings, f"the cheapest that fits{host}"


def savings(
    recipe: Recipe, world: int, on_gpu: bool, sizes: CountedSizes | None = None
) -> Iterator[Settings]:
    """The changes of a recipe that may lower a rank's memory, the cheapest one first.

    `sizes`: of a model of `transformers`, or of one with frozen weights.
    """
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


class Planned:
    """The memory of a subject with other settings."""

    def __init__(self, subject: Subject):
        self.subject = subject
        # By network and micro-batch; 0: of any micro-batch.
        self.counted = {(self._network(subject.recipe), 0): subject.counted}

    def __call__(self, settings: Settings, world: int = 0) -> Memory | None:
        """The fullest rank's memory; None if these settings are not valid, or it is unknown."""
        world = world or self.subject.world
        try:
            recipe = self.subject.recipe.replace(settings)
            recipe.batch(world, self.subject.device.kind)
            subject = replace(self.subject, recipe=recipe, world=world)
            network, micro_batch = self._network(recipe), recipe.train.micro_batch
            measured = (network, 0 if (network, 0) in self.counted else micro_batch)
            if measured not in self.counted:
                sized = with_sizes(subject, activations=True, several=not micro_batch)
                self.counted[measured] = sized.counted
        except UserError:
            return None
        subject = replace(subject, counted=self.counted[measured])
        counted, vocab = subject.counted, subject.size.vocab or 0
        if counted is not None and not counted.peaks:
            return None
        return memory(counted or recipe.model, vocab, subject.layout, recipe.optim.kind)

    @staticmethod
    def _network(recipe: Recipe) -> str:
        """The settings that determine a model's weights and activations."""
        checkpointing = recipe.parallel.activation_checkpointing
        return f"{recipe.model!r} {checkpointing} {recipe.train.master}"


def advise(planned: Planned, usable: int) -> tuple[Settings, str]:
    """Changes with which a recipe fits into `usable` bytes, and the memory of a rank then.

    Each change stays that lowers the memory, until the recipe fits; then the unnecessary ones go.
    """
    subject, recipe = planned.subject, planned.subject.recipe
    least, taken = planned({}), list[Settings]()
    changes = savings(recipe, subject.world, subject.device.kind == "cuda", subject.counted)
    smallest: Settings = {"train.micro_batch": recipe.parallel.pipeline}
    for change in (smallest, *changes):
        peak = planned(merged([*taken, change]))
        if peak is not None and (least is None or peak.total < least.total):
            least, taken = peak, [*taken, change]
        if least is not None and least.total <= usable:
            break
    if least is None:
        return {}, ""
    if least.total > usable:
        return {}, _nothing_fits(planned, merged(taken), least, usable)
    settings = merged(taken)
    for key in list(settings):
        fewer = {other: value for other, value in settings.items() if other != key}
        peak = planned(fewer)
        if peak is not None and peak.total <= usable:
            least, settings = peak, fewer
    host = f" and {least.host / 1e9:.3g} GB of the host's memory" if least.host else ""
    return settings, f"nothing fits as it is; with these a rank takes {_gb(least)}{host}"


def _nothing_fits(planned: Planned, settings: Settings, least: Memory, usable: int) -> str:
    """The least memory that any settings take, and the devices or ranks that would suffice."""
    how = f" with {pasted(settings)}" if settings else ""
    advice = f"use a device with more than {least.total / USABLE / 1e9:.3g} GB"
    sharded, ranks = settings | {"parallel.strategy": "full_shard"}, 2 * planned.subject.world
    while ranks <= MOST_RANKS:
        peak = planned(sharded, ranks)
        if peak is not None and peak.total <= usable:
            advice += f", or {ranks} ranks with parallel.strategy=full_shard"
            break
        ranks *= 2
    return f"nothing fits: the least is {_gb(least)}{how}; {advice}"


def merged(changes: list[Settings]) -> Settings:
    """Several changes as one."""
    return {key: value for change in changes for key, value in change.items()}


def pasted(settings: Settings) -> str:
    """Settings as overrides on a command line."""
    return " ".join(f"{key}={typed(value)}" for key, value in settings.items())


def _gb(peak: Memory) -> str:
    return f"{peak.total / 1e9:.3g} GB"
