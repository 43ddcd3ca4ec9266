"""Which checkpoints stay, decided purely: no disk, no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

EMERGENCY = "signal"
"""The reason of a checkpoint that was written because the run had to stop at a step that was not due."""
FINAL = "final"
"""The reason of the checkpoint at the end of a run."""
PERIODIC = "periodic"
"""The reason of one that was due."""
BEST = "best"
"""The reason of one that was written, though not due, because it was the best so far."""
LOSS = "loss"
"""The one measure (see `checkpoint.best`) of which less is better."""


@dataclass(frozen=True)
class Kept:
    """What retention must know of a checkpoint."""

    serial: int
    """Counts the commits of a run: the highest is the newest, also after the run went back to an earlier step."""
    step: int
    """Optimizer steps done."""
    loss: float | None = None
    """Validation loss at this step; None where it was not measured."""
    reason: str = PERIODIC
    """Why it was written: `periodic`, `best`, `signal` or `final`."""
    scores: Mapping[str, float] = field(default_factory=dict)
    """What else was measured at this step, by names as `squad.f1`."""

    def value(self, measure: str) -> float | None:
        """What was measured; None where it was not, or is not finite."""
        found = self.loss if measure == LOSS else self.scores.get(measure)
        return found if found is not None and math.isfinite(found) else None


def _never(step: int) -> bool:
    return False


@dataclass(frozen=True)
class Policy:
    """What is kept: `checkpoint.keep_last`, `keep_best`, `keep_every` as a question about a step, and `checkpoint.best`."""

    last: int = 10
    best: bool = True
    for_good: Callable[[int], bool] = field(default=_never)
    measure: str = LOSS
    start: int | None = None
    """The step that the run's present line goes on from, where that checkpoint is one of its own."""


def better(value: float, than: float | None, measure: str) -> bool:
    """Whether a value of the measure beats another one, or the first finite one there is; no other value ever wins."""
    if not math.isfinite(value):
        return False
    return than is None or (value < than if measure == LOSS else value > than)


def best(checkpoints: Iterable[Kept], measure: str = LOSS) -> Kept | None:
    """The one with the lowest validation loss, or the highest value of another measure; the first of equal ones.

    None where it was measured for none of them.
    """
    sign = 1.0 if measure == LOSS else -1.0
    measured = [(sign * value, c.serial, c) for c in checkpoints if (value := c.value(measure)) is not None]
    return min(measured, key=lambda found: found[:2])[2] if measured else None


def retain(checkpoints: Iterable[Kept], policy: Policy) -> dict[int, list[str]]:
    """Why each checkpoint is kept, by its serial number; those with an empty list may go.

    The newest is always kept, and the last N of those that were due or final. One that was written for being the best, or
    because the run had to stop, does not push those out, and goes when it is neither the newest nor the best any more. Final
    ones stay: a run may be extended, and its first end is a result. So does the one that the present line goes on from.
    """
    newest_first = sorted(checkpoints, key=lambda c: -c.serial)
    why: dict[int, list[str]] = {c.serial: [] for c in newest_first}
    regular = [c for c in newest_first if c.reason in (PERIODIC, FINAL)]
    for kept in {c.serial: c for c in (*newest_first[:1], *regular[: policy.last])}.values():
        why[kept.serial].append("last")
    first = best(newest_first, policy.measure) if policy.best else None
    for kept in newest_first:
        if kept is first:
            why[kept.serial].append("best")
        if kept.reason == FINAL:
            why[kept.serial].append("final")
        if policy.for_good(kept.step):
            why[kept.serial].append("every")
        if kept.step == policy.start:
            why[kept.serial].append("start")
    return why
