"""What a study adds to the page: the loss against what was swept, a heat map, the winner, the table of its cells."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from windlass.reports.measures import measures
from windlass.reports.page import Extra, figure, page, totals
from windlass.reports.payload import rounded
from windlass.reports.sections import section, table
from windlass.reports.study import (
    SEED,
    Cell,
    StudyView,
    cell_table,
    named,
    seed_table,
    short,
    winner,
    winner_command,
    winner_text,
)
from windlass.reports.swept import Heat, Sweep, heats, sweeps, sweeps_numeric, unique
from windlass.reports.text import escape, show


def study_page(study: StudyView) -> str:
    """The page of a study."""
    best = winner(study.cells)
    found = [
        ("winner", "Winner", _winner(study)),
        ("swept", "Swept", _swept(study.cells)),
        ("cells", "Cells", _cells(study.cells)),
    ]
    axes = [f"{key}: {', '.join(show(v) for v in _values(study.cells, key))}" for key in study.keys]
    extra = Extra(
        kicker="A study",
        title=study.name,
        lede=f"{escape(_states(study.cells))}. {escape('; '.join(axes))}",
        headline=_headline(study, best.loss if best else None, best.assignment if best else {}),
        sections=[(key, name, text) for key, name, text in found if text],
        results=False,
        looks=looks(study.cells),
        free=[_free(sweep, number) for number, sweep in enumerate(sweeps(study.cells))],
    )
    return page(study.views, extra)


def looks(cells: Sequence[Cell]) -> list[tuple[float | None, int]]:
    """For each cell that has begun its place on the colour ramp, by the first numeric swept setting, and its dash.

    Cells that differ only in other settings share the colour and differ in dash, seeds share both. Empty where nothing
    numeric was swept: then each run has its own colour.
    """
    numeric = sweeps_numeric(cells)
    if not numeric:
        return []
    key, values = numeric[0]
    rest = [{k: v for k, v in cell.assignment.items() if k not in (key, SEED)} for cell in cells]
    kinds = unique(rest)
    found: list[tuple[float | None, int]] = []
    for cell, others in zip(cells, rest, strict=True):
        if cell.view is not None:
            tone = values.index(cell.assignment[key]) / (len(values) - 1) if key in cell.assignment else None
            found.append((tone, kinds.index(others)))
    return found


def _values(cells: Sequence[Cell], key: str) -> list[Any]:
    return unique(cell.assignment[key] for cell in cells if key in cell.assignment)


def _states(cells: Sequence[Cell]) -> str:
    counts: dict[str, int] = {}
    for cell in cells:
        counts[cell.state] = counts.get(cell.state, 0) + 1
    return f"{len(cells)} cells: " + ", ".join(f"{count} {state}" for state, count in counts.items())


def _headline(study: StudyView, best: float | None, assignment: dict[str, Any]) -> list[tuple[str, str, str]]:
    found = [measures(view) for view in study.views]
    figures = [("Best evaluation loss", show(best, "loss"), named(assignment))] if best is not None else []
    figures.append(("Cells", str(len(study.cells)), _states(study.cells).partition(": ")[2]))
    return figures + totals(found)


def _winner(study: StudyView) -> str:
    best = winner(study.cells)
    if best is None:
        return ""
    command, remark = winner_command(study, best.assignment)
    what, measure = winner_text(best)
    text = f"<p><b>{escape(what)}</b>, {escape(measure)}.</p>"
    after = f'<p class="note after">{escape(remark)}</p>' if remark else ""
    return section("winner", "The winner", f'{text}<pre class="command">{escape(command)}</pre>{after}')


def _swept(cells: Sequence[Cell]) -> str:
    figures = [
        figure(f"sweep-{number}", f"Evaluation loss against {sweep.key}", "nats per token", _sweep_note(sweep))
        for number, sweep in enumerate(sweeps(cells))
    ]
    parts = [f'<div class="charts">{"".join(figures)}</div>'] if figures else []
    maps = "".join(_heat(found) for found in heats(cells))
    if maps:
        parts.append(f'<div class="charts">{maps}</div>')
    return section("swept", "Loss against what was swept", "".join(parts)) if parts else ""


def _sweep_note(sweep: Sweep) -> str:
    seeds = any(len(line.every) > len(line.median) for line in sweep.lines)
    return "lines: medians over the seeds, circles: each seed" if seeds else ""


def _free(sweep: Sweep, number: int) -> dict[str, Any]:
    """A chart with curves of its own, as the page's script takes it."""
    series = []
    for place, line in enumerate(sweep.lines):
        colour = f"var(--c{place % 8})"
        suffix = f", {line.name}" if line.name else ""
        seeds = len(line.every) > len(line.median)
        best = "best" if line.final else "best and final"
        for values, name, dash in ((line.median, f"{best}{suffix}", None), (line.final, f"final{suffix}", "6 4")):
            if not values:
                continue
            x, y = [sweep.x(v) for v, _ in values], [rounded(loss) for _, loss in values]
            points = not (seeds and dash is None)
            series.append(
                {"name": name, "color": colour, "dash": dash, "x": x, "y": y, "points": points and dash is None}
            )
        if seeds:
            x, y = [sweep.x(v) for v, _ in line.every], [rounded(loss) for _, loss in line.every]
            series.append(
                {
                    "name": f"seed{suffix}",
                    "color": colour,
                    "x": x,
                    "y": y,
                    "points": True,
                    "pointsOnly": True,
                    "quiet": True,
                }
            )
    free: dict[str, Any] = {"label": short(sweep.key), "log": sweep.log, "series": series}
    free |= {"values": [sweep.x(v) for v in sweep.values], "names": [show(v) for v in sweep.values]}
    return {
        "id": f"sweep-{number}",
        "source": "free",
        "curves": [],
        "smooth": False,
        "zero": False,
        "scale": 1,
        "free": free,
    }


def _heat(found: Heat) -> str:
    """The heat map as a table: the lower the loss, the stronger the colour."""
    known = [value for row in found.loss for value in row if value is not None]
    low, high = min(known), max(known)
    head = "".join(f'<th scope="col">{escape(show(value))}</th>' for value in found.columns)
    rows = []
    for value, losses in zip(found.rows, found.loss, strict=True):
        cells = []
        for loss in losses:
            share = 0.0 if loss is None else 1.0 - (_rank(loss, low, high))
            style = f"background:color-mix(in oklab,var(--accent) {8 + 62 * share:.0f}%,var(--paper))"
            cells.append(
                f'<td class="cell" style="{style if loss is not None else ""}">{escape(show(loss, "loss"))}</td>'
            )
        rows.append(
            f'<tr><th scope="row">{escape(short(found.row_key))} {escape(show(value))}</th>{"".join(cells)}</tr>'
        )
    caption = f"columns: {found.column_key}, rows: {found.row_key}; the stronger the colour, the lower"
    return (
        f'<div><h3 class="over">{escape(found.title)}</h3><p class="note heat-note">{escape(caption)}</p><div class="scroll"><table class="heat"><thead><tr><th></th>{head}'
        f"</tr></thead><tbody>{''.join(rows)}</tbody></table></div></div>"
    )


def _rank(loss: float, low: float, high: float) -> float:
    """Where a loss lies between lowest and highest; by the logarithm of the distance, so that a bad cell hides nothing."""
    if high <= low:
        return 0.0
    return math.log1p(9 * (loss - low) / (high - low)) / math.log(10)


def _cells(cells: Sequence[Cell]) -> str:
    best = winner(cells)
    shown = cell_table(cells)
    won = {i: "winner" for i, cell in enumerate(cells) if best is not None and cell in best.cells}
    parts = [f'<div class="wide">{table(shown, sortable=True, row_class=won)}</div>']
    seeds = seed_table(cells)
    if seeds is not None:
        parts.append(f'<h3 class="over">Over the seeds</h3>{table(seeds)}')
    return section("cells", "The cells", "".join(parts), "A click on a head sorts; the winner is tinted.")
