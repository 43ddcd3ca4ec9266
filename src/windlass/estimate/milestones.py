"""What happens in a run and at which step: turns of the schedule, saves, evaluations, epochs, the end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from windlass.optim.schedule import phases
from windlass.recipe import Duration, Horizon
from windlass.recipe.units import epochs_in

if TYPE_CHECKING:
    from windlass.recipe import Recipe

CHECKPOINT, EVALUATION, SAMPLE, EPOCH = "checkpoint", "evaluation", "sample", "epoch ends"
WARMUP_ENDS, DECAY_STARTS, END = "warm-up ends", "decay starts", "end"


@dataclass(frozen=True)
class Milestone:
    """Something that happens after `step` completed steps."""

    what: str
    step: int


def occurrences(horizon: Horizon, every: Duration) -> list[int]:
    """All steps of the run at which `horizon.due(every, step)` holds."""
    if not isinstance(every, str):
        period = horizon.steps_in(every)
        return list(range(period, horizon.steps + 1, period)) if period else []
    samples = epochs_in(every) * horizon.samples_per_epoch
    if not samples:
        return []
    last = horizon.steps * horizon.samples_per_step
    edges = range(1, int(last / samples) + 1)
    return sorted({-((-samples.numerator * k) // (samples.denominator * horizon.samples_per_step)) for k in edges})


def milestones(recipe: Recipe, horizon: Horizon) -> list[Milestone]:
    """Everything that happens in a whole run, in order, from the first evaluation at step 0 on.

    Where the data is not prepared (`samples_per_epoch` 0) nothing that is counted in epochs is in the list.
    """
    steps, turns = horizon.steps, phases(recipe.optim.schedule, horizon)
    at: dict[str, Iterable[int]] = {
        WARMUP_ENDS: [turns.warmup] if 0 < turns.warmup < steps else [],
        DECAY_STARTS: [turns.fall] if recipe.optim.schedule.kind == "wsd" and 0 < turns.fall < steps else [],
        EPOCH: occurrences(horizon, "1 epoch"),
        EVALUATION: sorted({0, *occurrences(horizon, recipe.eval.every), steps}) if recipe.eval.every else [],
        SAMPLE: occurrences(horizon, recipe.eval.sample_every),
        CHECKPOINT: sorted({*occurrences(horizon, recipe.checkpoint.every), steps}),
        END: [steps],
    }
    order = list(at)
    unsorted = [Milestone(what, step) for what, places in at.items() for step in places]
    return sorted(unsorted, key=lambda m: (m.step, order.index(m.what)))


def ahead(milestones: Sequence[Milestone], now: int = 0) -> list[Milestone]:
    """Those after step `now`; a run that has not begun (`now = 0`) still has what happens at step 0 before it."""
    return [m for m in milestones if m.step > now or now == m.step == 0]


def seconds_until(
    milestones: Sequence[Milestone], step: int, now: int, seconds_per_step: float, costs: Mapping[str, float]
) -> float:
    """Seconds from now until `step` is done, with what happens at it and on the way.

    Args:
        milestones: all of the run.
        step: in the run.
        now: steps done.
        seconds_per_step: of training alone.
        costs: seconds that one milestone of a kind takes; kinds that are not named cost nothing.
    """
    extra = sum(costs.get(m.what, 0.0) for m in ahead(milestones, now) if m.step <= step)
    return max(0, step - now) * seconds_per_step + extra


@dataclass(frozen=True)
class MilestoneRow:
    """All milestones of one kind that are still to come."""

    what: str
    first: int
    last: int
    left: int
    every: int | None
    """Steps between two of them, where it is the same throughout."""
    first_seconds: float | None = None
    """From now; None where no speed is known."""
    last_seconds: float | None = None


def milestone_rows(
    milestones: Sequence[Milestone], now: int, seconds_per_step: float | None, costs: Mapping[str, float]
) -> list[MilestoneRow]:
    """The milestones after step `now`, a row a kind, in the order in which they come first."""
    kinds: dict[str, list[int]] = {}
    for m in ahead(milestones, now):
        kinds.setdefault(m.what, []).append(m.step)
    rows = []
    for what, steps in sorted(kinds.items(), key=lambda item: item[1][0]):
        gaps = [b - a for a, b in pairwise(steps)]
        # The last one may come early, at the run's end.
        even = bool(gaps) and len(set(gaps[:-1] or gaps)) == 1 and gaps[-1] <= gaps[0]
        seconds = [
            None if seconds_per_step is None else seconds_until(milestones, step, now, seconds_per_step, costs)
            for step in (steps[0], steps[-1])
        ]
        rows.append(MilestoneRow(what, steps[0], steps[-1], len(steps), gaps[0] if even else None, *seconds))
    return rows


def kept_checkpoints(recipe: Recipe, horizon: Horizon, saves: Sequence[int]) -> int:
    """How many checkpoints there are in the end, of those saved at the given steps; one more while one is written."""
    settings = recipe.checkpoint
    older = saves[: -settings.keep_last]
    permanent = sum(horizon.due(settings.keep_every, step) for step in older)
    return min(len(saves), settings.keep_last) + permanent + (settings.keep_best and len(older) > permanent)


def checkpoints_to_come(recipe: Recipe, horizon: Horizon, done: int, present: int) -> int:
    """For how many more checkpoints there must be room: those kept in the end and one more, if the run makes so many.

    Args:
        recipe: what is saved when, and kept.
        horizon: the run's length.
        done: steps done.
        present: checkpoints that are there already.
    """
    saves = save_steps(recipe, horizon)
    return min(sum(step > done for step in saves), max(1, kept_checkpoints(recipe, horizon, saves) + 1 - present))


def save_steps(recipe: Recipe, horizon: Horizon) -> list[int]:
    """The steps at which a run saves."""
    return [m.step for m in milestones(recipe, horizon) if m.what == CHECKPOINT]
