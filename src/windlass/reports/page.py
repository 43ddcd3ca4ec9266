"""The contents of a report, and its page: one file, from the template `page.html` with autoescape.

The content security policy allows the page's script by hash, and no address at all.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from jinja2 import Environment, StrictUndefined, Template
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup

from windlass import __version__
from windlass.reports import study as studies
from windlass.reports import tables
from windlass.reports.answers import head_of
from windlass.reports.charts import AXES, Chart, charts
from windlass.reports.law import LawView, ladder_view, prediction_view
from windlass.reports.published import published
from windlass.reports.study import StudyView
from windlass.reports.tables import Table
from windlass.reports.view import RunView
from windlass.study.grid import SEED
from windlass.telemetry.measures import show
from windlass.telemetry.terminal import printable
from windlass.variables import scrub

CELL_PAGES = 200  # of a study, at most: each takes a tenth of a second and 100 kB
SAMPLES = 40  # steps of each run with samples in the page: evenly spaced, with the first and last


class Contents:
    """What a report on some runs, or on a study with its started runs, shows: once for its page,
    Markdown, tables and plots.

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
            self.scaled = studies.setup_table(study.study, study.setups)
            self.study_charts = studies.scaling_charts(study.study.scaling, study.setups)
            self.winner_title = "The recommended setup"
            shown.append(self.scaled)
        elif study and study.study.kind == "ladder":
            self.law = ladder_view(study.study)
        elif study:
            self.study_charts = studies.sweep_charts(study)
        elif law:
            self.law = prediction_view(law, [view.run for view in views])
        if self.law:
            self.study_charts = list(self.law.charts)
            shown += self.law.tables
        self.head = head_of(views, study, self.law)

        self.evaluations = list[Table]()
        if self.single:
            self.results = tables.results(views[0])  # every measure
            self.evaluations = tables.evaluations(views[0])
            shown.append(tables.results(views[0], brief=True))
        else:
            self.results = tables.comparison(views, self.settings)
            shown.append(studies.cell_table(study) if study else self.results)
            if study and SEED in study.study.keys:
                shown.append(studies.seed_table(study))
        if len(self.time.columns) > 1:
            shown.append(self.time)
        self.tables = {table.name: table for table in [*shown, *self.evaluations]}  # for people
        self.pictures: list[Chart] = [*self.study_charts, *self.run_charts]


def cell_page(view: RunView) -> str:
    return f"cells/{view.run.name}.html"


def page(report: Contents) -> str:
    files = map(Path(__file__).with_name, ("page.css", "chart.js", "page.js"))
    css, *js = (file.read_text("utf-8") for file in files)
    script = "\n".join(("(() => {", '"use strict";', *js, "})();", ""))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    lines = [*report.run_charts, *report.study_charts]
    study = report.study
    results = study.results if study else []
    pages = {view.run.path: cell_page(view) for view in report.cell_pages}
    samples = _samples(report.views)
    curves = {"curves": "Curves" if report.run_charts else ""}
    swept = study and report.study_charts and not report.scaled and not report.law
    sections = {  # the headings in their order; empty: no such section
        **({} if study else curves),
        "published": report.published.title if report.published else "",
        "winner": report.winner_title if report.recommendations else "",
        "scaling": "Scaling" if report.scaled else "",
        "law": "The law of scaling" if report.law else "",
        "swept": f"{study.heading} by setting" if study and swept else "",
        "cells": "Cells" if study else "",
        **(curves if study else {}),
        "results": "" if study else "Results",
        "time": report.time.title if "time" in report.tables else "",
        "samples": "Samples" if samples else "",
        "settings": "Settings",
    }
    context = {
        **vars(report),
        "sections": {name: heading for name, heading in sections.items() if heading},
        "samples": samples,
        "version": __version__,
        "style": Markup(css),
        "script": Markup(script),
        "script_hash": f"sha256-{digest}",
        "data": htmlsafe_json_dumps(scrub(payload(report.views, lines)), allow_nan=False),
        "unchanged": [row for row in report.settings if not (row.differs or row.changed)],
        # the page of the cell in each row of the table of cells; empty without one
        "links": [quote(pages.get(result.run.path, "")) for result in results],
        "show": show,
        "sample_limit": SAMPLES,
    }
    return _template().render(context)


@cache
def _template() -> Template:
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=lambda value: value if isinstance(value, Markup) else printable(scrub(str(value))),
    )
    return environment.from_string(Path(__file__).with_name("page.html").read_text("utf-8"))


SENT = ("run", "name", "colour", "dash", "grey", "minor", "points", "smooth", "bad")


def payload(runs: Sequence[RunView], charts: Sequence[Chart]) -> dict[str, Any]:
    """The line charts as plain values.

    Series with the same points share them: `at` of a series is a place in `points`.
    """
    shared: dict[bytes, tuple[int, dict[str, Any]]] = {}
    sent, seen = [], []
    for chart in charts:
        lines = []
        for one in chart.series:
            key = b"".join(values.tobytes() for values in one.at.values())
            points = {name: numbers(values) for name, values in one.at.items()}
            place, _ = shared.setdefault(key, (len(shared), points))
            band = None
            if one.low is not None and one.high is not None:
                band = [numbers(one.low), numbers(one.high)]
            fields = {name: getattr(one, name) for name in SENT}
            lines.append(fields | {"at": place, "y": numbers(one.y), "band": band})
        axes = {"x": asdict(chart.x), "y": asdict(chart.y)}
        sent.append({"id": chart.id, **axes, "series": lines})
    for run in runs:
        restarts = []
        for r in run.restarts:
            places = dict(zip(AXES, numbers((r.step, r.tokens, r.hours)), strict=True))
            text = f"{run.label}: {r.text} at step {r.step:,.0f} ({r.time})"
            restarts.append({**places, "what": r.what, "text": text})
        seen.append({"label": run.label, "restarts": restarts})
    points_of = [points for _, points in shared.values()]
    return {"runs": seen, "charts": sent, "points": points_of}


def numbers(values: Iterable[float]) -> list[float | int | None]:
    """Floats for JSON: six significant digits, integers without a point, None if not finite."""
    plain: list[float | int | None] = []
    for value in map(float, values):
        rounded = value if value.is_integer() else float(f"{value:.6g}")
        whole = rounded.is_integer() and abs(rounded) < 1e15
        plain.append(int(rounded) if whole else rounded if math.isfinite(value) else None)
    return plain


def _samples(views: Sequence[RunView]) -> list[dict[str, Any]]:
    samples = []
    for view in views:
        label = f"{view.label}, " if len(views) > 1 else ""
        steps = sorted({sample["step"] for sample in view.samples})
        places = np.linspace(0, len(steps) - 1, min(len(steps), SAMPLES))
        chosen = {steps[round(place)] for place in places}
        for one in view.samples:
            if one["step"] in chosen:
                prompt = str(one.get("prompt") or "")
                text = str(one["text"]).removeprefix(prompt)
                samples.append(
                    {"label": label, "step": one["step"], "prompt": prompt, "text": text}
                )
    return samples
