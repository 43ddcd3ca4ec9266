"""Writes a report: one HTML page, Markdown, tables as CSV and LaTeX, plots as PNG and PDF. The same runs give the same bytes.

`page.html` is a jinja2 template with autoescape; every value that it prints goes through `text.printable` too. The
charts are drawn in the browser by chart.js and page.js from the same description as the PNG files (`charts.Chart`), as
JSON in the page. The page opens from disk: its content security policy allows its script by hash, and no address at all.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from windlass import __version__
from windlass.checkpoint.retention import LOSS
from windlass.errors import UserError, argument, installed, require
from windlass.fileio import write_atomic
from windlass.recipe import flatten
from windlass.reports import tables
from windlass.reports.charts import Chart, Series, charts, run_dashes, slug, smoothing
from windlass.reports.published import Published, published
from windlass.reports.scaling import ScalingView, read_scaling
from windlass.reports.scaling_charts import STEP_PARTS
from windlass.reports.study import (
    StudyView,
    cell_table,
    heat_map,
    read_study,
    seed_table,
    sweep_charts,
    winner_text,
)
from windlass.reports.tables import label, measures
from windlass.reports.text import MISSING, markdown_cell, show
from windlass.reports.view import RunView, views
from windlass.run import Run
from windlass.study.compare import BITS, common_measure
from windlass.study.study import Study
from windlass.telemetry.terminal import printable
from windlass.variables import scrub

SAMPLES = (
    40  # steps of each run whose samples are in the page: evenly spaced, first and last among them
)

HEADLINES = {
    "eval_loss": "Validation loss",
    "full_eval_loss": "Validation loss, all data",
    "best_eval_loss": "Best validation loss",
    "best_score": "Best score",
    "train_loss": "Training loss",
    "tokens": "Tokens",
    "train_tokens_per_s": "Tokens per second",
    "mfu": "MFU",
    "goodput": "Goodput",
    "runtime_s": "Runtime",
    "device_hours": "Device-hours",
}
"""The measures at the top of the page, each by its short name."""

BEST = {
    LOSS: ("best_eval_loss", "Best validation loss"),
    BITS: ("best_bits_per_byte", "Best bits per byte"),
}
"""The figure that names the best of several runs, by what they are compared by."""


@dataclass(frozen=True)
class Report:
    """What was written."""

    page: Path
    markdown: Path
    tables: list[Path]
    plots: dict[str, Path]  # by the chart's id: its PNG, with a PDF of the same name beside it
    views: list[RunView]  # the runs as they were read
    published: Published | None  # the table of the preset's published work

    def __repr__(self) -> str:
        return f"report: {self.page}"  # as the verb prints it


def report(
    sources: str | Path | Run | Study | Sequence[str | Path | Run | Study],
    out: str | Path | None = None,
    *,
    skip: int | None = None,
    plots: bool | None = None,
    table: str = "",
) -> Report:
    """Report on a run, several runs beside each other, or a study.

    Args:
        sources: runs, studies, or their directories; a study among other sources stands for its runs.
        out: the directory to write into, created if it is missing; None: `report/` in the run or study, of several runs
            `report/` here.
        skip: the second picture of the loss leaves out the steps before this one; None: the first tenth.
        table: the published table to fill, by its preset's name; empty: the one of the preset that the runs have.
        plots: whether to draw the PNG and PDF files, which takes most of the time; None: where matplotlib is installed.

    Raises:
        UserError: there is no run, or no such table, one of them cannot be read, or the directory cannot be written.
    """
    if plots:
        require("matplotlib", "a PNG plot")
    plots = installed("matplotlib") if plots is None else plots
    given = [sources] if isinstance(sources, (str, Path, Run, Study)) else sources
    listed = [source.path if isinstance(source, Study) else source for source in given]
    study = None
    if len(listed) == 1 and not isinstance(listed[0], Run) and Study.is_study(listed[0]):
        study = read_study(listed[0])
        seen, place = study.views, study.study.path / "report"
        if not seen:
            raise UserError(f"no cell of {listed[0]} has begun yet; run the sweep first")
    else:
        runs: list[Run] = []
        for source in listed:
            if not isinstance(source, Run) and Study.is_study(source):
                runs += Study.open(source).runs()
            else:
                runs.append(source if isinstance(source, Run) else Run.open(source))
        if not runs:
            raise UserError("there is no run to report on; by default the runs lie in runs/")
        seen, place = views(runs), runs[0].report_dir if len(runs) == 1 else Path("report")
    target = Path(out) if out else place
    try:
        target.mkdir(parents=True, exist_ok=True)
        scaled = read_scaling(study) if study else None
        filled = published(seen, study, table, scaled.values if scaled else ())
        return _write(target, seen, study, scaled, skip, plots, filled)
    except OSError as error:
        message = f"the report cannot be written to {target}: {error.strerror}; give another place as {argument('out', 'DIR')}"
        raise UserError(message) from None


def _write(
    out: Path,
    seen: Sequence[RunView],
    study: StudyView | None,
    scaled: ScalingView | None,
    skip: int | None,
    plots: bool,
    filled: Published | None,
) -> Report:
    described, sweeps = (
        charts(seen),
        scaled.charts if scaled else sweep_charts(study) if study else [],
    )
    drawn: dict[str, Path] = {}
    if plots:
        from windlass.reports.plots import write_plots  # imports matplotlib, which takes a second

        ramp, heat = (study.tones, None if scaled else heat_map(study)) if study else ((), None)
        bars = scaled.bars if scaled else None
        drawn = write_plots(seen, [*sweeps, *described], out / "plots", skip, ramp, heat, bars)

    of_run = [((view.label,) if len(seen) > 1 else (), view) for view in seen]
    names = ["run"] if len(seen) > 1 else []
    settings = tables.all_settings(seen)
    files = {"settings.csv": tables.settings_table(seen, settings)}
    files["train.csv"] = tables.stacked([(run, tables.curves(view)) for run, view in of_run], names)
    evals = [
        ((*run, suite), table)
        for run, view in of_run
        for suite, table in tables.evaluations(view).items()
    ]
    if evals:
        files["evaluations.csv"] = tables.stacked(evals, [*names, "suite"])
    files["results.csv"] = (
        tables.comparison(seen) if len(seen) > 1 or study else tables.results(seen[0])
    )
    if study:
        files["cells.csv"] = cell_table(study)
        files |= {"seeds.csv": seeds} if (seeds := seed_table(study)) else {}
    if scaled:
        files |= {f"{name}.csv": own for name, (_, own, _) in scaled.tables.items()} | {
            "scaling.csv": scaled.csv
        }
    if filled:
        files["published.csv"] = filled.table
        write_atomic(out / "published.md", filled.table.markdown())
    for name, table in files.items():
        write_atomic(out / name, table.csv())
    # those that stand in a paper, with the columns and digits that people read
    papers = tables.evaluations(seen[0]) if len(seen) == 1 else {}
    papers = {f"evaluations-{slug(suite)}": table for suite, table in papers.items()}
    of_one = tables.results(seen[0], for_people=True)
    papers["results"] = of_one if len(seen) == 1 else tables.comparison(seen, tables.PRINCIPAL)
    for name in ("cells", "seeds", "published"):
        papers |= {name: files[f"{name}.csv"]} if f"{name}.csv" in files else {}
    papers |= {name: own for name, (_, own, _) in scaled.tables.items()} if scaled else {}
    for name, table in papers.items():
        write_atomic(out / f"{name}.tex", table.latex())

    titles = {
        "loss-late": "Loss without its first steps",
        "heat-map": "Heat map",
        "step-parts": STEP_PARTS,
    }
    titles |= {chart.id: markdown_cell(chart.title) for chart in (*sweeps, *described)}
    pictures = [f"\n![{titles[name]}](plots/{path.name})\n" for name, path in drawn.items()]
    text = "".join(
        [
            _markdown(seen, study, scaled),
            _published(filled),
            "\n## Plots\n" if drawn else "",
            *pictures,
        ]
    )
    which = "Those that differ between the runs first, then those" if len(seen) > 1 else "Those"
    changed = tables.settings_table(seen, [row for row in settings if row.differs or row.changed])
    text += f"\n## Settings\n\n{which} changed from the defaults.\n\n{changed.markdown()}"
    write_atomic(out / "report.md", text)
    write_atomic(out / "index.html", page(seen, described, study, filled, scaled))
    listed = [*files, *(f"{name}.tex" for name in papers)]
    return Report(
        out / "index.html",
        out / "report.md",
        [out / name for name in listed],
        drawn,
        list(seen),
        filled,
    )


def _published(filled: Published | None) -> str:
    note = f"\n{markdown_cell(filled.note)}\n" if filled and filled.note else ""
    return (
        f"\n## {markdown_cell(filled.title)}\n\n{filled.table.markdown()}{note}" if filled else ""
    )


def _markdown(seen: Sequence[RunView], study: StudyView | None, scaled: ScalingView | None) -> str:
    if study:
        text = f"# {markdown_cell(study.study.path.resolve().name)}\n"
        for heading, own, notes in scaled.tables.values() if scaled else ():
            under = "".join(f"\n{markdown_cell(note)}\n" for note in notes)
            text += f"\n## {heading}\n\n{own.markdown()}{under}"
        for one in scaled.winners if scaled else ():
            text += (
                f"\n{markdown_cell(one['text'])}. {one['remark']}\n\n```\n{one['command']}\n```\n"
            )
        text += f"\n{markdown_cell(study.remark)}\n" if study.remark else ""
        for best in study.winners:
            command, remark = study.study.winner_command(best.assignment)
            text += f"\nThe best: {markdown_cell(winner_text(study, best))}. {remark}\n\n```\n{command}\n```\n"
        text += f"\n## Cells\n\n{cell_table(study).markdown()}"
        seeds = seed_table(study)
        return text + (f"\n## Over the seeds\n\n{seeds.markdown()}" if seeds else "")
    if len(seen) > 1:
        remark = common_measure([view.evaluated for view in seen])[1]
        text = (
            f"# {len(seen)} runs\n\n{markdown_cell(remark)}\n\n"
            if remark
            else f"# {len(seen)} runs\n\n"
        )
        return f"{text}## Results\n\n{tables.comparison(seen, tables.PRINCIPAL).markdown()}"
    view = seen[0]
    restarts = "".join(
        f" At step {r.step:,.0f} ({r.time}): {markdown_cell(r.text)}." for r in view.restarts
    )
    text = f"# {markdown_cell(view.label)}\n\nState: {view.state}, {view.step:,} steps.{restarts}\n"
    text += f"\n## Results\n\n{tables.results(view, for_people=True).markdown()}"
    for suite, table in tables.evaluations(view).items():
        text += f"\n## Evaluations: {markdown_cell(suite)}\n\n{table.markdown()}"
    return text


def page(
    views: Sequence[RunView],
    charts: Sequence[Chart],
    study: StudyView | None = None,
    filled: Published | None = None,
    scaled: ScalingView | None = None,
) -> str:
    """The whole page of some runs with their charts, or of a study with its runs that have begun."""
    names, folder = (
        ("page.html", "page.css", "chart.js", "page.js"),
        resources.files("windlass.reports"),
    )
    template, css, *js = ((folder / name).read_text("utf-8") for name in names)
    script = f'(() => {{\n"use strict";\n{js[0]}\n{js[1]}\n}})();\n'
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    sweeps = scaled.charts if scaled else sweep_charts(study) if study else []
    rows = tables.all_settings(views)
    changed = [row for row in rows if row.differs or row.changed]
    parts: dict[str, Any] = {
        "scaling": scaled,
        "cells": cell_table(study) if study else None,
        "curves": [chart for chart in charts if chart.id != "loss" or scaled],
        "results": study is None,
        "time": _times(views),
        "samples": _samples(views),
        "settings": [changed, [row for row in rows if row not in changed]],
        "environment": _environment(views),
    }
    drawn = payload(views, [*charts, *sweeps], study.tones if study else ())
    data = json.dumps(scrub(drawn), allow_nan=False)
    for character in (
        "<>&"
    ):  # ASCII without a character that HTML gives a meaning: it can stand in a script element
        data = data.replace(character, f"\\u{ord(character):04x}")
    context = {
        **_head(views, study, scaled),
        **parts,
        "views": views,
        "study": study,
        "published": filled,
        "version": __version__,
        "links": [name for name in parts if parts[name] and (name != "curves" or study)],
        "style": Markup(css),
        "script": Markup(script),
        "script_hash": f"sha256-{digest}",
        "data": Markup(data),
        "lead": [chart for chart in charts if chart.id == "loss" and not scaled],
        "sweeps": sweeps,
        "heat": heat_map(study) if study and not scaled else None,
        "seeds": seed_table(study) if study else None,
        "differ": any(row.differs for row in rows),
        "comparison": tables.comparison(views, tables.PRINCIPAL) if len(views) > 1 else None,
        "measures": tables.results(views[0], for_people=True) if len(views) == 1 else None,
        "evaluations": tables.evaluations(views[0]) if len(views) == 1 else {},
        "show": show,
        "sample_limit": SAMPLES,
        "step_parts": STEP_PARTS,
    }
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=lambda value: value if isinstance(value, Markup) else printable(scrub(str(value))),
    )
    return environment.from_string(template).render(context)


def payload(
    views: Sequence[RunView], charts: Sequence[Chart], tones: Sequence[float] = ()
) -> dict[str, Any]:
    """The runs and charts as plain values. Series that have the same steps share them: `at` is a place in `axes`."""
    axes: dict[bytes, tuple[int, dict[str, Any]]] = {}

    def series(one: Series) -> dict[str, Any]:
        key = one.step.tobytes() + one.tokens.tobytes() + one.hours.tobytes()
        if key not in axes:
            axes[key] = (
                len(axes),
                {name: numbers(getattr(one, name)) for name in ("step", "tokens", "hours")},
            )
        names = ("run", "name", "colour", "dash", "minor", "points", "smooth", "bad", "diverged")
        band = (
            None if one.low is None or one.high is None else [numbers(one.low), numbers(one.high)]
        )
        return {name: getattr(one, name) for name in names} | {
            "at": axes[key][0],
            "y": numbers(one.y),
            "band": band,
        }

    names = ("id", "zero", "x_label", "x_names", "x_log")
    drawn = [
        {name: getattr(chart, name) for name in names}
        | {"x_values": numbers(chart.x_values), "series": [series(one) for one in chart.series]}
        for chart in charts
    ]
    runs: list[dict[str, Any]] = []
    looks = zip(
        tones or itertools.repeat(None, len(views)), run_dashes(len(views), tones), strict=True
    )
    for view, (tone, dash) in zip(views, looks, strict=True):
        restarts = [
            dict(
                zip(("step", "tokens", "hours"), numbers((r.step, r.tokens, r.hours)), strict=True)
            )
            | {"what": r.what, "text": f"{view.label}: {r.text} at step {r.step:,.0f} ({r.time})"}
            for r in view.restarts
        ]
        runs.append({"label": view.label, "tone": tone, "dash": dash, "restarts": restarts})
    return {
        "runs": runs,
        "charts": drawn,
        "axes": [one for _, one in axes.values()],
        "smoothing": smoothing(charts),
    }


def numbers(values: Iterable[float]) -> list[float | int | None]:
    """Floats for JSON: six significant digits, whole numbers without a point, None for what is not finite."""
    rounded = [
        float(value) if float(value).is_integer() else float(f"{value:.6g}") for value in values
    ]
    whole = [x.is_integer() and abs(x) < 1e15 for x in rounded]
    return [
        (int(x) if w else x) if math.isfinite(x) else None
        for x, w in zip(rounded, whole, strict=True)
    ]


def _head(
    views: Sequence[RunView], study: StudyView | None, scaled: ScalingView | None
) -> dict[str, Any]:
    """Kicker, title, state, lede, remark, notes, winners and figures (name, value, remark) at the top of the page."""
    values = [measures(view) for view in views]
    head: dict[str, Any] = {
        "state": "",
        "notes": "",
        "remark": "",
        "winners": [],
        "figures": (figures := []),
    }
    if study:
        swept = "; ".join(
            f"{key}: {', '.join(map(show, values))}" for key, values in study.swept.items()
        )
        head |= {
            "kicker": "A study",
            "title": study.study.path.resolve().name,
            "lede": swept,
            "remark": study.remark,
        }
        for best in study.winners:
            command, remark = study.study.winner_command(best.assignment)
            rows = [place for place, result in enumerate(study.results) if result in best.results]
            winner = {
                "text": winner_text(study, best),
                "command": command,
                "remark": remark,
                "rows": rows,
            }
            head["winners"].append(winner)
        if scaled:
            head |= {"kicker": "A scaling study", "lede": scaled.lede, "winners": scaled.winners}
            figures += scaled.figures
        if len(study.winners) == 1:
            figures.append(
                (
                    f"Best {study.title}",
                    show(study.winners[0].median, "loss"),
                    study.winners[0].label,
                )
            )
        states = ", ".join(
            f"{count} {state}" for state, count in Counter(r.state for r in study.results).items()
        )
        figures.append(("Cells", str(len(study.results)), states))
    elif len(views) == 1:
        (view,), (own,) = views, values
        lede = [f"{view.step:,} of {view.start.get('steps', view.step):,} steps"]
        sizes = f"{show(own['parameters'], 'count')} parameters" if "parameters" in own else ""
        trained = f"{own['trainable']} trained" if "trainable" in own else sizes
        lede += [str(text) for text in (own.get("network"), trained) if text]
        extensions = [r.text for r in view.restarts if r.what == "extended"]
        starts = 1 + len(view.restarts) - len(extensions)
        lede += [
            *extensions,
            *([f"started {starts} times and drawn as one curve"] if starts > 1 else []),
        ]
        figures += [
            (HEADLINES[name], show(own[name], label(name)[1]), "")
            for name in HEADLINES
            if name in own
        ]
        head |= {
            "kicker": "A run",
            "title": view.label,
            "state": view.state,
            "lede": ", ".join(lede),
        }
        return head | {"notes": view.settings["run.notes"]}
    else:
        lede = [
            f"{count} {state}" for state, count in Counter(view.state for view in views).items()
        ]
        head |= {
            "kicker": "A comparison of runs",
            "title": f"{len(views)} runs",
            "lede": ", ".join(lede),
        }
        pairs = zip(values, views, strict=True)
        measure, head["remark"] = common_measure([view.evaluated for view in views])
        name, title = BEST.get(measure, ("", ""))
        scores = sorted((own[name], view.label) for own, view in pairs if name in own)
        figures += [(title, show(score, "loss"), str(best)) for score, best in scores[:1]]
    for name in ("tokens", "runtime_s", "device_hours"):
        if total := sum(float(own.get(name) or 0) for own in values):
            figures.append((f"{HEADLINES[name]} in all", show(total, label(name)[1]), ""))
    return head


def _times(views: Sequence[RunView]) -> list[dict[str, Any]]:
    """For each run with times its share of training steps, and its parts: name, colour, share, time."""
    times = []
    for view in views:
        spent = {name: view.wall[name] for name in tables.PARTS if view.wall.get(name, 0) > 0}
        total = sum(spent.values())
        parts = [
            (*tables.PARTS[name], seconds / total, show(seconds, "duration"))
            for name, seconds in spent.items()
        ]
        if parts:
            times.append(
                {"label": view.label, "share": spent.get("train", 0.0) / total, "parts": parts}
            )
    return times


def _samples(views: Sequence[RunView]) -> list[dict[str, Any]]:
    """The generated texts that the page holds, each split into its prompt and what was generated."""
    samples = []
    for run, view in enumerate(views):
        steps = sorted({sample["step"] for sample in view.samples})
        steps = [steps[round(i)] for i in np.linspace(0, len(steps) - 1, min(len(steps), SAMPLES))]
        for one in view.samples:
            if one["step"] in steps:
                prompt = str(one.get("prompt") or "")
                text = str(one["text"]).removeprefix(prompt)
                samples.append({"run": run, "step": one["step"], "prompt": prompt, "text": text})
    return samples


def _environment(views: Sequence[RunView]) -> list[tuple[str, ...]]:
    """A row a fact: its name, and its value in each run; what differs between the runs first."""
    facts = [
        {key: show(value) for key, value in flatten(scrub(view.run.environment)).items()}
        for view in views
    ]
    names = dict.fromkeys(name for one in facts for name in one)
    rows = [(name, *(one.get(name, MISSING) for one in facts)) for name in names]
    return sorted(rows, key=lambda row: len(set(row[1:])) == 1)
