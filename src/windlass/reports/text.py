"""Values as people read them, text made safe for a terminal, Markdown, LaTeX and CSV, and the loss curve in the terminal.

A report is made to be shown: no text gets into one of these formats without `scrub`.
"""

from __future__ import annotations

import csv
import html
import io
import math
import shutil
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from windlass.reports.view import RunView
from windlass.telemetry.measures import duration
from windlass.telemetry.terminal import printable
from windlass.variables import scrub

MISSING = "–"
DECIMALS = {
    "loss": 4,
    "score": 4,
    "rate": 1,
    "mb": 0,
    "hours": 3,
}  # digits after the point by kind of number
DOTS = (
    (0x01, 0x08),
    (0x02, 0x10),
    (0x04, 0x20),
    (0x40, 0x80),
)  # a braille character's bits by row and column of dots


def show(value: Any, kind: str = "") -> str:
    """A value of a recipe or a ledger for a reader; None is shown as a dash.

    `kind`: a key of DECIMALS, `count`, `amount` (with a fraction), `share` (a fraction, shown as %), `duration`
    (seconds); empty: six significant digits.
    """
    if value is None or value == "":
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(show(v) for v in value) or "none"
    if isinstance(value, dict):
        return " ".join(f"{key} {show(v)}" for key, v in value.items())
    if not isinstance(value, (int, float)):
        return str(scrub(str(value)))
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("∞" if value > 0 else "−∞")
    if kind in DECIMALS:
        decimals = DECIMALS[kind]
        if (
            0 < abs(value) < 10**-decimals * 100 or abs(value) >= 1e12
        ):  # three significant digits instead
            return f"{value:.3g}"
        return f"{value:,.{decimals}f}" if value else "0"
    if kind == "duration":
        return f"{value:.1f}s" if value < 60 else duration(value)
    if kind == "share":
        return f"{100 * value:.1f} %"
    if kind == "count":
        return f"{value:,.0f}"
    if kind == "amount":
        return f"{value:,.3f}".rstrip("0").rstrip(".")
    return str(value) if isinstance(value, int) else f"{value:.6g}"


def markdown_cell(text: Any) -> str:
    """Text made safe for a cell of a Markdown table."""
    cleaned = html.escape(" ".join(printable(scrub(str(text))).split()), quote=False)
    return "".join(f"\\{c}" if c in "|`*_[]\\" else c for c in cleaned)


def markdown_table(
    head: Sequence[str], rows: Iterable[Sequence[Any]], right: Sequence[int] = ()
) -> str:
    """A Markdown table of cells that are text already; the columns numbered in `right` are set flush right."""
    lines = [" | ".join(map(markdown_cell, line)) for line in (head, *rows)]
    lines.insert(1, " | ".join("---:" if i in right else "---" for i in range(len(head))))
    return "".join(f"| {line} |\n" for line in lines)


LATEX = str.maketrans(
    {c: f"\\{c}" for c in "&%$#_{}"}
    | {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
        "–": "--",
        "−": "$-$",
        "∞": r"$\infty$",
        "·": r"$\cdot$",
        "…": r"\dots{}",
    }
)


def latex_table(
    head: Sequence[str], rows: Iterable[Sequence[Any]], right: Sequence[int] = ()
) -> str:
    """A LaTeX table (`booktabs`) of cells that are text already; the columns numbered in `right` are set flush right."""
    cells = [
        [" ".join(printable(scrub(str(cell))).split()).translate(LATEX) for cell in line]
        for line in (head, *rows)
    ]
    lines = list(map(" & ".join, cells))
    columns = "".join("r" if i in right else "l" for i in range(len(head)))
    body = "".join(f"{line} \\\\\n" for line in lines[1:])
    return f"\\begin{{tabular}}{{{columns}}}\n\\toprule\n{lines[0]} \\\\\n\\midrule\n{body}\\bottomrule\n\\end{{tabular}}\n"


def csv_text(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """The rows as CSV with Unix line ends; floats in full precision, what is missing empty."""

    def cell(value: Any) -> Any:
        if isinstance(value, bool):
            return "true" if value else "false"
        if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
            return int(value)
        return (
            " ".join(str(cell(v)) for v in value)
            if isinstance(value, (list, tuple))
            else scrub(value)
        )

    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(map(cell, row) for row in (head, *rows))
    return out.getvalue()


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
