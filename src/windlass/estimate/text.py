"""A plan as text for a terminal: what is it, does it fit, how long, what happens when, how much disk."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from windlass.estimate.memory import PARTS
from windlass.telemetry.console import duration, short

if TYPE_CHECKING:
    from rich.console import Console

    from windlass.estimate.plan import Plan

BASIS = {"projected": "projected, with the measured efficiency", "at best": "at best: no efficiency was measured"}

Fact = tuple[str, str]


def print_plan(plan: Plan, console: Console) -> None:
    """Print a plan; what is not known is shown with its reason."""
    progress = f"step {plan.length.done:,} of {plan.length.steps:,}" if plan.state else ""
    title = f"{plan.run_dir}: {plan.state}, {progress}" if plan.state else f"{plan.recipe} ({plan.config_hash})"
    _section(console, title, _facts(plan))
    if plan.memory:
        _memory(plan, console)
    if plan.length.steps is None or plan.length.done < plan.length.steps:
        _section(console, "Time", _time(plan))
        if plan.milestones:
            _milestones(plan, console)
    if plan.disk:
        _section(console, "Disk", _disk(plan))


def _facts(plan: Plan) -> list[Fact]:
    length, model, flops = plan.length, plan.model, plan.flops
    facts = [("ranks", f"{plan.world} rank{'s' * (plan.world != 1)} on {plan.device.name}, {plan.precision}")]
    if model:
        parts = ", ".join(f"{name.replace('_', '-')} {n:,}" for name, n in model.parts.items() if n)
        total = "" if model.parameters is None else f"{model.parameters:,}"
        within = "" if model.non_embedding is None else f"{model.non_embedding:,} in blocks and norms"
        facts.append(("parameters", f"{total} ({within})" if total and within else total or within))
        if parts:
            facts.append(("", parts))
        if model.trained != model.parameters:
            facts.append(("trained", f"{model.trained:,}: the adapters alone have gradients and optimizer state"))
    if "size" in plan.unknown:
        facts.append(("unknown", f"parameters in all, FLOPs, memory, checkpoint size: {plan.unknown['size']}"))
    if length.steps is None:
        facts.append(("length", plan.unknown["steps"]))
    else:
        tokens = f"{length.steps:,} steps x {length.tokens_per_step:,.0f} tokens = {short(length.tokens or 0)}"
        if length.tokens_per_step != length.padded_tokens_per_step:
            share = 100 * length.tokens_per_step / length.padded_tokens_per_step
            tokens += f" (real ones: {share:.0f} % of {length.padded_tokens_per_step:,} with padding)"
        facts.append(("length", tokens + ("; samples are taken as full" if length.taken_as_full else "")))
    if length.optimal_tokens:
        optimal = f"D = {length.optimal_ratio:g} N = {length.optimal_tokens:,} tokens = {length.optimal_steps:,} steps"
        ratio = length.tokens_per_parameter
        facts.append(("optimal", optimal + (f"; this run has {ratio:.3g} tokens a parameter" if ratio else "")))
    facts.append(("epochs", f"{length.epochs:.3g}" if length.epochs else plan.unknown.get("epochs", "unknown")))
    if flops:
        run = "" if flops.run is None else f"; {flops.run:.2e} in all"
        ways = f"{_flop(flops.per_token_6n)} a token by 6 N, {_flop(flops.per_token)} with attention{run}"
        facts.append(("FLOPs", ways))
    return facts


def _memory(plan: Plan, console: Console) -> None:
    """The memory of a rank by strategy and activation checkpointing, and what is recommended."""
    rows = plan.memory or []
    most, usable, ours = (
        max(row.memory.total for row in rows),
        plan.device.usable_bytes,
        plan.recommendation is not None,
    )
    unit, size = ("GB", 1e9) if most >= 2e9 else ("MB", 1e6)
    digits = sum(most < limit * size for limit in ((100,) if unit == "MB" else (200, 20)))
    first = rows[0].layout
    budget = f"budget {usable / 1e9:.3g} GB" if usable else "budget unknown"
    micro = f"micro-batch {first.micro_batch}, {first.accumulation} a step"
    title = f"Memory of a rank at the peak of a step in {unit}: {micro}, {first.precision}, {budget}"
    table = []
    for row in rows:
        shown = [f"{getattr(row.memory, part) / size:,.{digits}f}" for part in PARTS]
        if not ours:
            shown[3:] = ["?"] * 3
        largest = "?" if row.largest_micro_batch is None else str(row.largest_micro_batch or "-")
        fits = {True: "yes", False: "no", None: "?"}[row.fits]
        total = f"{row.memory.total / size:,.{digits}f}"
        table.append((row.layout.strategy, row.layout.checkpointing, *shown, total, fits, largest))
    head = ("strategy", "act ckpt", "param", "grad", "optim", "act", "logit", "buf", "all", "fits", "max")
    notes = ["max: the largest micro-batch that fits. The recipe's own layout is highlighted."]
    if not ours:
        notes = ["Of a Hugging Face model weights, gradients and AdamW state are known, activations are not."]
    if host := max(row.memory.host for row in rows):
        notes.append(f"offload: {host / 1e9:.3g} GB more of the host's memory")
    if plan.recommendation:
        settings = plan.recommendation.settings.items()
        words = " ".join(f"{key}={str(v).lower() if isinstance(v, bool) else v}" for key, v in settings)
        notes.append(f"Recommended ({plan.recommendation.why}): {words}" if words else plan.recommendation.why)
    chosen = [i for i, row in enumerate(rows) if row.chosen]
    _section(console, title, [], head, table, text_columns=2, strong=chosen, notes=notes)


def _time(plan: Plan) -> list[Fact]:
    if plan.time is None:
        return [("to the end", f"unknown: {plan.unknown['time']}")]
    time, speed, left = plan.time, plan.time.speed, plan.time.left
    basis = BASIS.get(speed.basis, speed.basis)
    end = f"{duration(left.seconds)}, {left.device_hours:.3g} device-hours ({basis})" if left else plan.unknown["steps"]
    facts = [
        ("to the end", end),
        ("from", speed.detail),
        ("speed", f"{speed.tokens_per_s:,.0f} tokens/s, {1e3 * time.seconds_per_step:,.0f} ms a step"),
    ]
    if left and left.not_counted:
        facts.append(
            ("not in it", f"{', '.join(f'{what}s' for what in left.not_counted)}: their time was not measured")
        )
    return facts


def _milestones(plan: Plan, console: Console) -> None:
    """What is still to come, with the time from now where a speed is known."""

    def time(seconds: float | None) -> str:
        return "?" if seconds is None else duration(seconds) if seconds else "now"

    table = []
    for m in plan.milestones or []:
        last = (f"{m.left:,}", f"{m.last:,}", time(m.last_seconds)) if m.left > 1 else ("", "", "")
        table.append((m.what, f"{m.first:,}", time(m.first_seconds), f"{m.every:,}" if m.every else "", *last))
    head = ("what", "next at step", "in", "every", "left", "last at step", "in")
    _section(console, "Milestones", [], head, table)


def _disk(plan: Plan) -> list[Fact]:
    disk = plan.disk
    assert disk is not None
    facts = [("a checkpoint", _bytes(disk.checkpoint_bytes))]
    if disk.checkpoints is not None and disk.peak_bytes is not None:
        more = (
            ", and one more while it is written" if disk.peak_bytes > disk.checkpoints * disk.checkpoint_bytes else ""
        )
        facts.append(("in all", f"{disk.checkpoints:,} checkpoints at the end{more}: {_bytes(disk.peak_bytes)}"))
    if disk.tokens_bytes:
        facts.append(("tokens", f"about {_bytes(disk.tokens_bytes)} (data.max_tokens)"))
    return facts


def _flop(value: float) -> str:
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= size:
            return f"{value / size:.4g} {letter}FLOP"
    return f"{value:,.0f} FLOP"


def _bytes(value: float) -> str:
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e3:.3g} kB"


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
    from rich import box
    from rich.table import Table
    from rich.text import Text

    console.print(Text(f"{title}", style="bold"))
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in facts:
        grid.add_row(f"  {name}", Text(value))
    if grid.row_count:
        console.print(grid)
    if rows:
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False, header_style="dim")
        for i, name in enumerate(head):
            table.add_column(name, justify="left" if i < text_columns else "right", no_wrap=i < text_columns)
        for i, row in enumerate(rows):
            table.add_row(*row, style="bold cyan" if i in strong else None)
        console.print(table)
    for note in notes:
        console.print(Text(note, style="italic"))
    console.print()
