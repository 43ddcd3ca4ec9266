"""What a report adds for a ladder: the law, how well it predicts, and its pictures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from windlass.errors import UserError
from windlass.reports.charts import Axis, Chart, Series, pattern
from windlass.reports.table import Column, Table
from windlass.run import Run
from windlass.study.ladder import Ladder, open_ladder
from windlass.study.law import FAR, FORMS, Law, Observation
from windlass.study.study import Study
from windlass.telemetry.measures import short
from windlass.telemetry.scores import LOSS

POINTS = 40  # of a drawn curve
SHAPES = {"model.layers", "model.width", "train.tokens_per_parameter"}
"""The settings that a ladder varies."""


@dataclass(frozen=True)
class LawView:
    """A law with its tables and charts; `remark` says why there is none."""

    tables: list[Table] = field(default_factory=list)
    charts: list[Chart] = field(default_factory=list)
    remark: str = ""


def ladder_view(study: Study) -> LawView:
    """The law of a ladder."""
    try:
        seen = open_ladder(study)
        law, runs, unit = seen.law, seen.observations, _unit(seen)
    except UserError as error:
        return LawView(remark=f"{str(error)[:1].upper()}{str(error)[1:]}.")
    charts = [compute_chart(law, runs, unit), slices(law, runs, unit), residuals(law, runs)]
    return LawView([law_table(seen), error_table(seen)], charts)


def prediction_view(ladder: str, runs: Sequence[Run]) -> LawView:
    """Runs beside the law of a ladder; UserError if they are unfinished or do not compare."""
    seen = open_ladder(ladder, runs)
    chart = compute_chart(seen.earlier, seen.observations, _unit(seen))
    return LawView([predicted_table(seen)], [chart])


def _unit(ladder: Ladder) -> str:
    return "nats per token" if ladder.measure == LOSS else "bits per byte"


def is_ladder(study: Study) -> bool:
    """Whether the cells of a study differ in size and in tokens per parameter."""
    varied = {key for key, values in study.values.items() if len(values) > 1}
    return (
        study.scaling is None
        and "train.tokens_per_parameter" in varied
        and bool(varied & (SHAPES - {"train.tokens_per_parameter"}))
    )


def law_table(ladder: Ladder) -> Table:
    """The constants of each form, its error on the largest runs, and the chosen form."""
    rows: list[Sequence[Any]] = []
    for one in ladder.judged:
        chosen = (one.form, one.embeddings) == (ladder.law.form, ladder.law.embeddings)
        counted = "all" if one.embeddings else "without embeddings"
        worst = max(one.errors.values(), key=abs)
        rows.append((FORMS[one.form].formula, counted, one.mean, abs(worst), chosen))
    columns = [
        Column("formula", "L(N, D)"),
        Column("parameters", "N counts"),
        Column("mean_error", "Mean error", "share"),
        Column("largest_error", "Largest error", "share"),
        Column("chosen", "Chosen"),
    ]
    predicted = ", ".join(ladder.judged[0].errors)
    constants = ", ".join(
        f"{name} = {value:.4g} ({low:.4g} to {high:.4g})"
        for name, (value, low, high) in ladder.law.constants().items()
    )
    notes = [
        f"The errors are of the largest runs, predicted from the others: {predicted}.",
        f"The chosen form, fitted to all runs: {constants}; 80 % ranges by bootstrap over runs.",
        *(f"Not in the fit: {reason}." for reason in ladder.left_out),
    ]
    return Table("law", columns, rows, "The law of scaling", notes)


def error_table(ladder: Ladder) -> Table:
    """Each run's measured loss beside the law's; a run kept back has the prediction without it."""
    errors, law, rows = ladder.judged[0].errors, ladder.law, []
    for one in ladder.observations:
        size = one.size(law.embeddings)
        before = one.loss * (1 + errors[one.name]) if one.name in errors else None
        flops = 6 * one.parameters * one.tokens
        fitted = law.loss(size, one.effective_tokens)
        error = None if before is None else errors[one.name]
        rows.append((one.name, one.parameters, one.tokens, flops, one.loss, fitted, before, error))
    columns = [
        Column("run", "Run"),
        Column("parameters", "Parameters", "count"),
        Column("tokens", "Tokens", "count"),
        Column("flops", "FLOPs (6 N D)"),
        Column("loss", "Measured", "loss"),
        Column("fitted", "Fitted", "loss"),
        Column("predicted", "Predicted without it", "loss"),
        Column("error", "Error", "share"),
    ]
    return Table("law-runs", columns, rows, "Predicted and measured")


def predicted_table(ladder: Ladder) -> Table:
    """The loss of each further run as the law predicts it without that run, and as it came."""
    law, rows, notes = ladder.earlier, [], list[str]()
    for one in ladder.further:
        predicted = law.predict(one.size(law.embeddings), one.effective_tokens)
        loss, low, high, beyond = predicted
        error = loss / one.loss - 1
        rows.append((one.name, one.parameters, one.tokens, loss, low, high, one.loss, error))
        notes += [f"{one.name}: {predicted}."] if beyond > FAR else []
    columns = [
        Column("run", "Run"),
        Column("parameters", "Parameters", "count"),
        Column("tokens", "Tokens", "count"),
        Column("predicted", "Predicted", "loss"),
        Column("low", "10 %", "loss"),
        Column("high", "90 %", "loss"),
        Column("measured", "Measured", "loss"),
        Column("error", "Error", "share"),
    ]
    notes = [f"The law of {ladder.study.path}, without these runs: {law}.", *notes]
    return Table("predicted", columns, rows, "Predicted by the law of scaling", notes)


def decades(values: Sequence[float], label: str) -> Axis:
    """A logarithmic axis with a tick for each power of ten."""
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    ticks = [10.0**n for n in range(low, high + 1)]
    return Axis(
        label, ticks, [short(tick) if tick < 1e12 else f"{tick:.0e}" for tick in ticks], log=True
    )


def by_size(runs: Sequence[Observation]) -> dict[int, list[Observation]]:
    """The runs of each number of parameters, both rising."""
    sizes: dict[int, list[Observation]] = {}
    for one in sorted(runs, key=lambda one: (one.parameters, one.tokens)):
        sizes.setdefault(one.parameters, []).append(one)
    return sizes


def flops_of(runs: Sequence[Observation]) -> np.ndarray:
    """6 N D of each run."""
    return np.array([6.0 * one.parameters * one.tokens for one in runs])


def compute_chart(law: Law, runs: Sequence[Observation], unit: str) -> Chart:
    """The loss against compute: the runs, the law of each size, and the compute-optimal envelope."""
    series = []
    for number, (size, own) in enumerate(by_size(runs).items()):
        x, y = flops_of(own), np.array([one.loss for one in own])
        look = pattern(number)
        series.append(Series(f"{short(size)} parameters", y, {"x": x}, points="only", **look))
        flops = np.geomspace(x.min(), x.max(), POINTS)
        n = own[0].size(law.embeddings)
        curve = np.array([law.loss(n, c / 6 / size) for c in flops])
        series.append(Series("", curve, {"x": flops}, minor=True, **look))
    every = flops_of(runs)
    flops = np.geomspace(every.min(), every.max() * FAR, POINTS)
    best = np.array([law.loss(*law.optimum(c)) for c in flops])
    series.append(Series("best size for the compute", best, {"x": flops}, grey=True))
    axis = decades([*every, flops[-1]], "FLOPs (6 N D)")
    note = "points: runs; lines: the law"
    return Chart("law-compute", "Loss against compute", unit, series, x=axis, note=note)


def slices(law: Law, runs: Sequence[Observation], unit: str) -> Chart:
    """The law along sizes at equal compute; the lowest point is the best size."""
    every, sizes = flops_of(runs), [float(one.size(law.embeddings)) for one in runs]
    series, n = [], np.geomspace(min(sizes) / 3, max(sizes) * 3, POINTS)
    for number, flops in enumerate(np.geomspace(every.min(), every.max(), 4)):
        y = np.array([law.loss(size, flops / 6 / size) for size in n])
        series.append(Series(f"{flops:.1e} FLOPs", y, {"x": n}, points="", **pattern(number)))
    counted = "parameters" if law.embeddings else "parameters without embeddings"
    axis = decades(n.tolist(), counted)
    return Chart("law-slices", "Equal compute, different sizes", unit, series, x=axis)


def residuals(law: Law, runs: Sequence[Observation]) -> Chart:
    """How far the law is from each run, in percent."""
    series = []
    for number, (size, own) in enumerate(by_size(runs).items()):
        fitted = [law.loss(one.size(law.embeddings), one.effective_tokens) for one in own]
        y = 100 * (np.array(fitted) / [one.loss for one in own] - 1)
        name, at = f"{short(size)} parameters", {"x": flops_of(own)}
        series.append(Series(name, y, at, points="line", **pattern(number)))
    axis = decades(flops_of(runs).tolist(), "FLOPs (6 N D)")
    title = "The law minus the measured loss"
    return Chart("law-residuals", title, "% of the loss", series, x=axis)
