"""A plan as text: for the terminal, and as Markdown for a page. Pure, from the values of `windlass.estimate.plan`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from windlass.reports.memory_grid import grid_table
from windlass.reports.text import compact, duration, markdown_cell, markdown_table

if TYPE_CHECKING:
    from rich.console import Console

UNKNOWN = "unknown"
PARTS = ("parameters", "gradients", "moments", "activations", "logits", "buffers")
BASIS = {
    "measured": "measured", "projected": "projected, with the measured efficiency", "assumed": "assumed",
    "at best": "at best: no efficiency was measured", "scaled": "scaled from another model",
}  # fmt: skip


@dataclass(frozen=True)
class Section:
    """A heading, facts as pairs, a table, and notes under it."""

    title: str
    facts: list[tuple[str, str]] = field(default_factory=list)
    head: tuple[str, ...] = ()
    rows: Sequence[tuple[str, ...]] = field(default_factory=list)
    left: int = 1
    """Columns that are text; the others are numbers, set flush right."""
    strong: tuple[int, ...] = ()
    """Rows to set off."""
    notes: list[str] = field(default_factory=list)


def sections(plan: dict[str, Any]) -> list[Section]:
    """A plan's sections, in the order in which one asks: what is it, does it fit, how long, what happens when."""
    found = [_run(plan)]
    if plan.get("memory"):
        found += memory_sections(plan)
    if plan["length"]["done"] < plan["length"]["steps"]:
        found += [_time(plan), milestones_section(plan)]
    if plan.get("predicted_and_measured"):
        found.append(predicted_section(plan["predicted_and_measured"]))
    if plan.get("disk"):
        found.append(_disk(plan))
    return found


def _run(plan: dict[str, Any]) -> Section:
    length, model, flops = plan["length"], plan.get("model"), plan.get("flops")
    device = plan["device"]
    ranks = f"{plan['world']} rank{'s' * (plan['world'] != 1)} on {device['name']}, {plan['precision']}"
    facts = [("ranks", ranks)]
    if model:
        parts = ", ".join(f"{k.replace('_', '-')} {v:,}" for k, v in model["parts"].items() if v)
        facts += [
            ("parameters", f"{model['parameters']:,} ({model['non_embedding']:,} of them in blocks and norms)"),
            ("", parts),
        ]
    if model and "trained" in model:
        facts.append(("trained", f"{model['trained']:,}: the adapters alone have gradients and moments"))
    per_step, padded = length["tokens_per_step"], length["padded_tokens_per_step"]
    tokens = f"{length['steps']:,} steps x {per_step:,.0f} tokens = {compact(length['tokens'])}"
    if per_step != padded:
        tokens += f" (real ones: {100 * per_step / padded:.0f} % of {padded:,} with padding)"
    facts.append(("length", tokens))
    if length.get("tokens_per_parameter"):
        optimal = (
            f"{length['optimal_ratio']:g} N = {length['optimal_tokens']:,} tokens = {length['optimal_steps']:,} steps"
        )
        facts.append(
            ("optimal", f"D = {optimal}; this run has {length['tokens_per_parameter']:.3g} tokens a parameter")
        )
    if length.get("same_compute"):
        facts.append(("same FLOPs", _same_compute(length["same_compute"])))
    epochs = length["epochs"]
    known = f" ({length['known_from']})" if length["known_from"] else ""
    facts.append(("epochs", f"{epochs:.3g}{known}" if epochs else f"{UNKNOWN} until the data is prepared"))
    if flops:
        rule = "4 N, 6 N of the adapters" if model and "trained" in model else "6 N"
        counted = "" if flops["per_token_counted"] is None else f", {_si(flops['per_token_counted'])} counted"
        ways = f"{_si(flops['per_token_6n'])} a token by {rule}, {_si(flops['per_token'])} with attention{counted}"
        facts.append(("FLOPs", f"{ways}; {flops['run']:.2e} in all"))
    notes = [plan["note"]] if plan.get("note") else []
    if length["taken_as_full"]:
        notes.append("Samples are taken as full: how far they are filled is unknown until the data is prepared.")
    return Section(_title(plan), facts, notes=notes)


def _same_compute(found: dict[str, Any]) -> str:
    fit, refit = (f"N = {compact(o['parameters'])}, D = {compact(o['tokens'])}" for o in found["optima"])
    outside = "" if found["within_the_fitted_sizes"] else " (fitted to 70 M to 16 B)"
    return f"{found['flops']:.3g} = 6 N D buy {fit} by the Chinchilla fit; {refit} by its refit{outside}"


def _title(plan: dict[str, Any]) -> str:
    if plan["length"]["done"] or plan.get("state"):
        at = f"step {plan['length']['done']:,} of {plan['length']['steps']:,}"
        return f"{plan['run_dir']}: {plan.get('state', '')}, {at}".replace(": ,", ":")
    return f"{plan['recipe']} ({plan['digest']})"


def _si(value: float) -> str:
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= size:
            return f"{value / size:.4g} {letter}FLOP"
    return f"{value:,.0f} FLOP"


def memory_sections(plan: dict[str, Any]) -> list[Section]:
    """The recipe's own ranks and precision in full, and the whole grid in short."""
    found = [memory_section(plan)]
    if plan.get("memory_grid"):
        head, rows, notes = grid_table(plan["memory_grid"])
        found.append(Section("Memory on other ranks and in other precisions", [], head, rows, left=3, notes=notes))
    return found


def memory_section(plan: dict[str, Any]) -> Section:
    """The memory of a rank by strategy and recomputation, and what is recommended."""
    table, device = plan["memory"], plan["device"]
    largest_total = max(row["total_bytes"] for row in table)
    unit, size = ("GB", 1e9) if largest_total >= 2e9 else ("MB", 1e6)
    digits = sum(largest_total < limit * size for limit in ((100,) if unit == "MB" else (200, 20)))

    def show(value: int) -> str:
        return f"{value / size:,.{digits}f}"

    rows, strong = [], []
    for i, row in enumerate(table):
        fits = {True: "yes", False: "no", None: "?"}[row["fits"]]
        largest = "?" if row["largest_micro_batch"] is None else str(row["largest_micro_batch"] or "-")
        parts = [show(row[f"{name}_bytes"]) for name in PARTS]
        rows.append((row["strategy"], row["checkpointing"], *parts, show(row["total_bytes"]), fits, largest))
        if row["chosen"]:
            strong.append(i)
    first, usable = table[0], device["usable_bytes"]
    room = f"room {usable / 1e9:.3g} GB" if usable else f"room {UNKNOWN}"
    head = ("strategy", "recompute", "param", "grad", "mom", "act", "logit", "buf", "all", "fits", "max")
    micro = f"micro-batch {first['micro_batch']}, {first['accumulation']} a step"
    title = f"Memory of a rank at the peak of a step in {unit}: {micro}, {first['precision']}, {room}"
    notes = ["max: the largest micro-batch that fits. The recipe's own layout is set off."]
    if any(row["host_bytes"] for row in table):
        notes.append(f"offload: {max(row['host_bytes'] for row in table) / 1e9:.3g} GB more of the host's memory")
    return Section(title, head=head, rows=rows, left=2, strong=tuple(strong), notes=[*notes, _advice(plan)])


def _advice(plan: dict[str, Any]) -> str:
    found = plan["recommendation"]
    if not found["settings"]:
        return f"Recommended: {found['why']}"
    words = " ".join(f"{key}={_toml(value)}" for key, value in found["settings"].items())
    return f"Recommended ({found['why']}): {words}"


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _time(plan: dict[str, Any]) -> Section:
    time = plan["time"]
    if time is None:
        peak = (
            f"the peak of {plan['device']['name']} in {plan['precision']} is not known. Use --measure, --from RUN, or "
        )
        peak += "--device with a device of the table"
        missing = peak if plan.get("flops") else "the model's FLOPs are not known. Use --measure or --from RUN"
        why = f"{UNKNOWN}: nothing was measured, and {missing}"
        return Section("Time", [("to the end", why)])
    facts = [
        (
            "to the end",
            f"{duration(time['seconds'])}, {time['device_hours']:.3g} device-hours ({BASIS[time['basis']]})",
        ),
        ("from", time["detail"]),
        ("speed", f"{time['tokens_per_s']:,.0f} tokens/s, {1e3 * time['seconds_per_step']:,.0f} ms a step"),
    ]
    if time["not_counted"]:
        facts.append(
            ("not in it", f"{', '.join(_plural(w) for w in time['not_counted'])}: their time was not measured")
        )
    rows = [
        (
            str(w["world"]),
            f"{w['tokens_per_s']:,.0f}",
            duration(w["seconds"]),
            f"{w['device_hours']:.3g}",
            BASIS[w["basis"]],
        )
        for w in plan["worlds"]
    ]
    strong = tuple(i for i, w in enumerate(plan["worlds"]) if w["world"] == plan["world"])
    head = ("ranks", "tokens/s", "time", "device-hours", "how it is known")
    return Section("Time", facts, head, rows, left=0, strong=strong)


def _plural(what: str) -> str:
    return {"evaluation": "evaluations", "checkpoint": "checkpoints", "sample": "samples"}.get(what, what)


def milestones_section(plan: dict[str, Any]) -> Section:
    """What is still to come, with the time from now where a speed is known."""
    rows = []
    for m in plan["milestones"]:
        several = m["left"] > 1
        rows.append(
            (
                m["what"], f"{m['first']:,}", _in(m["first_seconds"]), f"{m['every']:,}" if m["every"] else "",
                f"{m['left']:,}" if several else "", f"{m['last']:,}" if several else "",
                _in(m["last_seconds"]) if several else "",
            )
        )  # fmt: skip
    head = ("what", "next at step", "in", "every", "left", "last at step", "in")
    return Section("Milestones", head=head, rows=rows)


def _in(seconds: float | None) -> str:
    return "?" if seconds is None else duration(seconds) if seconds else "now"


NAMES = {
    "memory_mb": "memory of a rank, MB",
    "checkpoint_mb": "a checkpoint, MB",
    "runtime_s": "time from start to end, s",
}


def predicted_section(pairs: dict[str, Any]) -> Section:
    """What was predicted beside what was measured."""
    rows, notes = [], []
    for name, pair in pairs.items():
        if "why" in pair:
            notes.append(f"{NAMES[name]}: not predicted, {pair['why']}.".capitalize())
            continue
        predicted, measured = pair["predicted"], pair["measured"]
        off = f"{100 * (predicted / measured - 1):+.1f} %" if measured > 0 else ""
        rows.append((NAMES[name], f"{predicted:,.1f}", f"{measured:,.1f}", off))
        if "what" in pair:
            notes.append(f"Memory: {pair['what']}.")
        if "after_step" in pair:
            starts = (
                f"; {pair['starts']} starts, the pauses and what was done twice left out" if "starts" in pair else ""
            )
            notes.append(f"Time: predicted after step {pair['after_step']:,}{starts}.")
    return Section("Predicted beside measured", [], ("what", "predicted", "measured", "off by"), rows, notes=notes)


def _disk(plan: dict[str, Any]) -> Section:
    d = plan["disk"]
    more = ", and room for one more while it is written" if d["peak_bytes"] > d["kept_bytes"] else ""
    facts = [
        ("checkpoint", f"{_bytes(d['checkpoint_bytes'])}, {_bytes(d['rank_bytes'])} from each rank"),
        ("kept", f"{d['kept']:,} checkpoint{'s' * (d['kept'] != 1)}, {_bytes(d['kept_bytes'])}{more}"),
        ("shards", f"{d['token_bytes']} bytes a token, {_bytes(d['shard_bytes'])} a full shard"),
    ]
    if d.get("tokens_bytes"):
        facts.append(("tokens", f"about {_bytes(d['tokens_bytes'])} in all (data.max_tokens)"))
    return Section("Disk", facts)


def _bytes(value: float) -> str:
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e3:.3g} kB"


def optimum_section(flops: float, found: Sequence[Any]) -> Section:
    """What a budget of FLOPs buys, by each way of reckoning."""
    rows = [
        (o.method, o.source, compact(o.parameters), compact(o.tokens), f"{o.tokens / o.parameters:.3g}",
         f"{o.loss:.3f}" if o.loss else "") for o in found
    ]  # fmt: skip
    head = ("by", "source", "parameters N", "tokens D", "D / N", "loss")
    notes = [
        "6 N D = the budget. The losses are those of the papers' corpus and tokenizer; the refit corrects the first fit's "
        "constants and agrees with the rule of thumb."
    ]
    return Section(f"Compute-optimal for {flops:.3g} FLOPs", head=head, rows=rows, left=2, notes=notes)


def scaling_section(fit: Any, predictions: Sequence[Any], back_test: tuple[Any, float] | None) -> Section:
    """A fitted loss law, what it says of larger sizes, and how well it would have said the largest one at hand."""
    law = fit.law
    terms = zip(law.variables, law.coefficients, law.exponents, strict=True)
    formula = " + ".join([f"{law.E:.4f}", *(f"{c:.4g} / {v}^{e:.3f}" for v, c, e in terms)])
    facts = [("law", f"L = {formula}"), ("holds along", fit.along), ("fitted to", f"{len(fit.points)} runs")]
    for name in ("E", *law.variables):
        low_high = fit.interval(name)
        if low_high:
            label = "E" if name == "E" else f"exponent of {name}"
            facts.append((label, f"{low_high[0]:.3f} to {low_high[1]:.3f} (90 %)"))
    if fit.noise is None:
        facts.append(("uncertainty", "none can be given: as many unknowns as runs; add sizes or seeds"))
    else:
        facts.append(("noise", f"{100 * fit.noise:.2g} % from run to run"))
    if not fit.determined:
        facts.append(("warning", "these runs do not determine the exponent: it is at the edge of what was tried"))
    if back_test:
        guess, truth = back_test
        facts.append(
            ("back test", f"fitted without the largest size it says {guess.loss:.4f} there; measured {truth:.4f}")
        )
    rows = [
        (
            compact(p.parameters),
            compact(p.tokens),
            f"{p.loss:.4f}",
            f"{p.low:.4f} to {p.high:.4f}" if p.low else UNKNOWN,
        )
        for p in predictions
    ]
    head = ("parameters", "tokens", "loss", "90 % of runs between")
    notes = ["The intervals hold if the law does; that it holds far beyond the sizes it was fitted to is not known."]
    return Section("Loss law", facts, head, rows, left=0, notes=notes)


def show(found: Sequence[Section], console: Console) -> None:
    """Print sections to a terminal."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    for i, section in enumerate(found):
        if i:
            console.print()
        console.print(Text(section.title, style="bold"))
        if section.facts:
            facts = Table.grid(padding=(0, 2))
            facts.add_column(style="dim", no_wrap=True)
            facts.add_column(overflow="fold")
            for name, value in section.facts:
                facts.add_row(f"  {name}", Text(value))
            console.print(facts)
        if section.rows:
            table = Table(
                box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False, header_style="dim"
            )
            for column, name in enumerate(section.head):
                table.add_column(
                    name, justify="left" if column < section.left else "right", no_wrap=column < section.left
                )
            for number, row in enumerate(section.rows):
                table.add_row(*row, style="bold cyan" if number in section.strong else None)
            console.print(table)
        for note in section.notes:
            console.print(Text(note, style="italic"))


def markdown(found: Sequence[Section], level: int = 3) -> str:
    """The same as Markdown."""
    out = []
    for section in found:
        out.append(f"{'#' * level} {markdown_cell(section.title)}\n")
        if section.facts:
            lines = (f"- {name + ': ' if name else ''}{markdown_cell(value)}" for name, value in section.facts)
            out.append("\n".join(lines) + "\n")
        if section.rows:
            right = range(section.left, len(section.head))
            out.append(markdown_table(section.head, section.rows, right))
        out += [f"{markdown_cell(note)}\n" for note in section.notes]
    return "\n".join(out)
