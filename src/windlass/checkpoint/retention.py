"""Which checkpoints stay, decided purely: no disk, no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

EMERGENCY = "signal"
"""The reason of a checkpoint that was written because the run had to stop at a step that was not due."""
FINAL = "final"
"""The reason of the checkpoint at the end of a run."""
PERIODIC = "periodic"
"""The reason of one that was due."""


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
    """Why it was written: `periodic`, `signal` or `final`."""


def _never(step: int) -> bool:
    return False


@dataclass(frozen=True)
class Policy:
    """What is kept: `checkpoint.keep_last`, `keep_best`, and `keep_every` as a question about a step."""

    last: int = 10
    best: bool = True
    for_good: Callable[[int], bool] = field(default=_never)


def best(checkpoints: Iterable[Kept]) -> Kept | None:
    """The one with the lowest validation loss, the newest of equal ones; None where none was measured."""
    measured = [c for c in checkpoints if c.loss is not None and c.loss == c.loss]
    return min(measured, key=lambda c: (c.loss, -c.serial), default=None)


def retain(checkpoints: Iterable[Kept], policy: Policy) -> dict[int, list[str]]:
    """Why each checkpoint is kept, by its serial number; those with an empty list may go.

    The newest is always kept. The last N are counted over those that were due or final: a row of preemptions does not
    push them out. Of those written on a signal the newest is kept until one that was due follows it, as a stop close to the
    last save leaves two that are nearly alike. Final ones stay: a run may be extended, and its first end is a result.
    """
    newest_first = sorted(checkpoints, key=lambda c: -c.serial)
    why: dict[int, list[str]] = {c.serial: [] for c in newest_first}
    if not newest_first:
        return why
    regular = [c for c in newest_first if c.reason != EMERGENCY]
    for kept in regular[: policy.last]:
        why[kept.serial].append("last")
    newest = newest_first[0]
    if newest.reason == EMERGENCY:
        why[newest.serial].append("signal")
    lowest = best(newest_first) if policy.best else None
    if lowest is not None:
        why[lowest.serial].append("best")
    for kept in newest_first:
        if kept.reason == FINAL:
            why[kept.serial].append("final")
        if policy.for_good(kept.step):
            why[kept.serial].append("every")
    return why
