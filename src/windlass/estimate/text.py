"""A plan as text for a terminal: size, memory, time, milestones, disk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from windlass.data.open import mixture_table, repeated
from windlass.errors import UserError, plural
from windlass.estimate.devices import TIGHT, USABLE
from windlass.estimate.layouts import NETWORK, MemoryRow, Settings, settings_of
from windlass.estimate.memory import PARTS, Memory, memory
from windlass.estimate.rank import LINKS
from windlass.estimate.subject import Subject, with_sizes
from windlass.model.size import CountedSizes, describe_network, trainable
from windlass.recipe import Recipe, typed
from windlass.telemetry.measures import duration, short
from windlass.telemetry.terminal import pairs, table

if TYPE_CHECKING:
    from rich.console import Console

MOST_RANKS = 64  # that the advice tries


def recommend(rows: list[MemoryRow], subject: Subject) -> tuple[Settings, str]:
    """The settings of the cheapest layout that fits, and the reason; empty if nothing is known."""
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
    largest = row.largest_micro_batch or 0
    layout = replace(row.layout, micro_batch=largest if smaller else micro_batch or largest)
    given = ("parallel.tensor", "parallel.context", "parallel.pipeline")
    settings = {k: v for k, v in settings_of(layout).items() if k not in given}
    settings = {k: v for k, v in settings.items() if v not in (False, "auto")}
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
        # The devices or the number of ranks that would suffice.
        settings, world = merged(taken), 2 * subject.world
        advice = f"use a device with more than {least.total / USABLE / 1e9:.3g} GB"
        sharded = settings | {"parallel.strategy": "full_shard"}
        while world <= MOST_RANKS:
            peak = planned(sharded, world)
            if peak is not None and peak.total <= usable:
                advice += f", or {world} ranks with parallel.strategy=full_shard"
                break
            world *= 2
        how = f" with {pasted(settings)}" if settings else ""
        return {}, f"nothing fits: the least is {least.total / 1e9:.3g} GB{how}; {advice}"
    settings = merged(taken)
    for key in list(settings):
        fewer = {other: value for other, value in settings.items() if other != key}
        peak = planned(fewer)
        if peak is not None and peak.total <= usable:
            least, settings = peak, fewer
    size = f"{least.total / 1e9:.3g} GB"
    host = f" and {least.host / 1e9:.3g} GB of the host's memory" if least.host else ""
    return settings, f"nothing fits as it is; with these a rank takes {size}{host}"


def merged(changes: list[Settings]) -> Settings:
    return {key: value for change in changes for key, value in change.items()}


def pasted(settings: Settings) -> str:
    return " ".join(f"{key}={typed(value)}" for key, value in settings.items())


EACH = " each"


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
        disk = [
            ("a checkpoint", f"{_scaled(size, 'B')}, of which a save holds a copy in host memory")
        ]
        if plan.checkpoints:
            total = _scaled(plan.checkpoints * size, "B")
            disk.append(("in all", f"at most {plan.checkpoints:,} at a time: {total}"))
        elif why := plan.unknown.get("checkpoints"):
            disk.append(("in all", f"unknown, because {why}"))
        if plan.tokens_bytes:
            disk.append(("tokens", f"about {_scaled(plan.tokens_bytes, 'B')} of training data"))
        _section(console, "Disk", disk)


def _facts(plan: Any) -> list[tuple[str, str]]:
    size, ranks = plan.size, f"{plan.world} rank{'s' * (plan.world != 1)}"
    parts = ", ".join(f"{name.replace('_', '-')} {n:,}" for name, n in size.parts.items() if n)
    facts = {"ranks": f"{ranks} on {plan.device.name}, {plan.precision}"}
    if size.parameters is not None:
        inside = size.non_embedding
        within = "" if inside is None else f" ({inside:,} in blocks and norms)"
        facts["parameters"] = f"{size.parameters:,}{within}"
    facts |= {"by part": parts}
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
    if plan.schedule_steps:
        longer = plan.schedule_steps > plan.steps
        end = "the run ends earlier" if longer else "the final learning rate holds afterwards"
        facts["schedule"] = f"{plural(plan.schedule_steps, 'step')}: {end}"
    if plan.optimal_tokens and size.parameters:
        rule = f"D = {plan.optimal_tokens / size.parameters:.4g} N = {plan.optimal_tokens:,} tokens"
        facts["optimal"] = f"{rule} = {plural(plan.optimal_steps, 'step')}"
        if plan.tokens:
            ratio = plan.tokens / size.parameters
            facts["optimal"] += f"; this run has {ratio:.3g} tokens a parameter"
    why = plan.unknown.get("epochs", "")
    facts["epochs"] = f"{plan.epochs:.3g}" if plan.epochs else f"unknown{': ' * bool(why)}{why}"
    facts["mixture"] = mixture_table(plan.mixture) if plan.mixture else ""
    facts["problem"] = plan.unknown.get("mixture", "")
    facts["repeated"] = "\n".join(repeated(plan.mixture))
    if plan.evaluations:
        facts |= {"evaluation": str(plan.evaluations), "warning": plan.evaluations.warning}
    if size.flops_per_token:
        total = f"; {plan.flops:.2e} in all" if plan.flops else ""
        facts["FLOPs"] = f"{_scaled(size.flops_per_token, 'FLOP')} a token{total}"
    return [(name, text) for name, text in facts.items() if text]


def _print_memory(plan: Any, console: Console) -> None:
    rows, usable, first = plan.memory, plan.device.usable_bytes, plan.memory[0].layout
    most, ours = max(row.memory.total for row in rows), plan.size.non_embedding is not None
    measured = rows[0].memory.at == "measured"
    unit, size, digits = _unit(most)
    cells = []
    for row in rows:
        shown = [f"{getattr(row.memory, part) / size:,.{digits}f}" for part in (*PARTS, "total")]
        shown[-2] *= row.memory.average > 0  # an empty column is not shown
        if not ours and not measured:
            shown[3:6] = ["?"] * 3
        largest = "?" if row.largest_micro_batch is None else str(row.largest_micro_batch or "-")
        strategy = "offload" if row.layout.offload else row.layout.strategy
        strategy += EACH * (row.layout.reduce_each is True) + " *" * row.chosen
        fits = "tight" if row.tight else {True: "yes", False: "no", None: "?"}[row.fits]
        cells.append((strategy, row.layout.checkpointing, *shown, fits, largest))
    notes = ["The table is computed, not measured. *: the recipe's own layout."]
    most = f"{first.share or first.micro_batch * first.accumulation:,}"
    samples = f"{most}, the sequences of a rank in a step"
    notes.append(f"max: the largest micro-batch that fits; at most {samples}.")
    if any(row.layout.reduce_each is True for row in rows):
        notes.append("each: parallel.reduce_each_micro_batch=true.")
    if any(row.tight for row in rows):
        most_used = f"{100 * USABLE:.0f} to {100 * TIGHT:.0f} % of the device"
        notes.append(f"tight: {most_used}; fragmentation of the allocator may end the run.")
    if measured:
        notes.append("act includes the logits; a pass with fake tensors and CPU kernels gave it.")
    elif not ours:
        why = plan.unknown.get("activations", "")
        notes[1:] = [f"The activations of this model are unknown: {why}"]
    if "." in plan.optimizer:
        notes.append(f"The plan assumes that {plan.optimizer} has as much state as AdamW.")
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
    strong = [i for i, row in enumerate(rows) if row.chosen]
    _section(console, title, [], head, cells, text_columns=2, strong=strong, notes=notes)


def _print_layouts(plan: Any, console: Console) -> None:
    rows, machine, title = plan.layouts, plan.machine, f"Layouts of {plan.world} ranks"
    if not rows:
        _section(console, title, [], notes=[plan.layouts_advice])
        return
    unit, size, digits = _unit(max(row.memory.total for row in rows))
    sent_unit, sent_size, places = _unit(max(max(row.sent.values()) for row in rows))
    cells = []
    for row in rows:
        one, peak = row.layout, row.memory
        states = peak.parameters + peak.gradients + peak.optimizer + peak.average
        parts = (states, peak.total - states, peak.total)
        numbers = (one.tensor, one.context, one.pipeline)
        cells.append(
            (
                " ".join(f"{number:>2}" for number in numbers) + " *" * row.chosen,
                one.strategy + EACH * (one.reduce_each is True),
                one.checkpointing,
                str(one.micro_batch),
                f"{1e3 * row.seconds:,.0f}" if machine.knows_peak else "",
                f"{100 * one.bubble:.0f}%" if one.pipeline > 1 else "",
                *(f"{part / size:,.{digits}f}" for part in parts),
                *(f"{n / sent_size:,.{places}f}" if n else "" for n in row.sent.values()),
            )
        )
    head = ("tp cp pp", "strategy", "act ckpt", "micro", "ms", "wait", "state", "act", "all")
    links = f"{machine.device.link / 1e9:g} GB/s inside a host"
    if machine.ranks_of_host:
        links += f" of {machine.ranks_of_host} ranks, {NETWORK / 1e9:g} GB/s per rank between hosts"
    how = f"ms: predicted for full rows as under Time, with {links}."
    if not machine.knows_peak:
        how = f"The order is a guess, because {plan.device.name} has no published peak."
    unchanged = "it is the recipe's own layout"
    notes = [
        f"Each row is the fastest layout of its tp, cp and pp; within 2 % the simplest. {how}",
        "wait: a pipeline's bubble. state: param, grad, optim, avg; act: act, logit and buf.",
        f"dp, tp, cp, pp: {sent_unit} that a rank gives to collectives and messages in a step.",
        f"First row: {pasted(rows[0].settings) or unchanged}",
    ]
    strong = [i for i, row in enumerate(rows) if row.chosen]
    title += f" that fit, memory of the fullest rank in {unit}"
    _section(console, title, [], (*head, *LINKS), cells, 3, strong, notes)


def _unit(most: float) -> tuple[str, float, int]:
    unit, size = ("GB", 1e9) if most >= 2e9 else ("MB", 1e6)
    limits = (100,) if unit == "MB" else (200, 20)
    return unit, size, sum(most < limit * size for limit in limits)


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


def _scaled(value: float, unit: str) -> str:
    sizes = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
    size, letter = next((pair for pair in sizes if value >= pair[0]), (1.0, ""))
    return f"{value / size:.4g} {letter}{unit}"


def _section(
    console: Console,
    title: str,
    facts: Sequence[tuple[str, str]],
    head: Sequence[str] = (),
    rows: Sequence[Sequence[str]] = (),
    text_columns: int = 1,
    strong: Sequence[int] = (),
    notes: Sequence[str] = (),
) -> None:
    from rich.text import Text

    console.print(Text(title, style="bold"))
    if facts:
        console.print(pairs(facts, indent="  ", style="dim"))
    if rows:
        styles = ["bold cyan" if i in strong else "" for i in range(len(rows))]
        options: dict[str, Any] = {"text": head[:text_columns], "keys": text_columns}
        console.print(table(head, rows, console.width, styles=styles, **options))
    for note in notes:
        console.print(Text(note, style="italic"))
    console.print()
