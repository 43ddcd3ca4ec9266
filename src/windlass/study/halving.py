"""Asynchronous successive halving (arXiv 1810.05934) over a study's ledgers."""

from __future__ import annotations

from windlass.study.results import CellResult, Evaluation
from windlass.study.study import Study


class Halving:
    """Decides with Optuna's pruner which cells continue.

    At each rung (the 1st, 2nd, 4th, ... evaluation) a cell continues only if it is in the better
    half of the cells that reached the rung before it. Evaluations of earlier sweeps are reported in
    the order in which they happened, so that a repeated command decides alike.
    """

    def __init__(self, study: Study):
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=2)
        trials = optuna.create_study(direction="minimize", pruner=pruner)
        self._trials = {cell.key: trials.ask() for cell in study.cells}
        self._reported = dict.fromkeys(self._trials, 0)
        self._reasons: dict[str, str] = {}
        past = [(result, each) for result in study.results() for each in result.evaluations]
        for result, evaluation in sorted(past, key=lambda pair: pair[1].time):
            self._report(result, evaluation)

    def prune(self, result: CellResult) -> str:
        """Report a cell's new evaluations; why it is pruned, or empty if it continues."""
        for evaluation in result.evaluations[self._reported[result.cell.key] :]:
            self._report(result, evaluation)
        return self._reasons.get(result.cell.key, "")

    def _report(self, result: CellResult, evaluation: Evaluation) -> None:
        key = result.cell.key
        rung = self._reported[key] = self._reported[key] + 1
        sign = 1 if result.lower else -1
        self._trials[key].report(sign * evaluation.score, rung)
        if self._trials[key].should_prune() and key not in self._reasons:
            score = f"{result.measure} {evaluation.score:.4f} at step {evaluation.step}"
            self._reasons[key] = f"not in the better half after evaluation {rung} ({score})"
