"""Values as people read them, and text made safe for Markdown and LaTeX.

A report is made to be shown, so all text passes through `scrub` before it enters a file.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable
from typing import Any

from windlass.telemetry.measures import duration
from windlass.telemetry.terminal import printable
from windlass.variables import scrub

MISSING = "–"
DECIMALS = {"loss": 4, "score": 4, "rate": 1, "mb": 0, "hours": 3}
"""Digits after the point by kind of number."""

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


def show(value: Any, kind: str = "") -> str:
    """A value of a recipe or a ledger for a reader; a dash for None.

    `kind`: a key of DECIMALS, `count`, `amount` (with a fraction), `share` (a fraction, shown as
    %), `giga` (in units of 10^9), `duration` (seconds); empty: six significant digits.
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
    match kind:
        case "giga":
            return show(value / 1e9, "hours")
        case "duration":
            return f"{value:.1f}s" if value < 60 else duration(value)
        case "share":
            return f"{100 * value:.1f} %"
        case "count":
            return f"{value:,.0f}"
        case "amount":
            return f"{value:,.3f}".rstrip("0").rstrip(".")
    if kind in DECIMALS:
        decimals = DECIMALS[kind]
        if 0 < abs(value) < 10**-decimals * 100 or abs(value) >= 1e12:
            return f"{value:.3g}"
        return f"{value:,.{decimals}f}" if value else "0"
    return str(value) if isinstance(value, int) else f"{value:.6g}"


def markdown_cell(text: Any) -> str:
    """Text made safe for a cell of a Markdown table."""
    cleaned = html.escape(" ".join(printable(scrub(str(text))).split()), quote=False)
    return "".join(f"\\{c}" if c in "|`*_[]\\" else c for c in cleaned)


def latex_cell(text: Any) -> str:
    """Text made safe for a cell of a LaTeX table."""
    return " ".join(printable(scrub(str(text))).split()).translate(LATEX)


def numeric(values: Iterable[Any]) -> bool:
    return all(type(value) in (int, float) for value in values)


def slug(text: str) -> str:
    """A text as a part of a file's name."""
    return "".join(c if c.isalnum() and c.isascii() else "-" for c in text)
