"""The report's page: a template filled with text, tables and charts, in one file.

`page.html` is a jinja2 template with autoescape, and every value also passes through
`text.printable`. The page holds its line charts as JSON, which `chart.js` and `page.js` draw; the
template draws bars and heat maps. The page opens from disk: its content security policy allows its
script by hash, and no address at all.
"""

from __future__ import annotations

import base64
import hashlib
import math
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np
from jinja2 import Environment, StrictUndefined, Template
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup

from windlass import __version__
from windlass.recipe import flatten
from windlass.reports.charts import BEST, FEW, Chart, Look, Series, smoothing
from windlass.reports.contents import Contents
from windlass.reports.view import RunView
from windlass.telemetry.measures import MISSING, show
from windlass.telemetry.terminal import printable
from windlass.variables import scrub

SAMPLES = 40  # steps of each run with samples in the page: evenly spaced, with the first and last


def cell_page(view: RunView) -> str:
    """The page of a study's cell, beside the study's own page."""
    return f"cells/{view.run.name}.html"


def page(report: Contents) -> str:
    files = map(Path(__file__).with_name, ("page.css", "chart.js", "page.js"))
    css, *js = (file.read_text("utf-8") for file in files)
    script = "\n".join(("(() => {", '"use strict";', *js, "})();", ""))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    lines = [c for c in (*report.run_charts, *report.study_charts) if c.kind == "line"]
    study, heading = report.study, report.study.heading if report.study else ""
    environment = _environment(report.views)
    if study:  # the pages of the cells have the others
        environment = [fact for fact in environment if fact.same]
    parts: dict[str, tuple[str, Any]] = {  # the possible sections: heading and content
        "published": (report.published.title if report.published else "", report.published),
        "winner": (report.winner_title, report.recommendations),
        "scaling": ("Scaling", report.scaled),
        "law": ("The law of scaling", report.law),
        "swept": (
            f"{heading} by setting",
            None if report.scaled or report.law else report.study_charts,
        ),
        "cells": ("Cells", report.tables.get("cells")),
        "curves": ("Curves", report.run_charts),
        "results": ("Results", None if study else report.tables["results"]),
        "time": (report.time.title if report.time else "", report.time),
        "samples": ("Samples", _samples(report.views)),
        "settings": ("Settings", report.settings),
        "environment": ("Environment", environment),
    }
    if not study:  # the curves of a run come first
        parts = {"curves": parts.pop("curves"), **parts}
    context = {
        **vars(report),
        "sections": {name: part for name, part in parts.items() if part[1]},
        "version": __version__,
        "style": Markup(css),
        "script": Markup(script),
        "script_hash": f"sha256-{digest}",
        "data": htmlsafe_json_dumps(scrub(payload(report.looks, lines)), allow_nan=False),
        "unchanged": [row for row in report.settings if not (row.differs or row.changed)],
        "links": _cell_links(report),
        "show": show,
        "sample_limit": SAMPLES,
        "few": FEW,
        "best": BEST,
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


def _cell_links(report: Contents) -> list[str]:
    """The page of the cell in each row of the table of cells; empty without one."""
    pages = {view.run.path: cell_page(view) for view in report.cell_pages}
    results = report.study.results if report.study else ()
    return [quote(pages.get(result.run.path, "")) for result in results]


def payload(runs: Sequence[Look], charts: Iterable[Chart]) -> dict[str, Any]:
    """The line charts as plain values.

    Series with the same points share them: `at` of a series is a place in `points`.
    """
    shared: dict[bytes, tuple[int, dict[str, Any]]] = {}

    def series(one: Series) -> dict[str, Any]:
        key = b"".join(values.tobytes() for values in one.at.values())
        points = {name: numbers(values) for name, values in one.at.items()}
        place, _ = shared.setdefault(key, (len(shared), points))
        band = None
        if one.low is not None and one.high is not None:
            band = [numbers(one.low), numbers(one.high)]
        names = [
            "run",
            "name",
            "colour",
            "dash",
            "grey",
            "minor",
            "points",
            "smooth",
            "bad",
            "diverged",
        ]
        own = {name: getattr(one, name) for name in names}
        return own | {"at": place, "y": numbers(one.y), "band": band}

    listed = list(charts)
    return {
        "runs": [_plain_look(look) for look in runs],
        "charts": [
            {"id": chart.id, "x": asdict(chart.x), "y": asdict(chart.y)}
            | {"series": [series(one) for one in chart.series]}
            for chart in listed
        ],
        "points": [points for _, points in shared.values()],
        "smoothing": smoothing(listed),
    }


def _plain_look(look: Look) -> dict[str, Any]:
    restarts = []
    for r in look.restarts:
        places = zip(("step", "tokens", "hours"), numbers((r.step, r.tokens, r.hours)), strict=True)
        text = f"{look.label}: {r.text} at step {r.step:,.0f} ({r.time})"
        restarts.append({**dict(places), "what": r.what, "text": text})
    return {"label": look.label, "place": look.place, "rank": look.rank, "restarts": restarts}


def numbers(values: Iterable[float]) -> list[float | int | None]:
    """Floats for JSON: six significant digits, integers without a point, None if not finite."""

    def plain(value: float) -> float | int | None:
        if not math.isfinite(value):
            return None
        rounded = value if float(value).is_integer() else float(f"{value:.6g}")
        return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded

    return [plain(float(value)) for value in values]


def _samples(views: Sequence[RunView]) -> list[dict[str, Any]]:
    """The generated texts in the page, each split into its prompt and its continuation."""
    samples = []
    for run, view in enumerate(views):
        steps = sorted({sample["step"] for sample in view.samples})
        places = np.linspace(0, len(steps) - 1, min(len(steps), SAMPLES))
        chosen = {steps[round(place)] for place in places}
        for one in view.samples:
            if one["step"] in chosen:
                prompt = str(one.get("prompt") or "")
                text = str(one["text"]).removeprefix(prompt)
                samples.append({"run": run, "step": one["step"], "prompt": prompt, "text": text})
    return samples


class Fact(NamedTuple):
    name: str
    texts: list[str]  # in each run
    same: bool


def _environment(views: Sequence[RunView]) -> list[Fact]:
    facts = []
    for view in views:
        own = flatten(scrub(view.run.environment))
        if isinstance(own.get("command"), list):
            own["command"] = shlex.join(own["command"])
        facts.append({key: show(value) for key, value in own.items()})
    listed = []
    for name in dict.fromkeys(name for one in facts for name in one):
        texts = [one.get(name, MISSING) for one in facts]
        listed.append(Fact(name, texts, len(set(texts)) == 1))
    return listed
