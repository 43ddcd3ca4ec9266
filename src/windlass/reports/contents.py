"""The contents of a report: charts, tables and headlines, each computed once."""

from __future__ import annotations

import math
from collections.abc import Sequence

from windlass.reports import tables
from windlass.reports.answers import BEST, divergence, head_of
from windlass.reports.charts import Chart, looks
from windlass.reports.law import LawView, is_ladder
from windlass.reports.published import published
from windlass.reports.run_charts import charts, time_chart
from windlass.reports.scaling import ScalingView
from windlass.reports.study import StudyView, study_tables, sweep_charts
from windlass.reports.table import Table, stacked
from windlass.reports.view import RunView, first
from windlass.study.results import common_measure


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
        self.looks = looks(views, ranking(views, study))
        self.run_charts, self.time = charts(views), time_chart(views)
        self.study_charts = scaled.charts if scaled else sweep_charts(study) if study else []
        self.settings = tables.all_settings(views)
        # the settings that differ between the runs, or from the defaults
        self.changed = [row for row in self.settings if row.differs or row.changed]
        self.law = LawView(study.study) if study and is_ladder(study.study) else None
        self.study_charts = self.law.charts if self.law else self.study_charts
        self.head = head_of(views, study, scaled)
        single = len(views) == 1 and not study
        total = tables.results(views[0]) if single else tables.comparison(views, self.settings)
        shown = [total]
        if study:
            above = scaled or self.law
            shown = [*(above.tables if above else ()), *study_tables(study)]
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


def ranking(views: Sequence[RunView], study: StudyView | None) -> list[int]:
    """The indices of the runs, the best first; in their own order if their losses do not compare."""
    if study:
        lower = any(result.lower for result in study.results)
        by_run = {result.run.path: result.score for result in study.results}
        scores = [by_run.get(view.run.path) for view in views]
    else:
        lower = True
        name = BEST.get(common_measure([view.validation for view in views])[0], "")
        scores = [first(view.values.get(name)) for view in views]
    keys = [math.inf if x is None or math.isnan(x) else x if lower else -x for x in scores]
    return sorted(range(len(views)), key=lambda run: (bool(divergence(views[run])), keys[run]))
