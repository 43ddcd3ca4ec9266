"""How long to train: compute-optimal tokens and steps, and what the published loss laws say of a budget.

The rule of thumb is D = 20 N tokens for N parameters (arXiv 2203.15556, its approaches 1 and 2). The same paper's third
approach fits a law to the final losses, L(N, D) = E + A / N^alpha + B / D^beta, from which the best N and D for a number
of FLOPs follow; a later replication (arXiv 2404.10102) found its constants off and refitted them, and that fit agrees
with the rule of thumb. Both are here; neither knows the corpus, the tokenizer or the model at hand.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from windlass.errors import UserError
from windlass.recipe.units import Horizon

if TYPE_CHECKING:
    from windlass.recipe import Recipe

FLOPS_PER_PARAMETER_AND_TOKEN = 6
"""Forward 2, backward 4 (arXiv 2001.08361, section 2.1)."""

KNOWN_VOCABULARIES = {"byte": 257, "gpt2": 50257}
"""Tokenizers whose size is known before any data is there; the end-of-text token is in it."""


def known_vocab(recipe: Recipe) -> int | None:
    """Rows of the embedding as far as the recipe alone tells; None where only the prepared data knows."""
    if recipe.model.vocab:
        return recipe.model.vocab
    if recipe.data.tokenizer == "bpe":
        return recipe.data.tokenizer_vocab
    return KNOWN_VOCABULARIES.get(recipe.data.tokenizer.partition(":")[0])


def vocab_of(recipe: Recipe, parameters: int | None = None) -> int | None:
    """Rows of the embedding of a run: from its recipe, or from the number of its parameters, which grows row by row."""
    from windlass.model.size import count

    known = known_vocab(recipe)
    if known or parameters is None or recipe.model.kind != "gpt":
        return known
    none, one = (count(recipe.model, rows).total for rows in (0, 1))
    return (parameters - none) // (one - none)


def optimal_tokens(parameters: int, tokens_per_parameter: float = 20.0) -> int:
    """D = ratio x N, in whole tokens; exact in integers for a ratio such as 20."""
    return math.floor(Fraction(str(tokens_per_parameter)) * parameters)


def resolve_steps(
    recipe: Recipe,
    vocab: int | None = None,
    tokens_per_sample: float | None = None,
    samples_per_epoch: int | None = None,
    parameters: int | None = None,
) -> int:
    """The run's optimizer steps, for every way `train.steps` can be written.

    Args:
        recipe: `train.steps` is a number, `"compute-optimal"` (D counts real tokens, steps round down) or `"N epochs"`
            (rounded up: the run ends at the first step at or past the edge).
        vocab: rows of the embedding where the recipe leaves them to the tokenizer.
        tokens_per_sample: real tokens in a sample on average; None: `model.context`, as in packed data.
        samples_per_epoch: of the prepared training data, for `"N epochs"`.
        parameters: N, where the model is not described by the recipe (Hugging Face).

    Raises:
        UserError: when what is needed is not known yet, saying how to get it.
    """
    steps = recipe.train.steps
    if isinstance(steps, int):
        return steps
    batch = recipe.train.global_batch
    if steps != "compute-optimal":
        if not samples_per_epoch:
            raise UserError(
                f'train.steps = "{steps}" is worked out from the prepared data: run `windlass prepare` first, '
                "or write a number of steps"
            )
        return max(1, Horizon(0, samples_per_epoch, batch).steps_in(steps))
    if parameters is None:
        parameters = count_parameters(recipe, vocab)
    tokens = optimal_tokens(parameters, recipe.train.tokens_per_parameter)
    per_step = Fraction(tokens_per_sample if tokens_per_sample is not None else recipe.model.context) * batch
    return max(1, math.floor(tokens / per_step))


def count_parameters(recipe: Recipe, vocab: int | None = None) -> int:
    """N of a recipe's own GPT, all of it; UserError where the vocabulary or the model is not known from the recipe."""
    from windlass.model.size import count

    if recipe.model.kind != "gpt":
        raise UserError(
            "compute-optimal steps need the number of parameters, and a Hugging Face model's is in its configuration, which "
            "could not be read: write train.steps as a number or in epochs"
        )
    return count(recipe.model, vocab or needed_vocab(recipe)).total


def needed_vocab(recipe: Recipe) -> int:
    """`known_vocab`, or a UserError that says how to get it."""
    vocab = known_vocab(recipe)
    if not vocab:
        raise UserError(
            f"the vocabulary of the tokenizer {recipe.data.tokenizer!r} is known once the data is prepared: "
            "run `windlass prepare` first, or set model.vocab"
        )
    return vocab


@dataclass(frozen=True)
class LossLaw:
    """L(N, D) = E + A / N^alpha + B / D^beta, in nats a token."""

    name: str
    source: str
    E: float
    A: float
    B: float
    alpha: float
    beta: float

    def loss(self, parameters: float, tokens: float) -> float:
        """The law's loss for a model of so many parameters after so many tokens."""
        return self.E + self.A / parameters**self.alpha + self.B / tokens**self.beta

    def optimum(self, flops: float) -> tuple[float, float]:
        """The N and D with the lowest loss among those with 6 N D = flops (equation 4 of arXiv 2203.15556)."""
        nd = flops / FLOPS_PER_PARAMETER_AND_TOKEN
        g = (self.alpha * self.A / (self.beta * self.B)) ** (1 / (self.alpha + self.beta))
        parameters = g * nd ** (self.beta / (self.alpha + self.beta))
        return parameters, nd / parameters


CHINCHILLA = LossLaw("Chinchilla fit", "arXiv 2203.15556", E=1.69, A=406.4, B=410.7, alpha=0.34, beta=0.28)
CHINCHILLA_REFIT = LossLaw(
    "Chinchilla refit", "arXiv 2404.10102", E=1.8172, A=482.01, B=2085.43, alpha=0.3478, beta=0.3658
)


@dataclass(frozen=True)
class Optimum:
    """What one way of reckoning makes of a number of FLOPs."""

    method: str
    source: str
    parameters: float
    tokens: float
    loss: float | None
    """By the law, on its own corpus and tokenizer; None for the rule of thumb, which knows no loss."""


def for_compute(flops: float, tokens_per_parameter: float = 20.0) -> list[Optimum]:
    """Which N and D a budget of FLOPs buys: by the rule of thumb and by both fits, under 6 N D = flops."""
    if not (math.isfinite(flops) and flops > 0):
        raise UserError(f"--compute takes a number of FLOPs such as 1e19, not {flops}")
    rule = math.sqrt(flops / FLOPS_PER_PARAMETER_AND_TOKEN / tokens_per_parameter)
    found = [Optimum(f"D = {tokens_per_parameter:g} N", "arXiv 2203.15556", rule, tokens_per_parameter * rule, None)]
    for law in (CHINCHILLA, CHINCHILLA_REFIT):
        n, d = law.optimum(flops)
        found.append(Optimum(law.name, law.source, n, d, law.loss(n, d)))
    return found


FITTED_SIZES = (7e7, 1.6e10)
"""Parameters of the models that the Chinchilla laws were fitted to: 70 million to over 16 billion (arXiv 2203.15556)."""


def same_compute(parameters: int, tokens: int) -> dict[str, Any]:
    """What both Chinchilla fits would buy for the FLOPs of a run, 6 N D: `flops`, and `optima` as `for_compute` gives them."""
    flops = float(FLOPS_PER_PARAMETER_AND_TOKEN * parameters * tokens)
    optima = [asdict(o) for o in for_compute(flops)[1:]]
    inside = all(FITTED_SIZES[0] <= o["parameters"] <= FITTED_SIZES[1] for o in optima)
    return {"flops": flops, "optima": optima, "within_the_fitted_sizes": inside}
