"""The length of a training: the steps of a recipe, and the compute-optimal number of tokens.

The rule of thumb is D = 20 N tokens for N parameters (arXiv 2203.15556, approaches 1 and 2). A
replication (arXiv 2404.10102) refitted the constants of that paper's third approach and agrees with
it.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING

from windlass.errors import UserError
from windlass.model.size import count

if TYPE_CHECKING:
    from windlass.recipe import Recipe


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
    """The number of optimizer steps of a recipe; `train.steps` in epochs is rounded up.

    Args:
        vocab: rows of the embedding, if the recipe leaves them to the tokenizer.
        tokens_per_sample: average number of tokens without padding; None: `model.context`.
        samples_per_epoch: for steps in epochs.
        parameters: of a Hugging Face model.

    Raises UserError if a necessary number is not available yet; the message says how to get it.
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
