"""What will happen in a run, and at which step: the turns of the schedule, saves, evaluations, epochs, the end."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from windlass.optim.schedule import phases
from windlass.recipe.units import Duration, Horizon, epochs_in

if TYPE_CHECKING:
    from windlass.recipe import Recipe

CHECKPOINT, EVALUATION, SAMPLE, EPOCH = "checkpoint", "evaluation", "sample", "epoch ends"
WARMUP_ENDS, DECAY_STARTS, END = "warm-up ends", "decay starts", "end"


@dataclass(frozen=True)
class Milestone:
    """Something that happens after `step` completed steps."""

    what: str
    step: int
    number: int = 1
    """The first, second, ... of its kind."""


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
    """Everything that a whole run will meet, in order; at step 0 the first evaluation.

    Args:
        recipe: what is to be trained.
        horizon: its length; `samples_per_epoch` 0 where the data is not prepared yet: then nothing counted in epochs is
            in the list.
    """
    steps, bends = horizon.steps, phases(recipe.optim.schedule, horizon)
    evaluations = occurrences(horizon, recipe.eval.every)
    saves = occurrences(horizon, recipe.checkpoint.every)
    at: dict[str, Iterable[int]] = {
        WARMUP_ENDS: [bends.warmup] if 0 < bends.warmup < steps else [],
        DECAY_STARTS: [bends.fall] if recipe.optim.schedule.kind == "wsd" and 0 < bends.fall < steps else [],
        EPOCH: occurrences(horizon, "1 epoch"),
        EVALUATION: sorted({0, *evaluations, steps}) if recipe.eval.every else [],
        SAMPLE: occurrences(horizon, recipe.eval.sample_every),
        CHECKPOINT: sorted({*saves, steps}),
        END: [steps],
    }
    order = list(at)
    found = [Milestone(what, step, n) for what, places in at.items() for n, step in enumerate(places, 1)]
    return sorted(found, key=lambda m: (m.step, order.index(m.what)))


@dataclass(frozen=True)
class Row:
    """All milestones of one kind that are still to come."""

    what: str
    first: int
    last: int
    left: int
    every: int | None
    """Steps between two of them, where it is the same throughout."""


def rows(found: list[Milestone], now: int = 0) -> list[Row]:
    """The milestones after step `now`, a row a kind, in the order in which they come first.

    A run that has not begun (`now = 0`) still has what happens at step 0 before it.
    """
    ahead: dict[str, list[int]] = {}
    for m in found:
        if m.step > now or now == m.step == 0:
            ahead.setdefault(m.what, []).append(m.step)
    return [
        Row(what, places[0], places[-1], len(places), _even(places))
        for what, places in sorted(ahead.items(), key=lambda item: item[1][0])
    ]


def _even(places: list[int]) -> int | None:
    """The distance between neighbours, if it is one (the last one may come early, at the run's end)."""
    gaps = [b - a for a, b in pairwise(places)]
    body = gaps[:-1] if len(gaps) > 1 else gaps
    return gaps[0] if gaps and len(set(body)) == 1 and gaps[-1] <= gaps[0] else None


def clock(found: list[Milestone], now: int, seconds_per_step: float, costs: dict[str, float]) -> Callable[[int], float]:
    """The time from now until a step is done, with what evaluations and the like cost on the way.

    Args:
        found: all milestones of the run.
        now: steps already done.
        seconds_per_step: of training alone.
        costs: seconds that one milestone of a kind takes; kinds that are not named cost nothing.

    Returns:
        A function from a step to the seconds from now until it is done and what happens at it as well.
    """
    spent: list[tuple[int, float]] = []
    total = 0.0
    for m in found:
        if (m.step > now or now == m.step == 0) and costs.get(m.what):
            total += costs[m.what]
            spent.append((m.step, total))

    def seconds(step: int) -> float:
        beside = max((cost for at, cost in spent if at <= step), default=0.0)
        return max(0, step - now) * seconds_per_step + beside

    return seconds
