"""SQuAD v1.1: Exact Match and F1 as the official script computes them, and the answers a model gives.

Source of the definition: the evaluation script of Rajpurkar et al. (arXiv 1606.05250), `evaluate-v1.1.py`. In one case it
differs from later ones and from common libraries: where a normalised text is empty, F1 is 0 even if both are.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import string
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass.data.squad import end_of_text, prompt
from windlass.errors import UserError
from windlass.evaluation.generate import Sampling, generate, window
from windlass.parallel.parallelize import unwrap

if TYPE_CHECKING:
    from windlass.data.squad import Question
    from windlass.data.tokenizer import Tokenizer
    from windlass.parallel.dist import Ranks

MAX_ANSWER_CHARACTERS = 160
"""How long an answer may get: of a thousand of SQuAD's one is longer."""

_ARTICLES = re.compile(r"\b(a|an|the)\b", re.UNICODE)
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    """Lower case, without ASCII punctuation and English articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, reference: str) -> float:
    """1 where the normalised texts are equal, else 0."""
    return float(normalise(prediction) == normalise(reference))


def f1(prediction: str, reference: str) -> float:
    """Harmonic mean of precision and recall over the normalised words, counted as a bag; 0 where none is shared."""
    said, wanted = normalise(prediction).split(), normalise(reference).split()
    shared = sum((Counter(said) & Counter(wanted)).values())
    if not shared:
        return 0.0
    precision, recall = shared / len(said), shared / len(wanted)
    return 2 * precision * recall / (precision + recall)


def score(predictions: Mapping[str, str], references: Mapping[str, Sequence[str]]) -> dict[str, float]:
    """Exact Match and F1 in percent over all questions.

    Each question counts its best reference; one without a prediction counts 0, as in the official script.

    Args:
        predictions: Question id → text.
        references: Question id → the reference answers, at least one.

    Returns:
        `exact_match`, `f1` and `items`.

    Raises:
        UserError: There is no question.
    """
    if not references:
        raise UserError("there is no question to score")
    exact = overlap = 0.0
    for key, answers in references.items():
        if key in predictions:
            exact += best(exact_match, predictions[key], answers)
            overlap += best(f1, predictions[key], answers)
    return {
        "exact_match": 100.0 * exact / len(references),
        "f1": 100.0 * overlap / len(references),
        "items": len(references),
    }


def best(metric: Callable[[str, str], float], prediction: str, answers: Iterable[str]) -> float:
    """The metric's maximum over the reference answers."""
    return max(metric(prediction, answer) for answer in answers)


def answer(
    model: Any,
    tokenizer: Tokenizer,
    questions: Sequence[Question],
    ranks: Ranks,
    *,
    max_tokens: int = 0,
    batch: int = 16,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    poll: Callable[[], bool] | None = None,
) -> dict[str, str] | None:
    """The model's answer to each question, by greedy generation on all ranks, each question on one of them.

    The answer is what comes before the end-of-text token, at most `max_tokens` long (0: about 160 characters), without
    surrounding white space. A prompt that is longer than the model's context, or that leaves no room for an answer in a
    window that cannot grow, loses the end of its paragraph.

    Returns:
        Question id → answer, the same on every rank; None where `poll` cut it short.
    """
    model = unwrap(model)
    max_tokens = max_tokens or min(answer_tokens(tokenizer, questions), model.context // 2)
    room = min(model.context, window(model) - max_tokens)
    # Dealt out in the order of length, so that the ranks have about the same work.
    order = sorted(range(len(questions)), key=lambda i: (len(questions[i].context) + len(questions[i].question), i))
    mine = [questions[i] for i in order[ranks.rank :: ranks.world]]
    made = generate(
        model,
        [prompt(question, tokenizer, room) for question in mine],
        Sampling(max_tokens=max_tokens, temperature=0, stop=frozenset([end_of_text(tokenizer)])),
        ranks,
        batch=batch,
        vocab=tokenizer.vocab,
        autocast=autocast,
        poll=poll,
    )
    if made is None:
        return None
    own = {question.id: tokenizer.decode(ids).strip() for question, ids in zip(mine, made, strict=True)}
    everyone = {key: text for part in ranks.all_gather_object("squad", own) for key, text in part.items()}
    return {question.id: everyone[question.id] for question in questions}


def answer_tokens(tokenizer: Tokenizer, questions: Sequence[Question]) -> int:
    """Tokens in `MAX_ANSWER_CHARACTERS` characters of such text as the first 64 questions are made of."""
    texts = [question.question + " " + question.context for question in questions[:64]]
    rate = sum(len(tokenizer.encode(text)) for text in texts) / max(1, sum(map(len, texts)))
    return max(1, math.ceil(rate * MAX_ANSWER_CHARACTERS))


def evaluate_squad(
    model: Any, tokenizer: Tokenizer, questions: Sequence[Question], ranks: Ranks, **how: Any
) -> tuple[dict[str, float], dict[str, str]] | None:
    """Exact Match and F1 in percent, `items`, `runtime_s`, `samples_per_s`; and the predictions. Arguments as `answer`."""
    started = time.perf_counter()
    predictions = answer(model, tokenizer, questions, ranks, **how)
    if predictions is None:
        return None
    result = score(predictions, {question.id: question.answers for question in questions})
    runtime_s = time.perf_counter() - started
    return result | {"runtime_s": runtime_s, "samples_per_s": len(questions) / runtime_s}, predictions


def predictions_name(step: int | None) -> str:
    """The file of the predictions at a step, or of a model that knows no step; a run has it in its folder `eval`."""
    return f"squad-predictions-{'model' if step is None else f'step-{step:08d}'}.json"


def write_predictions(path: Path, predictions: Mapping[str, str]) -> None:
    """Write question id → answer as the official script reads it: the whole file, or what was there. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.new")
    try:
        with open(fresh, "w", encoding="utf-8", errors="replace") as file:
            file.write(json.dumps(dict(predictions), ensure_ascii=False, indent=0) + "\n")
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)
        raise
