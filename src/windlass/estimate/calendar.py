"""The length of a run, and its calendar: schedule, epochs, evaluations, samples, saves and the end.

The compute-optimal length is D = 20 N tokens for N parameters (arXiv 2203.15556, 2404.10102).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

from windlass.errors import UserError
from windlass.model.size import count
from windlass.optim.schedule import phases, schedule_horizon
from windlass.recipe import Duration, Horizon
from windlass.recipe.settings import LOSS_SUITE
from windlass.recipe.units import epochs_in

if TYPE_CHECKING:
    from windlass.recipe import Recipe

# Milestones that take time.
TIMED = EVALUATION, CHECKPOINT, SAMPLE = "evaluation", "checkpoint", "sample"
AT_END = 0.1  # largest share of a run's work for a last evaluation of all validation data


def recipe_vocab(recipe: Recipe) -> int | None:
    """Rows of the embedding by the recipe alone; None if they depend on the prepared data."""
    return recipe.model.vocab or recipe.data.vocab_ or None


def optimal_tokens(parameters: int, tokens_per_parameter: float = 20.0) -> int:
    """D = ratio x N, in whole tokens; exact in integers for a ratio such as 20."""
    return math.floor(Fraction(str(tokens_per_parameter)) * parameters)


def optimal_steps(recipe: Recipe, parameters: int, tokens_per_sample: float | None = None) -> int:
    """Steps of compute-optimal training, rounded down; D counts real tokens, without padding."""
    tokens = optimal_tokens(parameters, recipe.train.tokens_per_parameter)
    per_sample = Fraction(recipe.model.context if tokens_per_sample is None else tokens_per_sample)
    return max(1, math.floor(tokens / per_sample / recipe.train.global_batch))


def resolve_steps(
    recipe: Recipe,
    vocab: int | None = None,
    tokens_per_sample: float | None = None,
    samples_per_epoch: int | None = None,
    parameters: int | None = None,
) -> int:
    """The optimizer steps of a recipe; epochs are rounded up. UserError if a number is missing.

    `vocab`: rows of the embedding, if the recipe leaves them to the tokenizer; `tokens_per_sample`:
    without padding, None: `model.context`; `parameters`: of a Hugging Face model.
    """
    steps = recipe.train.steps
    if isinstance(steps, int):
        return steps
    if steps != "compute-optimal":
        if not samples_per_epoch:
            needs = f'train.steps = "{steps}" needs the number of samples in the prepared data'
            advice = "prepare them first (windlass prepare RECIPE), or write a number of steps"
            raise UserError(f"{needs}: {advice}")
        return max(1, recipe.horizon(0, samples_per_epoch).steps_in(steps))
    if parameters is None:
        if recipe.model.kind != "gpt":
            problem = "compute-optimal steps need the model's configuration, which is not readable"
            raise UserError(f"{problem}: write train.steps as a number or in epochs")
        if not (rows := recipe.model.vocab or vocab or recipe_vocab(recipe)):
            problem = f"the vocabulary of {recipe.data.tokenizer!r} depends on the prepared data"
            advice = "prepare them first (windlass prepare RECIPE), or set model.vocab"
            raise UserError(f"{problem}: {advice}")
        parameters = count(recipe.model, rows).total
    return optimal_steps(recipe, parameters, tokens_per_sample)


class Milestone(NamedTuple):
    what: str
    step: int
    size: float = 1.0  # of a last evaluation, relative to an earlier one


@dataclass(frozen=True)
class MilestoneRow:
    what: str
    first: int
    last: int
    left: int
    first_seconds: float | None  # from now; None: the speed is unknown
    last_seconds: float | None


def occurrences(horizon: Horizon, every: Duration) -> list[int]:
    """The steps at which `horizon.due(every, step)` holds, without a test of each step."""
    if not isinstance(every, str):
        period = horizon.period_in(every)
        return list(range(period, horizon.steps + 1, period)) if period else []
    if not (samples := epochs_in(every) * horizon.samples_per_epoch):
        return []
    size = horizon.samples_per_step
    edges = range(1, int(size * horizon.steps / samples) + 1)
    return sorted({math.ceil(samples * k / size) for k in edges})


def measures_all(recipe: Recipe, horizon: Horizon, val_samples: int) -> bool:
    """Whether a run's last evaluation uses all validation data (`eval.at_end`)."""
    # In training steps; a forward pass is a third of one.
    work = -(-val_samples // horizon.samples_per_step) / 3
    is_cheap = work <= AT_END * (work + horizon.steps)
    return recipe.eval.at_end == "all" or (recipe.eval.at_end == "auto" and is_cheap)


def milestones(recipe: Recipe, horizon: Horizon, val_samples: int = 0) -> list[Milestone]:
    """All milestones of a run in order, from the first evaluation at step 0.

    Without `samples_per_epoch` nothing is counted in epochs. `val_samples` sizes the last
    evaluation.
    """
    steps, schedule, saves = horizon.steps, recipe.optim.schedule, recipe.checkpoint
    warmup, decay = phases(schedule, horizon)
    end = schedule_horizon(schedule, horizon).steps
    evaluated = occurrences(horizon, recipe.eval.every)
    saved = occurrences(horizon, saves.every) + occurrences(horizon, saves.keep_every)
    at: dict[str, Iterable[int]] = {
        "warm-up ends": [warmup] if 0 < warmup < steps else [],
        "decay starts": [decay] if schedule.kind == "wsd" and 0 < decay < steps else [],
        "schedule ends": [end] if end < steps else [],
        "epoch ends": occurrences(horizon, "1 epoch"),
        EVALUATION: {0, *evaluated, steps} if recipe.eval.every else (),
        SAMPLE: occurrences(horizon, recipe.eval.sample_every),
        CHECKPOINT: {*saved, steps},
        "end": [steps],
    }
    limit = recipe.eval.batches * horizon.samples_per_step
    loss_alone = recipe.eval.suites == [LOSS_SUITE]  # other suites always have the same size
    train = min(recipe.eval.train_batches * horizon.samples_per_step, horizon.samples_per_epoch)
    whole = limit and loss_alone and measures_all(recipe, horizon, val_samples)
    size = {(EVALUATION, steps): max(1.0, (val_samples + train) / (limit + train))} if whole else {}
    pairs = [(what, step) for what, places in at.items() for step in sorted(places)]
    every = [Milestone(*pair, size.get(pair, 1.0)) for pair in pairs]
    return sorted(every, key=lambda m: m.step)


def milestone_rows(
    milestones: Sequence[Milestone],
    now: int,
    seconds_per_step: float | None,
    costs: Mapping[str, float],
) -> list[MilestoneRow]:
    """The milestones after step `now`, a row for each kind; `costs` in seconds by kind."""
    # Before the start also the ones at step 0.
    ahead = [m for m in milestones if m.step > now or now == m.step == 0]
    kinds: dict[str, list[int]] = {}
    for m in ahead:
        kinds.setdefault(m.what, []).append(m.step)

    def seconds(step: int) -> float | None:
        """From now to the end of a step."""
        if seconds_per_step is None:
            return None
        extra = sum(costs.get(m.what, 0.0) * m.size for m in ahead if m.step <= step)
        return max(0, step - now) * seconds_per_step + extra

    rows = ((what, steps[0], steps[-1], len(steps)) for what, steps in kinds.items())
    return [MilestoneRow(*row, seconds(row[1]), seconds(row[2])) for row in rows]


def most_checkpoints(recipe: Recipe, horizon: Horizon) -> int:
    """The most checkpoints of a run on disk at a time, with the one that is being written."""
    settings = recipe.checkpoint
    saves = [m.step for m in milestones(recipe, horizon) if m.what == CHECKPOINT]
    older = saves[: -settings.keep_last]
    permanent = sum(horizon.due(settings.keep_every, step) for step in older)
    stay = min(len(saves), settings.keep_last) + permanent
    if settings.keep_best and len(older) > permanent:
        stay += 1
    return min(len(saves), stay + 1)
