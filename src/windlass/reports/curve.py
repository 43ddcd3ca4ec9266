"""The loss of a run as text for a terminal."""

from __future__ import annotations

import math
import shutil

import numpy as np

from windlass.errors import plural
from windlass.reports.view import RunView
from windlass.telemetry.measures import LOSS, show


def curve(view: RunView, width: int | None = None, height: int = 13) -> str:
    """The training loss over steps as text with axes, the validation loss as `o`; empty if no loss
    is finite. `width`: None is as wide as the terminal, at most 100 columns."""
    curves = []  # steps and losses
    for track in (view.train, view.evals.get(LOSS)):
        if track is not None and track.has("loss"):
            good = np.isfinite(track["loss"])
            curves.append((track["step"][good], track["loss"][good]))
    if not curves:
        return ""
    steps, losses = (np.concatenate(part) for part in zip(*curves, strict=True))
    left, end, bottom = float(steps.min()), float(steps.max()), float(losses.min())
    across, up = end - left or 1.0, float(losses.max()) - bottom or 1.0
    digits = max(0, 2 - math.floor(math.log10(up)))
    values = [bottom + up * row / (height - 1) for row in reversed(range(height))]
    ticks = [f"{value:.{digits}f}" if row % 4 == 0 else "" for row, value in enumerate(values)]
    gutter = max(map(len, ticks)) + 1
    columns = max(10, (width or min(100, shutil.get_terminal_size((80, 24)).columns)) - gutter - 2)
    canvas = [[" "] * columns for _ in range(height)]

    def put(mark: str, step: float, loss: float) -> None:
        row = round((1 - (loss - bottom) / up) * (height - 1))
        canvas[row][round((step - left) / across * (columns - 1))] = mark

    drawn = np.linspace(left, end, columns)
    for step, loss in zip(drawn, np.interp(drawn, *curves[0]), strict=True):
        put("·", step, loss)
    for step, loss in zip(*curves[-1], strict=True) if len(curves) > 1 else ():
        put("o", step, loss)
    head = "loss in nats per token: ·· training" + (", o validation" if len(curves) > 1 else "")
    rows = zip(ticks, map("".join, canvas), strict=True)
    lines = [head, "", *(f"{tick:>{gutter}} ┤{row}".rstrip() for tick, row in rows)]
    lines.append(f"{'':>{gutter}} └{'─' * columns}")
    first, last = show(left, "count") if end > left else "", plural(int(end), "step")
    return "\n".join([*lines, f"{'':>{gutter}}  {first}{last:>{max(1, columns - len(first))}}"])
