"""The questions that the suite `squad` asks."""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

import numpy as np

from windlass.data.examples import Question, example_of
from windlass.data.locate import SourceSpec
from windlass.data.sources import open_source
from windlass.data.split import draws_of, held_out
from windlass.errors import UserError
from windlass.recipe import DataSettings, Recipe


def eval_questions(recipe: Recipe) -> list[Question]:
    """The suite's questions: `eval.squad_items` or `data.eval_size`, chosen by `run.seed`."""
    data, separate, questions = recipe.data, suite_sources(recipe), list[Question]()
    setting = "data.eval_source" if separate else "data.source"
    setting = "eval.squad_file" if recipe.eval.squad_file else setting
    split = "validation" if separate else "train"
    divided = [(s, part.val_fraction) for part in squad_parts(data) for s in part.sources]
    sources = dict.fromkeys(separate, 0.0) or dict(divided)
    if data.val_shards and not separate:
        problem = "data.val_shards holds out tokens, and the suite needs whole questions"
        raise UserError(f"{problem}; set data.val_fraction, data.eval_source or eval.squad_file")
    for source, fraction in sources.items():
        if source.partition(":")[0] != "squad":
            problem = f"{setting}: {source!r} has no questions"
            raise UserError(f"{problem}; write squad or squad:FILE.json")
        how: dict[str, Any] = {"columns": tuple(data.columns.items()), "setting": setting}
        spec = SourceSpec(source, source, "squad", split=split, **how)
        asked = list[Question]()
        for item in open_source(spec, lambda _: None).items():
            try:
                asked.append(cast(Question, example_of(item, spec)))
            except UserError:
                if data.on_bad_item == "stop":
                    raise
        if not separate:  # as training divides each source
            groups = np.array([question.group for question in asked], np.uint64)
            sizes = np.zeros(len(asked), np.int64)
            whole, _ = held_out(groups, sizes, fraction, are_examples=True)
            asked = [asked[i] for i in np.flatnonzero(whole)]
        questions += asked
    if not questions:
        remedy = "set eval.squad_file, data.eval_source or data.val_fraction"
        raise UserError(f"no questions to evaluate: {remedy}")
    name, count = Counter(question.id for question in questions).most_common(1)[0]
    if count > 1:
        raise UserError(f"{', '.join(sources)} has two questions {name!r}")
    size = recipe.eval.squad_items or data.eval_size or len(questions)
    hashes = np.array([question.hash for question in questions], np.uint64)
    draws = draws_of(hashes, f"eval/{recipe.run.seed}")
    return [questions[i] for i in sorted(np.argsort(draws, kind="stable")[:size].tolist())]


def suite_sources(recipe: Recipe) -> list[str]:
    """`eval.squad_file`, `data.eval_source`, or SQuAD's validation set; empty if the suite's
    questions are held out from the training questions."""
    data = recipe.data
    if recipe.eval.squad_file:
        return [f"squad:{recipe.eval.squad_file}"]
    if parts := squad_parts(data):
        given = [source for part in parts for source in part.eval_sources if source]
        return given or [s for part in parts for s in part.sources if s == "squad"]
    named = [source for source in data.eval_sources if source.partition(":")[0] == "squad"]
    return named or ["squad"]


def squad_parts(data: DataSettings) -> list[DataSettings]:
    """The settings of the sources that have questions."""
    parts = [data.part(number) for number in range(len(data.mix) or 1)]
    return [part for part in parts if part.format == "squad"]
