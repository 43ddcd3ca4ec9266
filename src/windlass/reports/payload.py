"""The numbers behind the page's charts as JSON: thinned, six significant digits, nothing that a script could trip over."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windlass.reports.charts import GRID, POINTS, Chart, rank_curves, smoothing_for, thin, tokens_at, wild
from windlass.reports.view import RunView, Seam, Track

DIGITS = 6


def numbers(values: Iterable[float]) -> list[float | int | None]:
    """Floats for JSON: rounded to six significant digits, whole ones as whole numbers, what is not finite as null."""
    return [rounded(float(value)) for value in values]


def rounded(value: float) -> float | int | None:
    """One number, see `numbers`."""
    if not math.isfinite(value):
        return None
    if value.is_integer() and abs(value) < 1e15:
        return int(value)
    short = float(f"{value:.{DIGITS}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def payload(
    views: Sequence[RunView], charts: Sequence[Chart], looks: Sequence[tuple[float | None, int]] = (),
    free: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:  # fmt: skip
    """All that the page's script draws.

    Args:
        views: the runs.
        charts: what is drawn of them.
        looks: for each run its place on a colour ramp, 0 to 1, and its kind of dash, where the runs have an order; empty:
            distinct colours.
        free: charts with curves of their own (a loss against a swept value).
    """
    limit = max(600, POINTS // max(1, len(views)))
    runs = [_run(view, charts, limit) for view in views]
    for run, (tone, dash) in zip(runs, looks, strict=False):
        run |= {"tone": None if tone is None else rounded(tone), "dash": dash}
    longest = max((len(run["train"]["step"]) for run in runs), default=0)
    return {"runs": runs, "charts": [*map(_chart, charts), *free], "smoothing": smoothing_for(longest)}


def _chart(chart: Chart) -> dict[str, Any]:
    curves = [{"column": c.column, "name": c.name, "minor": c.minor} for c in chart.curves]
    return {
        "id": chart.id, "source": chart.source, "curves": curves, "smooth": chart.smooth, "zero": chart.zero,
        "scale": chart.scale,
    }  # fmt: skip


def _run(view: RunView, charts: Sequence[Chart], limit: int) -> dict[str, Any]:
    train_columns = [c.column for chart in charts if chart.source == "train" for c in chart.curves]
    rank_columns = [c.column for chart in charts if chart.source == "ranks" for c in chart.curves]
    evals = {suite: _track(track, [*track.measures()], limit, None) for suite, track in view.evals.items()}
    bad = np.array(view.nonfinite_steps[:200], dtype=np.float64)
    bad_hours = [float(view.train["hours"][view.train["step"] == step][0]) for step in bad]
    return {
        "label": view.label,
        "wild": wild(view),
        "train": _track(view.train, train_columns, limit, "loss"),
        "evals": evals,
        "ranks": {name: found for name in rank_columns if (found := _ranks(view, name))},
        "seams": [
            {
                "step": s.step,
                "tokens": rounded(s.tokens),
                "hours": rounded(s.hours),
                "label": seam_label(view, s),
                "what": s.what,
            }
            for s in view.seams
        ],
        "bad": [
            {"step": int(step), "tokens": rounded(tokens), "hours": rounded(hours)}
            for step, tokens, hours in zip(bad, tokens_at(bad, view.train), bad_hours, strict=True)
        ],
    }


def seam_label(view: RunView, seam: Seam) -> str:
    """What a seam says when the pointer is on it."""
    return f"{view.label}: {seam.what} at step {seam.step:,.0f} ({seam.stamp})"


def _track(track: Track, columns: Sequence[str], limit: int, key: str | None) -> dict[str, Any]:
    places: NDArray[np.int64] = thin(track["step"], track[key], limit) if key else np.arange(len(track))
    if len(places) > 2 * limit:
        places = places[:: -(-len(places) // limit)]
    names = ["step", "tokens", "hours", *(c for c in dict.fromkeys(columns) if track.has(c))]
    return {name: numbers(track[name][places]) for name in names}


def _ranks(view: RunView, column: str) -> dict[str, Any] | None:
    found = rank_curves(view, column, GRID)
    if found is None:
        return None
    return {
        "step": numbers(found.steps), "tokens": numbers(found.tokens), "hours": numbers(found.hours),
        "lines": [{"name": name, "values": numbers(values)} for name, values in found.lines.items()],
        "mean": numbers(found.mean), "low": numbers(found.low), "high": numbers(found.high), "many": found.many,
    }  # fmt: skip


def as_json(found: Any) -> str:
    """JSON that can stand in a script element: ASCII, without a character that HTML gives a meaning."""
    text = json.dumps(found, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
