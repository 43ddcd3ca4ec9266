"""The scores of a run by step, and the best of them, from its ledger's `eval` lines. No torch.

A score is a value of `checkpoint.best`: `loss`, or `SUITE.NAME`. Training, retention, studies and
reports all find the best score here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from windlass.telemetry.measures import lower_is_better

LOSS = "loss"
SAME_ITEMS = ("samples", "items", "items_hash")
"""The fields of an `eval` line that identify the measured items."""


class Scores(dict[int, float]):
    """Values of a measure by step; `lower`: whether less is better."""

    def __init__(self, values: Mapping[int, float] = MappingProxyType({}), lower: bool = True):
        super().__init__(values)
        self.lower = lower

    def ranked(self) -> list[int]:
        """The steps with a finite value, the best first; among equals the earliest first."""
        sign = 1 if self.lower else -1
        finite = [step for step, value in self.items() if math.isfinite(value)]
        return sorted(finite, key=lambda step: (sign * self[step], step))

    @property
    def best_step(self) -> int | None:
        """The step with the best value; None without a finite value."""
        return next(iter(self.ranked()), None)

    @property
    def best(self) -> float | None:
        """The best value; None without a finite value."""
        return None if self.best_step is None else self[self.best_step]


def scores_by_step(lines: Iterable[Mapping[str, Any]], measure: str) -> Scores:
    """The finite, `comparable` values of a measure in `eval` lines."""
    suite, _, name = measure.partition(".")
    own = [x for x in lines if x["kind"] == "eval" and x.get("suite", LOSS) == suite]
    values = {int(x["step"]): float(x.get(name or suite, math.nan)) for x in comparable(own)}
    finite = {step: value for step, value in values.items() if math.isfinite(value)}
    return Scores(finite, lower_is_better(measure, own))


def without_improvement(lines: Sequence[Mapping[str, Any]], measure: str) -> int:
    """The number of evaluations of a measure since the best one."""
    best_step, suite = scores_by_step(lines, measure).best_step, measure.partition(".")[0]
    own = comparable([x for x in lines if x.get("suite", LOSS) == suite])
    return sum(best_step is None or step > best_step for step in {x["step"] for x in own})


def comparable(lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The `eval` lines of a suite on the items of the last one: a resume may change the items."""
    return [x for x in lines if all(x.get(key) == lines[-1].get(key) for key in SAME_ITEMS)]
