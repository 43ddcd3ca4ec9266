"""SQuAD: Exact Match and F1 of generated answers, as its official script computes them."""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from windlass.data.items import Question, question_prompt
from windlass.data.tokenizer import Tokenizer
from windlass.evaluation.generate import Sampling, generate_divided, window
from windlass.evaluation.passes import PLAIN, Passes
from windlass.model.sharding import unwrap
from windlass.parallel.ranks import Ranks

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
    """`exact_match` and `f1` in percent over all questions (by id), and `items`."""
    exact = overlap = 0.0
    for key, answers in references.items():
        exact += max(exact_match(predictions[key], answer) for answer in answers)
        overlap += max(f1(predictions[key], answer) for answer in answers)
    count = len(references)
    return {"exact_match": 100.0 * exact / count, "f1": 100.0 * overlap / count, "items": count}


def evaluate_squad(
    model: Any,
    tokenizer: Tokenizer,
    questions: Sequence[Question],
    ranks: Ranks,
    stop: frozenset[int],
    passes: Passes = PLAIN,
) -> tuple[dict[str, float], dict[str, str]] | None:
    """Scores, and predictions by question id; None if stopped."""
    model = unwrap(model)
    texts = [question.question + " " + question.context for question in questions[:64]]
    tokens = sum(len(tokenizer.encode(text)) for text in texts)
    longest_answer = math.ceil(tokens / max(1, sum(map(len, texts))) * MAX_ANSWER_CHARACTERS)
    max_tokens = max(1, min(longest_answer, model.context // 2))
    longest = min(model.context, window(model) - max_tokens)
    sampling = Sampling(max_tokens=max_tokens, temperature=0, stop=stop)

    def prompt_of(number: int) -> list[int]:
        return question_prompt(questions[number], tokenizer, longest)

    numbers = range(len(questions))
    answers = generate_divided(model, tokenizer, ranks, sampling, numbers, prompt_of, passes)
    if answers is None:
        return None
    predictions = {question.id: answers[i].strip() for i, question in enumerate(questions)}
    references = {question.id: question.answers for question in questions}
    return score(predictions, references), predictions
