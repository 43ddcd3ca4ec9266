"""The length of a run, and its calendar: evaluations, samples and saves.

The compute-optimal length is D = 20 N tokens for N parameters (arXiv 2203.15556, 2404.10102).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction
from typing import NamedTuple

from windlass.errors import UserError
from windlass.model.size import count
from windlass.recipe import Duration, Horizon, Recipe
from windlass.recipe.settings import LOSS_SUITE
from windlass.recipe.units import epochs_in

EVALUATION, CHECKPOINT, SAMPLE = "evaluation", "checkpoint", "sample"
AT_END = 0.1  # largest share of a run's work for a last evaluation of all validation data


def recipe_vocab(recipe: Recipe) -> int | None:
    """Rows of the embedding by the recipe only; None if they depend on the prepared data."""
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
    """Work of a run beside its training steps."""

    what: str
    step: int
    size: float = 1.0  # of a last evaluation, relative to an earlier one


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
    at_end, is_cheap = recipe.eval.at_end, work <= AT_END * (work + horizon.steps)
    return at_end == "all" or (at_end == "auto" and is_cheap)


def milestones(recipe: Recipe, horizon: Horizon, val_samples: int = 0) -> list[Milestone]:
    """The evaluations, samples and checkpoints of a run, from the first evaluation at step 0.

    Without `samples_per_epoch` nothing is counted in epochs. `val_samples` sizes the last
    evaluation.
    """
    steps, saves = horizon.steps, recipe.checkpoint
    evaluated = occurrences(horizon, recipe.eval.every)
    saved = occurrences(horizon, saves.every) + occurrences(horizon, saves.keep_every)
    at: dict[str, Iterable[int]] = {
        EVALUATION: {0, *evaluated, steps} if recipe.eval.every else (),
        SAMPLE: occurrences(horizon, recipe.eval.sample_every),
        CHECKPOINT: {*saved, steps},
    }
    limit = recipe.eval.batches * horizon.samples_per_step
    loss_alone = recipe.eval.suites == [LOSS_SUITE]  # other suites always have the same size
    train = min(recipe.eval.train_batches * horizon.samples_per_step, horizon.samples_per_epoch)
    whole = limit and loss_alone and measures_all(recipe, horizon, val_samples)
    size = {(EVALUATION, steps): max(1.0, (val_samples + train) / (limit + train))} if whole else {}
    pairs = [(what, step) for what, places in at.items() for step in places]
    work = [Milestone(*pair, size.get(pair, 1.0)) for pair in pairs]
    return sorted(work, key=lambda m: m.step)


def most_checkpoints(recipe: Recipe, horizon: Horizon) -> int:
    """The most checkpoints of a run on disk at a time, with the one that is being written."""
    settings, work = recipe.checkpoint, milestones(recipe, horizon)
    saves = [m.step for m in work if m.what == CHECKPOINT]
    evaluated = {m.step for m in work if m.what == EVALUATION and m.step}
    older = saves[: -settings.keep_last]
    permanent = sum(horizon.due(settings.keep_every, step) for step in older)
    stay = min(len(saves), settings.keep_last) + permanent
    # The best one may be older than the newest ones, or of an evaluation between two saves.
    between = settings.keep_best and not evaluated <= set(saves)
    stay += settings.keep_best and bool(evaluated) and (between or len(older) > permanent)
    return min(len(saves) + between, stay + 1)
