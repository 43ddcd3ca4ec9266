"""SQuAD: the questions of the suite, and Exact Match and F1 of generated answers, as its official
script computes them."""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from windlass.data.items import Question, example_of, question_prompt
from windlass.data.recipe_sources import SourceSpec
from windlass.data.sources import open_source
from windlass.data.split import draws_of, held_out
from windlass.errors import UserError
from windlass.evaluation.generate import Sampling, generate_divided, window
from windlass.evaluation.passes import Passes
from windlass.recipe import Recipe

MAX_ANSWER_CHARACTERS = 160  # one of a thousand answers in SQuAD is longer
PUNCTUATION = str.maketrans("", "", string.punctuation)


def eval_questions(recipe: Recipe) -> list[Question]:
    """The suite's questions: `data.eval_size` of them (0: all), chosen by `run.seed`.

    They come from a separate source, or are held out from training.
    """
    data, setting = recipe.data, "data.eval_source"
    named = [source for source in data.eval_sources if source.partition(":")[0] == "squad"]
    if recipe.eval.squad_file:
        separate, setting = [f"squad:{recipe.eval.squad_file}"], "eval.squad_file"
    elif data.format != "squad" or data.mix:
        separate = named or ["squad"]
    else:
        separate = data.eval_sources or [source for source in data.sources if source == "squad"]
        setting = setting if separate else "data.source"
    for limit in ("val_shards", "max_tokens"):
        if getattr(data, limit) and not separate:
            problem = f"data.{limit} counts tokens, and the suite needs whole questions"
            raise UserError(f"{problem}; set it to 0, or set data.eval_source or eval.squad_file")
    questions = list[Question]()
    for source in separate or data.sources:
        if source.partition(":")[0] != "squad":
            problem = f"{setting}: {source!r} lacks questions"
            raise UserError(f"{problem}; write squad or squad:FILE.json")
        asked = read_questions(source, "validation" if separate else "train", recipe, setting)
        if not separate:  # as training divides each source
            groups = np.array([question.group for question in asked], np.uint64)
            sizes = np.zeros(len(asked), np.int64)
            whole, _ = held_out(groups, sizes, data.val_fraction, are_examples=True)
            asked = [asked[i] for i in np.flatnonzero(whole)]
        questions += asked
    if not questions:
        remedy = "set eval.squad_file, data.eval_source or data.val_fraction"
        raise UserError(f"no questions to evaluate: {remedy}")
    name, count = Counter(question.id for question in questions).most_common(1)[0]
    if count > 1:
        raise UserError(f"{setting}: two questions have the id {name!r}")
    size = data.eval_size or len(questions)
    hashes = np.array([question.hash for question in questions], np.uint64)
    draws = draws_of(hashes, f"eval/{recipe.run.seed}")
    return [questions[i] for i in sorted(np.argsort(draws, kind="stable")[:size].tolist())]


def read_questions(source: str, split: str, recipe: Recipe, setting: str) -> list[Question]:
    """All questions of a source, without unreadable ones that `data.on_bad_item` leaves out."""
    data, questions = recipe.data, list[Question]()
    keys: dict[str, Any] = {"columns": tuple(data.columns.items()), "on_bad_item": data.on_bad_item}
    spec = SourceSpec(source, source, "squad", split=split, setting=setting, **keys)
    for item in open_source(spec, lambda _: None).items():
        try:
            questions.append(cast(Question, example_of(item, spec)))
        except UserError:
            if data.on_bad_item == "stop":
                raise
    return questions


def normalise(text: str) -> str:
    """Lower case, without ASCII punctuation and English articles, single spaces."""
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(PUNCTUATION)).split())


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
        exact += normalise(predictions[key]) in map(normalise, answers)
        overlap += max(f1(predictions[key], answer) for answer in answers)
    count = len(references)
    return {"exact_match": 100.0 * exact / count, "f1": 100.0 * overlap / count, "items": count}


def evaluate_squad(
    passes: Passes, questions: Sequence[Question]
) -> tuple[dict[str, float], dict[str, str]]:
    """Scores, and predictions by question id."""
    model, tokenizer = passes.model, passes.tokenizer
    texts = [question.question + " " + question.context for question in questions[:64]]
    tokens = sum(len(tokenizer.encode(text)) for text in texts)
    longest_answer = math.ceil(tokens / max(1, sum(map(len, texts))) * MAX_ANSWER_CHARACTERS)
    max_tokens = max(1, min(longest_answer, model.context // 2))
    longest = min(model.context, window(model) - max_tokens)
    sampling = Sampling(max_tokens=max_tokens, temperature=0, stop=passes.stop)

    def prompt_of(number: int) -> list[int]:
        return question_prompt(questions[number], tokenizer, longest)

    numbers = range(len(questions))
    answers = generate_divided(passes, sampling, numbers, prompt_of)
    predictions = {question.id: answers[i].strip() for i, question in enumerate(questions)}
    scores = score(predictions, {question.id: question.answers for question in questions})
    # A tokenizer gives a text no more tokens than it has bytes, and two for its start.
    cut = [i for i in numbers if len(questions[i].prompt.encode()) > longest - 2]
    shown = [any(a in tokenizer.decode(prompt_of(i)) for a in questions[i].answers) for i in cut]
    if hidden := shown.count(False):
        scores["unanswerable"] = 100.0 * hidden / len(questions)
    return scores, predictions
