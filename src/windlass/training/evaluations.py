"""What is measured while training: the validation loss and other suites, and generated texts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

from windlass.checkpoint.retention import better
from windlass.data.chat import stop_tokens
from windlass.evaluation.generate import Sampling, generate, text_after
from windlass.evaluation.loss import evaluate_loss
from windlass.parallel.parallelize import autocast
from windlass.recipe.settings import BestMeasure

if TYPE_CHECKING:
    from windlass.run import Run
    from windlass.training.session import Session

Poll = Callable[[], bool]


def evaluate_suites(session: Session, poll: Poll) -> list[dict[str, Any]] | None:
    """Every suite of `eval.suites`, as fields of `eval` lines; None where a stop signal cut one short.

    Rank 0 writes SQuAD's predictions into the run, as `windlass eval` does.
    """
    lines = []
    keep: dict[str, Any] = {}
    for suite in session.recipe.eval.suites:
        line = _suite(session, suite, poll, keep)
        if line is None:
            return None
        lines.append({"suite": suite, **line})
    if "predictions" in keep and session.ranks.main:
        _write_predictions(session, keep["predictions"])
    return lines


def _write_predictions(session: Session, predictions: dict[str, str]) -> None:
    """A disk that does not take them costs a warning and no more: the scores are in the ledger."""
    from windlass.evaluation.squad import predictions_name, write_predictions

    path = session.run.path / "eval" / predictions_name(session.state.step)
    try:
        write_predictions(path, predictions)
    except OSError as error:
        session.console.warning(f"the predictions {path} were not written: {error.strerror or error}")


def scores_by_step(run: Run, last: int) -> dict[int, dict[str, float]]:
    """What the ledger has of each step up to `last`, see `scores`."""
    lines: dict[int, list[dict[str, Any]]] = {}
    for line in run.lines("eval"):
        if line["step"] <= last:
            lines.setdefault(line["step"], []).append(line)
    return {step: scores(found) for step, found in lines.items()}


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


def best_of(measured: Mapping[int, Mapping[str, float]], measure: str) -> tuple[int | None, float | None]:
    """The first step at which the measure was best, and its value; None and None where it was never measured."""
    step, value = None, None
    for here in sorted(measured):
        found = measured[here].get(measure)
        if found is not None and better(found, value, measure):
            step, value = here, found
    return step, value


def _suite(session: Session, suite: str, poll: Poll, keep: dict[str, Any]) -> dict[str, Any] | None:
    recipe, ranks = session.recipe, session.ranks
    context = partial(autocast, recipe, ranks.device)
    if suite == "loss":
        assert session.data.val is not None
        limit = recipe.eval.batches * recipe.train.global_batch
        sizes = getattr(session.data.tokenizer, "byte_lengths", None)  # a user's own tokenizer may not know them
        return evaluate_loss(
            session.model, session.data.val, ranks, session.batch.micro_batch, limit, autocast=context, poll=poll,
            token_bytes=sizes() if sizes else None,
        )  # fmt: skip
    from windlass.evaluation.suites import run_suite

    return run_suite(
        suite, session.model, session.data.tokenizer, recipe, ranks, autocast=context, poll=poll, keep=keep
    )


def generate_samples(session: Session, poll: Poll) -> list[str] | None:
    """Texts from the recipe's prompt, the same on every rank and world; None where a stop signal cut them short."""
    recipe, tokenizer = session.recipe, session.data.tokenizer
    settings = recipe.eval
    prompt = tokenizer.encode_prompt(settings.prompt)
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
