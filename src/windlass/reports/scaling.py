"""What a report adds for a scaling study: its setups as tables, charts and text, and `windlass scale`'s table in the terminal.

The numbers come from `windlass.study.setups`. What a setup does not have is a dash, with its reason under the table; in
scaling.csv the column `reasons` has them.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from windlass.reports.charts import Chart
from windlass.reports.scaling_charts import Bars, scaling_charts, step_bars
from windlass.reports.study import StudyView
from windlass.reports.tables import Column, Table, measures
from windlass.reports.text import show
from windlass.study.grid import NODES, WORLD, Scaling
from windlass.study.projection import Projection, projections
from windlass.study.setups import SETUP_MEASURES, Setup, read_setups

if TYPE_CHECKING:
    from rich.console import Group

    from windlass.study.study import Study

COLUMNS: dict[str, tuple[str, str, str]] = {
    "setup": ("Setup", "setup", ""),
    "state": ("State", "state", ""),
    "layers": ("Layers", "layers", "count"),
    "batch_per_device": ("Samples of a rank in a step", "batch/rank", "amount"),
    "global_batch": ("Samples of a step", "batch", "count"),
    "parameters": ("Parameters", "parameters", "count"),
    "flops_per_device": ("GFLOP of a rank in a step", "GFLOP/rank", "hours"),
    "step_ms": ("Step (ms)", "step ms", "rate"),
    "spread": ("Lowest to highest (ms)", "low to high", ""),
    "samples_per_s": ("Samples/s", "samples/s", "rate"),
    "steps_per_s": ("Steps/s", "steps/s", "hours"),
    "util_pct": ("Utilisation (%)", "util. %", "rate"),
    "exact_match": ("Exact match", "EM", "score"),
    "f1": ("F1", "F1", "score"),
    "peak_mem_mb": ("Peak memory, fullest rank (MB)", "memory MB", "mb"),
    "pareto": ("Pareto front", "pareto", ""),
    "recommended": ("Recommended", "best", ""),
    "tokens_per_s_per_device": ("Tokens/s of a rank", "tok/s/rank", "count"),
    "mfu": ("MFU", "MFU", "share"),
    "speedup": ("Speed-up", "speed-up", "hours"),
    "efficiency": ("Efficiency", "eff.", "share"),
    "serial_fraction": ("Serial fraction", "serial", "hours"),
    "ratio": ("Runtime ÷ baseline's", "runtime÷", "share"),
    "compute_ms": ("Computing (ms)", "compute", "rate"),
    "exposed_ms": ("Communication exposed (ms)", "comm.", "rate"),
    "data_ms": ("Waiting for data (ms)", "data", "rate"),
    "host_ms": ("Host (ms)", "host", "rate"),
    "predicted_ms": ("Predicted step (ms)", "predicted", "rate"),
    "predicted_error": ("Prediction's error", "error", "share"),
    "train_loss_mean": ("Training loss, mean", "loss", "loss"),
    "runtime_s": ("Runtime (s)", "runtime s", "rate"),
    "startup_s": ("Start-up (s)", "start-up s", "rate"),
    "compile_s": ("Compiling (s)", "compile s", "rate"),
}
"""What the tables show, by name: the heading in a report, in the terminal, and the kind of number (see `text.show`)."""
IF_DIFFERENT = (
    "layers",
    "batch_per_device",
    "global_batch",
    "parameters",
    "flops_per_device",
    "pareto",
    "recommended",
)
METERS = (
    "The driver's numbers come from NVML, the wall clock's samples/s are those of the whole run without its start-up; the trainer's "
    "are what its allocator holds and samples/s of its steps after the warm-up."
)
UNEXPLAINED = (
    "predicted_error",
    "compile_s",
    "exact_match",
    "f1",
)  # columns without a sentence on why they are empty
OF_STRATEGIES, OF_RANKS = (
    ("pareto", "recommended", "steps_per_s", "util_pct"),
    ("speedup", "efficiency", "serial_fraction", "ratio"),
)
KARP = "p = N ÷ N0; serial fraction = (1 ÷ speed-up − 1 ÷ p) ÷ (1 − 1 ÷ p) (Karp and Flatt 1990)."
FORMULAS = {
    "strong": f"Efficiency = T(N0) · N0 ÷ (T(N) · N), T the time of a step, N0 the fewest ranks; speed-up = T(N0) ÷ T(N); {KARP}",
    "fixed-data": "Efficiency = T(N0) · N0 ÷ (T(N) · N), T the time of a sample (that of a step ÷ its samples), N0 the fewest ranks; "
    f"speed-up = T(N0) ÷ T(N); {KARP}",
    "weak": "Efficiency = T(N0) ÷ T(N), T the time of a step, N0 the fewest ranks; speed-up = efficiency · N ÷ N0.",
    "strategies": "Recommended: the fastest; of those within 2 % of it, or the spread of its repeats, the one with the least memory.",
}


@dataclass(frozen=True)
class ScalingView:
    """A scaling study as a report shows it."""

    scaling: Scaling
    rows: list[Setup]
    values: list[dict[str, Any]]  # of the rows: see `setup_values`
    tables: dict[
        str, tuple[str, Table, list[str]]
    ]  # by the file's name: heading, table, sentences under it
    csv: Table  # every number in full, for scaling.csv
    charts: list[Chart]
    bars: Bars | None
    winners: list[dict[str, Any]]  # of strategies the recommended one: text, command, remark

    @property
    def lede(self) -> str:
        """What the study compares, in a line."""
        what = {
            "strong": "strong scaling: the batch of a step stays",
            "fixed-data": "fixed data: the batch of a rank and the data stay",
            "weak batch": "weak scaling: the batch of a rank stays",
            "weak model": "weak scaling: the layers grow with the ranks",
            "strategies": "strategies at one number of ranks",
        }[f"{self.scaling.mode} {self.scaling.grow}".strip()]
        return f"{what}; {self.scaling.repeats} repeats" if self.scaling.repeats > 1 else what

    @property
    def figures(self) -> list[tuple[str, str, str]]:
        """Headlines of the setup with the highest throughput: name, value, remark."""
        best = max(
            (row for row in self.rows if row.measured),
            key=lambda row: row.values["samples_per_s"],
            default=None,
        )
        if best is None:
            return []
        kinds = {
            "samples_per_s": ("Samples per second", "rate"),
            "efficiency": ("Efficiency", "share"),
        }
        return [
            (text, show(best.values[n], kind), best.name)
            for n, (text, kind) in kinds.items()
            if n in best.values
        ]


def read_scaling(seen: StudyView) -> ScalingView | None:
    """What a report shows of a scaling study; None of a sweep."""
    study, scaling = seen.study, seen.study.scaling
    if scaling is None:
        return None
    table = read_setups(study, seen.results)
    values = setup_values(seen, table)
    tables = {"scaling": ("Setups", _table(table), sentences(study, table))}
    tables["meters"] = ("The two meters", _meters(table, values), [METERS])
    projected, basis = projections(study, table)
    if projected:
        tables["projected"] = (
            "Projected, not measured",
            _projected(projected),
            [basis] if basis else [],
        )
    drawn = scaling_charts(scaling, table), step_bars(table)
    return ScalingView(scaling, table, values, tables, _csv(table), *drawn, _winners(study, table))


def setup_values(seen: StudyView, table: Sequence[Setup] | None = None) -> list[dict[str, Any]]:
    """Of each setup everything by name: its settings, the medians of its finished runs' measures, its numbers of
    `study.setups.SETUP_MEASURES`, `setup`, `state`, and `reasons`: why a number is not there, by name."""
    runs, setups = {view.run.path: measures(view) for view in seen.views}, []
    for row in read_setups(seen.study, seen.results) if table is None else table:
        finished = [
            runs[r.run.path] for r in row.results if r.state == "finished" and r.run.path in runs
        ]
        medians: dict[str, Any] = {}
        for name in dict.fromkeys(name for run in finished for name in run):
            values: list[Any] = [run[name] for run in finished if name in run]
            numbers = all(type(value) in (int, float) for value in values)
            medians[name] = statistics.median(values) if numbers else values[0]
        head = {"setup": row.name, "state": row.state, "reasons": row.missing}
        head |= (
            {"train.precision": row.start["precision"]} if "precision" in row.start else {}
        )  # what `auto` was
        setups.append({**row.recipe.flat(), **row.assignment, **medians, **row.values, **head})
    return setups


def _value(row: Setup, name: str) -> Any:
    """What stands in a row under a name of COLUMNS."""
    if name == "setup":
        return row.name
    if name == "state":
        return f"{row.state}: {row.reason}" if row.reason else row.state
    if name == "spread":
        return (
            " to ".join(show(ms, "rate") for ms in row.spread["step_ms"])
            if "step_ms" in row.spread
            else None
        )
    value = row.values.get(name)
    return value / 1e9 if value is not None and name == "flops_per_device" else value


def _table(table: Sequence[Setup]) -> Table:
    """A row a setup, for people: the columns with a value, without those that describe the setup and are all the same."""
    strategies = any("pareto" in row.values for row in table)
    wanted = [name for name in COLUMNS if strategies or name not in OF_STRATEGIES]
    texts = {
        n: {show(x, COLUMNS[n][2]) for row in table if (x := _value(row, n)) is not None}
        for n in wanted
    }
    names = [
        name for name, values in texts.items() if len(values) > (1 if name in IF_DIFFERENT else 0)
    ]
    columns = [Column(name, COLUMNS[name][0], COLUMNS[name][2]) for name in names]
    return Table(columns, [tuple(_value(row, name) for name in names) for row in table])


def _csv(table: Sequence[Setup]) -> Table:
    """Every number of every setup, with the spread of step and throughput, remarks, and the reason for what is not there."""
    ends = {
        f"{n}_{end}": (n, i)
        for n in ("step_ms", "samples_per_s")
        for i, end in enumerate(("low", "high"))
    }
    keys = dict.fromkeys(
        key for row in table for key in row.assignment if key not in (WORLD, NODES)
    )
    names, cells = (
        ("setup", "state", *keys, *SETUP_MEASURES, *ends, "repeats", "remarks", "reasons"),
        [],
    )
    for row in table:
        cells.append(
            (
                row.name,
                _value(row, "state"),
                *map(row.assignment.get, keys),
                *map(row.values.get, SETUP_MEASURES),
                *(row.spread[name][i] if name in row.spread else None for name, i in ends.values()),
                len(row.results),
                "; ".join(row.remarks),
                "; ".join(f"{name}: {text}" for name, text in row.missing.items()),
            )
        )
    return Table([Column(name) for name in names], cells)


def _projected(projected: Sequence[Projection]) -> Table:
    """Numbers of ranks that were not measured, a row each."""
    headings = {
        "world": ("Ranks", "count"),
        "state": ("State", ""),
        "compute_ms": ("Without communication (ms)", "rate"),
        "communication_ms": ("Communication (ms)", "rate"),
        "step_ms": ("Projected step (ms)", "rate"),
        "samples_per_s": ("Projected samples/s", "rate"),
        "efficiency": ("Projected efficiency", "share"),
    }
    headings |= {"reason": ("Reason", "")} if any(one.reason for one in projected) else {}
    cells = [
        tuple("projected" if n == "state" else getattr(one, n) or None for n in headings)
        for one in projected
    ]
    return Table([Column(name, *heading) for name, heading in headings.items()], cells)


def _meters(table: Sequence[Setup], values: Sequence[dict[str, Any]]) -> Table:
    """What the driver and the wall clock say of each setup beside what the trainer measured; on a CPU the driver is silent."""
    names = {
        "driver_mem_mb": "Driver: memory of a rank's GPU (MB)",
        "util_pct": "Driver: utilisation (%)",
        "samples_per_s_whole_run": "Wall clock: samples/s",
        "mem_alloc_mb": "Trainer: memory allocated (MB)",
        "samples_per_s": "Trainer: samples/s",
    }
    cpu = any(row.on_cpu for row in table)
    names |= {"rss_mb": "Trainer: resident memory of a rank (MB)"} if cpu else {}
    lines = list[tuple[Any, ...]]()
    for row, numbers in zip(table, values, strict=True):
        why = (
            dict.fromkeys(("driver_mem_mb", "util_pct", "mem_alloc_mb"), "no GPU")
            if row.on_cpu
            else {}
        )
        state = "not measured" if row.start else row.state
        lines.append((row.name, *(why.get(name) or numbers.get(name, state) for name in names)))
    columns = [
        Column(name, text, "mb" if name.endswith("_mb") else "rate") for name, text in names.items()
    ]
    return Table([Column("setup", "Setup"), *columns], lines)


def sentences(study: Study, table: Sequence[Setup]) -> list[str]:
    """What stands under the table: how its numbers are defined, what to know of them, and why some are not there."""
    scaling = study.scaling or Scaling("strategies")
    measured = [row for row in table if row.measured]
    repeats = f", then over {scaling.repeats} repeats" if scaling.repeats > 1 else ""
    start = f"Step: the median over the lines of the ledger that begin after {scaling.warmup} steps of each start"
    text = [f"{start}{repeats}. {FORMULAS[scaling.mode]}"]
    if scaling.grow == "model" and len(measured) > 1:
        (low, high), names = (
            (measured[0], measured[-1]),
            ("layers", "parameters", "flops_per_device"),
        )
        more = [high.values[name] / low.values[name] for name in names]
        sizes = f"{low.values['parameters']:,} to {high.values['parameters']:,}"
        text.append(
            f"{more[0]:g} times the layers are {more[1]:.3g} times the parameters ({sizes}), as embedding and head do not grow, and "
            f"{more[2]:.3g} times the FLOPs of a rank in a step. Runtime ÷ baseline's is what the exercise prints as its efficiency; "
            "ours is the other way round, of the time of a step, and 100 % at best."
        )
    if scaling.mode == "strategies" and scaling.repeats == 1 and len(measured) > 1:
        text.append(
            "Each setup ran once, so nothing here tells a difference from noise: the Pareto front and the recommended setup may "
            "be others the next time. With `--repeats 3` the table has the spread of each setup."
        )
    hosts = set().union(*(row.hosts for row in measured))
    if len(hosts) == 1:
        text.append(
            f"All setups ran on one host, {hosts.pop()}: this says nothing about several hosts."
        )
    if any("predicted_ms" in row.values for row in measured):
        text.append(
            "Predicted: FLOPs of a rank ÷ the measured rate of matrix products, and the collectives' bytes on a ring ÷ the measured "
            "bus bandwidth at their size, nothing overlapped."
        )
    remarks = (
        (row.name, text)
        for row in table
        for text in row.remarks
        if not text.startswith("recommended")
    )
    text += [f"{setup}: {remark}." for setup, remark in remarks]
    skipped = (*UNEXPLAINED, *(OF_RANKS if scaling.mode == "strategies" else OF_STRATEGIES))
    empty: dict[tuple[str, ...], list[str]] = {}  # by reason and setups, the columns
    for name, (heading, _, _) in COLUMNS.items():
        without: dict[str, list[str]] = {}
        for row in measured:
            if name in row.missing and name not in skipped:
                without.setdefault(row.missing[name], []).append(row.name)
        for why, setups in without.items():
            words = heading.partition(" (")[0]
            words = words if words.isupper() else words[0].lower() + words[1:]
            empty.setdefault((why, *setups), []).append(words)
    for (why, *setups), columns in empty.items():
        where = "all setups" if len(setups) == len(measured) > 1 else "; ".join(setups)
        text.append(f"No value of {', '.join(columns)} ({where}): {why}.")
    return text


def _winners(study: Study, table: Sequence[Setup]) -> list[dict[str, Any]]:
    """The recommended setup of a study of strategies, with the command that trains with it."""
    for number, row in enumerate(table):
        if row.values.get("recommended"):
            assignment = {key: value for key, value in row.assignment.items() if key != NODES}
            command, remark = study.winner_command(assignment, row.world)
            numbers = f"{show(row.values['samples_per_s'], 'rate')} samples/s, {show(row.values['peak_mem_mb'], 'mb')} MB on the fullest rank"
            why = next(text for text in row.remarks if text.startswith("recommended"))
            return [
                {
                    "text": f"{row.name}: {numbers}; {why}",
                    "command": command,
                    "remark": remark,
                    "rows": [number],
                }
            ]
    return []


def scaling_table(table: Sequence[Setup], width: int, title: str = "") -> Group:
    """The setups as a table for a terminal of that width, for `windlass scale`; print `sentences` under it."""
    from windlass.telemetry.terminal import table as terminal_table

    shown = _table(table)
    head = [COLUMNS[column.name][1] for column in shown.columns]
    return terminal_table(head, shown.shown(), width, text=("setup", "state"), title=title)


def endings(study: Study, table: Sequence[Setup], width: int) -> list[Group | str]:
    """What `windlass scale` prints under the sentences: what is projected, and the command of the recommended strategy."""
    from windlass.telemetry.terminal import table as terminal_table

    projected, basis = projections(study, table)
    parts: list[Group | str] = []
    if projected:
        shown = _projected(projected)
        parts += [
            terminal_table(
                [h.lower() for h in shown.headings], shown.shown(), width, text=("reason",)
            ),
            basis,
        ]
    parts += [
        f"{best['text']}\n  {best['command']}\n  {best['remark']}".rstrip()
        for best in _winners(study, table)
    ]
    return [part for part in parts if part]
