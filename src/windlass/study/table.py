"""A study's table: computed from its runs' ledgers, never typed. No torch."""

from __future__ import annotations

import math
import statistics
from typing import Any

from windlass.study.cells import progress
from windlass.study.study import Study

SEED = "run.seed"


def rows(study: Study) -> list[dict[str, Any]]:
    """A row a cell: what it sets, `state`, `reason`, `step`, `steps`, `loss`, `eval_loss`, `best_loss`, `tokens`,
    `tokens_per_s`, `device_hours`, `run`; what is not known yet is None."""
    found = []
    for cell in study.cells:
        run = study.run_of(cell)
        state, reason = study.state_of(cell)
        now = progress(run)
        summary = run.summary
        found.append(
            {
                **{key: cell.assignment[key] for key in cell.assignment},
                "state": state,
                "reason": reason,
                "step": now.step,
                "steps": now.steps or None,
                "loss": now.loss,
                "eval_loss": now.eval_loss,
                "best_loss": now.best_loss,
                "tokens": now.tokens,
                "tokens_per_s": summary.get("tokens_per_s_mean", now.tokens_per_s),
                "device_hours": summary.get("device_hours"),
                "run": str(run.path),
            }
        )
    return found


def by_seed(study: Study) -> list[dict[str, Any]]:
    """Cells that differ only in `run.seed` as one row: `median`, `low`, `high` of the best loss, and `seeds`.

    Empty where the seed is no axis of the study. Only finished cells count.
    """
    if not any(SEED in cell.assignment for cell in study.cells):
        return []
    groups: dict[str, tuple[dict[str, Any], list[float]]] = {}
    for cell, row in zip(study.cells, rows(study), strict=True):
        rest = {k: v for k, v in cell.assignment.items() if k != SEED}
        group = groups.setdefault(repr(rest), (rest, []))
        if row["state"] == "finished" and row["best_loss"] is not None:
            group[1].append(row["best_loss"])
    return [
        {**rest, "median": statistics.median(v) if v else None, "low": min(v, default=None),
         "high": max(v, default=None), "seeds": len(v)}
        for rest, v in groups.values()
    ]  # fmt: skip


def winner(study: Study) -> dict[str, Any] | None:
    """The assignment with the lowest best loss among finished cells (the lowest median where seeds are an axis)."""
    seeds = [row for row in by_seed(study) if row["median"] is not None]
    if seeds:
        best = min(seeds, key=lambda row: row["median"])
        return {k: v for k, v in best.items() if k not in ("median", "low", "high", "seeds")} | {
            "best_loss": best["median"]
        }
    done = [r for r in rows(study) if r["state"] == "finished" and r["best_loss"] is not None]
    done = [r for r in done if math.isfinite(r["best_loss"])]
    if not done:
        return None
    best = min(done, key=lambda row: row["best_loss"])
    keys = [key for axis in study.cells[:1] for key in axis.assignment]
    return {key: best[key] for key in keys} | {"best_loss": best["best_loss"]}
