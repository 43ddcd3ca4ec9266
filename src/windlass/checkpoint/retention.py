"""The checkpoints that stay. No torch.

The scores come from the ledger, because a save begins before the evaluation of its step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from windlass.checkpoint.format import Manifest
from windlass.recipe import Horizon
from windlass.recipe.settings import CheckpointSettings
from windlass.telemetry.scores import LOSS, Scores

if TYPE_CHECKING:
    from windlass.checkpoint.lineage import Lineage

# The reason of a checkpoint: it was due; the best so far; the run had to stop; the end of the run.
PERIODIC, BEST, EMERGENCY, FINAL = "periodic", "best", "signal", "final"


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
    best_step = Scores(present, scores.lower).best_step if policy.best else None
    # An older checkpoint of the same step is another one: only the newest of it has the score.
    best_serial = next((c.serial for c in newest_first if c.step == best_step), None)
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
