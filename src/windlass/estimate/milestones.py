"""What happens in a run and at which step: turns of the schedule, epochs, evaluations, samples, saves, the end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from windlass.optim.schedule import phases, schedule_horizon
from windlass.recipe import Duration, Horizon
from windlass.recipe.settings import LOSS_SUITE
from windlass.recipe.units import epochs_in

if TYPE_CHECKING:
    from windlass.recipe import Recipe

TIMED = EVALUATION, CHECKPOINT, SAMPLE = "evaluation", "checkpoint", "sample"
"""Milestones that take time."""
AT_END = 0.1  # of a run's work: all validation data with a larger share is not measured at the end
MUCH = 0.3  # of a run's work: evaluations with a larger share get a warning


class Milestone(NamedTuple):
    """Something that happens after `step` completed steps."""

    what: str
    step: int
    size: float = (
        1.0  # a last evaluation of all validation data takes so many times as long as one before it
    )


class Evaluations(NamedTuple):
    """What a run's evaluations of the loss are, in global batches."""

    number: int
    batches: int  # of each but the last
    last: int  # of the last one: of all validation data, or as many as before
    train: int  # of training data, in each
    share: float  # of the run's arithmetic, by which a forward pass is a third of a training step

    @property
    def warning(self) -> str:
        """What to do where they take much of the run; else empty."""
        share = f"evaluations are {100 * self.share:.0f} % of the run's work"
        return (
            f"{share}: lower eval.batches, raise eval.every, or hold out less"
            if self.share > MUCH
            else ""
        )

    def __str__(self) -> str:
        last = f", the last one {self.last:,}" if self.last != self.batches else ""
        share = f"{100 * self.share:.2g} % of the run's work"
        train = f", and {self.train:,} of training data" if self.train else ""
        return f"{self.number:,} evaluations x {self.batches:,} batches{last}{train}: {share}"


@dataclass(frozen=True)
class MilestoneRow:
    """All milestones of one kind that are still to come."""

    what: str
    first: int
    last: int
    left: int
    first_seconds: float | None  # from now; None where no speed is known
    last_seconds: float | None


def occurrences(horizon: Horizon, every: Duration) -> list[int]:
    """All steps of the run at which `horizon.due(every, step)` holds, without asking it at each of a million."""
    if not isinstance(every, str):
        period = horizon.steps_in(every)
        return list(range(period, horizon.steps + 1, period)) if period else []
    if not (samples := epochs_in(every) * horizon.samples_per_epoch):
        return []
    edges = range(1, int(horizon.steps * horizon.samples_per_step / samples) + 1)
    return sorted(
        {
            -((-samples.numerator * k) // (samples.denominator * horizon.samples_per_step))
            for k in edges
        }
    )


def measures_all(recipe: Recipe, horizon: Horizon, val_samples: int) -> bool:
    """Whether a run's last evaluation is of all validation data (`eval.at_end`)."""
    work = (
        -(-val_samples // horizon.samples_per_step) / 3
    )  # in training steps, of which a forward pass is a third
    return recipe.eval.at_end == "all" or (
        recipe.eval.at_end == "auto" and work <= AT_END * (work + horizon.steps)
    )


def evaluations(recipe: Recipe, horizon: Horizon, val_samples: int) -> Evaluations | None:
    """The evaluations of a run's loss; None where there are none, or the validation set is not known (0)."""
    steps = [m.step for m in milestones(recipe, horizon) if m.what == EVALUATION]
    if not (steps and val_samples and LOSS_SUITE in recipe.eval.suites):
        return None
    whole = -(-val_samples // horizon.samples_per_step)
    batches = min(recipe.eval.batches or whole, whole)
    last = whole if measures_all(recipe, horizon, val_samples) else batches
    train = min(
        recipe.eval.train_batches, -(-horizon.samples_per_epoch // horizon.samples_per_step)
    )
    work = ((len(steps) - 1) * batches + last + len(steps) * train) / 3
    return Evaluations(len(steps), batches, last, train, work / (work + horizon.steps))


def milestones(recipe: Recipe, horizon: Horizon, val_samples: int = 0) -> list[Milestone]:
    """Everything that happens in a whole run, in order, from the first evaluation at step 0 on.

    Where the data is not prepared (`samples_per_epoch` 0) nothing that is counted in epochs is in the list. With the size of
    the validation set the last evaluation is as long as it will be.
    """
    steps, (warmup, fall), settings = (
        horizon.steps,
        phases(recipe.optim.schedule, horizon),
        recipe.checkpoint,
    )
    saves = [
        step
        for every in (settings.every, settings.keep_every)
        for step in occurrences(horizon, every)
    ]
    at: dict[str, Iterable[int]] = {
        "warm-up ends": [warmup] if 0 < warmup < steps else [],
        "decay starts": [fall] if recipe.optim.schedule.kind == "wsd" and 0 < fall < steps else [],
        "schedule ends": [end]
        if (end := schedule_horizon(recipe.optim.schedule, horizon).steps) < steps
        else [],
        "epoch ends": occurrences(horizon, "1 epoch"),
        EVALUATION: sorted({0, *occurrences(horizon, recipe.eval.every), steps})
        if recipe.eval.every
        else [],
        SAMPLE: occurrences(horizon, recipe.eval.sample_every),
        CHECKPOINT: sorted({*saves, steps}),
        "end": [steps],
    }
    limit = recipe.eval.batches * horizon.samples_per_step
    loss_alone = recipe.eval.suites == [
        LOSS_SUITE
    ]  # other suites are measured the same way each time
    train = min(recipe.eval.train_batches * horizon.samples_per_step, horizon.samples_per_epoch)
    whole = limit and loss_alone and measures_all(recipe, horizon, val_samples)
    size = {(EVALUATION, steps): max(1.0, (val_samples + train) / (limit + train))} if whole else {}
    every = (
        Milestone(what, step, size.get((what, step), 1.0))
        for what, places in at.items()
        for step in places
    )
    return sorted(every, key=lambda m: m.step)


def ahead(milestones: Sequence[Milestone], now: int = 0) -> list[Milestone]:
    """Those after step `now`; a run that has not begun (`now = 0`) still has what happens at step 0 before it."""
    return [m for m in milestones if m.step > now or now == m.step == 0]


def seconds_until(
    milestones: Sequence[Milestone],
    step: int,
    now: int,
    seconds_per_step: float,
    costs: Mapping[str, float],
) -> float:
    """Seconds from step `now` until `step` is done, with the milestones up to it, as far as `costs` has their seconds."""
    extra = sum(costs.get(m.what, 0.0) * m.size for m in ahead(milestones, now) if m.step <= step)
    return max(0, step - now) * seconds_per_step + extra


def milestone_rows(
    milestones: Sequence[Milestone],
    now: int,
    seconds_per_step: float | None,
    costs: Mapping[str, float],
) -> list[MilestoneRow]:
    """The milestones after step `now`, a row a kind, in the order in which they come first."""
    kinds: dict[str, list[int]] = {}
    for m in ahead(milestones, now):
        kinds.setdefault(m.what, []).append(m.step)

    def seconds(step: int) -> float | None:
        return (
            None
            if seconds_per_step is None
            else seconds_until(milestones, step, now, seconds_per_step, costs)
        )

    return [
        MilestoneRow(what, s[0], s[-1], len(s), seconds(s[0]), seconds(s[-1]))
        for what, s in kinds.items()
    ]


def checkpoints_to_come(recipe: Recipe, horizon: Horizon, done: int = 0, present: int = 0) -> int:
    """For how many more checkpoints than the `present` ones there must be room after `done` steps: those that stay in the
    end, and one more while it is written.
    """
    settings = recipe.checkpoint
    saves = [m.step for m in milestones(recipe, horizon) if m.what == CHECKPOINT]
    older = saves[: -settings.keep_last]
    permanent = sum(horizon.due(settings.keep_every, step) for step in older)
    stay = (
        min(len(saves), settings.keep_last)
        + permanent
        + (settings.keep_best and len(older) > permanent)
    )
    stay += settings.keep_signal
    return min(sum(step > done for step in saves), max(1, stay + 1 - present))
