"""The layouts of our GPT on a number of ranks: which fit, how long a step takes, what is sent.

Every combination of `parallel.tensor` (inside a host), `context` and `pipeline` is tried that the
recipe's checks accept, with each strategy, activation checkpointing and micro-batch. `step.slowest` predicts the
step, `memory.memory` the peak.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from windlass.errors import UserError, plural
from windlass.estimate.devices import Device
from windlass.estimate.layouts import CHECKPOINTING, kinds_of, layout_on, shard_of
from windlass.estimate.memory import Memory, memory
from windlass.estimate.rank import Layout, layout_of
from windlass.estimate.step import Links, Speeds, StepTime, published_speeds, slowest
from windlass.estimate.subject import Subject
from windlass.estimate.work import LINKS, works
from windlass.recipe import Recipe, typed
from windlass.recipe.strategies import STRATEGIES
from windlass.telemetry.timing import peak_flops

ROWS = 8  # of the table, one for each combination of tensor, context and pipeline
PER_HOST = 8  # assumed GPUs of a host
NETWORK = 25e9
"""Assumed bytes a second between hosts for each GPU: one adapter of 200 Gbit/s."""
NOMINAL = {"cpu": 5e10, "cuda": 1e14}
"""FLOP/s of a rank that order layouts if the device has no published peak; they are not shown."""
ALIKE = 0.02
"""Predicted steps that differ by less than this part count as equal."""

Settings = dict[str, str | int | bool]


@dataclass(frozen=True)
class LayoutRow:
    """A layout that fits, with the step of its slowest rank."""

    layout: Layout
    memory: Memory  # of the fullest rank
    # Seconds of a step, predicted; only for the order if the device has no published peak.
    compute: float
    communication: float
    bubble: float
    sent: dict[str, int]  # bytes of a rank in a step along each dimension, at most
    settings: Settings  # that differ from the recipe's
    chosen: bool  # whether it is the recipe's own layout

    @property
    def seconds(self) -> float:
        """The predicted time of a step."""
        return self.compute + self.communication + self.bubble


@dataclass(frozen=True)
class Machine:
    """The ranks for which layouts are compared."""

    device: Device
    world: int
    precision: str
    per_host: int = 0  # ranks; 0: PER_HOST GPUs, or all ranks on a CPU

    @property
    def ranks_of_host(self) -> int:
        """Ranks of each of several hosts; 0 if there is one host."""
        per_host = self.per_host or (PER_HOST if self.device.kind == "cuda" else self.world)
        return per_host if per_host < self.world else 0

    @property
    def knows_peak(self) -> bool:
        return peak_flops(self.device.name, self.precision) is not None

    @staticmethod
    def of(subject: Subject, per_host: int) -> Machine:
        """The ranks of a plan."""
        return Machine(subject.device, subject.world, subject.precision, per_host)

    def speeds(self, recipe: Recipe) -> Speeds:
        """The speeds of a rank, by the device's data sheet and the published rates of links."""
        own = peak_flops(self.device.name, self.precision, recipe.train.tf32)
        peak = peak_flops(self.device.name, "bf16") if self.precision == "float8" else own
        links = Links(self.device.link, NETWORK, self.ranks_of_host)
        speeds = published_speeds(self.device, peak or NOMINAL[self.device.kind], links)
        if self.precision == "float8" and own and peak:  # head and attention are in bf16
            return replace(speeds, float8=speeds.products * own / peak)
        return speeds


def layouts(recipe: Recipe, machine: Machine) -> Iterator[tuple[Layout, Settings]]:
    """Every valid layout, with its settings."""
    world, train = machine.world, recipe.train
    numbers = [n for n in range(1, world + 1) if world % n == 0]
    # Some optimizers of libraries need whole matrices.
    whole = "." in recipe.optim.kind
    for t, c, p in product(numbers, numbers, numbers):
        # Links between hosts are too slow for tensor parallelism.
        apart = bool(machine.ranks_of_host) and t > machine.ranks_of_host
        if world % (t * c * p) or (whole and t > 1) or apart:
            continue
        division: Settings = {"parallel.tensor": t, "parallel.context": c, "parallel.pipeline": p}
        division |= {"parallel.strategy": "auto", "parallel.offload": False}
        division |= {"parallel.shard_size": 0}
        samples = train.global_batch // max(1, world // (t * c * p))
        sizes = [n for n in range(1, samples + 1) if samples % n == 0]
        for size in [train.micro_batch] if train.micro_batch else sizes:
            settings = division | {"train.micro_batch": size}
            try:
                base = layout_of(recipe.replace(settings), world, machine.device.kind)
            except UserError:  # the checks of `recipe.combinations` and of the batch
                continue
            base = replace(base, precision=machine.precision)
            base = replace(base, workspace=machine.device.workspace_bytes)
            groups = 0 if machine.ranks_of_host % (t * c) else machine.ranks_of_host // (t * c)
            kinds = product(kinds_of(base), CHECKPOINTING)
            for (strategy, reduce_each), checkpointing in kinds:
                more: Settings = {"parallel.strategy": strategy}
                more["parallel.activation_checkpointing"] = checkpointing
                more["parallel.reduce_each_micro_batch"] = reduce_each
                shard = shard_of(strategy, base, groups)
                if STRATEGIES[strategy].grouped:
                    if not 1 < shard // c < base.data_world:
                        continue
                    more["parallel.shard_size"] = shard // c
                how: dict[str, Any] = {"strategy": strategy, "shard": shard}
                how |= {"checkpointing": checkpointing, "reduce_each": reduce_each}
                yield replace(base, **how), settings | more


def layout_rows(recipe: Recipe, vocab: int, machine: Machine) -> tuple[list[LayoutRow], str]:
    """The fastest layouts that fit, one for each combination of tensor, context and pipeline; or why
    none fits.

    Of layouts within about ALIKE of each other the simplest is first: with the fewest parts, without
    recomputation, with the least sharding, and with the largest micro-batch.
    """
    if (usable := machine.device.usable_bytes) is None:
        return [], "the device's memory is unknown"
    speeds, timed, kind = machine.speeds(recipe), list[tuple[Any, ...]](), recipe.optim.kind
    bucket = recipe.parallel.bucket_mb
    for layout, settings in layouts(recipe, machine):
        step = slowest(recipe.model, vocab, layout, speeds, kind, bucket_mb=bucket)
        about = round(math.log(step.total) / ALIKE)
        parts = layout.model_ranks, layout.pipeline, layout.context
        cost = CHECKPOINTING.index(layout.checkpointing), [*STRATEGIES].index(layout.strategy)
        timed.append(((about, parts, cost, -layout.micro_batch), layout, settings, step))
    timed.sort(key=lambda one: one[0])
    fitting, done = list[LayoutRow](), set[tuple[int, ...]]()
    least = list[Any]()
    for _, layout, settings, step in timed:
        division = layout.tensor, layout.context, layout.pipeline
        if division in done:
            continue
        peak = memory(recipe.model, vocab, layout, recipe.optim.kind)
        if peak.total <= usable:
            fitting.append(_row(recipe, vocab, machine, layout, settings, peak, step))
            done.add(division)
        elif not least or peak.total < least[0]:
            least = [peak.total, settings]
        if len(fitting) == ROWS:
            break
    return fitting, "" if fitting else _nothing_fits(recipe, machine, usable, least)


def _row(
    recipe: Recipe,
    vocab: int,
    machine: Machine,
    layout: Layout,
    settings: Settings,
    peak: Memory,
    step: StepTime,
) -> LayoutRow:
    every = works(recipe.model, vocab, layout, recipe.parallel.bucket_mb)
    sent = [work.bytes_sent() for work in every]
    most = {link: max(one[link] for one in sent) for link in LINKS}
    changes = _changes(recipe, settings, layout.world)
    own = _is_own(recipe, vocab, layout, machine)
    times = (step.compute, step.communication, step.bubble)
    return LayoutRow(layout, peak, *times, most, changes, own)


def _changes(recipe: Recipe, settings: Settings, world: int) -> Settings:
    """The settings that differ from the recipe's."""
    before = recipe.flat()
    if before["parallel.strategy"] == "auto":
        before["parallel.strategy"] = "ddp" if world > 1 else "single"
    return {key: value for key, value in settings.items() if before[key] != value}


def _is_own(recipe: Recipe, vocab: int, layout: Layout, machine: Machine) -> bool:
    """Whether a recipe has this layout already."""
    try:
        own = layout_on(recipe, vocab, layout.world, machine.device, layout.precision)
    except UserError:
        return False
    return own == layout


def _nothing_fits(recipe: Recipe, machine: Machine, usable: int, least: list[Any]) -> str:
    """Which layout is the closest, and what it lacks."""
    ranks = plural(machine.world, "rank")
    if not least:
        problem = f"no layout divides the model and train.global_batch among {ranks}"
        return f"{problem}: use another number of ranks, or another batch"
    size, settings = least
    changes = _changes(recipe, settings, machine.world)
    closest = " ".join(f"{key}={typed(value)}" for key, value in changes.items())
    lacks = f"{size / 1e9:.3g} GB of {usable / 1e9:.3g} GB, {(size - usable) / 1e9:.3g} GB too much"
    problem = f"no layout of {ranks} fits. The closest ({closest or 'as it is'}) takes {lacks}"
    return f"{problem}. Under the memory above are settings that fit, if there are any"
