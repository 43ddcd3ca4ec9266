"""The loss of a study's cells against what was swept: lines over one setting, a map over two. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from windlass.reports.measures import MEASURES
from windlass.reports.study import SEED, Cell, Group, by_seed, named


@dataclass(frozen=True)
class Sweep:
    """The loss against one swept setting: a line for each combination of the others."""

    key: str
    values: list[Any]
    """The setting's values in the order they are drawn."""
    numeric: bool
    log: bool
    lines: list[SweepLine]

    def x(self, value: Any) -> float:
        """Where a value lies: itself, or its place among the values."""
        return float(value) if self.numeric else float(self.values.index(value))


@dataclass(frozen=True)
class SweepLine:
    """Medians over the seeds, and every seed's value, as (value of the setting, best evaluation loss)."""

    name: str
    median: list[tuple[Any, float]]
    final: list[tuple[Any, float]]
    """Medians of the final losses; empty where they are the best ones all along."""
    every: list[tuple[Any, float]]


def sweeps(cells: Sequence[Cell]) -> list[Sweep]:
    """For each swept setting with more than one value, the loss against it."""
    groups = by_seed(cells)
    keys = list(dict.fromkeys(key for group in groups for key in group.assignment))
    found = []
    for key in keys:
        values = unique(group.assignment[key] for group in groups if key in group.assignment)
        if len(values) < 2:
            continue
        numbers = numeric(values)
        if numbers:
            values.sort()
        log = numbers and values[0] > 0 and values[-1] / values[0] >= 8
        lines = _lines(groups, key, values)
        if any(line.median for line in lines):
            found.append(Sweep(key, values, numbers, log, lines))
    return found


def numeric(values: Sequence[Any]) -> bool:
    """Whether all are numbers."""
    return all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values)


def unique(values: Any) -> list[Any]:
    """The values without repetition, in order; they need not be hashable."""
    found: list[Any] = []
    for value in values:
        if value not in found:
            found.append(value)
    return found


def _lines(groups: Sequence[Group], key: str, values: Sequence[Any]) -> list[SweepLine]:
    others: dict[str, list[Group]] = {}
    for group in groups:
        rest = {k: v for k, v in group.assignment.items() if k != key}
        others.setdefault(named(rest) if rest else "", []).append(group)
    lines = []
    for name, members in others.items():
        ordered = sorted(members, key=lambda g: list(values).index(g.assignment[key]))
        pick = [(g.assignment[key], g) for g in ordered]
        median = [(v, m) for v, g in pick if (m := g.median("best_eval_loss")) is not None]
        final = [(v, m) for v, g in pick if (m := g.median("eval_loss")) is not None]
        final = [] if final == median else final
        every = [(v, one) for v, g in pick for one in g.values("best_eval_loss")]
        lines.append(SweepLine(name, median, final, every))
    return lines


@dataclass(frozen=True)
class Heat:
    """An evaluation loss over two swept settings: `loss[row][column]`, None where nothing has finished."""

    title: str
    row_key: str
    column_key: str
    rows: list[Any]
    columns: list[Any]
    loss: list[list[float | None]]


def heat(cells: Sequence[Cell], measure: str = "best_eval_loss") -> Heat | None:
    """The heat map of a study with exactly two swept settings besides the seed; None for any other."""
    groups = by_seed(cells)
    keys = list(dict.fromkeys(key for group in groups for key in group.assignment))
    axes = [(key, unique(g.assignment.get(key) for g in groups)) for key in keys]
    axes = [(key, sorted(values) if numeric(values) else values) for key, values in axes if len(values) > 1]
    if len(axes) != 2:
        return None
    (row_key, rows), (column_key, columns) = axes if len(axes[0][1]) <= len(axes[1][1]) else (axes[1], axes[0])
    loss: list[list[float | None]] = [[None] * len(columns) for _ in rows]
    for group in groups:
        place = rows.index(group.assignment[row_key]), columns.index(group.assignment[column_key])
        loss[place[0]][place[1]] = group.median(measure)
    return Heat(MEASURES[measure][0], row_key, column_key, rows, columns, loss)


def heats(cells: Sequence[Cell]) -> list[Heat]:
    """The maps of the best and, where a cell's differs, of the final loss; those without any number are left out."""
    found = [one for name in ("best_eval_loss", "eval_loss") if (one := heat(cells, name)) is not None]
    found = [one for one in found if any(value is not None for row in one.loss for value in row)]
    return found[:1] if len(found) == 2 and found[0].loss == found[1].loss else found


def sweeps_numeric(cells: Sequence[Cell]) -> list[tuple[str, list[Any]]]:
    """The swept settings other than the seed that are numbers, with their rising values."""
    keys = list(dict.fromkeys(key for cell in cells for key in cell.assignment if key != SEED))
    found = []
    for key in keys:
        values = unique(cell.assignment[key] for cell in cells if key in cell.assignment)
        if len(values) > 2 and numeric(values):
            found.append((key, sorted(values)))
    return found
