"""The charts of a scaling study: speed, efficiency and memory against ranks, or against memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from windlass.reports.charts import Axis, Chart, Series
from windlass.reports.text import show
from windlass.study.grid import Scaling
from windlass.study.setups import Setup, baseline
from windlass.telemetry.measures import SETUP, STEP_PARTS


def scaling_charts(scaling: Scaling, table: Sequence[Setup]) -> list[Chart]:
    """Charts against ranks, or for strategies throughput against memory; the parts of a step."""
    measured = [setup for setup in table if setup.measured]
    if scaling.mode == "strategies":
        charts = pareto(measured, scaling.repeats)
    else:
        charts = against_ranks(scaling, measured, baseline(table))
    return [*charts, *step_parts(measured)]


def against_ranks(scaling: Scaling, measured: Sequence[Setup], base: Setup) -> list[Chart]:
    """Throughput with the ideal line, efficiency and memory; none for a single number of ranks."""
    measured = sorted(measured, key=lambda setup: setup.world)
    if len({setup.world for setup in measured}) < 2:
        return []
    ranks = np.array([float(setup.world) for setup in measured])

    def line(name: str, label: str = "measured", factor: float = 1) -> Series:
        y = np.array([setup.values.get(name, np.nan) for setup in measured], dtype=np.float64)
        ends = (setup.spread.get(name, (v, v)) for setup, v in zip(measured, y, strict=True))
        low, high = np.array(list(ends)).T * factor
        spread = any(name in setup.spread for setup in measured)
        band = {"low": low, "high": high} if spread else {}
        return Series(label, y * factor, {"x": ranks}, colour=0, points="line", **band)

    def ideal(y: Any) -> Series:
        y = np.broadcast_to(np.asarray(y, dtype=np.float64), ranks.shape)
        return Series("ideal", y, {"x": ranks}, colour=7, dash=1, minor=True)

    def chart(name: str, title: str, unit: str, *series: Series, **options: Any) -> Chart:
        x = Axis("ranks", ranks.tolist(), [f"{n:g}" for n in ranks], log=True)
        return Chart(f"scaling-{name}", title, unit, series, x=x, **options)

    zero, note = Axis(zero=True), "against ranks"
    throughput, efficiency = [line("samples_per_s")], [line("efficiency", factor=100)]
    charts = []
    if base.measured:  # nothing compares with a baseline without numbers
        growth = 1.0 if scaling.grow == "model" else ranks / base.world
        throughput.append(ideal(base.values["samples_per_s"] * growth))
        efficiency.append(ideal(100))
        charts.append(chart("efficiency", "Efficiency", "%", *efficiency, y=zero, note=note))
    if any("samples_per_s" in setup.spread for setup in measured):
        note += ", band: lowest to highest of the repeats"
    # proportional throughput is a straight line only if both scales are logarithmic
    both = chart("throughput", "Throughput", "samples/s", *throughput, y=Axis(log=True), note=note)
    if any("peak_mem_mb" in setup.values for setup in measured):
        unit, title = memory_unit(measured), "Peak memory of the fullest rank"
        lines = line("peak_mem_mb", "memory")
        charts.append(chart("memory", title, unit, lines, y=zero, note="against ranks"))
    return [both, *charts]


def memory_unit(measured: Sequence[Setup]) -> str:
    return "MB resident" if measured[0].on_cpu else "MB allocated"


def pareto(measured: Sequence[Setup], repeats: int) -> list[Chart]:
    """Throughput against memory, with the line of the setups that no other one beats in both."""
    rivals = [setup for setup in measured if "pareto" in setup.values]
    rivals.sort(key=lambda setup: setup.values["peak_mem_mb"])
    places = sorted({float(setup.values["peak_mem_mb"]) for setup in rivals})
    if len(places) < 2:
        return []

    def series(name: str, setups: Sequence[Setup], **look: Any) -> Series:
        x = np.array([setup.values["peak_mem_mb"] for setup in setups], dtype=np.float64)
        y = np.array([setup.values["samples_per_s"] for setup in setups], dtype=np.float64)
        return Series(name, y, {"x": x}, **look)

    front, others = ([r for r in rivals if r.values["pareto"] is on] for on in (True, False))
    lines = [series("Pareto front", front, colour=7, dash=1, minor=True)]
    for i, setup in enumerate(front):
        name = setup.name + ", recommended" * setup.values["recommended"]
        lines.append(series(name, [setup], colour=i % 7, points="only"))
    if others:  # the table names them; there are more of them than colours
        lines.append(series("not on the front", others, colour=7, points="only"))
    x = f"{memory_unit(measured)} on the fullest rank"
    noise = "each setup ran once" if repeats == 1 else f"medians over {repeats} repeats"
    axis, note = Axis(x, places, [show(place, "mb") for place in places]), f"against {x}; {noise}"
    title = "Throughput against memory"
    return [Chart("scaling-pareto", title, "samples/s", lines, x=axis, note=note)]


def step_parts(measured: Sequence[Setup]) -> list[Chart]:
    """The parts of a step in stacked bars, for each setup whose parts are known."""
    divided = [setup for setup in measured if "compute_ms" in setup.values]
    if not divided:
        return []
    series = []
    for place, part in enumerate(STEP_PARTS):
        y = np.array([float(setup.values.get(part, 0.0)) for setup in divided])
        texts = [f"{show(ms, 'rate')} ms" for ms in y.tolist()]
        series.append(Series(SETUP[part].words, y, colour=place, texts=texts))
    totals = np.sum([one.y for one in series], axis=0)
    notes = [show(float(total), "rate") for total in totals]
    bars = Axis(names=[setup.name for setup in divided], notes=notes)
    return [Chart("step-parts", "Where the time of a step went", "ms", series, "bars", y=bars)]
