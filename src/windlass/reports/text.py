"""Values as people read them, and text made safe for a terminal, Markdown and CSV. No locale, no clock."""

from __future__ import annotations

import csv
import html
import io
import math
from collections.abc import Iterable, Sequence
from typing import Any

MISSING = "–"

DECIMALS = {"loss": 4, "score": 4, "rate": 1, "mb": 0, "hours": 3}
"""Digits after the point by kind of number, for values of ordinary size."""


def show(value: Any, kind: str = "") -> str:
    """A value for a reader.

    Args:
        value: anything that a recipe or a ledger holds; None is shown as a dash.
        kind: `loss`, `score`, `rate`, `count`, `compact` (`3.28 M`), `amount` (with a fraction), `mb`,
            `share` (a fraction, shown as %), `duration` (seconds), `hours`; empty: six significant digits.
    """
    if value is None or value == "":
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(show(v) for v in value) or "none"
    if not isinstance(value, (int, float)):
        return str(value)
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("∞" if value > 0 else "−∞")
    if kind in DECIMALS:
        return fixed(value, DECIMALS[kind])
    match kind:
        case "duration":
            return duration(value)
        case "share":
            return f"{100 * value:.1f} %"
        case "compact":
            return compact(value)
        case "count":
            return f"{value:,.0f}"
        case "amount":
            return f"{value:,.3f}".rstrip("0").rstrip(".")
    return str(value) if isinstance(value, int) else f"{value:.6g}"


def fixed(value: float, decimals: int) -> str:
    """So many decimals, thousands separated; small numbers keep three significant digits, huge ones go scientific."""
    size = abs(value)
    if size == 0:
        return "0"
    if size >= 1e12 or size < 10 ** -(decimals + 2):
        return f"{value:.3g}"
    if size < 10**-decimals * 100:
        return f"{value:.{2 - math.floor(math.log10(size))}f}" if decimals else f"{value:.2g}"
    return f"{value:,.{decimals}f}"


def duration(seconds: float) -> str:
    """Seconds as `8.3 s`, `4 min 10 s`, `3 h 05 min`, `2 d 04 h`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    if round(seconds) < 3600:
        return f"{round(seconds) // 60} min {round(seconds) % 60:02d} s"
    minutes = round(seconds / 60)
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    hours = round(seconds / 3600)
    return f"{hours // 24} d {hours % 24:02d} h"


def compact(value: float) -> str:
    """A count for a headline: `812`, `3.28 M`, `600 M`, `1.2 B`."""
    for scale, divisor, letter in ((1e12, 1e12, "T"), (1e9, 1e9, "B"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= scale:
            scaled = value / divisor
            return f"{scaled:.3g} {letter}" if scaled < 1000 else f"{scaled:,.0f} {letter}"
    return f"{value:,.0f}"


def printable(text: Any) -> str:
    """Text without the control characters that a terminal would obey: each is shown as a replacement character."""
    cleaned = "".join(c if c in "\n\t" or (c >= " " and not 0x7F <= ord(c) < 0xA0) else "\ufffd" for c in str(text))
    return cleaned.encode("utf-8", "replace").decode("utf-8")


def markdown_cell(text: Any) -> str:
    """Text made safe for a cell of a Markdown table."""
    cleaned = html.escape(" ".join(printable(text).split()), quote=False)
    return "".join(f"\\{c}" if c in "|`*_[]\\" else c for c in cleaned)


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[Any]], right: Iterable[int] = ()) -> str:
    """A Markdown table of cells that are text already; the columns numbered in `right` are set flush right."""
    flush = set(right)
    lines = [" | ".join(map(markdown_cell, line)) for line in (head, *rows)]
    lines.insert(1, " | ".join("---:" if i in flush else "---" for i in range(len(head))))
    return "".join(f"| {line} |\n" for line in lines)


def csv_text(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """The rows as CSV with Unix line ends; floats in full precision, what is missing empty."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(["" if cell is None else csv_cell(cell) for cell in row] for row in rows)
    return out.getvalue()


def csv_cell(value: Any) -> Any:
    """A value for CSV: whole floats without a point, lists joined."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, (list, tuple)):
        return " ".join(str(csv_cell(v)) for v in value)
    return value
