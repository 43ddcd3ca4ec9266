"""A plan as text for a terminal: what is it, does it fit, how long, what happens when, how much disk."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from windlass.estimate.memory import PARTS
from windlass.model.size import describe_network, trainable
from windlass.recipe import typed
from windlass.telemetry.console import duration, short
from windlass.telemetry.terminal import pairs, table

if TYPE_CHECKING:
    from rich.console import Console

Fact = tuple[str, str]


def print_plan(plan: Any, console: Console) -> None:
    """Print a `Plan`; what is not known is shown with its reason."""
    title = f"{plan.recipe} ({plan.config_hash})"
    if plan.state:
        title = f"{plan.run_dir}: {plan.state}, step {plan.done:,} of {plan.steps:,}"
    _section(console, title, _facts(plan))
    if plan.memory:
        _print_memory(plan, console)
    if plan.steps is None or plan.done < plan.steps:
        _section(console, "Time", _time(plan))
    if plan.milestones:
        seconds = [(m.first_seconds, m.last_seconds) for m in plan.milestones]
        times = [
            ["?" if s is None else duration(s) if s else "now" for s in pair] for pair in seconds
        ]
        cells = [
            (
                m.what,
                f"{m.first:,}",
                first,
                *((f"{m.left:,}", f"{m.last:,}", last) if m.left > 1 else ("", "", "")),
            )
            for m, (first, last) in zip(plan.milestones, times, strict=True)
        ]
        _section(
            console,
            "Milestones",
            [],
            ("what", "next at step", "in", "left", "last at step", "in"),
            cells,
        )
    if size := plan.size.checkpoint_bytes:
        disk = [("a checkpoint", _scaled(size, "B"))]
        if plan.checkpoints:
            disk.append(
                (
                    "in all",
                    f"at most {plan.checkpoints:,} at a time: {_scaled(plan.checkpoints * size, 'B')}",
                )
            )
        if plan.tokens_bytes:
            disk.append(("tokens", f"about {_scaled(plan.tokens_bytes, 'B')} (data.max_tokens)"))
        _section(console, "Disk", disk)


def _facts(plan: Any) -> list[Fact]:
    size = plan.size
    facts = [
        (
            "ranks",
            f"{plan.world} rank{'s' * (plan.world != 1)} on {plan.device.name}, {plan.precision}",
        )
    ]
    if size.parameters is not None:
        within = (
            "" if size.non_embedding is None else f" ({size.non_embedding:,} in blocks and norms)"
        )
        facts.append(("parameters", f"{size.parameters:,}{within}"))
    if size.parts:
        facts.append(
            (
                "",
                ", ".join(f"{name.replace('_', '-')} {n:,}" for name, n in size.parts.items() if n),
            )
        )
    if size.trained != size.parameters:
        what = trainable(size.trained or 0, size.parameters or 0)
        facts.append(("trainable", f"{what}: the rest has neither gradients nor optimizer state"))
    if plan.export:
        facts.append(("export", plan.export))
    if size.network:
        facts.append(("network", describe_network(size.network)))
    if "size" in plan.unknown:
        facts.append(
            (
                "unknown",
                f"parameters in all, FLOPs, memory, checkpoint size: {plan.unknown['size']}",
            )
        )
    if plan.steps is None:
        facts.append(("length", plan.unknown["steps"]))
    else:
        tokens = (
            f"{plan.steps:,} steps x {plan.tokens_per_step:,.0f} tokens = {short(plan.tokens or 0)}"
        )
        if plan.tokens_per_step != plan.padded_tokens_per_step:
            share = 100 * plan.tokens_per_step / plan.padded_tokens_per_step
            tokens += f" (real ones: {share:.0f} % of {plan.padded_tokens_per_step:,} with padding)"
        facts.append(("length", tokens + "; samples are taken as full" * plan.taken_as_full))
    if plan.schedule_steps:
        longer = plan.schedule_steps > plan.steps
        end = "the run ends before it" if longer else "its last learning rate holds from there on"
        facts.append(("schedule", f"of {plan.schedule_steps:,} steps: {end}"))
    if plan.optimal_tokens and size.parameters:
        ratio = (
            f"; this run has {plan.tokens / size.parameters:.3g} tokens a parameter"
            if plan.tokens
            else ""
        )
        rule = f"D = {plan.optimal_tokens / size.parameters:.4g} N"
        facts.append(
            (
                "optimal",
                f"{rule} = {plan.optimal_tokens:,} tokens = {plan.optimal_steps:,} steps{ratio}",
            )
        )
    facts.append(
        ("epochs", f"{plan.epochs:.3g}" if plan.epochs else plan.unknown.get("epochs", "unknown"))
    )
    if plan.evaluations:
        facts.append(("evaluation", str(plan.evaluations)))
        facts += [("", plan.evaluations.warning)] if plan.evaluations.warning else []
    if size.flops_per_token:
        flops = f"{_scaled(size.flops_per_token, 'FLOP')} a token"
        facts.append(("FLOPs", flops + (f"; {plan.flops:.2e} in all" if plan.flops else "")))
    return facts


def _print_memory(plan: Any, console: Console) -> None:
    """The memory of a rank by strategy and activation checkpointing, and what is recommended."""
    rows, usable, first = plan.memory, plan.device.usable_bytes, plan.memory[0].layout
    most, ours = max(row.memory.total for row in rows), plan.size.non_embedding is not None
    measured = rows[0].memory.at == "measured"
    unit, size = ("GB", 1e9) if most >= 2e9 else ("MB", 1e6)
    digits = sum(most < limit * size for limit in ((100,) if unit == "MB" else (200, 20)))
    cells = []
    for row in rows:
        shown = [f"{getattr(row.memory, part) / size:,.{digits}f}" for part in (*PARTS, "total")]
        if not ours and not measured:
            shown[3:6] = ["?"] * 3
        largest = "?" if row.largest_micro_batch is None else str(row.largest_micro_batch or "-")
        strategy = ("offload" if row.layout.offload else row.layout.strategy) + " *" * row.chosen
        fits = {True: "yes", False: "no", None: "?"}[row.fits]
        cells.append((strategy, row.layout.checkpointing, *shown, fits, largest))
    notes = ["max: the largest micro-batch that fits. *: the recipe's own layout."]
    if measured:
        notes.append(
            "act has the logits, and is measured: a pass with fake tensors and the kernels of a CPU."
        )
    elif not ours:
        model, why = (
            "a Hugging Face model, and with model.freeze,",
            plan.unknown.get("activations", ""),
        )
        notes = [
            f"Of {model} weights, gradients and AdamW state are known, activations are not: {why}"
        ]
    if plan.optimizer.startswith("torch."):
        notes.append(f"The state of {plan.optimizer} is taken to be as large as AdamW's.")
    if host := max(row.memory.host for row in rows):
        notes.append(f"offload: sharded, with {host / 1e9:.3g} GB more of the host's memory")
    settings = " ".join(f"{key}={typed(value)}" for key, value in plan.recommended.items())
    if plan.advice:
        notes.append(f"Recommended ({plan.advice}): {settings}" if settings else plan.advice)
    micro = f"micro-batch {first.micro_batch}, {first.accumulation} a step"
    budget = f"budget {usable / 1e9:.3g} GB" if usable else "budget unknown"
    title = (
        f"Memory of a rank at the peak of a step in {unit}: {micro}, {first.precision}, {budget}"
    )
    head = (
        "strategy",
        "act ckpt",
        "param",
        "grad",
        "optim",
        "act",
        "logit",
        "buf",
        "all",
        "fits",
        "max",
    )
    strong = [i for i, row in enumerate(rows) if row.chosen]
    _section(console, title, [], head, cells, text_columns=2, strong=strong, notes=notes)


def _time(plan: Any) -> list[Fact]:
    speed = plan.speed
    if speed is None:
        return [("to the end", f"unknown: {plan.unknown['time']}")]
    end = plan.unknown.get("steps", "")
    if plan.seconds is not None:
        end = f"{duration(plan.seconds)}, {plan.device_hours:.3g} device-hours ({speed.basis})"
    step = (
        f"{speed.tokens_per_s:,.0f} tokens/s, {1e3 * (plan.seconds_per_step or 0):,.0f} ms a step"
    )
    missing = ", ".join(f"{what}s" for what in plan.not_counted)
    more = [("not in it", f"{missing}: their time was not measured")] if missing else []
    return [("to the end", end), ("from", speed.detail), ("speed", step), *more]


def _scaled(value: float, unit: str) -> str:
    sizes = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
    size, letter = next((pair for pair in sizes if value >= pair[0]), (1.0, ""))
    return f"{value / size:.4g} {letter}{unit}"


def _section(
    console: Console,
    title: str,
    facts: Iterable[Fact],
    head: Sequence[str] = (),
    rows: Sequence[Sequence[str]] = (),
    text_columns: int = 1,
    strong: Sequence[int] = (),
    notes: Sequence[str] = (),
) -> None:
    """Print a title, facts as pairs, a table whose first columns are text, and notes."""
    from rich.text import Text

    console.print(Text(title, style="bold"))
    if facts := list(facts):
        console.print(pairs(facts, indent="  ", style="dim"))
    if rows:
        styles = ["bold cyan" if i in strong else "" for i in range(len(rows))]
        console.print(
            table(
                head,
                rows,
                console.width,
                text=head[:text_columns],
                styles=styles,
                keys=text_columns,
            )
        )
    for note in notes:
        console.print(Text(note, style="italic"))
    console.print()
