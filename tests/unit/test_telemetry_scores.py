"""The best score of a run, from its `eval` lines."""

from typing import Any

from windlass.study.results import RunNumbers
from windlass.telemetry.summary import Scores, scores_by_step

NAN, INF = float("nan"), float("inf")


def test_scores_are_the_finite_values_in_the_ledger() -> None:
    lines = [
        {"kind": "eval", "step": 1, "suite": "loss", "loss": 3.0},
        {"kind": "eval", "step": 2, "loss": NAN},
        {"kind": "eval", "step": 1, "suite": "squad", "f1": 10.0, "loss": 9.0},
        {"kind": "train", "step": 3, "loss": 1.0},
    ]
    wanted = {"loss": {1: 3.0}, "squad.f1": {1: 10.0}, "hellaswag.acc": {}}
    assert {measure: scores_by_step(lines, measure) for measure in wanted} == wanted


def test_the_best_is_the_first_of_equal_values() -> None:
    assert (Scores().best_step, Scores().best) == (None, None)
    first = Scores({2: 1.0, 1: 1.0, 0: NAN})
    assert (first.best_step, first.best) == (1, 1.0)
    highest = Scores({1: 3.0, 2: 2.0, 3: INF}, lower=False)
    assert (highest.best_step, highest.best) == (1, 3.0)
    assert Scores({1: 3.0, 2: 2.0, 3: -INF}).best_step == 2


def test_a_suite_of_ones_own_says_whether_less_is_better() -> None:
    lines: list[dict[str, Any]] = [
        {"kind": "eval", "step": 1, "suite": "own:x", "error": 0.1, "right": 0.1},
        {"kind": "eval", "step": 2, "suite": "own:x", "error": 0.2, "right": 0.2},
    ]
    assert scores_by_step(lines, "own:x.error").best_step == 2, "more is better by default"
    lines = [line | {"lower": ["error"]} for line in lines]
    assert scores_by_step(lines, "own:x.error").best_step == 1
    assert scores_by_step(lines, "own:x.right").best_step == 2
    numbers = RunNumbers(lines, lines, "own:x.error")
    assert (numbers.score, numbers.lower) == (0.1, True), "a study has the same best score"


def test_scores_of_other_items_are_left_out() -> None:
    lines = [
        {"kind": "eval", "step": step, "loss": loss, "samples": samples}
        for step, loss, samples in ((1, 1.0, 8), (2, 3.0, 16), (3, 2.0, 16), (4, 2.5, 16))
    ]
    scores = scores_by_step(lines, "loss")
    assert (scores.best_step, scores.best) == (3, 2.0)
    numbers = RunNumbers(lines, lines)
    assert numbers.score == numbers.best_loss == 2.0
