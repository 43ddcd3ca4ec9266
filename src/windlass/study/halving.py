"""Successive halving over a study's ledgers (arXiv 1810.05934), by Optuna's pruner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from windlass.errors import UserError
from windlass.study.grid import Cell
from windlass.study.progress import Evaluation, evaluations
from windlass.study.study import Study


class Halving:
    """Says which cells are left behind: at each rung (the 1st, 2nd, 4th, ... evaluation) the better half goes on.

    Asynchronous: a cell is cell_state against those that came to the rung before it, and nobody waits for the others; the first
    to come to a rung goes on. What cells of earlier starts reached is read from their ledgers and cell_state in the order in
    which it happened, so that a sweep that was killed judges as before.
    """

    def __init__(self, study: Study):
        try:
            import optuna
        except ImportError:
            raise UserError("--halving needs Optuna: pip install 'windlass[sweep]'") from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=2)
        self._optuna = optuna.create_study(direction="minimize", pruner=pruner)
        self._trials: dict[str, Any] = {}
        self._reported: dict[str, int] = {}
        self._behind: dict[str, str] = {}
        past = [(cell, each) for cell in study.cells for each in evaluations(study.run_of(cell))]
        for cell, each in sorted(past, key=lambda pair: pair[1].time):
            self._report(cell, each)

    def prunes(self, cell: Cell, evaluated: Sequence[Evaluation]) -> str:
        """Report what is new of all evaluations of a cell; why it is left behind, or empty while it goes on."""
        for each in evaluated[self._reported.get(cell.key, 0) :]:
            self._report(cell, each)
        return self._behind.get(cell.key, "")

    def _report(self, cell: Cell, each: Evaluation) -> None:
        if cell.key not in self._trials:
            self._trials[cell.key] = self._optuna.ask()
        rung = self._reported[cell.key] = self._reported.get(cell.key, 0) + 1
        trial = self._trials[cell.key]
        trial.report(each.loss, rung)
        if trial.should_prune() and cell.key not in self._behind:
            said = f"loss {each.loss:.4f} at step {each.step}"
            self._behind[cell.key] = f"not among the better half after evaluation {rung} ({said})"
