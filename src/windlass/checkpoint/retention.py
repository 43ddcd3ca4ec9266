"""The checkpoints that stay, and the scores that decide about them. No torch.

Scores come from the ledger, because a save begins before the evaluation of its step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from windlass.checkpoint.format import Manifest
from windlass.recipe import Horizon
from windlass.recipe.settings import CheckpointSettings
from windlass.telemetry.measures import lower_is_better

if TYPE_CHECKING:
    from windlass.checkpoint.lineage import Lineage

# The reason of a checkpoint: it was due; the best so far; the run had to stop; the end of the run.
PERIODIC, BEST, EMERGENCY, FINAL = "periodic", "best", "signal", "final"
LOSS = "loss"
SAME_ITEMS = ("samples", "items", "items_hash")
"""The fields of an `eval` line that identify the measured items."""


@dataclass(frozen=True)
class Policy:
    """The settings of retention, as in `[checkpoint]`."""

    last: int = 10
    best: bool = True
    keep_forever: Callable[[int], bool] = lambda step: False
    measure: str = LOSS
    start: int | None = None  # the step of the lineage's first checkpoint, if it is the run's own


def policy_of(
    settings: CheckpointSettings, horizons: Sequence[Horizon], lineage: Lineage | None = None
) -> Policy:
    """The policy of a run; `keep_every` holds for each of `horizons` (an extended run has two)."""
    inside = lineage and lineage.checkpoint and not Path(lineage.checkpoint).is_absolute()
    return Policy(
        settings.keep_last,
        settings.keep_best,
        lambda step: any(h.due(settings.keep_every, step) for h in horizons),
        settings.best,
        lineage.step if lineage and inside and not lineage.skipped else None,
    )


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
    def best(self) -> int | None:
        """The step with the best value."""
        return next(iter(self.ranked()), None)


def scores_by_step(lines: Iterable[Mapping[str, Any]], measure: str) -> Scores:
    """The finite, `comparable` values of a measure (`loss` or `SUITE.NAME`) in `eval` lines."""
    suite, _, name = measure.partition(".")
    own = [x for x in lines if x["kind"] == "eval" and x.get("suite", LOSS) == suite]
    values = {int(x["step"]): float(x.get(name or suite, math.nan)) for x in comparable(own)}
    finite = {step: value for step, value in values.items() if math.isfinite(value)}
    return Scores(finite, lower_is_better(measure, own))


def without_improvement(lines: Sequence[Mapping[str, Any]], measure: str) -> int:
    """The number of evaluations of a measure since the best one."""
    top, suite = scores_by_step(lines, measure).best, measure.partition(".")[0]
    own = comparable([x for x in lines if x.get("suite", LOSS) == suite])
    return sum(top is None or step > top for step in {x["step"] for x in own})


def comparable(lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The `eval` lines of a suite on the items of the last one: a resume may change the items."""
    return [x for x in lines if all(x.get(key) == lines[-1].get(key) for key in SAME_ITEMS)]


def retain(checkpoints: Iterable[Manifest], policy: Policy, scores: Scores) -> dict[int, list[str]]:
    """Why each checkpoint stays, by serial number; one with an empty list may be deleted.

    These stay:

    - the newest;
    - the last `policy.last` that were due or final;
    - the best, by `scores`: values of `policy.measure` by step;
    - final ones, because the first end of an extended run is a result;
    - the steps of `policy.keep_forever`, and the first checkpoint of the current lineage.
    """
    newest_first = sorted(checkpoints, key=lambda c: -c.serial)
    regular = [c for c in newest_first if c.reason in (PERIODIC, FINAL)]
    last = {c.serial for c in (*newest_first[:1], *regular[: policy.last])}
    steps = {c.step for c in newest_first}
    present = {step: score for step, score in scores.items() if step in steps}
    top = Scores(present, scores.lower).best if policy.best else None
    # An older checkpoint of the same step is another one: only the newest of it has the score.
    best_serial = next((c.serial for c in newest_first if c.step == top), None)
    why = {}
    for c in newest_first:
        reasons = {
            "last": c.serial in last,
            "best": c.serial == best_serial,
            "final": c.reason == FINAL,
            "every": policy.keep_forever(c.step),
            "start": c.step == policy.start,
        }
        why[c.serial] = [reason for reason, applies in reasons.items() if applies]
    return why
