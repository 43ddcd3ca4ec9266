"""A study's table: computed from its runs' ledgers, never typed. No torch."""

from __future__ import annotations

import statistics
from typing import Any

from windlass.errors import UserError
from windlass.estimate.optimum import resolve_steps
from windlass.study.grid import Cell
from windlass.study.progress import ledger_of
from windlass.study.study import Study

SEED = "run.seed"


def rows(study: Study) -> list[dict[str, Any]]:
    """A row a cell: what it sets, `state`, `reason`, `step`, `steps`, `loss`, `eval_loss`, `best_loss`, `tokens`,
    `tokens_per_s`, `device_hours`, `run`; what is not known yet is None."""
    found = []
    for cell in study.cells:
        run = study.run_of(cell)
        state, reason = study.state_of(cell)
        ledger = ledger_of(run)
        now, summary = ledger.progress, ledger.summary
        found.append(
            {
                **{key: cell.assignment[key] for key in cell.assignment},
                "state": state,
                "reason": reason,
                "step": now.step,
                "steps": now.steps or planned_steps(cell),
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


def planned_steps(cell: Cell) -> int | None:
    """The steps of a cell that has not begun; None where they hang on data that is not prepared yet."""
    try:
        return resolve_steps(cell.recipe)
    except UserError:
        return None


def by_seed(study: Study) -> list[dict[str, Any]]:
    """Cells that differ only in `run.seed` as one row: `median`, `low`, `high` of the best loss, `seeds`, and `of`.

    Empty where the seed is no axis of the study. Only finished cells count: `seeds` says how many, `of` how many there are.
    """
    if not any(SEED in cell.assignment for cell in study.cells):
        return []
    groups: dict[str, tuple[dict[str, Any], list[float]]] = {}
    sizes: dict[str, int] = {}
    for cell, row in zip(study.cells, rows(study), strict=True):
        rest = {k: v for k, v in cell.assignment.items() if k != SEED}
        group = groups.setdefault(repr(rest), (rest, []))
        sizes[repr(rest)] = sizes.get(repr(rest), 0) + 1
        if row["state"] == "finished" and row["best_loss"] is not None:
            group[1].append(row["best_loss"])
    return [
        {**rest, "median": statistics.median(v) if v else None, "low": min(v, default=None),
         "high": max(v, default=None), "seeds": len(v), "of": sizes[name]}
        for name, (rest, v) in groups.items()
    ]  # fmt: skip
