"""A run in the terminal: its loss curve in characters, and its last generated text."""

from __future__ import annotations

import math
import shutil

import numpy as np

from windlass.reports.text import show
from windlass.reports.view import RunView
from windlass.telemetry.terminal import printable

DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""The bits of a braille character by row and column of its dots."""


def last_sample(view: RunView) -> str:
    """The last generated text, indented; empty where there is none."""
    if not view.samples:
        return ""
    lines = "\n".join(f"  | {line}" for line in printable(view.samples[-1]["text"]).split("\n"))
    return f"sample at step {view.samples[-1]['step']:,}:\n{lines}"


def curve(view: RunView, width: int | None = None, height: int = 13) -> str:
    """The training loss over steps as lines of text with axes, the validation loss as `o`; empty without a finite value.

    `width`: characters in a line (None: as wide as the terminal, at most 100); `height`: lines of the curve itself.
    """
    evals = view.evals.get("loss")
    x, y = (
        [track[name] for track in (view.train, evals) if track is not None]
        for name in ("step", "loss")
    )
    good = np.isfinite(np.concatenate(y))
    if not good.any():
        return ""
    all_x, all_y = np.concatenate(x)[good], np.concatenate(y)[good]
    left, bottom = float(all_x.min()), float(all_y.min())
    across, up = float(all_x.max()) - left or 1.0, float(all_y.max()) - bottom or 1.0
    digits = max(0, 2 - math.floor(math.log10(up)))
    values = [bottom + up * row / (height - 1) for row in reversed(range(height))]
    ticks = [f"{value:.{digits}f}" if row % 4 == 0 else "" for row, value in enumerate(values)]
    gutter = max(map(len, ticks)) + 1
    columns = max(10, (width or min(100, shutil.get_terminal_size((80, 24)).columns)) - gutter - 2)

    # A character is 2 × 4 dots. In each column of dots is the mean of what falls into it, joined to the one before.
    bits = np.zeros((height, columns), dtype=np.int64)
    steps, losses = x[0][np.isfinite(y[0])], y[0][np.isfinite(y[0])]
    places = ((steps - left) / across * (2 * columns - 1)).round()
    before = None
    for at in np.unique(places).astype(int):
        dot = round((1 - (float(losses[places == at].mean()) - bottom) / up) * (4 * height - 1))
        from_at, from_dot = before or (at, dot)
        for share in np.linspace(0, 1, 1 + max(at - from_at, abs(dot - from_dot), 1)):
            column, row = (
                round(from_at + (at - from_at) * share),
                round(from_dot + (dot - from_dot) * share),
            )
            bits[row // 4, column // 2] |= DOTS[row % 4][column % 2]
        before = (at, dot)
    canvas = [[chr(0x2800 + int(cell)) if cell else " " for cell in line] for line in bits]

    for step, loss in zip(*(x[1], y[1]) if evals is not None else ((), ()), strict=True):
        if math.isfinite(loss):
            row = round((1 - (loss - bottom) / up) * (height - 1))
            canvas[row][round((step - left) / across * (columns - 1))] = "o"
    end = float(all_x.max())
    first, last = (
        show(left, "count") if end > left else "",
        f"{show(end, 'count')} step{'s' * (end != 1)}",
    )
    lines = [
        "loss in nats per token: ⠒⠒ training" + (", o validation" if evals is not None else ""),
        "",
    ]
    lines += [
        f"{tick:>{gutter}} ┤{''.join(row)}".rstrip()
        for tick, row in zip(ticks, canvas, strict=True)
    ]
    lines.append(f"{'':>{gutter}} └{'─' * columns}")
    return "\n".join([*lines, f"{'':>{gutter}}  {first}{last:>{max(1, columns - len(first))}}"])
