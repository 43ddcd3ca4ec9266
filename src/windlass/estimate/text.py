"""A plan as text for a terminal: size, memory, time, milestones, disk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from windlass.data.describe import mixture_table, repeated
from windlass.errors import UserError, plural
from windlass.estimate.devices import USABLE
from windlass.estimate.layouts import NETWORK, MemoryRow, Settings, settings_of
from windlass.estimate.memory import PARTS, Memory, memory
from windlass.estimate.subject import Subject, with_sizes
from windlass.model.size import CountedSizes, describe_network, trainable
from windlass.recipe import Recipe, typed
from windlass.telemetry.measures import duration, short
from windlass.telemetry.terminal import pairs, table

if TYPE_CHECKING:
    from rich.console import Console


def recommend(rows: list[MemoryRow], subject: Subject) -> tuple[Settings, str]:
    """The settings of the cheapest layout that fits, and the reason; empty if nothing is known."""
    usable, micro_batch = subject.device.usable_bytes, subject.recipe.train.micro_batch
    if usable is None:
        return {}, "the device's memory is unknown: give --memory GB"
    if rows[0].largest_micro_batch is None:  # the activations are unknown
        return {}, ""
    fitting = [row for row in rows if row.fits and micro_batch]
    fitting += [row for row in rows if row.largest_micro_batch]
    if not fitting:
        return advise(Planned(subject), usable)
    row = fitting[0]
    size = micro_batch if row.fits and micro_batch else row.largest_micro_batch or 0
    layout = replace(row.layout, micro_batch=size)
    given = ("parallel.tensor", "parallel.context", "parallel.pipeline")
    settings = {k: v for k, v in settings_of(layout).items() if v and k not in given}
    host = f"; {row.memory.host / 1e9:.3g} GB of the host's memory" if layout.offload else ""
    return settings, f"the cheapest that fits{host}"


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


class Planned:
    def __init__(self, subject: Subject):
        self.subject = subject
        # By network and micro-batch; 0: of any micro-batch.
        self.counted = {(self._network(subject.recipe), 0): subject.counted}

    @staticmethod
    def _network(recipe: Recipe) -> str:
        """The settings that determine a model's weights and activations."""
        checkpointing = recipe.parallel.activation_checkpointing
        return f"{recipe.model!r} {checkpointing} {recipe.train.master}"

    def __call__(self, settings: Settings) -> Memory | None:
        """The fullest rank's memory; None if these settings are not valid, or it is unknown."""
        try:
            recipe = self.subject.recipe.replace(settings)
            recipe.batch(self.subject.world, self.subject.device.kind)
            subject = replace(self.subject, recipe=recipe)
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


def advise(planned: Planned, usable: int) -> tuple[Settings, str]:
    """Changes with which a recipe fits into `usable` bytes, and the memory of a rank then.

    Each change stays that lowers the memory, until the recipe fits; then the unnecessary ones go.
    """
    subject, recipe = planned.subject, planned.subject.recipe
    settings: Settings = {}
    least = planned(settings)
    changes = savings(recipe, subject.world, subject.device.kind == "cuda", subject.counted)
    smallest: Settings = {"train.micro_batch": recipe.parallel.pipeline}
    for change in (smallest, *changes):
        peak = planned(settings | change)
        if peak is not None and (least is None or peak.total < least.total):
            least, settings = peak, settings | change
        if least is not None and least.total <= usable:
            break
    if least is None:
        return {}, ""
    if least.total > usable:
        how = f" with {pasted(settings)}" if settings else ""
        problem = f"nothing fits: the least is {least.total / 1e9:.3g} GB{how}"
        device = f"a device with more than {least.total / USABLE / 1e9:.3g} GB"
        return {}, f"{problem}; use {device}, or more ranks with parallel.strategy=full_shard"
    for key in list(settings):
        fewer = {other: value for other, value in settings.items() if other != key}
        peak = planned(fewer)
        if peak is not None and peak.total <= usable:
            least, settings = peak, fewer
    size = f"{least.total / 1e9:.3g} GB"
    host = f" and {least.host / 1e9:.3g} GB of the host's memory" if least.host else ""
    return settings, f"nothing fits as it is; with these a rank takes {size}{host}"


def pasted(settings: Settings) -> str:
    return " ".join(f"{key}={typed(value)}" for key, value in settings.items())


def print_plan(plan: Any, console: Console) -> None:
    """Print a `Plan`, with the reason for every unknown number."""
    title = f"{plan.recipe} ({plan.config_hash})"
    if plan.state:
        title = f"{plan.run_dir}: {plan.state}, step {plan.done:,} of {plan.steps:,}"
    _section(console, title, _facts(plan))
    if plan.memory:
        _print_memory(plan, console)
    if plan.layouts or plan.layouts_advice:
        _print_layouts(plan, console)
    if plan.steps is None or plan.done < plan.steps:
        _section(console, "Time", _time(plan))
    if plan.milestones:
        cells = []
        for m in plan.milestones:
            seconds = (m.first_seconds, m.last_seconds)
            unknown = "?" if plan.speed else ""  # an empty column is not shown
            first, last = (unknown if s is None else duration(s) if s else "now" for s in seconds)
            more = (f"{m.left:,}", f"{m.last:,}", last) if m.left > 1 else ("", "", "")
            cells.append((m.what, f"{m.first:,}", first, *more))
        head = ("what", "next at step", "in", "left", "last at step", "in")
        _section(console, "Milestones", [], head, cells)
    if size := plan.size.checkpoint_bytes:
        one = f"{size / 1e9:.4g} GB, of which a save holds a copy in host memory"
        disk = [("a checkpoint", one)]
        if plan.checkpoints:
            total = f"{plan.checkpoints * size / 1e9:.4g} GB"
            disk.append(("in all", f"at most {plan.checkpoints:,} at a time: {total}"))
        elif why := plan.unknown.get("checkpoints"):
            disk.append(("in all", f"unknown, because {why}"))
        _section(console, "Disk", disk)


def _facts(plan: Any) -> list[tuple[str, str]]:
    size, ranks = plan.size, f"{plan.world} rank{'s' * (plan.world != 1)}"
    facts = {"ranks": f"{ranks} on {plan.device.name}, {plan.precision}"}
    if size.parameters is not None:
        inside = size.non_embedding
        within = "" if inside is None else f" ({inside:,} in blocks and norms)"
        facts["parameters"] = f"{size.parameters:,}{within}"
    if size.trained != size.parameters:
        part = trainable(size.trained or 0, size.parameters or 0)
        facts["trainable"] = f"{part}: the rest has neither gradients nor optimizer state"
    facts["network"] = describe_network(size.network) if size.network else ""
    if "size" in plan.unknown:
        facts["unknown"] = f"parameters, FLOPs, memory, checkpoint size: {plan.unknown['size']}"
    if plan.steps is None:
        facts["length"] = plan.unknown["steps"]
    else:
        steps = f"{plural(plan.steps, 'step')} x {plan.tokens_per_step:,.0f} tokens"
        steps += f" = {short(plan.tokens or 0)}"
        if plan.tokens_per_step != plan.padded_tokens_per_step:
            share = 100 * plan.tokens_per_step / plan.padded_tokens_per_step
            steps += f" ({share:.0f} % of {plan.padded_tokens_per_step:,.0f} with padding)"
        facts["length"] = steps + "; padding is unknown and not counted" * plan.taken_as_full
    if plan.optimal_tokens and size.parameters:
        rule = f"D = {plan.optimal_tokens / size.parameters:.4g} N = {plan.optimal_tokens:,} tokens"
        facts["optimal"] = f"{rule} = {plural(plan.optimal_steps, 'step')}"
        if plan.tokens:
            ratio = plan.tokens / size.parameters
            facts["optimal"] += f"; this run has {ratio:.3g} tokens a parameter"
    why = plan.unknown.get("epochs", "")
    facts["epochs"] = f"{plan.epochs:.3g}" if plan.epochs else f"unknown{': ' * bool(why)}{why}"
    facts["mixture"] = mixture_table(plan.mixture) if plan.mixture else ""
    facts["repeated"] = "\n".join(repeated(plan.mixture))
    if size.flops_per_token:
        total = f"; {plan.flops:.2e} in all" if plan.flops else ""
        facts["FLOPs"] = f"{short(size.flops_per_token)} a token{total}"
    return [(name, text) for name, text in facts.items() if text]


def _print_memory(plan: Any, console: Console) -> None:
    rows, usable, first = plan.memory, plan.device.usable_bytes, plan.memory[0].layout
    most, ours = max(row.memory.total for row in rows), plan.size.non_embedding is not None
    measured = rows[0].memory.at == "measured"
    unit, size = _unit(most)
    cells = []
    for row in rows:
        shown = [f"{getattr(row.memory, part) / size:,.1f}" for part in (*PARTS, "total")]
        shown[-2] *= row.memory.average > 0  # an empty column is not shown
        if not ours and not measured:
            shown[3:6] = ["?"] * 3
        largest = "?" if row.largest_micro_batch is None else str(row.largest_micro_batch or "-")
        strategy = "offload" if row.layout.offload else row.layout.strategy
        strategy += " *" * row.chosen
        fits = {True: "yes", False: "no", None: "?"}[row.fits]
        cells.append((strategy, row.layout.checkpointing, *shown, fits, largest))
    notes = ["The table is computed, not measured. *: the recipe's own layout."]
    most = f"{first.share or first.micro_batch * first.accumulation:,}"
    samples = f"{most}, the sequences of a rank in a step"
    notes.append(f"max: the largest micro-batch that fits; at most {samples}.")
    if measured:
        notes.append("act includes the logits; a pass with fake tensors and CPU kernels gave it.")
    elif not ours:
        why = plan.unknown.get("activations", "")
        notes[1:] = [f"The activations of this model are unknown: {why}"]
    if host := max(row.memory.host for row in rows):
        notes.append(f"offload: sharded, with {host / 1e9:.3g} GB of host memory in addition")
    settings = pasted(plan.recommended) if plan.recommended else ""
    if plan.advice:
        notes.append(f"Recommended ({plan.advice}): {settings}" if settings else plan.advice)
    micro = f"micro-batch {first.micro_batch}, {first.accumulation} a step"
    budget = f"budget {usable / 1e9:.3g} GB" if usable else "budget unknown"
    title = f"Peak memory of a rank in {unit}: {micro}, {first.precision}, {budget}"
    parts = ("param", "grad", "optim", "act", "logit", "buf", "avg")
    head = ("strategy", "act ckpt", *parts, "all", "fits", "max")
    _section(console, title, [], head, cells, text_columns=2, notes=notes)


def _print_layouts(plan: Any, console: Console) -> None:
    rows, title = plan.layouts, f"Layouts of {plan.world} ranks"
    if not rows:
        _section(console, title, [], notes=[plan.layouts_advice])
        return
    unit, size = _unit(max(row.memory.total for row in rows))
    cells = []
    for row in rows:
        one = row.layout
        numbers = (one.tensor, one.context, one.pipeline)
        cells.append(
            (
                " ".join(f"{number:>2}" for number in numbers) + " *" * row.chosen,
                one.strategy,
                one.checkpointing,
                str(one.micro_batch),
                f"{1e3 * row.seconds:,.0f}",
                f"{row.memory.total / size:,.1f}",
            )
        )
    head = ("tp cp pp", "strategy", "act ckpt", "micro", "ms", "all")
    notes = [
        "Each row is the fastest layout of its tp, cp and pp; within 2 % the simplest.",
        f"ms: predicted for full rows, with {NETWORK / 1e9:g} GB/s per rank between hosts.",
        f"First row: {pasted(rows[0].settings) or 'the recipe'}",
    ]
    title += f" that fit, memory of the fullest rank in {unit}"
    _section(console, title, [], head, cells, 3, notes)


def _unit(most: float) -> tuple[str, float]:
    return ("GB", 1e9) if most >= 2e9 else ("MB", 1e6)


def _time(plan: Any) -> list[tuple[str, str]]:
    speed = plan.speed
    if speed is None:
        return [("to the end", f"unknown: {plan.unknown['time']}")]
    end = plan.unknown.get("steps", "")
    if plan.seconds is not None:
        end = f"{duration(plan.seconds)}, {plan.device_hours:.3g} device-hours ({speed.basis})"
        if speed.range:
            low, high = (plan.seconds / factor for factor in speed.range[::-1])
            end += f"; {duration(low)} to {duration(high)} by the range below"
    milliseconds = 1e3 * (plan.seconds_per_step or 0)
    step = f"{speed.tokens_per_s:,.0f} tokens/s, {milliseconds:,.0f} ms a step"
    missing = ", ".join(f"{what}s" for what in plan.not_counted)
    more = [("without", f"{missing}, whose time was not measured")] if missing else []
    return [("to the end", end), ("from", speed.detail), ("speed", step), *more]


def _section(
    console: Console,
    title: str,
    facts: Sequence[tuple[str, str]],
    head: Sequence[str] = (),
    rows: Sequence[Sequence[str]] = (),
    text_columns: int = 1,
    notes: Sequence[str] = (),
) -> None:
    from rich.text import Text

    console.print(Text(title, style="bold"))
    if facts:
        console.print(pairs(facts, indent="  ", style="dim"))
    if rows:
        text = head[:text_columns]
        console.print(table(head, rows, console.width, text=text, keys=text_columns))
    for note in notes:
        console.print(Text(note, style="italic"))
    console.print()
