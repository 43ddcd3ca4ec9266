"""Durations, and the division of a step's samples among ranks."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from windlass.errors import UserError

TOKENS_PER_MICRO_BATCH = {"cpu": 4096, "cuda": 16384}  # at most, with `train.micro_batch = 0`
SHORTEST_PERIOD = 20  # steps between two saves, evaluations or samples if the period is a fraction
DURATION = 'steps (250), a share of the run (0.0 to 1.0), or "1 epoch"; 0 is never'
EPOCHS = re.compile(r"\s*([0-9]*\.?[0-9]+)\s+epochs?\s*")


def _check_duration(value: Any) -> Any:
    if isinstance(value, str):
        epochs_in(value)
        return value
    most = 1 if isinstance(value, float) else math.inf
    if type(value) not in (int, float) or not 0 <= value <= most:
        raise ValueError(f"it takes {DURATION}")
    return value


_FIELD = Field(json_schema_extra={"description": DURATION})
Duration = Annotated[int | float | str, BeforeValidator(_check_duration), _FIELD]


def epochs_in(text: str) -> Fraction:
    """The number of epochs in `"1 epoch"` or `"2.5 epochs"`; ValueError for anything else."""
    if match := EPOCHS.fullmatch(text):
        return Fraction(match[1])
    raise ValueError(f"it takes {DURATION}")


@dataclass(frozen=True)
class Horizon:
    """The run's length in steps, and the samples of an epoch and of a step."""

    steps: int
    samples_per_epoch: int
    samples_per_step: int

    def steps_in(self, duration: int | float | str) -> int:
        """The duration in whole steps; epochs round up, a fraction to the nearest (at least 1)."""
        if isinstance(duration, str):
            return math.ceil(self.epochs_as_steps(duration))
        if isinstance(duration, float):
            return max(round(duration * self.steps), 1) if duration > 0 else 0
        return duration

    def epochs_as_steps(self, duration: str) -> Fraction:
        return epochs_in(duration) * self.samples_per_epoch / self.samples_per_step

    def steps_before_last(self, duration: int | float | str) -> int:
        """The steps before the run's last ones, which have this duration."""
        if isinstance(duration, str):
            return math.floor(self.steps - self.epochs_as_steps(duration))
        return self.steps - self.steps_in(duration)

    def period_in(self, every: int | float) -> int:
        """A period in whole steps; a fraction means at least SHORTEST_PERIOD, at most the run."""
        shortest = min(SHORTEST_PERIOD, self.steps) if isinstance(every, float) and every > 0 else 0
        return max(self.steps_in(every), shortest)

    def due(self, every: int | float | str, step: int) -> bool:
        """Whether something with the period `every` is due after `step` steps; never at step 0.

        A period in epochs is due at the first step at or past its end.
        """
        if isinstance(every, str):
            period = self.epochs_as_steps(every)
            return step > 0 and period > 0 and step // period > (step - 1) // period
        steps = self.period_in(every)
        return step > 0 and steps > 0 and step % steps == 0


@dataclass(frozen=True)
class BatchPlan:
    """How the samples of one optimizer step are divided.

    Micro-batch *k* of a step is the contiguous slice `[k * micro_batch, (k + 1) * micro_batch)` of
    the step's samples; data rank `r` of `n` takes the micro-batches `r, r + n, r + 2 * n, ...`.
    """

    global_batch: int
    micro_batch: int
    data_world: int  # ranks that read different samples
    context: int

    @property
    def share(self) -> int:
        return self.global_batch // self.data_world

    @property
    def accumulation(self) -> int:
        """Micro-batches that one rank works through in a step."""
        return self.global_batch // (self.micro_batch * self.data_world)

    @property
    def tokens_per_step(self) -> int:
        """Tokens in one optimizer step over all ranks, padding included."""
        return self.global_batch * self.context

    def micro_batches(self, data_rank: int) -> range:
        """The numbers of the micro-batches that a data rank works through, in order."""
        return range(data_rank, self.global_batch // self.micro_batch, self.data_world)


def samples_per_pass(context: int, device: str) -> int:
    """Samples for one forward pass: at most TOKENS_PER_MICRO_BATCH tokens, at least one sample."""
    return max(1, TOKENS_PER_MICRO_BATCH[device] // context)


def plan_batch(
    global_batch: int,
    micro_batch: int,
    data_world: int,
    context: int,
    device: str = "cpu",
    stages: int = 1,
) -> BatchPlan:
    """Divide the global batch among `data_world` ranks that read different samples.

    `micro_batch = 0` takes the largest divisor of each rank's share that has at most
    TOKENS_PER_MICRO_BATCH tokens and leaves a micro-batch for each of the pipeline's `stages`.
    UserError if the division leaves a remainder, with the nearest sizes that work.
    """
    share, remainder = divmod(global_batch, data_world)
    batch = f"train.global_batch = {global_batch}"
    if remainder:
        near = (share * data_world, (share + 1) * data_world)
        sizes = " or ".join(str(size) for size in near if size)
        problem = f"{batch} sequences is not divisible by {data_world} data ranks"
        raise UserError(f"{problem}; write {sizes}, or use a number of ranks that divides it")
    divisors = [d for d in range(1, share + 1) if share % d == 0]
    if micro_batch == 0:
        most = min(samples_per_pass(context, device), max(1, share // stages))
        micro_batch = max(d for d in divisors if d <= most)
    if share % micro_batch:
        below = [d for d in divisors if d < micro_batch]
        above = [d for d in divisors if d > micro_batch]
        sizes = " or ".join(map(str, [*below[-1:], *above[:1]]))
        if data_world > 1:
            batch = f"the {share} sequences of a step on each of {data_world} data ranks ({batch})"
        raise UserError(f"train.micro_batch = {micro_batch} does not divide {batch}; write {sizes}")
    return BatchPlan(global_batch, micro_batch, data_world, context)
