"""Writes a report: one HTML page, Markdown, CSV tables and PNG plots. The same runs give the same bytes.

`page.html` is a jinja2 template with autoescape; every value that it prints goes through `text.printable` too. The
charts are drawn in the browser by chart.js and page.js from the same description as the PNG files (`charts.Chart`), as
JSON in the page. The page opens from disk: its content security policy allows its script by hash, and no address at all.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from windlass import __version__
from windlass.errors import UserError
from windlass.fileio import write_atomic
from windlass.recipe.load import flatten
from windlass.reports import tables
from windlass.reports.charts import Chart, Look, Series, charts, smoothing
from windlass.reports.study import (
    StudyView,
    cell_table,
    heat_map,
    looks,
    read_study,
    seed_table,
    short,
    sweep_charts,
    winner_text,
)
from windlass.reports.tables import Value, goodput, measures
from windlass.reports.text import MISSING, markdown_cell, printable, show
from windlass.reports.view import RunView, views
from windlass.run import Run
from windlass.study.study import Study

SAMPLES = 40
"""Steps of each run whose samples are in the page: evenly spaced, first and last among them."""

Figures = list[tuple[str, str, str]]
"""The figures at the top of the page: name, value, remark."""


@dataclass(frozen=True)
class Report:
    """What was written."""

    page: Path
    markdown: Path
    tables: list[Path] = field(default_factory=list)
    plots: dict[str, Path] = field(default_factory=dict)
    """By the chart's id."""


def report(
    sources: str | Path | Run | Sequence[str | Path | Run],
    out: str | Path | None = None,
    *,
    skip: int | None = None,
    plots: bool = True,
) -> Report:
    """Report on a run, several runs beside each other, or a study.

    Args:
        sources: runs, run directories, or one study's directory; a study among other sources stands for its runs.
        out: the directory to write into, made where it is missing; None: `report/` in the run or study, of several runs
            `report/` here.
        skip: the second picture of the loss leaves out the steps before this one; None: the first tenth.
        plots: whether to draw the PNG files, which takes most of the time.

    Raises:
        UserError: there is no run, one of them cannot be read, or the directory cannot be written.
    """
    listed = [sources] if isinstance(sources, (str, Path, Run)) else list(sources)
    study = None
    if len(listed) == 1 and not isinstance(listed[0], Run) and Study.is_study(listed[0]):
        study = read_study(listed[0])
        seen, place = study.views, study.study.path / "report"
        if not seen:
            raise UserError(f"no cell of {listed[0]} has begun yet; `windlass sweep` trains them")
    else:
        runs = open_runs(listed)
        seen, place = views(runs), runs[0].report_dir if len(runs) == 1 else Path("report")
    target = Path(out) if out else place
    try:
        target.mkdir(parents=True, exist_ok=True)
        return _write(target, seen, study, skip, plots)
    except OSError as error:
        message = f"the report cannot be written to {target}: {error.strerror}; give another place with --out"
        raise UserError(message) from None


def open_runs(sources: Sequence[str | Path | Run]) -> list[Run]:
    """The runs of `sources`, see `report`; raises UserError where there are none."""
    runs: list[Run] = []
    for source in sources:
        if not isinstance(source, Run) and Study.is_study(source):
            runs += Study.open(source).runs()
        else:
            runs.append(source if isinstance(source, Run) else Run.open(source))
    if not runs:
        raise UserError("there is no run to report on; `windlass runs` lists the runs")
    return runs


def _write(out: Path, seen: Sequence[RunView], study: StudyView | None, skip: int | None, plots: bool) -> Report:
    run_looks, sweeps = (looks(study), sweep_charts(study)) if study else ((), [])
    described = charts(seen, run_looks)
    drawn: dict[str, Path] = {}
    if plots:
        from windlass.reports.plots import write_plots  # imports matplotlib, which takes a second

        heat = heat_map(study) if study else None
        drawn = write_plots(seen, [*sweeps, *described], out / "plots", skip, run_looks, heat)

    of_run = [((view.label,) if len(seen) > 1 else (), view) for view in seen]
    names = ["run"] if len(seen) > 1 else []
    settings = tables.all_settings(seen)
    files = {"settings.csv": tables.settings_table(seen, settings)}
    files["train.csv"] = tables.stacked([(run, tables.curves(view)) for run, view in of_run], names)
    evals = [((*run, suite), table) for run, view in of_run for suite, table in tables.evaluations(view).items()]
    if evals:
        files["evaluations.csv"] = tables.stacked(evals, [*names, "suite"])
    files["results.csv"] = tables.comparison(seen) if len(seen) > 1 or study else tables.results(seen[0])
    if study:
        files["cells.csv"] = cell_table(study)
        files |= {"seeds.csv": seeds} if (seeds := seed_table(study)) else {}
    for name, table in files.items():
        write_atomic(out / name, table.csv())

    titles = {chart.id: chart.title for chart in (*sweeps, *described)}
    titles |= {"loss-late": "Loss without its beginning", "goodput": "Where the time went"}
    text = _study_markdown(study) if study else _markdown(seen)
    text += "\n## Plots\n\n" if drawn else ""
    text += "\n".join(
        f"![{markdown_cell(titles.get(name, name.replace('-', ' ').capitalize()))}](plots/{path.name})\n"
        for name, path in drawn.items()
    )
    which = "Those that differ between the runs first, then those" if len(seen) > 1 else "Those"
    changed = tables.settings_table(seen, [row for row in settings if row.differs or row.changed])
    text += f"\n## Settings\n\n{which} changed from the defaults.\n\n{changed.markdown()}"
    write_atomic(out / "report.md", text)
    write_atomic(out / "index.html", page(seen, described, study))
    return Report(out / "index.html", out / "report.md", [out / name for name in files], drawn)


def _markdown(seen: Sequence[RunView]) -> str:
    if len(seen) > 1:
        return f"# {len(seen)} runs\n\n## Results\n\n{tables.comparison(seen, tables.PRINCIPAL).markdown()}"
    view = seen[0]
    restarts = "".join(f" {r.what.capitalize()} at step {r.step:,.0f} ({r.time})." for r in view.restarts)
    text = f"# {markdown_cell(view.label)}\n\nState: {view.state}, {view.step:,} steps.{restarts}\n"
    text += f"\n## Results\n\n{tables.results_for_people(view).markdown()}"
    for suite, table in tables.evaluations(view).items():
        text += f"\n## Evaluations: {markdown_cell(suite)}\n\n{table.markdown()}"
    return text


def _study_markdown(study: StudyView) -> str:
    text, best = f"# {markdown_cell(study.name)}\n", study.winner
    if best is not None:
        command, remark = study.study.winner_command(best.assignment)
        what, score = winner_text(study, best)
        text += f"\nThe winner: {markdown_cell(what)}, {score}. {remark}\n\n```\n{command}\n```\n"
    text += f"\n## Cells\n\n{cell_table(study).markdown()}"
    seeds = seed_table(study)
    return text + (f"\n## Over the seeds\n\n{seeds.markdown()}" if seeds else "")


# --- the page --------------------------------------------------------------------------------------------------------


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
    rows = tables.all_settings(views)
    changed = [row for row in rows if row.differs or row.changed]
    parts: dict[str, Any] = {
        "cells": cell_table(study) if study else None,
        "curves": [chart for chart in charts if chart.id != "loss"],
        "results": study is None,
        "time": _times(views),
        "samples": _samples(views),
        "settings": [changed, [row for row in rows if row not in changed]],
        "environment": _environment(views),
    }
    data = json.dumps(payload(views, [*charts, *sweeps], looks(study) if study else ()), allow_nan=False)
    for character in "<>&":  # ASCII without a character that HTML gives a meaning: it can stand in a script element
        data = data.replace(character, f"\\u{ord(character):04x}")
    context = {
        **(_study_head(study) if study else _head(views)), **parts,
        "views": views, "study": study, "version": __version__,
        "links": [name for name in parts if parts[name] and (name != "curves" or study)],
        "style": Markup(_asset("page.css")), "script": Markup(script), "script_hash": f"sha256-{digest}",
        "data": Markup(data),
        "lead": [chart for chart in charts if chart.id == "loss"], "sweeps": sweeps,
        "heat": heat_map(study) if study else None,
        "seeds": seed_table(study) if study else None, "differ": any(row.differs for row in rows),
        "comparison": tables.comparison(views, tables.PRINCIPAL) if len(views) > 1 else None,
        "measures": tables.results_for_people(views[0], each_evaluation=False) if len(views) == 1 else None,
        "evaluations": tables.evaluations(views[0]) if len(views) == 1 else {}, "short": short, "show": show,
        "sample_limit": SAMPLES,
    }  # fmt: skip
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
        finalize=lambda value: value if isinstance(value, Markup) else printable(value),
    )  # fmt: skip
    return environment.from_string(_asset("page.html")).render(context)


def _asset(name: str) -> str:
    return (resources.files("windlass.reports") / name).read_text(encoding="utf-8")


def payload(views: Sequence[RunView], charts: Sequence[Chart], looks: Sequence[Look] = ()) -> dict[str, Any]:
    """The runs and charts as plain values. Series that have the same steps share them: `at` is a place in `axes`."""
    axes: dict[bytes, tuple[int, dict[str, Any]]] = {}

    def series(one: Series) -> dict[str, Any]:
        key = one.step.tobytes() + one.tokens.tobytes() + one.hours.tobytes()
        if key not in axes:
            axes[key] = len(axes), {name: numbers(getattr(one, name)) for name in ("step", "tokens", "hours")}
        names = ("run", "name", "colour", "dash", "minor", "points", "smooth", "bad", "diverged")
        band = None if one.low is None or one.high is None else [numbers(one.low), numbers(one.high)]
        return {name: getattr(one, name) for name in names} | {"at": axes[key][0], "y": numbers(one.y), "band": band}

    drawn = [
        {
            "id": chart.id, "zero": chart.zero, "x_label": chart.x_label, "x_values": numbers(chart.x_values),
            "x_names": chart.x_names, "x_log": chart.x_log, "series": [series(one) for one in chart.series],
        }
        for chart in charts
    ]  # fmt: skip
    runs = [
        {
            "label": view.label, "tone": tone,
            "restarts": [
                dict(zip(("step", "tokens", "hours"), numbers((r.step, r.tokens, r.hours)), strict=True))
                | {"what": r.what, "text": f"{view.label}: {r.what} at step {r.step:,.0f} ({r.time})"}
                for r in view.restarts
            ],
        }
        for view, (tone, _) in zip(views, looks or [(None, 0)] * len(views), strict=True)
    ]  # fmt: skip
    return {"runs": runs, "charts": drawn, "axes": [one for _, one in axes.values()], "smoothing": smoothing(charts)}


def numbers(values: Iterable[float]) -> list[float | int | None]:
    """Floats for JSON: six significant digits, whole numbers without a point, None for what is not finite."""
    rounded = [float(value) if float(value).is_integer() else float(f"{value:.6g}") for value in values]
    whole = [x.is_integer() and abs(x) < 1e15 for x in rounded]
    return [(int(x) if w else x) if math.isfinite(x) else None for x, w in zip(rounded, whole, strict=True)]


# --- the head of the page --------------------------------------------------------------------------------------------


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


def _figures(values: Mapping[str, Value]) -> Figures:
    """The figures at the top of the page of one run, each with a remark."""
    remarks = {"goodput": "of wall time in steps"}
    if "best_eval_loss" in values and values["best_eval_loss"] != values.get("eval_loss"):
        at = show(values["best_eval_step"], "count")
        remarks["eval_loss"] = f"best {show(values['best_eval_loss'], 'loss')} at step {at}"
    if "best_score" in values:
        remarks["best_score"] = f"at step {show(values['best_score_step'], 'count')}"
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


def _totals(values: Sequence[Mapping[str, Value]]) -> Figures:
    kinds = (
        ("Tokens", "tokens", "compact"),
        ("Runtime", "runtime_s", "duration"),
        ("Device-hours", "device_hours", "hours"),
    )
    totals = [(name, kind, sum(float(one.get(key) or 0) for one in values)) for name, key, kind in kinds]
    return [(f"{name} in all", show(total, kind), "") for name, kind, total in totals if total]


def _study_head(study: StudyView) -> dict[str, Any]:
    best, figures, winner = study.winner, [], None
    if best is not None:
        figures.append((f"Best {study.title}", show(best.median, "loss"), best.label))
        what, score = winner_text(study, best)
        command, remark = study.study.winner_command(best.assignment)
        rows = [place for place, result in enumerate(study.results) if result in best.results]
        winner = {"what": what, "score": score, "command": command, "remark": remark, "rows": rows}
    figures.append(("Cells", str(len(study.results)), study.states))
    swept = "; ".join(f"{key}: {', '.join(map(show, values))}" for key, values in study.swept.items())
    return {
        "kicker": "A study", "title": study.name, "state": "", "notes": "", "winner": winner,
        "lede": f"{len(study.results)} cells: {study.states}. {swept}",
        "figures": [*figures, *_totals([measures(view) for view in study.views])],
    }  # fmt: skip


# --- the sections of the page ----------------------------------------------------------------------------------------


def _times(views: Sequence[RunView]) -> list[dict[str, Any]]:
    """For each run with times its share of training steps, and its parts: name, colour, share, time."""
    times = []
    for view in views:
        spent = goodput(view)
        total = sum(spent.values())
        parts = [(*tables.PARTS[name], seconds / total, show(seconds, "duration")) for name, seconds in spent.items()]
        if parts:
            times.append({"label": view.label, "share": spent.get("train", 0.0) / total, "parts": parts})
    return times


def _samples(views: Sequence[RunView]) -> list[dict[str, Any]]:
    """The generated texts that the page holds, each split into its prompt and what was generated."""
    samples = []
    for run, view in enumerate(views):
        steps = sorted({sample["step"] for sample in view.samples})
        if len(steps) > SAMPLES:
            steps = [steps[round(i * (len(steps) - 1) / (SAMPLES - 1))] for i in range(SAMPLES)]
        for one in view.samples:
            if one["step"] in steps:
                prompt = str(one.get("prompt") or "")
                text = str(one["text"]).removeprefix(prompt)
                samples.append({"run": run, "step": one["step"], "prompt": prompt, "text": text})
    return samples


def _environment(views: Sequence[RunView]) -> list[tuple[str, ...]]:
    """A row a fact: its name, and its value in each run; what differs between the runs first."""

    def text(value: Any) -> str:
        if not isinstance(value, list):
            return show(value)
        return ", ".join(" ".join(f"{k} {v}" for k, v in x.items()) if isinstance(x, dict) else str(x) for x in value)

    facts = [{key: text(value) for key, value in flatten(view.run.environment).items()} for view in views]
    names = dict.fromkeys(name for one in facts for name in one)
    rows = [(name, *(one.get(name, MISSING) for one in facts)) for name in names]
    return sorted(rows, key=lambda row: len(set(row[1:])) == 1)
