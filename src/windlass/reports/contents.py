"""The contents of a report: charts, tables and headlines, each computed once."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from windlass.checkpoint.retention import LOSS
from windlass.reports.charts import Chart, Look, looks
from windlass.reports.published import published
from windlass.reports.run_charts import charts, time_chart
from windlass.reports.scaling import ScalingView, read_scaling
from windlass.reports.study import StudyView, Winner, study_tables, sweep_charts
from windlass.reports.table import Table, stacked
from windlass.reports.tables import (
    SettingRow,
    all_settings,
    comparison,
    curves,
    evaluations,
    results,
    settings_table,
)
from windlass.reports.text import plural, show
from windlass.reports.view import RunView
from windlass.study.compare import BITS, common_measure
from windlass.telemetry.measures import RUN

BEST = {LOSS: "best_eval_loss", BITS: "best_bits_per_byte"}
"""The measure of the best of several runs, by what they have in common."""


@dataclass(frozen=True)
class Head:
    """The top of the page."""

    kicker: str
    title: str
    lede: str
    state: str = ""
    remark: str = ""  # by what runs are compared, or why there is no best
    notes: str = ""  # `run.notes`
    figures: list[tuple[str, str, str]] = field(default_factory=list)  # name, value, remark


@dataclass(frozen=True)
class Contents:
    """Everything in a report of some runs, or of a study with its started runs."""

    head: Head
    views: Sequence[RunView]
    study: StudyView | None
    scaled: ScalingView | None
    published: Table | None
    winners: Sequence[Winner]
    looks: Sequence[Look]
    run_charts: Sequence[Chart]
    study_charts: Sequence[Chart]
    time: Chart | None
    settings: Sequence[SettingRow]
    tables: Mapping[str, Table]  # for people, in the order of report.md
    csv: Mapping[str, Table]  # the rest, as CSV alone
    evaluations: Mapping[str, Table]  # of a single run, by suite

    @property
    def changed(self) -> list[SettingRow]:
        """The settings that differ between the runs, or from the defaults."""
        return [row for row in self.settings if row.differs or row.changed]

    def pictures(self) -> list[Chart]:
        return [*self.study_charts, *self.run_charts, *([self.time] if self.time else [])]


def contents(views: Sequence[RunView], study: StudyView | None = None, table: str = "") -> Contents:
    """Compute a report; `table`: the published table to fill, empty for the preset's own.

    Raises:
        UserError: there is no such published table.
    """
    scaled = read_scaling(study) if study else None
    settings, evals = all_settings(views), {view.label: evaluations(view) for view in views}
    single = len(views) == 1 and not study
    total = results(views[0]) if single else comparison(views, settings)
    shown = [total]
    if study:
        shown = [*(scaled.tables if scaled else ()), *study_tables(study)]
    keys = [] if single else ["run"]
    own = {view.label: () if single else (view.label,) for view in views}
    parts = {(*own[run], suite): t for run, each in evals.items() for suite, t in each.items()}
    csv = [
        settings_table(views, settings),
        stacked("train", keys, {own[v.label]: curves(v.train) for v in views}),
        *([stacked("evaluations", [*keys, "suite"], parts)] if parts else []),
        total,
    ]
    return Contents(
        head=_head(views, study, scaled),
        views=views,
        study=study,
        scaled=scaled,
        published=published(views, study, table, scaled.values if scaled else ()),
        winners=scaled.winners if scaled else study.winners if study else [],
        looks=looks(views, study.tones if study else ()),
        run_charts=charts(views),
        study_charts=scaled.charts if scaled else sweep_charts(study) if study else [],
        time=time_chart(views),
        settings=settings,
        tables={each.name: each for each in shown},
        csv={each.name: each for each in csv},
        evaluations=evals[views[0].label] if single else {},
    )


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
    measure, remark = common_measure([view.evaluated for view in views])
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
