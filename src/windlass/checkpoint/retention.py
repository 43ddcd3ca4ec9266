"""Which checkpoints stay, decided purely: no disk, no torch.

The scores come from the run's ledger, not from the checkpoints: a save is begun before its step is evaluated, and
nothing is written into a checkpoint once it is committed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from windlass.recipe import Horizon
from windlass.recipe.settings import CheckpointSettings

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
class Saved:
    """What retention must know of a checkpoint."""

    serial: int
    """Counts the commits of a run: the highest is the newest, also after the run went back to an earlier step."""
    step: int
    reason: str = PERIODIC


def _never(step: int) -> bool:
    return False


@dataclass(frozen=True)
class Policy:
    """What is kept: `checkpoint.keep_last`, `keep_best`, `keep_every` as a question about a step, `best`."""

    last: int = 10
    best: bool = True
    keep_forever: Callable[[int], bool] = _never
    measure: str = LOSS
    start: int | None = None
    """The step that the run's current lineage started from, where that checkpoint is one of its own."""


def policy_of(settings: CheckpointSettings, horizons: Sequence[Horizon], start: int | None = None) -> Policy:
    """The policy of a run, whose `keep_every` is measured against any of `horizons` (an extended run has two)."""
    return Policy(
        settings.keep_last, settings.keep_best, lambda step: any(h.due(settings.keep_every, step) for h in horizons),
        settings.best, start,
    )  # fmt: skip


def scores_by_step(lines: Iterable[Mapping[str, Any]], measure: str) -> dict[int, float]:
    """The finite values of a measure (`loss`, or `SUITE.NAME` as `squad.f1`) in a ledger's `eval` lines, by step."""
    suite, _, name = measure.partition(".")
    scores = {}
    for line in lines:
        if line["kind"] == "eval" and line.get("suite", LOSS) == suite:
            value = line.get(name or suite)
            if value is not None and math.isfinite(float(value)):
                scores[int(line["step"])] = float(value)
    return scores


def better(value: float, than: float | None, measure: str) -> bool:
    """Whether a value of the measure beats another one, or is the first; one that is not finite never wins."""
    if not math.isfinite(value):
        return False
    return than is None or (value < than if measure == LOSS else value > than)


def best(scores: Mapping[int, float], measure: str) -> int | None:
    """The step with the lowest validation loss, or the highest value of another measure; the first of equal ones."""
    winner = None
    for step in sorted(scores):
        if better(scores[step], scores[winner] if winner is not None else None, measure):
            winner = step
    return winner


def retain(checkpoints: Iterable[Saved], policy: Policy, scores: Mapping[int, float]) -> dict[int, list[str]]:
    """Why each checkpoint is kept, by its serial number; those with an empty list may go.

    The newest is always kept, and the last N of those that were due or final. One that was written because it was the
    best, or because the run had to stop, does not push those out, and goes when it is neither the newest nor the best
    any more. Final ones stay: a run may be extended, and its first end is a result. So does the one that the current
    lineage started from.

    Args:
        checkpoints: all of a run.
        policy: the rules.
        scores: values of `policy.measure` by step.
    """
    newest_first = sorted(checkpoints, key=lambda c: -c.serial)
    why: dict[int, list[str]] = {c.serial: [] for c in newest_first}
    regular = [c for c in newest_first if c.reason in (PERIODIC, FINAL)]
    last = {c.serial for c in (*newest_first[:1], *regular[: policy.last])}
    there = {c.step for c in newest_first}
    best_step = best({step: score for step, score in scores.items() if step in there}, policy.measure)
    for c in newest_first:
        if c.serial in last:
            why[c.serial].append("last")
        if policy.best and c.step == best_step:
            why[c.serial].append("best")
            best_step = None  # an older checkpoint of the same step is another one
        if c.reason == FINAL:
            why[c.serial].append("final")
        if policy.keep_forever(c.step):
            why[c.serial].append("every")
        if c.step == policy.start:
            why[c.serial].append("start")
    return why
