"""A run in the terminal: its loss curve in characters, and its last generated text."""

from __future__ import annotations

import math
import shutil
from itertools import pairwise

import numpy as np

from windlass.errors import plural
from windlass.reports.view import RunView
from windlass.telemetry.measures import show
from windlass.telemetry.terminal import printable

DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""The bits of a braille character by row and column of its dots."""


def last_sample(view: RunView) -> str:
    """The last generated text, indented; empty if there is none."""
    if not view.samples:
        return ""
    lines = "\n".join(f"  | {line}" for line in printable(view.samples[-1]["text"]).split("\n"))
    return f"sample at step {view.samples[-1]['step']:,}:\n{lines}"


def curve(view: RunView, width: int | None = None, height: int = 13) -> str:
    """The training loss over steps as text with axes, the validation loss as `o`.

    It is empty if no loss is finite.

    Args:
        width: characters in a line; None: as wide as the terminal, at most 100.
        height: lines of the curve itself.
    """
    tracks = [track for track in (view.train, view.evals.get("loss")) if track is not None]
    curves = []  # steps and losses
    for track in tracks:
        good = np.isfinite(track["loss"])
        curves.append((track["step"][good], track["loss"][good]))
    steps, losses = (np.concatenate(part) for part in zip(*curves, strict=True))
    if not len(losses):
        return ""
    left, end, bottom = float(steps.min()), float(steps.max()), float(losses.min())
    across, up = end - left or 1.0, float(losses.max()) - bottom or 1.0
    digits = max(0, 2 - math.floor(math.log10(up)))
    values = [bottom + up * row / (height - 1) for row in reversed(range(height))]
    ticks = [f"{value:.{digits}f}" if row % 4 == 0 else "" for row, value in enumerate(values)]
    gutter = max(map(len, ticks)) + 1
    columns = max(10, (width or min(100, shutil.get_terminal_size((80, 24)).columns)) - gutter - 2)

    # A character has 2 × 4 dots. The curve joins the means of the losses in each column of dots.
    x, y = curves[0]
    places = ((x - left) / across * (2 * columns - 1)).round()
    means = {int(at): float(y[places == at].mean()) for at in np.unique(places)}
    dots = [(at, (1 - (mean - bottom) / up) * (4 * height - 1)) for at, mean in means.items()]
    bits = np.zeros((height, columns), dtype=np.int64)
    for (a, from_row), (b, to_row) in pairwise(dots[:1] + dots):
        count = 1 + max(b - a, math.ceil(abs(to_row - from_row)), 1)
        for column, row in np.linspace((a, from_row), (b, to_row), count).round().astype(int):
            bits[row // 4, column // 2] |= DOTS[row % 4][column % 2]
    canvas = [[chr(0x2800 + int(cell)) if cell else " " for cell in line] for line in bits]
    for step, loss in zip(*curves[-1], strict=True) if len(curves) > 1 else ():
        row = round((1 - (loss - bottom) / up) * (height - 1))
        canvas[row][round((step - left) / across * (columns - 1))] = "o"

    head = "loss in nats per token: ⠒⠒ training" + (", o validation" if len(tracks) > 1 else "")
    rows = zip(ticks, map("".join, canvas), strict=True)
    lines = [head, "", *(f"{tick:>{gutter}} ┤{row}".rstrip() for tick, row in rows)]
    lines.append(f"{'':>{gutter}} └{'─' * columns}")
    first, last = show(left, "count") if end > left else "", plural(int(end), "step")
    return "\n".join([*lines, f"{'':>{gutter}}  {first}{last:>{max(1, columns - len(first))}}"])
