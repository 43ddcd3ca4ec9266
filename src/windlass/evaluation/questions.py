"""Choose the questions of the SQuAD suite, from a separate source or held out from training."""

from __future__ import annotations

from collections import Counter
from typing import cast

import numpy as np

from windlass.data.items import Question, example_of
from windlass.data.recipe_sources import SourceSpec
from windlass.data.sources import open_source
from windlass.data.split import draws_of, held_out
from windlass.errors import UserError
from windlass.recipe import Recipe


def eval_questions(recipe: Recipe) -> list[Question]:
    """The suite's questions: `data.eval_size` of them (0: all), chosen by `run.seed`."""
    data, separate = recipe.data, separate_sources(recipe)
    setting = "data.eval_source" if separate else "data.source"
    setting = "eval.squad_file" if recipe.eval.squad_file else setting
    for limit in ("val_shards", "max_tokens"):
        if getattr(data, limit) and not separate:
            problem = f"data.{limit} counts tokens, and the suite needs whole questions"
            raise UserError(f"{problem}; set it to 0, or set data.eval_source or eval.squad_file")
    questions = list[Question]()
    for source in separate or data.sources:
        if source.partition(":")[0] != "squad":
            problem = f"{setting}: {source!r} lacks questions"
            raise UserError(f"{problem}; write squad or squad:FILE.json")
        spec = SourceSpec(
            source,
            source,
            "squad",
            split="validation" if separate else "train",
            columns=tuple(data.columns.items()),
            on_bad_item=data.on_bad_item,
            setting=setting,
        )
        asked = read_questions(spec)
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


def read_questions(spec: SourceSpec) -> list[Question]:
    """All questions of a source, without unreadable ones that `data.on_bad_item` leaves out."""
    questions = list[Question]()
    for item in open_source(spec, lambda _: None).items():
        try:
            questions.append(cast(Question, example_of(item, spec)))
        except UserError:
            if spec.on_bad_item == "stop":
                raise
    return questions


def separate_sources(recipe: Recipe) -> list[str]:
    """The separate sources of the suite's questions; empty if they are held out from training."""
    data = recipe.data
    if recipe.eval.squad_file:
        return [f"squad:{recipe.eval.squad_file}"]
    if data.format == "squad" and not data.mix:
        return data.eval_sources or [source for source in data.sources if source == "squad"]
    named = [source for source in data.eval_sources if source.partition(":")[0] == "squad"]
    return named or ["squad"]
