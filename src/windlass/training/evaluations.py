"""What is measured while training: the validation loss and other suites, and generated texts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

from windlass.data.chat import stop_tokens
from windlass.evaluation.generate import Sampling, generate, prompt_ids, text_after
from windlass.evaluation.suites import Suites, write_predictions
from windlass.parallel.parallelize import autocast
from windlass.recipe.settings import BestMeasure

if TYPE_CHECKING:
    from windlass.training.session import Session

Poll = Callable[[], bool]


def evaluate_suites(session: Session, poll: Poll) -> list[dict[str, Any]] | None:
    """Every suite of `eval.suites`, as fields of `eval` lines; None where a stop signal cut one short.

    Rank 0 writes SQuAD's predictions into the run, as `windlass eval` does.
    """
    lines = []
    data = session.data
    suites = Suites(session.recipe, data.tokenizer, session.ranks, data.val, session.batch.micro_batch)
    for suite in session.recipe.eval.suites:
        outcome = suites.measure(suite, session.model, poll)
        if outcome is None:
            return None
        numbers, predictions = outcome
        lines.append({"suite": suite, **numbers})
        if predictions and session.ranks.main:
            try:
                write_predictions(session.run.path / "eval", session.state.step, predictions)
            except OSError as error:  # a disk that does not take them costs a warning: the scores are in the ledger
                session.console.warning(f"{suite}: the predictions were not written: {error.strerror or error}")
    return lines


def scores(lines: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """What `checkpoint.best` may name, out of the `eval` lines of one step: measure → finite value."""
    found = {}
    for line in lines:
        for measure in get_args(BestMeasure):
            suite, _, name = measure.partition(".")
            value = line.get(name or suite) if line.get("suite", "loss") == suite else None
            if value is not None and math.isfinite(float(value)):
                found[measure] = float(value)
    return found


def generate_samples(session: Session, poll: Poll) -> list[str] | None:
    """Texts from the recipe's prompt, the same on every rank and world; None where a stop signal cut them short."""
    recipe, tokenizer = session.recipe, session.data.tokenizer
    settings = recipe.eval
    prompt = prompt_ids(session.model, tokenizer, settings.prompt)
    sampling = Sampling(
        max_tokens=settings.sample_tokens, temperature=settings.temperature, top_k=settings.top_k, seed=recipe.run.seed,
        stop=stop_tokens(tokenizer, session.data.template),
    )  # fmt: skip
    texts = generate(
        session.model, [prompt] * settings.sample_count, sampling, session.ranks, vocab=tokenizer.vocab,
        autocast=partial(autocast, recipe, session.ranks.device), poll=poll,
    )  # fmt: skip
    seen = prompt if settings.prompt else []
    return None if texts is None else [settings.prompt + text_after(tokenizer, seen, text) for text in texts]
