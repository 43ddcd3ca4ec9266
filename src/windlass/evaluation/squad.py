"""SQuAD v1.1: a model's answers, and Exact Match and F1 as the official script computes them.

Source: `evaluate-v1.1.py` of Rajpurkar et al. (arXiv 1606.05250). Unlike later scripts and common
libraries, it gives F1 = 0 if a normalised text is empty, even if both are.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from windlass.data.examples import Question, question_prompt
from windlass.data.tokenizer import Tokenizer
from windlass.errors import UserError
from windlass.evaluation.generate import Sampling, generate_divided, window
from windlass.parallel.dist import Ranks
from windlass.parallel.parallelize import unwrap

MAX_ANSWER_CHARACTERS = 160  # one of a thousand answers in SQuAD is longer
PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    """Lower case, without ASCII punctuation and English articles, single spaces."""
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(PUNCTUATION)).split())


def exact_match(prediction: str, reference: str) -> float:
    return float(normalise(prediction) == normalise(reference))


def f1(prediction: str, reference: str) -> float:
    """Harmonic mean of precision and recall over bags of normalised words; 0 if none is shared."""
    predicted, wanted = normalise(prediction).split(), normalise(reference).split()
    shared = sum((Counter(predicted) & Counter(wanted)).values())
    if not shared:
        return 0.0
    precision, recall = shared / len(predicted), shared / len(wanted)
    return 2 * precision * recall / (precision + recall)


def score(
    predictions: Mapping[str, str], references: Mapping[str, Sequence[str]]
) -> dict[str, float]:
    """`exact_match` and `f1` in percent over all questions (by id), and `items`.

    Each question counts its best reference; without a prediction it counts 0, as in the official
    script. Raises UserError without questions.
    """
    if not references:
        raise UserError("scores need at least one question")

    def percent(metric: Callable[[str, str], float]) -> float:
        total = sum(
            max(metric(predictions[key], answer) for answer in answers)
            for key, answers in references.items()
            if key in predictions
        )
        return 100.0 * total / len(references)

    return {"exact_match": percent(exact_match), "f1": percent(f1), "items": len(references)}


def evaluate_squad(
    model: Any,
    tokenizer: Tokenizer,
    questions: Sequence[Question],
    ranks: Ranks,
    stop: frozenset[int],
    *,
    max_tokens: int = 0,
    **how: Any,
) -> tuple[dict[str, float], dict[str, str]] | None:
    """Exact Match and F1 in percent, and `items`; and predictions by question id.

    Answers are greedy, up to a token of `stop` or `max_tokens` (0: about 160 characters). A
    prompt that leaves no space for an answer in the context loses the end of its paragraph.
    """
    model = unwrap(model)
    if not max_tokens:
        texts = [question.question + " " + question.context for question in questions[:64]]
        tokens = sum(len(tokenizer.encode(text)) for text in texts)
        longest_answer = math.ceil(tokens / max(1, sum(map(len, texts))) * MAX_ANSWER_CHARACTERS)
        max_tokens = max(1, min(longest_answer, model.context // 2))
    longest = min(model.context, window(model) - max_tokens)
    sampling = Sampling(max_tokens=max_tokens, temperature=0, stop=stop)

    def prompt_of(number: int) -> list[int]:
        return question_prompt(questions[number], tokenizer, longest)

    numbers = range(len(questions))
    answers = generate_divided(model, tokenizer, ranks, sampling, numbers, prompt_of, **how)
    if answers is None:
        return None
    predictions = {question.id: answers[i].strip() for i, question in enumerate(questions)}
    return score(
        predictions, {question.id: question.answers for question in questions}
    ), predictions
