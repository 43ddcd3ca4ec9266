"""The charts of a scaling study: throughput, efficiency and memory against ranks, the parts of a step, the Pareto front."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from windlass.reports.charts import Chart, Series
from windlass.reports.text import show
from windlass.study.grid import Scaling
from windlass.study.setups import STEP_TIMES, Setup, baseline

STEP_PARTS = "Where the time of a step went"
COLOURS = {"compute_ms": 0, "exposed_ms": 1, "data_ms": 5, "host_ms": 4}


class Bars(NamedTuple):
    """Stacked bars of milliseconds, a bar a setup."""

    names: list[str]  # of the setups
    parts: dict[str, list[float]]  # by name, a value a setup
    colours: list[int]  # of the parts, by their place in the palette

    def stacks(self) -> list[tuple[str, float, str, list[tuple[str, int, float, str]]]]:
        """For the page: name, length in % of the longest, total, and of each part name, colour, share and text."""
        totals, bars = [sum(values) for values in zip(*self.parts.values(), strict=True)], []
        for i, (name, total) in enumerate(zip(self.names, totals, strict=True)):
            parts = zip(self.parts.items(), self.colours, strict=True)
            shares = [
                (part, colour, v[i] / total, f"{show(v[i], 'rate')} ms")
                for (part, v), colour in parts
                if v[i] > 0
            ]
            bars.append((name, 100 * total / max(totals), show(total, "rate"), shares))
        return bars


def scaling_charts(scaling: Scaling, table: Sequence[Setup]) -> list[Chart]:
    """Throughput with the ideal line, efficiency and memory against the ranks; of strategies throughput against memory."""
    measured = [row for row in table if row.measured]
    if scaling.mode == "strategies":
        return _pareto(measured, scaling.repeats)
    if len({row.world for row in measured}) < 2:
        return []
    base, at = baseline(table), np.array([float(row.world) for row in measured])
    names: dict[str, Any] = {
        "x_label": "ranks",
        "x_values": at.tolist(),
        "x_names": [f"{n:g}" for n in at],
        "x_log": True,
        "zero": True,
    }
    axis: dict[str, Any] = {"step": at, "tokens": at, "hours": at}

    def series(name: str, label: str, factor: float = 1.0) -> Series:
        y = np.array([row.values.get(name, np.nan) for row in measured], dtype=np.float64)
        low, high = (
            np.array([row.spread.get(name, (v, v)) for row, v in zip(measured, y, strict=True)]).T
            * factor
        )
        band = {"low": low, "high": high} if any(name in row.spread for row in measured) else {}
        return Series(-1, label, **axis, y=y * factor, colour=0, points="line", **band)

    def line(label: str, y: Any) -> Series:
        return Series(
            -1, label, **axis, y=np.asarray(y, dtype=np.float64), colour=7, dash=1, minor=True
        )

    band = (
        ", band: lowest to highest of the repeats"
        if any("samples_per_s" in row.spread for row in measured)
        else ""
    )
    what = "MB resident" if measured[0].on_cpu else "MB allocated"
    throughput = [series("samples_per_s", "measured")]
    efficiency = [series("efficiency", "measured", 100), line("ideal", 100 * np.ones_like(at))]
    memory, title = [series("peak_mem_mb", "memory")], "Peak memory of the fullest rank"
    if base.measured:  # else nothing is compared with it
        grown = np.ones_like(at) if scaling.grow == "model" else at / base.world
        throughput.append(line("ideal", base.values["samples_per_s"] * grown))
    charts = [
        Chart(
            "scaling-throughput",
            "Throughput",
            "samples/s",
            throughput,
            note=f"against ranks{band}",
            **names,
        )
    ]
    if base.measured:
        charts.append(
            Chart(
                "scaling-efficiency", "Efficiency", "%", efficiency, note="against ranks", **names
            )
        )
    if any("peak_mem_mb" in row.values for row in measured):
        charts.append(Chart("scaling-memory", title, what, memory, note="against ranks", **names))
    return charts


def _pareto(measured: Sequence[Setup], repeats: int) -> list[Chart]:
    """Throughput against memory of each setup, with the line of those that no other one beats in both."""
    rivals = sorted(
        (row for row in measured if "pareto" in row.values),
        key=lambda row: row.values["peak_mem_mb"],
    )
    if len({row.values["peak_mem_mb"] for row in rivals}) < 2:
        return []

    def series(label: str, setups: Sequence[Setup], **rest: Any) -> Series:
        names = ("peak_mem_mb", "samples_per_s")
        x, y = (np.array([row.values[name] for row in setups], dtype=np.float64) for name in names)
        return Series(-1, label, step=x, tokens=x, hours=x, y=y, **rest)

    front, rest = ([row for row in rivals if row.values["pareto"] is on] for on in (True, False))
    lines = [series("Pareto front", front, colour=7, dash=1, minor=True)]
    for i, row in enumerate(
        front
    ):  # each of the others is in the table: there are more than colours
        name = row.name + ", recommended" * row.values["recommended"]
        lines.append(series(name, [row], colour=i % 7, points="only"))
    lines += [series("not on the front", rest, colour=7, points="only")] if rest else []
    values = sorted({float(row.values["peak_mem_mb"]) for row in rivals})
    x_names = [show(value, "mb") for value in values]
    label = (
        "MB resident on the fullest rank"
        if measured[0].on_cpu
        else "MB allocated on the fullest rank"
    )
    noise = "each setup ran once" if repeats == 1 else f"medians over {repeats} repeats"
    names: dict[str, Any] = {
        "x_label": label,
        "x_values": values,
        "x_names": x_names,
        "note": f"against {label}; {noise}",
    }
    return [Chart("scaling-pareto", "Throughput against memory", "samples/s", lines, **names)]


def step_bars(table: Sequence[Setup]) -> Bars | None:
    """Where the time of a step went, of the setups where that is known."""
    divided = [row for row in table if "compute_ms" in row.values]
    if not divided:
        return None
    parts = {
        words: [float(row.values.get(name, 0.0)) for row in divided]
        for name, words in STEP_TIMES.items()
    }
    return Bars([row.name for row in divided], parts, list(COLOURS.values()))
