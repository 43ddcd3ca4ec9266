"""A plan as text for a terminal: size, memory, time, disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from windlass.data.describe import mixture_table, repeated
from windlass.errors import plural
from windlass.estimate.advice import amount, pasted
from windlass.estimate.inputs import NETWORK
from windlass.estimate.memory import PARTS
from windlass.model.size import describe_network, trainable
from windlass.telemetry.measures import duration, short, show
from windlass.telemetry.terminal import pairs, table

if TYPE_CHECKING:
    from rich.console import Console


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
    if size := plan.size.checkpoint_bytes:
        one = f"{amount(size)}, of which a save holds a copy in host memory"
        disk = {"a checkpoint": one}
        if plan.checkpoints:
            total = amount(plan.checkpoints * size)
            disk["in all"] = f"at most {plan.checkpoints:,} at a time: {total}"
        elif why := plan.unknown.get("checkpoints"):
            disk["in all"] = f"unknown, because {why}"
        _section(console, "Disk", disk)


def _facts(plan: Any) -> dict[str, str]:
    size = plan.size
    facts = {"ranks": f"{plural(plan.world, 'rank')} on {plan.device.name}, {plan.precision}"}
    if size.parameters is not None:
        facts["parameters"] = f"{size.parameters:,}"
        if size.non_embedding is not None:
            facts["parameters"] += f" ({size.non_embedding:,} in blocks and norms)"
    if size.trained != size.parameters:
        part = trainable(size.trained or 0, size.parameters or 0)
        facts["trainable"] = f"{part}: the rest has neither gradients nor optimizer state"
    if size.network:
        facts["network"] = describe_network(size.network)
    if "size" in plan.unknown:
        facts["unknown"] = f"parameters, FLOPs, memory, checkpoint size: {plan.unknown['size']}"
    facts["length"] = plan.unknown.get("steps", "")
    if plan.steps is not None:
        steps = f"{plural(plan.steps, 'step')} x {plan.tokens_per_step:,.0f} tokens"
        facts["length"] = f"{steps} = {short(plan.tokens or 0)}"
        if plan.tokens_per_step != plan.padded_tokens_per_step:
            share = 100 * plan.tokens_per_step / plan.padded_tokens_per_step
            padded = f"{plan.padded_tokens_per_step:,.0f} with padding"
            facts["length"] += f" ({share:.0f} % of {padded})"
    if plan.optimal_tokens and size.parameters:
        rule = f"D = {plan.optimal_tokens / size.parameters:.4g} N = {plan.optimal_tokens:,} tokens"
        facts["optimal"] = f"{rule} = {plural(plan.optimal_steps or 0, 'step')}"
        if plan.tokens:
            ratio = show(plan.tokens / size.parameters, "digits")
            facts["optimal"] += f"; this run has {ratio} tokens a parameter"
    if plan.epochs:
        facts["epochs"] = show(plan.epochs, "digits")
    else:
        facts["epochs"] = ": ".join(filter(None, ["unknown", plan.unknown.get("epochs")]))
    if plan.mixture:
        facts["mixture"] = mixture_table(plan.mixture)
    facts["repeated"] = "\n".join(repeated(plan.mixture))
    if size.flops_per_token:
        facts["FLOPs"] = f"{short(size.flops_per_token)} a token"
        if plan.flops:
            facts["FLOPs"] += f"; {plan.flops:.2e} in all"
    return facts


def _print_memory(plan: Any, console: Console) -> None:
    rows, first = plan.memory, plan.memory[0].layout
    measured, ours = rows[0].memory.at == "measured", plan.size.non_embedding is not None
    unit, size = _unit(max(row.memory.total for row in rows))
    cells = []
    for row in rows:
        parts = {part: f"{getattr(row.memory, part) / size:,.1f}" for part in (*PARTS, "total")}
        if not row.memory.average:
            parts["average"] = ""  # an empty column is not shown
        if not ours and not measured:
            parts |= dict.fromkeys(("activations", "logits", "buffers"), "?")
        strategy = "offload" if row.layout.offload else row.layout.strategy
        strategy += " *" if row.chosen else ""
        fits = {True: "yes", False: "no", None: "?"}[row.fits]
        largest = "?" if row.largest_micro_batch is None else str(row.largest_micro_batch or "-")
        place = (strategy, row.layout.checkpointing)
        cells.append((*place, *parts.values(), fits, largest))
    notes = ["The table is computed, not measured. *: the recipe's own layout."]
    if ours or measured:
        most = f"at most {first.samples:,}, the sequences of a rank in a step"
        notes.append(f"max: the largest micro-batch that fits; {most}.")
    else:
        why = plan.unknown.get("activations", "")
        notes.append(f"The activations of this model are unknown: {why}")
    if measured:
        notes.append("act includes the logits; a pass with fake tensors and CPU kernels gave it.")
    if host := max(row.memory.host for row in rows):
        notes.append(f"offload: sharded, with {amount(host)} of host memory in addition")
    if plan.recommended:
        notes.append(f"Recommended ({plan.advice}): {pasted(plan.recommended)}")
    elif plan.advice:
        notes.append(plan.advice)
    usable = plan.device.usable_bytes
    budget = f"budget {amount(usable)}" if usable else "budget unknown"
    micro = f"micro-batch {first.micro_batch}, {first.accumulation} a step"
    title = f"Peak memory of a rank in {unit}: {micro}, {first.precision}, {budget}"
    names = ("param", "grad", "optim", "act", "logit", "buf", "avg")
    head = ("strategy", "act ckpt", *names, "all", "fits", "max")
    _section(console, title, {}, head, cells, text_columns=2, notes=notes)


def _print_layouts(plan: Any, console: Console) -> None:
    rows, title = plan.layouts, f"Layouts of {plan.world} ranks"
    if not rows:
        _section(console, title, {}, notes=[plan.layouts_advice])
        return
    unit, size = _unit(max(row.memory.total for row in rows))
    cells = []
    for row in rows:
        one = row.layout
        division = f"{one.tensor:>2} {one.context:>2} {one.pipeline:>2}"
        numbers = (f"{1e3 * row.seconds:,.0f}", f"{row.memory.total / size:,.1f}")
        how = (one.strategy, one.checkpointing, str(one.micro_batch))
        cells.append((division, *how, *numbers))
    head = ("tp cp pp", "strategy", "act ckpt", "micro", "ms", "all")
    notes = [
        "Each row is the fastest layout of its tp, cp and pp; within 2 % the simplest.",
        f"ms: predicted for full rows, with {NETWORK / 1e9:g} GB/s per rank between hosts.",
        f"First row: {pasted(rows[0].settings) or 'the recipe'}",
    ]
    title += f" that fit, memory of the fullest rank in {unit}"
    _section(console, title, {}, head, cells, 3, notes)


def _unit(most: float) -> tuple[str, float]:
    return ("GB", 1e9) if most >= 2e9 else ("MB", 1e6)


def _time(plan: Any) -> dict[str, str]:
    speed = plan.speed
    if speed is None:
        return {"to the end": f"unknown: {plan.unknown['time']}"}
    end = plan.unknown.get("steps", "")
    if plan.seconds is not None:
        hours = show(plan.device_hours, "digits")
        end = f"{duration(plan.seconds)}, {hours} device-hours ({speed.basis})"
        if speed.range:
            slow, fast = speed.range
            times = f"{duration(plan.seconds / fast)} to {duration(plan.seconds / slow)}"
            end += f"; {times} by the range below"
    milliseconds = 1e3 * (plan.seconds_per_step or 0)
    step = f"{speed.tokens_per_s:,.0f} tokens/s, {milliseconds:,.0f} ms a step"
    ahead = ", ".join(plural(count, what) for what, count in plan.milestones.items())
    time = {"to the end": end, "from": speed.detail, "speed": step, "ahead": ahead}
    if plan.not_counted:
        missing = ", ".join(f"{what}s" for what in plan.not_counted)
        time["without"] = f"{missing}, whose time was not measured"
    return time


def _section(
    console: Console,
    title: str,
    facts: Mapping[str, str],
    head: Sequence[str] = (),
    rows: Sequence[Sequence[str]] = (),
    text_columns: int = 1,
    notes: Sequence[str] = (),
) -> None:
    from rich.text import Text

    console.print(Text(title, style="bold"))
    if facts:
        given = [(name, text) for name, text in facts.items() if text]
        console.print(pairs(given, indent="  ", style="dim"))
    if rows:
        text = head[:text_columns]
        console.print(table(head, rows, console.width, text=text, keys=text_columns))
    for note in notes:
        console.print(Text(note, style="italic"))
    console.print()
