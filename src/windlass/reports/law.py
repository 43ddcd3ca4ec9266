"""A ladder in a report: the law, its errors, and its charts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from windlass.errors import UserError
from windlass.reports.charts import Axis, Chart, Series
from windlass.reports.tables import Column, Table
from windlass.run import Run
from windlass.study.ladder import Ladder, open_ladder
from windlass.study.law import FAR, FORMS, Law, Observation, effective_tokens
from windlass.study.study import Study
from windlass.telemetry.measures import short, show

POINTS = 40  # of a drawn curve


class LawView(NamedTuple):
    tables: Sequence[Table] = ()
    charts: Sequence[Chart] = ()
    summary: str = ""
    remark: str = ""  # the reason


def ladder_view(study: Study) -> LawView:
    try:
        seen = open_ladder(study)
        tables = [law_table(seen), error_table(seen)]
    except UserError as error:
        return LawView(remark=f"{str(error)[:1].upper()}{str(error)[1:]}.")
    law, runs = seen.law, seen.observations
    charts = [compute_chart(law, runs, seen.unit), predicted_chart(seen)]
    charts += [residuals(law, runs), slices(law, runs, seen.unit)]
    off = show(seen.forms[0].mean, "share")
    summary = f"It predicts the largest runs from the others with a mean error of {off}"
    return LawView(tables, charts, summary)


def prediction_view(ladder: str, runs: Sequence[Run]) -> LawView:
    """Runs beside the law of a ladder; UserError if they are unfinished or do not compare."""
    seen = open_ladder(ladder, runs)
    chart = compute_chart(seen.earlier, seen.observations, seen.unit)
    return LawView([predicted_table(seen)], [chart])


def law_table(ladder: Ladder) -> Table:
    """The constants of each form, its error on the largest runs, and the chosen form."""
    rows: list[Sequence[Any]] = []
    for one in ladder.forms:
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
    predicted = "; ".join(ladder.forms[0].errors)
    notes = [
        f"The errors are of the largest runs, predicted from the others: {predicted}.",
        f"The chosen form, fitted to all runs: {ladder.law}; 80 % ranges by bootstrap over runs.",
        *(f"Not in the fit: {reason}." for reason in ladder.left_out),
    ]
    return Table("law", columns, rows, "The law of scaling", notes)


def error_table(ladder: Ladder) -> Table:
    """Each run's measured and fitted loss; a run outside the fit also has a prediction."""
    errors, law, rows = ladder.forms[0].errors, ladder.law, []
    for one, flops in zip(ladder.observations, law.flops(ladder.observations), strict=True):
        error = errors.get(one.name)
        before = None if error is None else one.loss * (1 + error)
        size = one.size(law.embeddings)
        rows.append((one.name, size, one.tokens, flops, one.loss, law.of_run(one), before, error))
    columns = [
        Column("run", "Run"),
        Column("parameters", law.counted.capitalize(), "count"),
        Column("tokens", "Tokens", "count"),
        Column("flops", "FLOPs (6 N D)"),
        Column("loss", "Measured", "loss"),
        Column("fitted", "Fitted", "loss"),
        Column("predicted", "Predicted without it", "loss"),
        Column("error", "Error", "share"),
    ]
    return Table("law-runs", columns, rows, "Predicted and measured")


def predicted_table(ladder: Ladder) -> Table:
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
    names = [short(tick) if ticks[-1] < 1e12 else f"{tick:.0e}" for tick in ticks]
    return Axis(label, ticks, names, log=True)


def compute_axis(law: Law, flops: Sequence[float]) -> Axis:
    return decades(flops, f"FLOPs (6 N D, N: {law.counted})")


def by_size(runs: Sequence[Observation]) -> list[tuple[str, list[Observation]]]:
    """A name and the runs of each number of parameters, both rising."""
    ordered = sorted(runs, key=lambda one: (one.parameters, one.tokens))
    sizes = itertools.groupby(ordered, lambda one: one.parameters)
    return [(f"{short(size)} parameters", list(own)) for size, own in sizes]


def compute_chart(law: Law, runs: Sequence[Observation], unit: str) -> Chart:
    """The loss against compute: the runs, the law of each size, and the compute-optimal envelope.

    A curve repeats tokens as its runs do.
    """
    series = []
    for number, (name, own) in enumerate(by_size(runs)):
        x, y = law.flops(own), np.array([one.loss for one in own])
        series.append(Series(name, y, {"x": x}, number, points="only"))
        size, unique = own[0].size(law.embeddings), own[0].unique_tokens
        flops = np.geomspace(x.min(), x.max(), POINTS)
        losses = [law.loss(size, effective_tokens(c / 6 / size, unique)) for c in flops]
        series.append(Series("", np.array(losses), {"x": flops}, number, minor=True))
    all_flops = law.flops(runs)
    flops = np.geomspace(all_flops.min(), all_flops.max() * FAR, POINTS)
    best = np.array([law.loss(*law.optimum(c)) for c in flops])
    series.append(Series("best size for the compute", best, {"x": flops}, grey=True))
    axis = compute_axis(law, [*all_flops, flops[-1]])
    note = f"against {axis.label}; points: runs; lines: the law; the best size repeats no token"
    return Chart("law-compute", "Loss against compute", unit, series, x=axis, note=note)


def slices(law: Law, runs: Sequence[Observation], unit: str) -> Chart:
    all_flops, sizes = law.flops(runs), [float(one.size(law.embeddings)) for one in runs]
    series, n = [], np.geomspace(min(sizes) / 3, max(sizes) * 3, POINTS)
    for number, flops in enumerate(np.geomspace(all_flops.min(), all_flops.max(), 4)):
        y = np.array([law.loss(size, flops / 6 / size) for size in n])
        series.append(Series(f"{flops:.1e} FLOPs", y, {"x": n}, number))
    title, axis = "Equal compute, different sizes", decades(n.tolist(), law.counted)
    note = f"against {axis.label}; no token is repeated"
    return Chart("law-slices", title, unit, series, x=axis, note=note)


def predicted_chart(ladder: Ladder) -> Chart:
    """The law's losses against the measured ones, and its predictions of the largest runs."""
    errors, series = ladder.forms[0].errors, list[Series]()
    losses = sorted(one.loss for one in ladder.observations)
    for number, (name, runs) in enumerate(by_size(ladder.observations)):
        own = sorted(runs, key=lambda one: one.loss)
        fitted = np.array([ladder.law.of_run(one) for one in own])
        at = {"x": np.array([one.loss for one in own])}
        series.append(Series(name, fitted, at, number, points="only"))
        outside = [one for one in own if one.name in errors]
        if outside:
            at = {"x": np.array([one.loss for one in outside])}
            predicted = at["x"] * np.array([1 + errors[one.name] for one in outside])
            series.append(Series(f"{name}, predicted", predicted, at, number, points="median"))
    ticks = np.linspace(losses[0], losses[-1], 5).tolist()
    ends = np.array([losses[0], losses[-1]])
    series.append(Series("equal", ends, {"x": ends}, grey=True))
    axis = Axis("measured loss", ticks, [f"{tick:.3g}" for tick in ticks])
    note = "against the measured loss; hollow: fitted, solid: predicted without these runs"
    return Chart("law-predicted", "Predicted and measured", ladder.unit, series, x=axis, note=note)


def residuals(law: Law, runs: Sequence[Observation]) -> Chart:
    series = []
    for number, (name, own) in enumerate(by_size(runs)):
        y = np.array([100 * (law.of_run(one) / one.loss - 1) for one in own])
        series.append(Series(name, y, {"x": law.flops(own)}, number, points="line"))
    axis, title = compute_axis(law, law.flops(runs).tolist()), "The law minus the measured loss"
    note = f"against {axis.label}"
    return Chart("law-residuals", title, "% of the loss", series, x=axis, note=note)
