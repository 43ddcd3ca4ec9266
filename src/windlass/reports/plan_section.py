"""A run's plan in its report: where the parameters are, the memory of a rank for each strategy, what happens when.

Pure, from the values of `windlass.estimate.of_run`: the same run gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from windlass.reports.plan import PARTS, Section, markdown, predicted_section, sections
from windlass.reports.sections import section
from windlass.reports.text import escape, markdown_cell
from windlass.reports.view import RunView

NOTE = "Reckoned from the recipe and the ledger, for the whole run from its first step, at the speed it showed."
GRID = "Memory on other ranks and in other precisions"
FOLDED = {GRID: GRID, "Time": "Time, also on other numbers of ranks", "Disk": "Disk"}
"""Sections that are folded away on the page, and what is said of them there."""
HEADS = {"next at step": "first at step", "left": "times"}
"""What a column is called where the whole run is planned, not what is left of it."""


def plan_html(views: Sequence[RunView]) -> str:
    """The page's section; empty for several runs, and for a run that has not begun."""
    if len(views) != 1 or not (views[0].plan or views[0].plan_note):
        return ""
    if not views[0].plan:
        return section("plan", "Plan", "", views[0].plan_note)
    plan = views[0].plan
    first, *others = _sections(plan)
    side = "".join(f"<div>{_part(s)}</div>" for s in others if s.title.startswith("Predicted"))
    facts = _facts(first, shown_elsewhere=bool(plan.get("model")))
    facts += "".join(f'<p class="note after">{escape(note)}</p>' for note in first.notes)
    body = [_parameters(plan), f'<div class="pair plan"><div>{facts}</div>{side}</div>']
    for found in sorted(others, key=lambda s: s.title in FOLDED):
        if found.title in FOLDED:
            inner = _part(found, headed=False)
            body.append(f"<details><summary>{escape(FOLDED[found.title])}</summary>{inner}</details>")
        elif found.title.startswith("Memory of a rank"):
            body.append(_part(found, bars=plan["memory"]))
        elif not found.title.startswith("Predicted"):
            body.append(_part(found))
    return section("plan", "Plan", "".join(body), NOTE)


def plan_markdown(views: Sequence[RunView]) -> list[str]:
    """The same for `report.md`."""
    if len(views) != 1 or not (views[0].plan or views[0].plan_note):
        return []
    found = ["\n## Plan\n"]
    if not views[0].plan:
        return [*found, f"{markdown_cell(views[0].plan_note)}\n"]
    first, *others = _sections(views[0].plan)
    return [*found, f"{NOTE}\n", markdown([first, *others])]


def _sections(plan: Mapping[str, Any]) -> list[Section]:
    """Those of the terminal, with what was measured right after what it is, and nothing that is not known."""
    measured = plan.get("predicted_and_measured")
    first, *others = sections({k: v for k, v in plan.items() if k != "predicted_and_measured"})
    found = [_clean(first, "The run")]
    if measured:
        found.append(predicted_section(measured))
    return found + [_clean(s) for s in others]


def _clean(found: Section, title: str = "") -> Section:
    """A section without columns and notes that only say that nothing is known; `Time` without what only a terminal can do."""
    rows, head, notes = list(found.rows), found.head, found.notes
    hidden = {i for i in range(len(head)) if rows and all(row[i] == "?" for row in rows)}
    if hidden:
        head = tuple(name for i, name in enumerate(head) if i not in hidden)
        rows = [tuple(cell for i, cell in enumerate(row) if i not in hidden) for row in rows]
        notes = ["The run's own layout is set off."] if found.strong else []
    facts = [("from start to end" if name == "to the end" else name, value) for name, value in found.facts]
    shown = (title or found.title).removesuffix(", room unknown")
    head = tuple(HEADS.get(name, name) for name in head)
    return Section(shown, facts, head, rows, found.left, found.strong, notes)


def _part(found: Section, headed: bool = True, bars: Sequence[dict[str, Any]] = ()) -> str:
    notes = "".join(f'<p class="note after">{escape(note)}</p>' for note in found.notes)
    title = f'<h3 class="over">{escape(found.title)}</h3>' if headed else ""
    table = _table(found, bars) if found.rows else ""
    return title + (_facts(found) if found.facts else "") + table + notes


def _facts(found: Section, shown_elsewhere: bool = False) -> str:
    """Pairs as a table; a value without a name goes on with the one before it, unless it is shown elsewhere."""
    rows: list[tuple[str, list[str]]] = []
    for name, value in found.facts:
        if name or not rows:
            rows.append((name, [value]))
        elif not shown_elsewhere:
            rows[-1][1].append(value)
    cells = "".join(
        f'<tr><th scope="row">{escape(name[:1].upper() + name[1:])}</th>'
        f'<td class="text">{"<br>".join(escape(value) for value in values)}</td></tr>'
        for name, values in rows
    )
    return f'<div class="scroll"><table class="measures"><tbody>{cells}</tbody></table></div>'


def _table(found: Section, bars: Sequence[dict[str, Any]] = ()) -> str:
    """A section's table; with `bars` a column that draws each row's bytes by part, and the parts' colours in the head."""

    def side(i: int) -> str:
        return "" if i < found.left else ' class="n"'

    last = found.left + len(PARTS)
    head = "".join(
        f'<th scope="col"{side(i)}>'
        + (f'<i style="background:var(--c{i - found.left})"></i>' if bars and found.left <= i < last else "")
        + f"{escape(name)}</th>"
        for i, name in enumerate(found.head)
    )
    rows = "".join(
        f"<tr{' class=winner' if number in found.strong else ''}>"
        + "".join(
            f'<th scope="row"{side(i)}>{escape(cell)}</th>' if i == 0 else f"<td{side(i)}>{escape(cell)}</td>"
            for i, cell in enumerate(row)
        )
        + (_bar(bars[number], max(bar["total_bytes"] for bar in bars)) if bars else "")
        + "</tr>"
        for number, row in enumerate(found.rows)
    )
    look, more = (' class="bars"', '<td class="bar-cell"></td>') if bars else ("", "")
    return f'<div class="scroll"><table{look}><thead><tr>{head}{more}</tr></thead><tbody>{rows}</tbody></table></div>'


def _bar(row: dict[str, Any], most: int) -> str:
    pieces = "".join(
        f'<i style="flex:{row[f"{part}_bytes"] / most:.6f};background:var(--c{i})" title="{part}, '
        f'{row[f"{part}_bytes"] / 1e6:,.1f} MB"></i>'
        for i, part in enumerate(PARTS)
        if row[f"{part}_bytes"] > 0
    )
    rest = f'<i style="flex:{1 - row["total_bytes"] / most:.6f}"></i>' if row["total_bytes"] < most else ""
    return f'<td class="bar-cell"><div class="stack">{pieces}{rest}</div></td>'


def _parameters(plan: Mapping[str, Any]) -> str:
    """A bar of the parameters by part."""
    parts = {k: v for k, v in plan.get("model", {}).get("parts", {}).items() if v}
    total = sum(parts.values())
    if not total:
        return ""
    names = {name: name.replace("_", "-").capitalize() for name in parts}
    bar = "".join(
        f'<i style="flex:{n / total:.6f};background:var(--c{i})" title="{escape(names[name])} {100 * n / total:.1f} %, {n:,}"></i>'
        for i, (name, n) in enumerate(parts.items())
    )
    items = "".join(
        f'<li><i style="background:var(--c{i})"></i>{escape(names[name])} <b>{100 * n / total:.1f} %</b>, {n:,}</li>'
        for i, (name, n) in enumerate(parts.items())
    )
    head = f'<h3 class="over">{total:,} parameters</h3>'
    return f'{head}<div class="stack">{bar}</div><ul class="parts">{items}</ul>'
