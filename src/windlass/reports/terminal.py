"""The loss curve in the terminal: plain Unicode, drawn with braille dots, no colour and no library."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from windlass.reports.text import show
from windlass.reports.view import RunView, view
from windlass.run import Run

Numbers = NDArray[np.float64]

BLOCKS = "▁▂▃▄▅▆▇█"
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""The bits of a braille character by row and column of its 4 × 2 dots."""


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """A line of text whose blocks rise and fall with the values; what is not finite is a gap."""
    numbers = np.asarray(values, dtype=np.float64)
    if not np.isfinite(numbers).any():
        return ""
    if len(numbers) > width:
        numbers = np.array([_mean(part) for part in np.array_split(numbers, width)])
    low, high = np.nanmin(_finite(numbers)), np.nanmax(_finite(numbers))
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((x - low) * scale)] if math.isfinite(x) else " " for x in numbers)


def _finite(values: Numbers) -> Numbers:
    return np.where(np.isfinite(values), values, math.nan)


def _mean(values: Numbers) -> float:
    good = values[np.isfinite(values)]
    return float(good.mean()) if len(good) else math.nan


def plot(x: Numbers, y: Numbers, marks: tuple[Numbers, Numbers], width: int, height: int, x_name: str) -> str:
    """A curve as text with axes.

    Args:
        x: [n] rising.
        y: [n]; what is not finite is left out.
        marks: x and y of points that are set as `o` over the curve.
        width: Characters in a line.
        height: Lines of the plot itself.
        x_name: What the horizontal axis counts.
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
    first, last = show(left, "count"), f"{show(right, 'count')} {x_name}"
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
        mean = _mean(y[place == column])
        if not math.isfinite(mean):
            continue
        dot = round((top - mean) / (top - bottom) * (4 * rows - 1))
        for at, row in _line(before, (column, dot)):
            bits[row // 4, at // 2] |= DOTS[row % 4][at % 2]
        before = (column, dot)
    return [[chr(0x2800 + int(cell)) if cell else " " for cell in line] for line in bits]


def _line(start: tuple[int, int] | None, end: tuple[int, int]) -> list[tuple[int, int]]:
    """The dots from one to another."""
    if start is None:
        return [end]
    count = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1)
    return [
        (start[0] + round((end[0] - start[0]) * i / count), start[1] + round((end[1] - start[1]) * i / count))
        for i in range(count + 1)
    ]


def curve(found: RunView, width: int | None = None, height: int = 13) -> str:
    """The training loss over steps as a curve, the validation loss as `o`; empty where nothing was logged."""
    width = width or min(100, shutil.get_terminal_size((80, 24)).columns)
    evals = found.evals.get("loss")
    marks = (evals["step"], evals["loss"]) if evals is not None else (np.array([]), np.array([]))
    drawn = plot(found.train["step"], found.train["loss"], marks, width, height, "steps")
    if not drawn:
        return ""
    legend = "loss in nats per token: ⠒⠒ training" + (", o validation" if len(marks[0]) else "")
    return f"{legend}\n\n{drawn}"


def loss_curve(run: Run, width: int | None = None, height: int = 13) -> str:
    """The loss curve of a run as text for a terminal, see `curve`."""
    return curve(view(run), width, height)
