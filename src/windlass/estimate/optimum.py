"""How long to train: the steps of a recipe, and the compute-optimal number of tokens.

The rule of thumb is D = 20 N tokens for N parameters (arXiv 2203.15556, approaches 1 and 2); a replication (arXiv
2404.10102) refitted the constants of that paper's third approach and agrees with it.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING

from windlass.errors import UserError
from windlass.recipe import Horizon

if TYPE_CHECKING:
    from windlass.recipe import Recipe

TOKENIZER_VOCABULARIES = {"byte": 257, "gpt2": 50257}
"""Tokenizers whose size is known before any data is there; the end-of-text token is counted."""


def known_vocab(recipe: Recipe) -> int | None:
    """Rows of the embedding as far as the recipe alone says; None where only the prepared data does."""
    if recipe.model.vocab:
        return recipe.model.vocab
    if recipe.data.tokenizer == "bpe":
        return recipe.data.tokenizer_vocab
    return TOKENIZER_VOCABULARIES.get(recipe.data.tokenizer.partition(":")[0])


def vocab_of(recipe: Recipe, parameters: int | None = None) -> int | None:
    """Rows of the embedding of a run: from its recipe, or from its number of parameters (linear in them)."""
    from windlass.model.size import count

    vocab = known_vocab(recipe)
    if vocab or parameters is None or recipe.model.kind != "gpt":
        return vocab
    without, with_one = (count(recipe.model, rows).total for rows in (0, 1))
    return (parameters - without) // (with_one - without)


def optimal_tokens(parameters: int, tokens_per_parameter: float = 20.0) -> int:
    """D = ratio x N, in whole tokens; exact in integers for a ratio such as 20."""
    return math.floor(Fraction(str(tokens_per_parameter)) * parameters)


def optimal_steps(recipe: Recipe, parameters: int, tokens_per_sample: float | None = None) -> int:
    """Steps of compute-optimal training, rounded down; D counts real tokens, without padding."""
    tokens = optimal_tokens(parameters, recipe.train.tokens_per_parameter)
    per_sample = Fraction(recipe.model.context if tokens_per_sample is None else tokens_per_sample)
    return max(1, math.floor(tokens / (per_sample * recipe.train.global_batch)))


def resolve_steps(
    recipe: Recipe,
    vocab: int | None = None,
    tokens_per_sample: float | None = None,
    samples_per_epoch: int | None = None,
    parameters: int | None = None,
) -> int:
    """The run's optimizer steps, for every way `train.steps` can be written.

    Args:
        recipe: `train.steps` is a number, `"compute-optimal"`, or `"N epochs"` (rounded up: the run ends at the first
            step at or past the epoch's end).
        vocab: rows of the embedding where the recipe leaves them to the tokenizer.
        tokens_per_sample: real tokens in a sample on average; None: `model.context`, as in packed data.
        samples_per_epoch: of the prepared training data, for `"N epochs"`.
        parameters: N, where the model is not described by the recipe (Hugging Face).

    Raises:
        UserError: what is needed is not known yet; the message says how to get it.
    """
    from windlass.model.size import count

    steps = recipe.train.steps
    if isinstance(steps, int):
        return steps
    if steps != "compute-optimal":
        if not samples_per_epoch:
            raise UserError(
                f'train.steps = "{steps}" needs the number of samples in the prepared data: run `windlass prepare` '
                "first, or write a number of steps"
            )
        return max(1, Horizon(0, samples_per_epoch, recipe.train.global_batch).steps_in(steps))
    if parameters is None:
        if recipe.model.kind != "gpt":
            raise UserError(
                "compute-optimal steps need the number of parameters, and a Hugging Face model's is in its "
                "configuration, which could not be read: write train.steps as a number or in epochs"
            )
        vocab = recipe.model.vocab or vocab or known_vocab(recipe)
        if not vocab:
            raise UserError(
                f"the vocabulary of the tokenizer {recipe.data.tokenizer!r} is known once the data is prepared: "
                "run `windlass prepare` first, or set model.vocab"
            )
        parameters = count(recipe.model, vocab).total
    return optimal_steps(recipe, parameters, tokens_per_sample)
