"""The report as one HTML page that opens from disk: no network, no library, everything escaped, the same bytes each time.

Tables, texts and headings are written here; the charts are drawn by chart.js and page.js, which travel in the page. Its
content security policy allows those two scripts by their hash, and no address at all.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from windlass import __version__
from windlass.reports import sections
from windlass.reports.charts import Chart, ceiling, charts
from windlass.reports.measures import Value, measures
from windlass.reports.payload import as_json, payload
from windlass.reports.text import compact, duration, escape, show
from windlass.reports.view import RunView

MOON = (
    '<svg viewBox="0 0 24 24" fill="none" stroke="currentColor" stroke-width="1.8" aria-hidden="true">'
    '<circle cx="12" cy="12" r="8.5"/><path d="M12 3.5a8.5 8.5 0 0 1 0 17z" fill="currentColor" stroke="none"/></svg>'
)


@dataclass(frozen=True)
class Extra:
    """What a study adds to the page of its runs."""

    kicker: str = ""
    title: str = ""
    lede: str = ""
    headline: Sequence[tuple[str, str, str]] = ()
    """Figures at the top: name, value, remark."""
    sections: Sequence[tuple[str, str, str]] = ()
    """Anchor, name and HTML, put before the results."""
    results: bool = True
    """Whether the results of the runs are tabulated."""
    looks: Sequence[tuple[float | None, int]] = ()
    """For each run its place on a colour ramp (0 to 1) and its kind of dash; empty: distinct colours."""
    free: Sequence[dict[str, Any]] = field(default_factory=tuple)
    """Charts with curves of their own, which the sections have places for."""


NAMES = {
    "results": "Results", "time": "Time", "samples": "Samples", "settings": "Settings",
    "environment": "Environment",
}  # fmt: skip


def page(views: Sequence[RunView], extra: Extra | None = None) -> str:
    """The whole page for one run or several."""
    extra = extra or Extra()
    found = charts(views)
    below = {
        "results": sections.results(views) if extra.results else "",
        "time": sections.time(views),
        "samples": sections.samples(views),
        "settings": sections.settings(views),
        "environment": sections.environment(views),
    }
    links = [(key, name) for key, name, _ in extra.sections] + [
        (key, NAMES[key]) for key, text in below.items() if text
    ]
    script = f'(() => {{\n"use strict";\n{_asset("chart.js")}\n{_asset("page.js")}\n}})();\n'
    parts = {
        "title": escape(extra.title or _title(views)),
        "csp": _policy(script),
        "style": _asset("page.css"),
        "masthead": _masthead(views, extra),
        "bar": _bar(links) if found else "",
        "chips": _chips(views),
        "lead": _lead(found, views),
        "extra": "\n".join(text for _, _, text in extra.sections),
        "charts": _rest(found, bool(extra.sections)),
        "sections": "\n".join(text for text in below.values() if text),
        "version": escape(__version__),
        "data": as_json(payload(views, found, extra.looks, extra.free)),
        "script": script,
    }
    pieces = _asset("page.html").split("%%")
    return "".join(parts[piece] if i % 2 else piece for i, piece in enumerate(pieces))


def _asset(name: str) -> str:
    return (resources.files("windlass.reports") / name).read_text(encoding="utf-8")


def _policy(script: str) -> str:
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


# ---------------------------------------------------------------- head


def _title(views: Sequence[RunView]) -> str:
    if len(views) == 1:
        return views[0].label
    names = [view.label for view in views]
    return ", ".join(names) if len(names) <= 3 else f"{len(names)} runs"


def _masthead(views: Sequence[RunView], extra: Extra) -> str:
    lede = extra.lede or (_one_lede(views[0]) if len(views) == 1 else _many_lede(views))
    figures = extra.headline or (_one_headline(views[0]) if len(views) == 1 else _many_headline(views))
    cells = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}{f'<small>{escape(remark)}</small>' if remark else ''}</dd></div>"
        for name, value, remark in figures
    )
    notes = views[0].settings.get("run.notes") if len(views) == 1 else ""
    kicker = extra.kicker or ("A run" if len(views) == 1 else "A comparison of runs")
    return (
        f'<button id="theme" type="button" title="Light or dark">{MOON}</button>'
        f'<p class="kicker">{escape(kicker)}</p><h1>{escape(extra.title or _title(views))}</h1><p class="lede">{lede}</p>'
        + (f'<p class="notes">{escape(notes)}</p>' if notes else "")
        + (f'<dl class="figures">{cells}</dl>' if cells else "")
    )


def _one_lede(view: RunView) -> str:
    found = measures(view)
    planned = view.settings.get("train.steps")
    steps = f"{view.step:,} of {planned:,} steps" if isinstance(planned, int) else f"{view.step:,} steps"
    parts = [steps]
    if "parameters" in found:
        parts.append(f"{show(found['parameters'], 'count')} parameters")
    if "world" in found:
        parts.append(f"{found['world']:.0f} rank{'s' if found['world'] != 1 else ''}")
    if view.seams:
        times = {1: "once", 2: "twice"}.get(len(view.seams), f"{len(view.seams)} times")
        parts.append(f"interrupted {times} and drawn as one curve")
    return f'<span class="state {escape(view.state)}">{escape(view.state)}</span>, {escape(", ".join(parts))}'


def _many_lede(views: Sequence[RunView]) -> str:
    states: dict[str, int] = {}
    for view in views:
        states[view.state] = states.get(view.state, 0) + 1
    return escape(f"{len(views)} runs: {', '.join(f'{count} {state}' for state, count in states.items())}")


def _one_headline(view: RunView) -> list[tuple[str, str, str]]:
    found = measures(view)
    best = ""
    if "best_eval_loss" in found and found["best_eval_loss"] != found.get("eval_loss"):
        best = f"best {show(found['best_eval_loss'], 'loss')} at step {found['best_eval_step']:,}"
    scored = f"at step {found['best_score_step']:,}" if found.get("best_score_step") is not None else ""
    epochs = f"{found['epochs']:.3g} epochs" if found.get("epochs") else ""
    hours = f"{show(found['device_hours'], 'hours')} device-hours" if "device_hours" in found else ""
    candidates = [
        ("Validation loss", "eval_loss", show(found.get("eval_loss"), "loss"), best),
        (f"Best {found.get('best_measure')}", "best_score", show(found.get("best_score"), "score"), scored),
        ("Training loss", "train_loss", show(found.get("train_loss"), "loss"), ""),
        ("Tokens", "tokens", compact(_float(found.get("tokens"))), epochs),
        ("Tokens per second", "train_tokens_per_s", show(_whole(found.get("train_tokens_per_s")), "count"), ""),
        ("MFU", "mfu", show(found.get("mfu"), "share"), ""),
        ("Goodput", "goodput", show(found.get("goodput"), "share"), "of wall time in steps"),
        ("Runtime", "runtime_s", show(found.get("runtime_s"), "duration"), hours),
    ]
    return [(name, value, remark) for name, key, value, remark in candidates if key in found]


def _many_headline(views: Sequence[RunView]) -> list[tuple[str, str, str]]:
    found = [measures(view) for view in views]
    figures = []
    scored = [(f["best_eval_loss"], v.label) for f, v in zip(found, views, strict=True) if "best_eval_loss" in f]
    if scored:
        value, label = min(scored)
        figures.append(("Best validation loss", show(value, "loss"), label))
    figures.append(("Runs", str(len(views)), ""))
    return figures + totals(found)


def totals(found: Sequence[Mapping[str, Value]]) -> list[tuple[str, str, str]]:
    """Headline figures of several runs' measures: tokens, runtime and device-hours in all."""
    figures = []
    for name, key, text in (
        ("Tokens in all", "tokens", compact),
        ("Runtime in all", "runtime_s", duration),
        ("Device-hours in all", "device_hours", _hours),
    ):
        values = [float(value) for one in found if isinstance(value := one.get(key), (int, float))]
        if values:
            figures.append((name, text(sum(values)), ""))
    return figures


def _hours(value: float) -> str:
    return show(value, "hours")


def _float(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None


def _whole(value: Any) -> int | None:
    return round(value) if isinstance(value, (int, float)) else None


def _bar(links: Sequence[tuple[str, str]]) -> str:
    axes = "".join(
        f'<button type="button" data-axis="{axis}" aria-pressed="{str(axis == "step").lower()}">{name}</button>'
        for axis, name in (("step", "Steps"), ("tokens", "Tokens"), ("hours", "Time"))
    )
    nav = "".join(f'<a href="#{key}">{escape(name)}</a>' for key, name in links)
    return (
        '<div class="bar"><div class="wrap">'
        f'<span class="control"><span class="segments" role="group" aria-label="Horizontal axis">{axes}</span></span>'
        '<label class="control">Smoothing <input id="smoothing" type="range" min="0" max="0.99" step="0.01">'
        '<output id="smoothing-value" for="smoothing"></output></label>'
        '<label class="control">Leave out the first <input id="skip" type="number" min="0" step="10" value="0"> steps</label>'
        '<button id="reset" class="quiet" type="button" disabled>Whole range</button>'
        f'<nav aria-label="Sections">{nav}</nav></div></div>'
    )


def _chips(views: Sequence[RunView]) -> str:
    if len(views) == 1:
        return ""
    chips = "".join(
        f'<button type="button" class="chip" data-run="{i}" aria-pressed="true" title="{escape(view.label)}: click to show or '
        f'hide, double-click for this one alone"><i></i><span>{escape(view.label)}</span></button>'
        for i, view in enumerate(views)
    )
    return f'<div class="chips" role="group" aria-label="Runs">{chips}<button id="show-all" class="quiet" type="button">Show all</button></div>'


# ---------------------------------------------------------------- charts


def figure(chart_id: str, title: str, unit: str, note: str = "", tools: str = "") -> str:
    """The place of a chart, which the script fills."""
    remark = ", ".join(part for part in (unit, note) if part)
    label = f"Chart: {title}{f', {remark}' if remark else ''}. The arrow keys move through its points."
    return (
        f'<figure class="chart" data-chart="{escape(chart_id)}"><figcaption><h3>{escape(title)}</h3>'
        f'<span class="unit">{escape(remark)}</span>{tools}</figcaption><div class="legend"></div>'
        f'<div class="plot" tabindex="0" role="img" aria-label="{escape(label)}"></div></figure>'
    )


def _lead(found: Sequence[Chart], views: Sequence[RunView]) -> str:
    if not found:
        return '<p class="note">No step has been logged yet.</p>'
    tools = (
        '<span class="tools" role="group" aria-label="Scales">'
        '<button type="button" data-toggle="logY" aria-pressed="false">Log loss</button>'
        '<button type="button" data-toggle="logX" aria-pressed="false">Log x-axis</button></span>'
    )
    voices = "lines: training, circles: validation" if len(views) > 1 else ""
    voices += "; what diverged is cut off above" if ceiling(views) is not None else ""
    lead = [figure(c.id, c.title, c.unit, voices, tools) for c in found if c.id == "loss"]
    without = '<noscript><p class="note">The charts need JavaScript; the tables below do not.</p></noscript>'
    return f'{without}<h2 class="unseen">Curves</h2><div class="lead">{"".join(lead)}</div>'


def _rest(found: Sequence[Chart], headed: bool) -> str:
    rest = "".join(figure(c.id, c.title, c.unit, c.note) for c in found if c.id != "loss")
    if not rest:
        return ""
    grid = f'<div class="charts">{rest}</div>'
    return sections.section("curves", "All curves", grid) if headed else grid
