"""What is known of a few public corpora before they are here: a small table, used where a recipe names one of them exactly."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from windlass.estimate.plan import Facts

if TYPE_CHECKING:
    from windlass.recipe import Recipe


@dataclass(frozen=True)
class Text:
    """A single text, by the checksum that a recipe gives."""

    name: str
    characters: int
    symbols: int
    """Different ones."""


TEXTS = {
    "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed": Text("tiny Shakespeare", 1_115_394, 65),
}
"""By SHA-256: a recipe that gives it trains on no other text."""
SQUAD_QUESTIONS = 87_599
"""Training questions of SQuAD v1.1 (arXiv 1606.05250; `rajpurkar/squad` on the Hub)."""


def known_facts(recipe: Recipe) -> Facts:
    """What the prepared data of a recipe will say, as far as it is known already; empty where nothing is.

    A text in characters is known to the last sample. Of SQuAD the number of questions is known, which a question too long
    for the context may lower; how many tokens they have is not.
    """
    data = recipe.data
    if data.format == "squad" and data.source == "squad":
        questions = min(data.train_size or SQUAD_QUESTIONS, SQUAD_QUESTIONS)
        source = "data.train_size" if data.train_size else "SQuAD v1.1"
        return Facts(samples_per_epoch=questions, source=f"{questions:,} questions at most, {source}")
    text = TEXTS.get(data.sha256.lower())
    whole = not (data.eval_source or data.eval_split or data.val_shards or data.max_tokens or data.max_documents)
    if text is None or data.format != "text" or data.tokenizer != "char" or data.packing != "packed" or not whole:
        return Facts()
    characters = int(text.characters * (1 - Fraction(str(data.val_fraction))))
    samples = (characters - 1) // recipe.model.context
    source = f"{text.name}: {text.symbols} symbols, {characters:,} characters to train on"
    return Facts(text.symbols, samples, float(recipe.model.context), source)
