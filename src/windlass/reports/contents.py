"""Everything that a report shows, for its page, Markdown, tables and plots."""

from __future__ import annotations

from collections.abc import Sequence

from windlass.reports import tables
from windlass.reports.answers import head_of
from windlass.reports.charts import Chart, charts
from windlass.reports.law import LawView, ladder_view, prediction_view
from windlass.reports.published import published
from windlass.reports.scaling import recommended, scaling_charts, setup_table
from windlass.reports.study import StudyView, cell_table, seed_table, sweep_charts
from windlass.reports.tables import Table
from windlass.reports.view import RunView
from windlass.study.grid import SEED

CELL_PAGES = 200  # of a study, at most: each takes a tenth of a second and 100 kB


class Contents:
    """The contents of a report on some runs, or on a study with its started runs.

    UserError if no published `table` has that name, or the law does not compare with the runs.
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
        self.cell_pages = list(views[:CELL_PAGES]) if study else []
        self.run_charts, self.time = charts(views), tables.times(views)
        self.settings, self.base = tables.all_settings(views), tables.base_of(views)
        # A study's table of cells has the settings that differ.
        self.differing = [row for row in self.settings if row.differs and not study]
        self.changed = [row for row in self.settings if row.changed and not row.differs]

        self.scaled: Table | None = None  # the table of setups
        self.law: LawView | None = None
        self.study_charts = list[Chart]()
        self.recommendations = study.recommendations if study else []
        self.winner_title = "The best"
        shown = list[Table]()  # in the order of report.md
        if study and study.study.scaling:
            self.scaled = setup_table(study.study, study.setups)
            self.study_charts = scaling_charts(study.study.scaling, study.setups)
            self.recommendations = recommended(study.study, study.setups)
            self.winner_title = "The recommended setup"
            shown.append(self.scaled)
        elif study and study.study.kind == "ladder":
            self.law = ladder_view(study.study)
        elif study:
            self.study_charts = sweep_charts(study)
        elif law:
            self.law = prediction_view(law, [view.run for view in views])
        if self.law:
            self.study_charts = list(self.law.charts)
            shown += self.law.tables
        self.head = head_of(views, study, self.recommendations, self.law)

        self.evaluations = list[Table]()
        if self.single:
            self.results = tables.results(views[0])  # every measure
            self.evaluations = tables.evaluations(views[0])
            shown.append(tables.results(views[0], brief=True))
        else:
            self.results = tables.comparison(views, self.settings)
            shown.append(cell_table(study) if study else self.results)
            if study and SEED in study.study.keys:
                shown.append(seed_table(study))
        if len(self.time.columns) > 1:
            shown.append(self.time)
        self.tables = {table.name: table for table in [*shown, *self.evaluations]}  # for people
        self.pictures: list[Chart] = [*self.study_charts, *self.run_charts]
