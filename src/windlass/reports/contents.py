"""The contents of a report: charts, tables and headlines, each computed once."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from windlass.checkpoint.retention import LOSS
from windlass.reports import tables
from windlass.reports.charts import Chart, looks
from windlass.reports.published import published
from windlass.reports.run_charts import charts, time_chart
from windlass.reports.scaling import ScalingView
from windlass.reports.study import StudyView, study_tables, sweep_charts
from windlass.reports.table import Table, stacked
from windlass.reports.text import plural, show
from windlass.reports.view import RunView
from windlass.study.results import BITS, common_measure
from windlass.telemetry.measures import RUN

BEST = {LOSS: "best_eval_loss", BITS: "best_bits_per_byte"}
"""The measure of the best of several runs, by what they have in common."""


@dataclass(frozen=True)
class Head:
    kicker: str
    title: str
    lede: str
    state: str = ""
    remark: str = ""  # by what runs are compared, or why there is no best
    notes: str = ""  # `run.notes`
    figures: list[tuple[str, str, str]] = field(default_factory=list)  # name, value, remark


class Contents:
    """Everything in a report of some runs, or of a study with its started runs.

    `table`: the published table to fill, empty for the preset's own.

    Raises:
        UserError: there is no such published table.
    """

    def __init__(self, views: Sequence[RunView], study: StudyView | None = None, table: str = ""):
        self.views, self.study = views, study
        self.scaled = scaled = ScalingView(study) if study and study.study.scaling else None
        self.published = published(views, study, table, scaled.values if scaled else ())
        self.winners = scaled.winners if scaled else study.winners if study else []
        self.looks = looks(views, study.tones if study else ())
        self.run_charts, self.time = charts(views), time_chart(views)
        self.study_charts = scaled.charts if scaled else sweep_charts(study) if study else []
        self.settings = tables.all_settings(views)
        # the settings that differ between the runs, or from the defaults
        self.changed = [row for row in self.settings if row.differs or row.changed]
        self.head = _head(views, study, scaled)
        single = len(views) == 1 and not study
        total = tables.results(views[0]) if single else tables.comparison(views, self.settings)
        shown = [total]
        if study:
            shown = [*(scaled.tables if scaled else ()), *study_tables(study)]
        keys, evals = [] if single else ["run"], [tables.evaluations(view) for view in views]
        trains, parts = dict[tuple[str, ...], Table](), dict[tuple[str, ...], Table]()
        for view, suites in zip(views, evals, strict=True):
            own = () if single else (view.label,)
            trains[own] = tables.curves(view.train)
            parts |= {(*own, suite): one for suite, one in suites.items()}
        csv = [tables.settings_table(views, self.settings), stacked("train", keys, trains)]
        csv += [stacked("evaluations", [*keys, "suite"], parts)] if parts else []
        # for people, in the order of report.md; the rest, as CSV alone; of a single run, by suite
        self.tables = {each.name: each for each in shown}
        self.csv = {each.name: each for each in (*csv, total)}
        self.evaluations = evals[0] if single else {}
        times = [self.time] if self.time else []
        self.pictures: list[Chart] = [*self.study_charts, *self.run_charts, *times]


def _head(views: Sequence[RunView], study: StudyView | None, scaled: ScalingView | None) -> Head:
    if study:
        head = _study_head(study, scaled)
    elif len(views) == 1:
        return _run_head(views[0])
    else:
        head = _comparison_head(views)
    for name in ("tokens", "runtime_s", "device_hours"):
        if total := sum(float(view.values.get(name) or 0) for view in views):
            head.figures.append((f"{RUN[name].headline} in all", show(total, RUN[name].kind), ""))
    return head


def _run_head(view: RunView) -> Head:
    values = view.values
    parts = [f"{view.step:,} of {view.start.get('steps', view.step):,} steps"]
    if "network" in values:
        parts.append(str(values["network"]))
    if "trainable" in values:
        parts.append(f"{values['trainable']} trained")
    elif "parameters" in values:
        parts.append(f"{show(values['parameters'], 'count')} parameters")
    extensions = [restart.text for restart in view.restarts if restart.what == "extended"]
    starts = 1 + len(view.restarts) - len(extensions)
    parts += extensions
    parts += [f"started {plural(starts, 'time')} and drawn as one curve"] * (starts > 1)
    shown = [m for m in RUN.values() if m.headline and m.name in values]
    shown.sort(key=lambda m: m.kind != "loss")  # the losses come first
    figures = [(m.headline, show(values[m.name], m.kind), "") for m in shown]
    notes = view.settings["run.notes"]
    return Head("A run", view.label, ", ".join(parts), view.state, notes=notes, figures=figures)


def _comparison_head(views: Sequence[RunView]) -> Head:
    measure, remark = common_measure([view.validation for view in views])
    name = BEST.get(measure, "")
    scores = [(x, v.label) for v in views if isinstance(x := v.values.get(name), float)]
    best = min((one for one in scores if not math.isnan(one[0])), default=None)
    title = RUN[name].headline or RUN[name].title if name else ""
    figures = [(title, show(best[0], "loss"), best[1])] if best else []
    lede = _counts(view.state for view in views)
    return Head("A comparison of runs", f"{len(views)} runs", lede, remark=remark, figures=figures)


def _study_head(seen: StudyView, scaled: ScalingView | None) -> Head:
    kicker, figures = "A study", list[tuple[str, str, str]]()
    lede = "; ".join(f"{key}: {', '.join(map(show, x))}" for key, x in seen.swept.items())
    if scaled:
        kicker, lede, figures = "A scaling study", scaled.lede, scaled.figures
    if len(seen.best) == 1:
        best = seen.best[0]
        figures.append((f"Best {seen.title}", show(best.median, "loss"), best.label))
    states = _counts(result.state for result in seen.results)
    figures.append(("Cells", str(len(seen.results)), states))
    title = seen.study.path.resolve().name
    return Head(kicker, title, lede, remark=seen.remark, figures=figures)


def _counts(states: Iterable[str]) -> str:
    return ", ".join(f"{count} {state}" for state, count in Counter(states).items())
