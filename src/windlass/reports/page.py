"""The report as one HTML page that opens from disk: no network, everything escaped, the same bytes each time.

`page.html` is a jinja2 template with autoescape; every value that it prints goes through `text.printable` too. The
charts are drawn in the browser by chart.js and page.js from the same description as the PNG files (`charts.Chart`), as
JSON in the page. The page's content security policy allows its script by hash, and no address at all.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from windlass import __version__
from windlass.recipe.load import flatten
from windlass.reports.charts import Chart, Look, Series, smoothing
from windlass.reports.measures import PARTS, Value, goodput, measures
from windlass.reports.study import StudyView, cell_table, heats, looks, seed_table, short, sweep_charts, winner_text
from windlass.reports.tables import PRINCIPAL, all_settings, comparison, evaluations, results_for_people
from windlass.reports.text import MISSING, duration, printable, show
from windlass.reports.view import RunView

SIDE_BY_SIDE = 6
"""Up to this many runs have a column each in the results table; more have a row each only."""
SAMPLES = 40
"""Steps of each run whose samples are in the page: evenly spaced, first and last among them."""

Figure = tuple[str, str, str]
"""A figure at the top of the page: name, value, remark."""


def page(views: Sequence[RunView], charts: Sequence[Chart], study: StudyView | None = None) -> str:
    """The whole page.

    Args:
        views: the runs; of a study those that have begun.
        charts: of the runs, as `charts.charts` describes them.
        study: the study that the runs belong to.
    """
    script = f'(() => {{\n"use strict";\n{_asset("chart.js")}\n{_asset("page.js")}\n}})();\n'
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    sweeps = sweep_charts(study) if study else []
    run_looks = looks(study) if study else []
    rows = all_settings(views)
    parts: dict[str, Any] = {
        "cells": cell_table(study) if study else None,
        "curves": [chart for chart in charts if chart.id != "loss"],
        "results": study is None,
        "time": _times(views),
        "samples": _samples(views),
        "settings": [
            [row for row in rows if row.differs or row.changed],
            [row for row in rows if not (row.differs or row.changed)],
        ],
        "environment": _environment(views),
    }
    context = {
        **(_study_head(study) if study else _head(views)), **parts,
        "views": views, "study": study, "version": __version__,
        "links": [name for name in parts if parts[name] and (name != "curves" or study)],
        "style": Markup(_asset("page.css")), "script": Markup(script), "script_hash": f"sha256-{digest}",
        "data": Markup(as_json(payload(views, [*charts, *sweeps], run_looks))),
        "lead": [chart for chart in charts if chart.id == "loss"], "sweeps": sweeps,
        "heats": heats(study) if study else [],
        "seeds": seed_table(study) if study else None, "differ": any(row.differs for row in rows),
        "comparison": comparison(views, PRINCIPAL) if len(views) > 1 else None,
        "side_by_side": len(views) <= SIDE_BY_SIDE,
        "measures": results_for_people(views, each_evaluation=len(views) > 1),
        "evaluations": evaluations(views[0]) if len(views) == 1 else {}, "short": short, "show": show,
        "sample_limit": SAMPLES,
    }  # fmt: skip
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
        finalize=lambda value: value if isinstance(value, Markup) else printable(value),
    )  # fmt: skip
    return environment.from_string(_asset("page.html")).render(context)


def _asset(name: str) -> str:
    return (resources.files("windlass.reports") / name).read_text(encoding="utf-8")


# --- the numbers that the script draws -------------------------------------------------------------------------------


def payload(views: Sequence[RunView], charts: Sequence[Chart], looks: Sequence[Look] = ()) -> dict[str, Any]:
    """The runs and charts as plain values. Series that have the same steps share them: `at` is a place in `axes`."""
    axes: dict[bytes, tuple[int, dict[str, Any]]] = {}

    def series(one: Series) -> dict[str, Any]:
        key = one.step.tobytes() + one.tokens.tobytes() + one.hours.tobytes()
        if key not in axes:
            columns = {"step": one.step, "tokens": one.tokens, "hours": one.hours}
            axes[key] = len(axes), {name: numbers(values) for name, values in columns.items()}
        band = None if one.low is None or one.high is None else [numbers(one.low), numbers(one.high)]
        return {
            "run": one.run, "name": one.name, "at": axes[key][0], "y": numbers(one.y), "band": band,
            "colour": one.colour,
            "dash": one.dash, "minor": one.minor, "points": one.points, "smooth": one.smooth, "bad": one.bad,
            "diverged": one.diverged,
        }  # fmt: skip

    drawn = [
        {
            "id": chart.id, "zero": chart.zero, "x_label": chart.x_label, "x_values": numbers(chart.x_values),
            "x_names": chart.x_names, "x_log": chart.x_log, "series": [series(one) for one in chart.series],
        }
        for chart in charts
    ]  # fmt: skip
    runs = [
        {
            "label": view.label, "tone": rounded(look[0]) if look[0] is not None else None,
            "restarts": [
                {
                    "step": rounded(r.step), "tokens": rounded(r.tokens), "hours": rounded(r.hours), "what": r.what,
                    "text": f"{view.label}: {r.what} at step {r.step:,.0f} ({r.time})",
                }
                for r in view.restarts
            ],
        }
        for view, look in zip(views, looks or [(None, 0)] * len(views), strict=True)
    ]  # fmt: skip
    return {"runs": runs, "charts": drawn, "axes": [one for _, one in axes.values()], "smoothing": smoothing(charts)}


def numbers(values: Iterable[float]) -> list[float | int | None]:
    """Floats for JSON, see `rounded`."""
    return [rounded(float(value)) for value in values]


def rounded(value: float) -> float | int | None:
    """Six significant digits, whole numbers without a point, None for what is not finite."""
    if not math.isfinite(value):
        return None
    short = value if value.is_integer() else float(f"{value:.6g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def as_json(value: Any) -> str:
    """JSON that can stand in a script element: ASCII, without a character that HTML gives a meaning."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


# --- the head --------------------------------------------------------------------------------------------------------


def _head(views: Sequence[RunView]) -> dict[str, Any]:
    """Kicker, title, lede, notes and figures of one run's page or of a comparison."""
    values = [measures(view) for view in views]
    if len(views) > 1:
        names, states = [view.label for view in views], Counter(view.state for view in views)
        scored = [(v["best_eval_loss"], name) for v, name in zip(values, names, strict=True) if "best_eval_loss" in v]
        figures = [("Best validation loss", show(min(scored)[0], "loss"), min(scored)[1])] if scored else []
        return {
            "kicker": "A comparison of runs", "title": ", ".join(names) if len(names) <= 3 else f"{len(names)} runs",
            "state": "", "lede": f"{len(views)} runs: {', '.join(f'{n} {state}' for state, n in states.items())}",
            "notes": "",
            "figures": [*figures, ("Runs", str(len(views)), ""), *_totals(values)],
        }  # fmt: skip
    view, own = views[0], values[0]
    planned, world = view.settings.get("train.steps"), own.get("world")
    lede = [f"{view.step:,} of {planned:,} steps" if isinstance(planned, int) else f"{view.step:,} steps"]
    lede += [f"{show(own['parameters'], 'count')} parameters"] if "parameters" in own else []
    lede += [f"{show(world, 'count')} rank{'' if world == 1 else 's'}"] if world else []
    lede += [f"started {1 + len(view.restarts)} times and drawn as one curve"] if view.restarts else []
    return {
        "kicker": "A run", "title": view.label, "state": view.state, "lede": ", ".join(lede),
        "notes": view.settings.get("run.notes") or "", "figures": _figures(own),
    }  # fmt: skip


def _figures(values: Mapping[str, Value]) -> list[Figure]:
    """The figures at the top of the page of one run, each with a remark."""
    remarks = {"goodput": "of wall time in steps"}
    if "best_eval_loss" in values and values["best_eval_loss"] != values.get("eval_loss"):
        at = show(values["best_eval_step"], "count")
        remarks["eval_loss"] = f"best {show(values['best_eval_loss'], 'loss')} at step {at}"
    if "best_score" in values:
        remarks["best_score"] = f"at step {show(values['best_score_step'], 'count')}"
    if values.get("epochs"):
        remarks["tokens"] = f"{values['epochs']:.3g} epochs"
    if "device_hours" in values:
        remarks["runtime_s"] = f"{show(values['device_hours'], 'hours')} device-hours"
    shown = {
        "eval_loss": ("Validation loss", "loss"), "best_score": (f"Best {values.get('best_measure')}", "score"),
        "train_loss": ("Training loss", "loss"), "tokens": ("Tokens", "compact"),
        "train_tokens_per_s": ("Tokens per second", "count"), "mfu": ("MFU", "share"), "goodput": ("Goodput", "share"),
        "runtime_s": ("Runtime", "duration"),
    }  # fmt: skip
    return [
        (name, show(values[key], kind), remarks.get(key, "")) for key, (name, kind) in shown.items() if key in values
    ]


def _totals(values: Sequence[Mapping[str, Value]]) -> list[Figure]:
    figures = []
    for name, key, kind in (
        ("Tokens", "tokens", "compact"),
        ("Runtime", "runtime_s", "duration"),
        ("Device-hours", "device_hours", "hours"),
    ):
        known = [float(value) for one in values if isinstance(value := one.get(key), (int, float))]
        figures += [(f"{name} in all", show(sum(known), kind), "")] if known else []
    return figures


def _study_head(study: StudyView) -> dict[str, Any]:
    best, figures, winner = study.winner, [], None
    if best is not None:
        figures.append((f"Best {study.title}", show(best.median, "loss"), best.label))
        what, score = winner_text(study, best)
        command, remark = study.study.winner_command(best.assignment)
        rows = [place for place, result in enumerate(study.results) if result in best.results]
        winner = {"what": what, "score": score, "command": command, "remark": remark, "rows": rows}
    figures.append(("Cells", str(len(study.results)), study.states))
    swept = "; ".join(f"{key}: {', '.join(map(show, values))}" for key, values in study.swept().items())
    return {
        "kicker": "A study", "title": study.name, "state": "", "notes": "", "winner": winner,
        "lede": f"{len(study.results)} cells: {study.states}. {swept}",
        "figures": [*figures, *_totals([measures(view) for view in study.views])],
    }  # fmt: skip


# --- the sections ----------------------------------------------------------------------------------------------------


def _times(views: Sequence[RunView]) -> list[dict[str, Any]]:
    """For each run with times its share of training steps, and its parts: name, colour, share, time."""
    times = []
    for view in views:
        spent = goodput(view)
        total = sum(spent.values())
        parts = [(*PARTS[name], seconds / total, duration(seconds)) for name, seconds in spent.items()]
        if parts:
            times.append({"label": view.label, "share": spent.get("train", 0.0) / total, "parts": parts})
    return times


def _samples(views: Sequence[RunView]) -> list[dict[str, Any]]:
    """The generated texts that the page holds, each split into its prompt and what was generated."""
    samples = []
    for run, view in enumerate(views):
        steps = sorted({sample.step for sample in view.samples})
        if len(steps) > SAMPLES:
            steps = [steps[round(i * (len(steps) - 1) / (SAMPLES - 1))] for i in range(SAMPLES)]
        for one in view.samples:
            if one.step in steps:
                samples.append(
                    {"run": run, "step": one.step, "prompt": one.prompt, "text": one.text.removeprefix(one.prompt)}
                )
    return samples


def _environment(views: Sequence[RunView]) -> list[tuple[str, ...]]:
    """A row a fact: its name, and its value in each run; what differs between the runs first."""

    def text(value: Any) -> str:
        if not isinstance(value, list):
            return show(value)
        return ", ".join(" ".join(f"{k} {v}" for k, v in x.items()) if isinstance(x, dict) else str(x) for x in value)

    facts = [{key: text(value) for key, value in flatten(view.environment).items()} for view in views]
    rows = [
        (key, *(one.get(key, MISSING) for one in facts)) for key in dict.fromkeys(key for one in facts for key in one)
    ]
    return sorted(rows, key=lambda row: len(set(row[1:])) == 1)
