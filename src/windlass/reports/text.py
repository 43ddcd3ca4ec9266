"""Numbers as people read them, and text made safe for Markdown, CSV and HTML. Pure, no locale, no clock."""

from __future__ import annotations

import csv
import html
import io
import math
from collections.abc import Iterable, Sequence
from typing import Any

MISSING = "–"

DECIMALS = {"loss": 4, "score": 4, "rate": 1, "mb": 0, "pct": 1, "hours": 3}
"""Digits after the point by kind of number, for values of ordinary size."""


def show(value: Any, kind: str = "") -> str:
    """A value for a reader. `kind`: loss, score, rate, count, amount (with a fraction), mb, pct, share (a fraction as %), duration (s), hours."""
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
    if kind == "duration":
        return duration(value)
    if kind == "share":
        return f"{100 * value:.1f} %"
    if kind == "count":
        return f"{value:,.0f}"
    if kind == "amount":
        return f"{value:,.3f}".rstrip("0").rstrip(".")
    if kind == "pct":
        return f"{value:.1f} %"
    if kind in DECIMALS:
        return fixed(value, DECIMALS[kind])
    if isinstance(value, int):
        return str(value)
    return f"{value:.6g}"


def fixed(value: float, decimals: int) -> str:
    """So many decimals, thousands separated; small numbers keep three significant digits, huge ones go scientific."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e12 or size < 10 ** -(decimals + 2):
        return f"{value:.3g}"
    if size < 10**-decimals * 100:
        return f"{value:.{2 - math.floor(math.log10(size))}f}" if decimals else f"{value:.2g}"
    return f"{value:,.{decimals}f}"


def duration(seconds: float) -> str:
    """Seconds as `8.3 s`, `4 min 10 s`, `3 h 05 min`, `2 d 04 h`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    hours = round(seconds / 3600)
    return f"{hours // 24} d {hours % 24:02d} h"


def compact(value: float | None) -> str:
    """A count for a headline: `812`, `3.28 M`, `600 M`, `1.2 B`."""
    if value is None or not math.isfinite(value):
        return MISSING
    for scale, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= scale:
            scaled = value / (1e3 if letter == "k" else scale)
            return f"{scaled:.3g} {letter}" if scaled < 1000 else f"{scaled:,.0f} {letter}"
    return f"{value:,.0f}"


def escape(text: Any) -> str:
    """Text made safe for HTML, in elements and in quoted attributes; characters that no page may hold are shown."""
    return html.escape(printable(text), quote=True)


def printable(text: Any) -> str:
    """Text without the control characters that a terminal would obey: each is shown as a replacement character."""
    cleaned = "".join(c if c in "\n\t" or (c >= " " and not 0x7F <= ord(c) < 0xA0) else "\ufffd" for c in str(text))
    return cleaned.encode("utf-8", "replace").decode("utf-8")


def markdown_cell(text: Any) -> str:
    """Text made safe for a cell of a Markdown table."""
    cleaned = html.escape(" ".join(str(text).split()), quote=False)
    return "".join(f"\\{c}" if c in "|`*_[]\\" else c for c in cleaned)


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[Any]], right: Iterable[int] = ()) -> str:
    """A Markdown table of cells that are text already; the columns numbered in `right` are set flush right."""
    flush = set(right)
    rule = ["---:" if i in flush else "---" for i in range(len(head))]
    lines = [head, rule, *rows]
    cells = [[cell if i == 1 else markdown_cell(cell) for cell in line] for i, line in enumerate(lines)]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells) + "\n"


def csv_text(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """The rows as CSV with Unix line ends; floats in full precision, what is missing empty."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(head)
    for row in rows:
        writer.writerow(["" if cell is None else csv_cell(cell) for cell in row])
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
