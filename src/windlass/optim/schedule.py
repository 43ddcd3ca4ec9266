"""The learning rate over the run: a pure function of settings, horizon and update.

Updates are numbered from 0. A schedule of N steps (the run's, or `optim.schedule.steps`) covers the
updates 0 to N - 1 and keeps its last value after them. With a warm-up of w steps, update i uses
`lr` times

    rise:   (i + 1) / w                                 for i < w: update w - 1 is first at the peak
    peak:   1
    fall:   1 - (1 - final) * x,  x = (i - s) / (N - s)     (linear, wsd)
            final + (1 - final) * (1 + cos(pi x)) / 2       (cosine)

The fall begins at update s: at the end of the warm-up for `linear` and `cosine`, `decay` steps
before the end for `wsd` (arXiv 2404.06395). `final` is the value one update after the last: no
update has a learning rate of 0. build-nanogpt does the same; nanoGPT divides by w + 1.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from windlass.errors import UserError
from windlass.recipe.settings import ScheduleSettings
from windlass.recipe.units import Horizon

if TYPE_CHECKING:
    from torch.optim import Optimizer


def schedule_horizon(schedule: ScheduleSettings, horizon: Horizon) -> Horizon:
    """The run's horizon with the length of the schedule, from which its durations are measured."""
    steps = horizon.steps_in(schedule.steps) or horizon.steps
    return horizon if steps == horizon.steps else replace(horizon, steps=steps)


def phases(schedule: ScheduleSettings, horizon: Horizon) -> tuple[int, int]:
    """The end of the warm-up and the start of the fall, in updates; a decay that overlaps the
    warm-up is shortened.

    `horizon` is the run's, here and in `lr_multiplier`; a longer schedule may end after the run.
    """
    horizon = schedule_horizon(schedule, horizon)
    steps = horizon.steps
    warmup = fall = min(horizon.steps_in(schedule.warmup), steps)
    if schedule.kind == "constant":
        fall = steps
    elif schedule.kind == "wsd":
        fall = max(warmup, horizon.steps_before_last(schedule.decay))
    return warmup, fall


def check_fits(schedule: ScheduleSettings, horizon: Horizon) -> None:
    """Raise UserError if warm-up and decay are longer than the schedule of a run."""
    whole, parts = schedule_horizon(schedule, horizon), {"warmup": schedule.warmup}
    if schedule.kind == "wsd":
        parts["decay"] = schedule.decay
    # Fractions are not rounded: 1 % of 10 steps is not a step.
    steps = [d * whole.steps if isinstance(d, float) else whole.steps_in(d) for d in parts.values()]
    if round(sum(steps), 6) >= whole.steps + 1:
        keys = " + ".join(f"optim.schedule.{key} = {value}" for key, value in parts.items())
        problem = f"{keys} are longer than the {whole.steps:,} steps of the schedule"
        raise UserError(f"{problem}: shorten them, write shares, as 0.02, or train longer")


def lr_multiplier(schedule: ScheduleSettings, horizon: Horizon, step: int) -> float:
    """The factor of the peak learning rate in the update numbered `step` (0 is the first)."""
    steps, (warmup, fall) = schedule_horizon(schedule, horizon).steps, phases(schedule, horizon)
    if step < warmup - 1:
        return (step + 1) / warmup
    if step < fall or fall == steps:
        return 1.0
    x = min(1.0, (step - fall) / (steps - fall))
    if schedule.kind == "cosine":
        return schedule.final + (1 - schedule.final) * (1 + math.cos(math.pi * x)) / 2
    return 1 - (1 - schedule.final) * x


def set_lr(optimizer: Optimizer, multiplier: float, number: int = 0) -> None:
    """Set every group's learning rate to its peak times `multiplier`, on the host. The `number` of
    the update and the seed determine the rounding of bf16 weights."""
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * multiplier
        if "number" in group:
            group["number"] = number
