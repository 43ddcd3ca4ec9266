"""The contents of a report: charts, tables and headlines, each computed once."""

from __future__ import annotations

import math
from collections.abc import Sequence

from windlass.reports import tables
from windlass.reports.charts import Chart, looks
from windlass.reports.head import BEST, divergence, head_of
from windlass.reports.law import LawView, ladder_view, prediction_view
from windlass.reports.published import published
from windlass.reports.run_charts import charts, time_chart
from windlass.reports.scaling import recommended, scaling_charts, setup_table
from windlass.reports.study import StudyView, study_tables, sweep_charts
from windlass.reports.table import Table, stacked
from windlass.reports.view import RunView, first
from windlass.study.results import common_measure

CELL_PAGES = 200


class Contents:
    """Everything in a report of some runs, or of a study with its started runs.

    Args:
        views: The runs.
        study: Their study, if they are one.
        table: The published table to fill, empty for the preset's own.
        law: A ladder whose law predicts the runs.

    Raises:
        UserError: no published table has that name, or the law does not compare with the runs.
    """

    def __init__(
        self,
        views: Sequence[RunView],
        study: StudyView | None = None,
        table: str = "",
        law: str = "",
    ):
        self.views, self.study = views, study
        self.single = len(views) == 1 and not study
        self.published = published(views, study, table)
        self.looks = looks(views, ranking(views, study))
        # Bounded, because each takes a tenth of a second and 100 kB.
        self.cell_pages = list(views[:CELL_PAGES]) if study else []
        self.run_charts, self.time = charts(views), time_chart(views)
        self.settings, self.base = tables.all_settings(views), tables.base_of(views)
        # A study's table of cells has the settings that differ.
        self.differing = [row for row in self.settings if row.differs and not study]
        self.changed = [row for row in self.settings if row.changed and not row.differs]
        self.scaled: Table | None = None  # the table of setups
        self.law: LawView | None = None
        self.winner_title = "The recommended setup" if study and study.setups else "The best"
        self.study_charts = list[Chart]()
        self.recommendations = study.recommendations if study else []
        shown = list[Table]()
        if study and study.study.scaling:
            self.scaled = setup_table(study.study, study.setups)
            self.study_charts = scaling_charts(study.study.scaling, study.setups)
            self.recommendations = recommended(study.study, study.setups)
            shown = [self.scaled]
        elif law or (study and study.study.kind == "ladder"):
            runs = [view.run for view in views]
            self.law = ladder_view(study.study) if study else prediction_view(law, runs)
            self.study_charts, shown = list(self.law.charts), list(self.law.tables)
        elif study:
            self.study_charts = sweep_charts(study)
        self.head = head_of(views, study, self.recommendations, self.law)
        if self.single:
            total = tables.results(views[0])
            shown.append(tables.results(views[0], brief=True))
        else:
            total = tables.comparison(views, self.settings)
            shown += study_tables(study) if study else [total]
        keys, evals = [] if self.single else ["run"], [tables.evaluations(view) for view in views]
        trains, parts = dict[tuple[str, ...], Table](), dict[tuple[str, ...], Table]()
        for view, suites in zip(views, evals, strict=True):
            own = () if self.single else (view.label,)
            trains[own] = tables.curves(view.train)
            parts |= {(*own, suite): one for suite, one in suites.items()}
        csv = [tables.settings_table(views, self.settings), stacked("train", keys, trains)]
        csv += [stacked("evaluations", [*keys, "suite"], parts)] if parts else []
        # for people, in the order of report.md; the rest, as CSV alone; of a single run, by suite
        self.tables = {each.name: each for each in shown}
        self.csv = {each.name: each for each in (*csv, total)}
        self.evaluations = evals[0] if self.single else {}
        times = [self.time] if self.time else []
        self.pictures: list[Chart] = [*self.study_charts, *self.run_charts, *times]


def ranking(views: Sequence[RunView], study: StudyView | None) -> list[int]:
    """The indices of the runs, the best first; in their order if their losses do not compare."""
    best = None
    if study:
        lower, winner = study.lower, study.winners.cell
        best = winner.run.path if winner else None
        by_run = {result.run.path: result.score for result in study.results}
        scores = [by_run.get(view.run.path) for view in views]
    else:
        lower = True
        name = BEST.get(common_measure([view.validation for view in views])[0], "")
        scores = [first(view.values.get(name)) for view in views]
    keys = [math.inf if x is None or math.isnan(x) else x if lower else -x for x in scores]

    def place(run: int) -> tuple[bool, bool, float]:
        return views[run].run.path != best, bool(divergence(views[run])), keys[run]

    return sorted(range(len(views)), key=place)
