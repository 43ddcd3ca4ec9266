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
BEST = "best"
"""The reason of one that was written, though not due, because its validation loss was the lowest so far."""


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

    The newest is always kept, and the last N of those that were due or final. One that was written for its loss, or because
    the run had to stop, does not push those out, and goes when it is neither the newest nor the best any more. Final ones
    stay: a run may be extended, and its first end is a result.
    """
    newest_first = sorted(checkpoints, key=lambda c: -c.serial)
    why: dict[int, list[str]] = {c.serial: [] for c in newest_first}
    regular = [c for c in newest_first if c.reason in (PERIODIC, FINAL)]
    for kept in {c.serial: c for c in (*newest_first[:1], *regular[: policy.last])}.values():
        why[kept.serial].append("last")
    lowest = best(newest_first) if policy.best else None
    for kept in newest_first:
        if kept is lowest:
            why[kept.serial].append("best")
        if kept.reason == FINAL:
            why[kept.serial].append("final")
        if policy.for_good(kept.step):
            why[kept.serial].append("every")
    return why
