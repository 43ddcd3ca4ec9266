"""Durations: how often or how long, in steps, as a fraction of the run, or in epochs of the data."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

_EPOCHS = re.compile(r"^\s*([0-9]*\.?[0-9]+)\s+epochs?\s*$")


def _check(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("a duration is a number of steps, a fraction of the run or 'N epochs', not true or false")
    if isinstance(value, int):
        if value < 0:
            raise ValueError("a duration cannot be negative (0 is never)")
        return value
    if isinstance(value, float):
        if not 0 <= value <= 1:
            raise ValueError("a fraction of the run lies between 0.0 and 1.0; whole steps are written without a point")
        return value
    if isinstance(value, str) and is_epochs(value):
        return value
    raise ValueError('a duration is steps (250), a fraction of the run (0.01) or epochs ("1 epoch")')


Duration = Annotated[
    int | float | str,
    BeforeValidator(_check),
    Field(
        json_schema_extra={
            "description": 'steps (250), a fraction of the run (0.01), or epochs ("1 epoch"); 0 is never'
        }
    ),
]
"""Steps (`250`), a fraction of the run (`0.01`) or epochs (`"1 epoch"`); 0 is never."""


def is_epochs(text: str) -> bool:
    """Whether the text is a number of epochs: `"1 epoch"`, `"2.5 epochs"`."""
    return _EPOCHS.match(text) is not None


def epochs_in(text: str) -> Fraction:
    """The number of epochs in `"1 epoch"`, `"2.5 epochs"`; raises ValueError for anything else."""
    match = _EPOCHS.match(text)
    if not match:
        raise ValueError(f'{text!r} is not a number of epochs, such as "1 epoch" or "2.5 epochs"')
    return Fraction(match.group(1))


@dataclass(frozen=True)
class Horizon:
    """What durations are measured against: the run's steps and how many steps one epoch of the data takes."""

    steps: int
    samples_per_epoch: int
    samples_per_step: int

    def steps_in(self, duration: int | float | str) -> int:
        """The duration in whole steps: a fraction is rounded to the nearest step, epochs up to the next one."""
        if isinstance(duration, str):
            samples = epochs_in(duration) * self.samples_per_epoch
            return -((-samples.numerator) // (samples.denominator * self.samples_per_step))
        if isinstance(duration, float):
            steps = round(duration * self.steps)
            return max(steps, 1) if duration > 0 else 0
        return duration

    def due(self, every: int | float | str, step: int) -> bool:
        """Whether something that happens `every` so often happens after `step` completed steps (step 0: never).

        An epoch's edge rarely falls on a step; the duration fires at the first step at or past the edge.
        """
        if step <= 0:
            return False
        if isinstance(every, str):
            period = epochs_in(every) * self.samples_per_epoch
            if period == 0:
                return False
            return (step * self.samples_per_step) // period > ((step - 1) * self.samples_per_step) // period
        steps = self.steps_in(every)
        return steps > 0 and step % steps == 0
