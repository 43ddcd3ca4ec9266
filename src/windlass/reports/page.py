"""The page of a report: one file, from the template `page.html` with autoescape.

The content security policy allows its script by hash, and no address at all.
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
from windlass.reports.charts import AXES, Chart
from windlass.reports.contents import Contents
from windlass.reports.view import RunView
from windlass.telemetry.measures import show
from windlass.telemetry.terminal import printable
from windlass.variables import scrub

SAMPLES = 40  # steps of each run with samples in the page: evenly spaced, with the first and last


def cell_page(view: RunView) -> str:
    return f"cells/{view.run.name}.html"


def page(report: Contents) -> str:
    files = map(Path(__file__).with_name, ("page.css", "chart.js", "page.js"))
    css, *js = (file.read_text("utf-8") for file in files)
    script = "\n".join(("(() => {", '"use strict";', *js, "})();", ""))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    lines = [*report.run_charts, *report.study_charts]
    results = report.study.results if report.study else []
    pages = {view.run.path: cell_page(view) for view in report.cell_pages}
    samples = _samples(report.views)
    context = {
        **vars(report),
        "sections": _sections(report, bool(samples)),
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


def _sections(report: Contents, samples: bool) -> dict[str, str]:
    """The headings of the page's sections in their order."""
    study, sections = report.study, dict[str, str]()
    if report.run_charts and not study:
        sections["curves"] = "Curves"
    if report.published:
        sections["published"] = report.published.title
    if report.recommendations:
        sections["winner"] = report.winner_title
    if report.scaled:
        sections["scaling"] = "Scaling"
    elif report.law:
        sections["law"] = "The law of scaling"
    elif study and report.study_charts:
        sections["swept"] = f"{study.heading} by setting"
    if study:
        sections["cells"] = "Cells"
        if report.run_charts:
            sections["curves"] = "Curves"
    else:
        sections["results"] = "Results"
    if "time" in report.tables:
        sections["time"] = report.time.title
    if samples:
        sections["samples"] = "Samples"
    return sections | {"settings": "Settings"}


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
