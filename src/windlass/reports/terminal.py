"""The loss curve in the terminal: plain Unicode, drawn with braille dots, no colour and no library."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence

import numpy as np

from windlass.reports.tables import results_for_people
from windlass.reports.text import printable, show
from windlass.reports.view import Numbers, RunView

DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""The bits of a braille character by row and column of its 4 × 2 dots."""


def curve(view: RunView, width: int | None = None, height: int = 13) -> str:
    """The training loss over steps as a curve, the validation loss as `o`; empty where nothing was logged.

    Args:
        view: the run.
        width: characters in a line; None: as wide as the terminal, at most 100.
        height: lines of the curve itself.
    """
    width = width or min(100, shutil.get_terminal_size((80, 24)).columns)
    evals, nothing = view.evals.get("loss"), np.array([])
    marks = (evals["step"], evals["loss"]) if evals is not None else (nothing, nothing)
    drawn = plot(view.train["step"], view.train["loss"], marks, width, height)
    legend = "loss in nats per token: ⠒⠒ training" + (", o validation" if len(marks[0]) else "")
    return f"{legend}\n\n{drawn}" if drawn else ""


def last_sample(view: RunView) -> str:
    """The last generated text, indented; empty where there is none."""
    if not view.samples:
        return ""
    lines = "\n".join(f"  | {line}" for line in printable(view.samples[-1].text).splitlines())
    return f"sample at step {view.samples[-1].step:,}:\n{lines}"


def results_text(views: Sequence[RunView]) -> str:
    """The results table in columns."""
    rows = results_for_people(views).shown()
    width = max(len(row[0]) for row in rows)
    return "\n".join(f"{row[0]:<{width}}  {'  '.join(f'{cell:>14}' for cell in row[1:])}".rstrip() for row in rows)


def plot(x: Numbers, y: Numbers, marks: tuple[Numbers, Numbers], width: int, height: int) -> str:
    """A curve over steps as text with axes; empty where no value is finite.

    Args:
        x: [n] rising.
        y: [n]; what is not finite is left out.
        marks: x and y of points that are set as `o` over the curve.
        width: characters in a line.
        height: lines of the curve itself.
    """
    every_x, every_y = np.concatenate([x, marks[0]]), np.concatenate([y, marks[1]])
    good = np.isfinite(every_x) & np.isfinite(every_y)
    if not good.any():
        return ""
    left, right = float(every_x[good].min()), float(every_x[good].max())
    bottom, top = float(every_y[good].min()), float(every_y[good].max())
    right, top = right if right > left else left + 1, top if top > bottom else bottom + 1
    digits = max(0, 2 - math.floor(math.log10(top - bottom)))
    values = [top - (top - bottom) * row / (height - 1) for row in range(height)]
    ticks = [f"{value:.{digits}f}" if row % 4 == 0 else "" for row, value in enumerate(values)]
    gutter = max(map(len, ticks)) + 1
    columns = max(10, width - gutter - 2)
    canvas = _braille(x, y, (left, right, bottom, top), columns, height)
    for at, value in zip(*marks, strict=True):
        if math.isfinite(at) and math.isfinite(value):
            row = round((top - value) / (top - bottom) * (height - 1))
            canvas[row][round((at - left) / (right - left) * (columns - 1))] = "o"
    lines = [f"{tick:>{gutter}} ┤{''.join(row)}".rstrip() for tick, row in zip(ticks, canvas, strict=True)]
    first, last = show(left, "count"), f"{show(right, 'count')} steps"
    lines.append(f"{'':>{gutter}} └{'─' * columns}")
    lines.append(f"{'':>{gutter}}  {first}{last:>{max(1, columns - len(first))}}")
    return "\n".join(lines)


def _braille(
    x: Numbers, y: Numbers, box: tuple[float, float, float, float], columns: int, rows: int
) -> list[list[str]]:
    """The curve on a canvas of characters of 2 × 4 dots: in each column of dots the mean, joined to the one before."""
    left, right, bottom, top = box
    bits = np.zeros((rows, columns), dtype=np.int64)
    place = np.clip(((x - left) / (right - left) * (2 * columns - 1)).round(), 0, 2 * columns - 1)
    before: tuple[int, int] | None = None
    for column in range(2 * columns):
        values = y[(place == column) & np.isfinite(y)]
        if not len(values):
            continue
        dot = round((top - float(values.mean())) / (top - bottom) * (4 * rows - 1))
        from_column, from_dot = before or (column, dot)
        count = max(column - from_column, abs(dot - from_dot), 1)
        for i in range(count + 1):
            at, row = (
                from_column + round((column - from_column) * i / count),
                from_dot + round((dot - from_dot) * i / count),
            )
            bits[row // 4, at // 2] |= DOTS[row % 4][at % 2]
        before = (column, dot)
    return [[chr(0x2800 + int(cell)) if cell else " " for cell in line] for line in bits]
