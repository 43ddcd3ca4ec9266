"""The page's sections below the charts, as HTML: results, where the time went, samples, settings, environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from windlass.recipe.load import flatten
from windlass.reports.charts import PART_COLOURS, PART_NAMES
from windlass.reports.measures import MEASURES, goodput
from windlass.reports.tables import (
    PRINCIPAL,
    Setting,
    Table,
    all_settings,
    comparison,
    evaluations,
    results_shown,
)
from windlass.reports.text import MISSING, duration, escape, show
from windlass.reports.view import RunView, Sample

SIDE_BY_SIDE = 6
"""Up to so many runs stand side by side in the results table; more only in rows."""
LONG = 28
"""A text of more characters in a table may take several lines."""
SAMPLES = 40
"""Steps of each run whose samples are in the page: evenly spaced, first and last among them."""


def table(found: Table, sortable: bool = False, css: str = "", row_class: Mapping[int, str] | None = None) -> str:
    """A table in HTML; numbers flush right, and with `sortable` heads that sort the rows."""
    numeric = set(found.numeric)
    heads = []
    for i, name in enumerate(found.heads):
        inner = f'<button type="button">{escape(name)}</button>' if sortable else escape(name)
        heads.append(f'<th scope="col"{" class=n" if i in numeric else ""}>{inner}</th>')
    rows = []
    for number, (raw, shown) in enumerate(zip(found.rows, found.shown(), strict=True)):
        cells = []
        for i, (value, text) in enumerate(zip(raw, shown, strict=True)):
            tag, scope = ("th", ' scope="row"') if i == 0 else ("td", "")
            exact = f' data-value="{escape("" if value is None else value)}"' if sortable else ""
            css_class = ' class="n"' if i in numeric else ' class="long"' if len(text) > LONG else ""
            cells.append(f"<{tag}{scope}{css_class}{exact}>{escape(text)}</{tag}>")
        look = (row_class or {}).get(number)
        rows.append(f"<tr{f' class={look}' if look else ''}>{''.join(cells)}</tr>")
    classes = " ".join(c for c in ("sortable" if sortable else "", css) if c)
    return (
        f'<div class="scroll"><table{f" class={chr(34)}{classes}{chr(34)}" if classes else ""}><thead><tr>{"".join(heads)}'
        f"</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def section(key: str, title: str, body: str, note: str = "") -> str:
    """A section of the page."""
    remark = f'<p class="note">{escape(note)}</p>' if note else ""
    return f'<section id="{key}"><h2>{escape(title)}</h2>{remark}{body}</section>'


def results(views: Sequence[RunView]) -> str:
    """The results table: a run's measures, or the runs side by side and in rows."""
    parts = []
    if len(views) > 1:
        apart = [name for name in comparison(views).columns if name not in ("run", *MEASURES)]
        note = "The settings that differ come first." if apart else "All settings that matter are the same."
        parts.append(f'<p class="note">{note} A click on a head sorts; the CSV beside the page has every measure.</p>')
        parts.append(f'<div class="wide">{table(comparison(views, PRINCIPAL), sortable=True)}</div>')
    if len(views) <= SIDE_BY_SIDE:
        inner = table(results_shown(views, each_evaluation=len(views) > 1), css="measures")
        tables = "".join(
            f"<h3>{escape(title)}</h3>{table(found)}"
            for view in views[:1]
            if len(views) == 1
            for found, title in ((t, _evaluation_title(s)) for t, s in evaluations(view))
        )
        parts.append(f'<div class="pair">{inner}<div>{tables}</div></div>' if tables else inner)
    return section("results", "Results", "".join(parts))


def _evaluation_title(suite: str) -> str:
    return "Evaluations" if suite == "loss" else f"Evaluations: {suite}"


def time(views: Sequence[RunView]) -> str:
    """Wall time by what it was spent on, a bar a run."""
    spent = [(view, parts) for view in views if (parts := goodput(view))]
    if not spent:
        return ""
    names = list(dict.fromkeys(["train", *(name for _, parts in spent for name in parts)]))
    colours = {name: f"var(--c{PART_COLOURS.get(name, 7)})" for name in names}
    note = "Wall time over all starts; the parts sum to the whole."
    if len(views) == 1:
        parts = spent[0][1]
        total = sum(parts.values())
        items = "".join(
            f'<li><i style="background:{colours[n]}"></i>{escape(PART_NAMES.get(n, n))} <b>{100 * parts[n] / total:.1f} %</b>, '
            f"{escape(duration(parts[n]))}</li>"
            for n in names
            if n in parts
        )
        return section("time", "Where the time went", f'{_stack(parts, colours)}<ul class="parts">{items}</ul>', note)
    legend = "".join(f'<li><i style="background:{colours[n]}"></i>{escape(PART_NAMES.get(n, n))}</li>' for n in names)
    rows = "".join(
        f'<div class="time"><span title="{escape(view.label)}">{escape(view.label)}</span>{_stack(parts, colours)}'
        f"<b>{100 * parts.get('train', 0.0) / sum(parts.values()):.1f} %</b></div>"
        for view, parts in spent
    )
    note += " The number is the share of training steps, the goodput."
    return section("time", "Where the time went", f'<ul class="parts">{legend}</ul>{rows}', note)


def _stack(parts: Mapping[str, float], colours: Mapping[str, str]) -> str:
    total = sum(parts.values())
    pieces = "".join(
        f'<i style="flex:{parts[n] / total:.6f};background:{colours[n]}" title="{escape(PART_NAMES.get(n, n))} '
        f'{100 * parts[n] / total:.1f} %, {escape(duration(parts[n]))}"></i>'
        for n in colours
        if n in parts
    )
    return f'<div class="stack">{pieces}</div>'


def samples(views: Sequence[RunView]) -> str:
    """The generated texts, of which the script shows one step at a time."""
    articles, chosen_some = [], False
    for number, view in enumerate(views):
        steps = sorted({sample.step for sample in view.samples})
        if len(steps) > SAMPLES:
            steps = sorted({steps[round(i * (len(steps) - 1) / (SAMPLES - 1))] for i in range(SAMPLES)})
            chosen_some = True
        keep = set(steps)
        articles += [_article(number, sample) for sample in view.samples if sample.step in keep]
    if not articles:
        return ""
    having = [i for i, view in enumerate(views) if view.samples]
    options = "".join(f'<option value="{i}">{escape(views[i].label)}</option>' for i in having)
    pick = f'<select id="sample-run" aria-label="Run">{options}</select>' if len(views) > 1 else ""
    controls = (
        f'<div id="sample-controls" hidden>{pick}<input id="sample-step" type="range" min="0" value="0" step="1" '
        'aria-label="Step of the sample"><span id="sample-at"></span></div>'
    )
    note = "Generated along the way, the prompt in colour."
    note += f" {SAMPLES} evenly spaced steps are shown; the run directory has them all." if chosen_some else ""
    return section("samples", "Samples", controls + "".join(articles), note)


def _article(run: int, sample: Sample) -> str:
    text, prompt = sample.text, sample.prompt
    rest = text[len(prompt) :] if prompt and text.startswith(prompt) else text
    return (
        f'<article data-run="{run}" data-step="{sample.step}"><h3>step {sample.step:,}</h3><pre class="sample" tabindex="0">'
        f"<b>{escape(prompt)}</b>{escape(rest)}</pre></article>"
    )


def settings(views: Sequence[RunView]) -> str:
    """Every setting: those that differ between the runs, those changed from the defaults, and the rest folded away."""
    found = all_settings(views)
    groups = (
        [s for s in found if s.differs],
        [s for s in found if s.changed and not s.differs],
        [s for s in found if not s.changed and not s.differs],
    )
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in ("Setting", *(v.label for v in views)))

    def rows(settings: Sequence[Setting]) -> str:
        return "".join(
            f'<tr{" class=differs" if s.differs else ""}><th scope="row" title="{escape(s.meaning)}">{escape(s.key)}</th>'
            + "".join(f'<td class="text">{escape(show(value))}</td>' for value in s.values)
            + "</tr>"
            for s in settings
        )

    def block(settings: Sequence[Setting]) -> str:
        body = f"<thead><tr>{head}</tr></thead><tbody>{rows(settings)}</tbody>"
        return f'<div class="scroll"><table>{body}</table></div>'

    first = [*groups[0], *groups[1]]
    parts = ['<input id="filter" type="search" placeholder="Find a setting" aria-label="Find a setting">']
    parts.append(block(first) if first else "")
    parts.append(f"<details><summary>{len(groups[2])} settings at their defaults</summary>{block(groups[2])}</details>")
    note = "Those that differ between the runs come first, then" if groups[0] else "First"
    return section(
        "settings",
        "Settings",
        "".join(parts),
        f"{note} those changed from the defaults. Rest the pointer on a name for its meaning.",
    )


def environment(views: Sequence[RunView]) -> str:
    """Versions, hosts, devices, command; what differs between the runs first."""
    flat = [{k: _joined(v) for k, v in flatten(view.environment).items()} for view in views]
    keys = list(dict.fromkeys(key for one in flat for key in one))
    if not keys:
        return ""
    if len(views) > 1:
        keys.sort(key=lambda key: len({one.get(key) for one in flat}) == 1)
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in ("", *(v.label for v in views)))
    rows = "".join(
        f'<tr><th scope="row">{escape(key)}</th>'
        + "".join(f'<td class="text">{escape(one.get(key, MISSING))}</td>' for one in flat)
        + "</tr>"
        for key in keys
    )
    head = f"<thead><tr>{head}</tr></thead>" if len(views) > 1 else ""
    return section(
        "environment", "Environment", f'<div class="scroll"><table>{head}<tbody>{rows}</tbody></table></div>'
    )


def _joined(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(", ".join(f"{k} {v}" for k, v in x.items()) if isinstance(x, dict) else str(x) for x in value)
    return show(value)
