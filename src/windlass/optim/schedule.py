"""The learning rate over the run: a pure function of the settings, the horizon and the number of the update.

Updates are numbered from 0. A schedule of N steps (the run's, or `optim.schedule.steps`) is for the updates 0 to N - 1, and
stays at its end from there on. With a warm-up of w steps, update i uses

    rise:   start + (1 - start) * (i + 1) / w           for i < w: update w - 1 is the first at the peak
    peak:   1
    fall:   1 - (1 - final) * x,  x = (i - s) / (N - s)     (linear, wsd)
            final + (1 - final) * (1 + cos(pi x)) / 2       (cosine)

times `lr`, where the fall begins at update s: at the end of the warm-up for `linear` and `cosine`, `decay` steps before
the end for `wsd`. `start` and `final` are the values the line would have one update before the first and one after the
last: a warm-up from 0 spends no update on a learning rate of 0, and neither does a decay to 0 (its last update uses
1 / decay of the peak). build-nanogpt does the same; nanoGPT itself divides by w + 1. The shape `wsd`: arXiv 2404.06395.
"""

from __future__ import annotations

import math
from dataclasses import replace

from windlass.recipe.settings import ScheduleSettings
from windlass.recipe.units import Horizon


def schedule_horizon(schedule: ScheduleSettings, horizon: Horizon) -> Horizon:
    """What the schedule's durations are measured against: the run's horizon, of the length that the schedule has."""
    return replace(horizon, steps=horizon.steps_in(schedule.steps) or horizon.steps)


def phases(schedule: ScheduleSettings, horizon: Horizon) -> tuple[int, int]:
    """The end of the warm-up and the start of the fall, in updates; where warm-up and decay overlap the decay is shorter.

    `horizon` is the run's, here and in `factor`; with a longer schedule either may lie beyond the run's end.
    """
    horizon = schedule_horizon(schedule, horizon)
    steps = horizon.steps
    warmup = fall = min(horizon.steps_in(schedule.warmup), steps)
    if schedule.kind == "constant":
        fall = steps
    elif schedule.kind == "wsd":
        fall = max(warmup, steps - horizon.steps_in(schedule.decay))
    return warmup, fall


def factor(schedule: ScheduleSettings, horizon: Horizon, step: int) -> float:
    """What the peak learning rate is multiplied by for the update numbered `step` (0 is the first) of a run."""
    assert step >= 0, step
    steps, (warmup, fall) = schedule_horizon(schedule, horizon).steps, phases(schedule, horizon)
    if step < warmup - 1:
        return schedule.start + (1 - schedule.start) * (step + 1) / warmup
    if step < fall or fall == steps:
        return 1.0
    x = min(1.0, (step - fall) / (steps - fall))
    if schedule.kind == "cosine":
        return schedule.final + (1 - schedule.final) * (1 + math.cos(math.pi * x)) / 2
    return 1 - (1 - schedule.final) * x
