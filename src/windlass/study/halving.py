"""Successive halving over a study's ledgers (arXiv 1810.05934), by Optuna's pruner."""

from __future__ import annotations

from typing import Any

from windlass.errors import UserError
from windlass.study.cells import evaluations
from windlass.study.grid import Cell
from windlass.study.study import Study


class Halving:
    """Says which cells are left behind: at each rung (the 1st, 2nd, 4th, ... evaluation) the better half goes on.

    What cells of earlier sessions reached is read from their ledgers, so that a sweep that was killed judges as before.
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
        for cell in study.cells:
            past = evaluations(study.run_of(cell))
            if past:
                self.prunes(cell, past)

    def prunes(self, cell: Cell, evaluated: list[tuple[int, float]]) -> str:
        """Report new evaluations of a cell; why it is left behind, or empty while it goes on."""
        digest = cell.recipe.digest
        if digest not in self._trials:
            self._trials[digest] = self._optuna.ask()
        trial, reason = self._trials[digest], ""
        for rung, (step, loss) in enumerate(
            evaluated[self._reported.get(digest, 0) :], self._reported.get(digest, 0) + 1
        ):
            trial.report(loss, rung)
            if trial.should_prune() and not reason:
                reason = f"not among the better half after evaluation {rung} (loss {loss:.4f} at step {step})"
        self._reported[digest] = max(len(evaluated), self._reported.get(digest, 0))
        return reason
