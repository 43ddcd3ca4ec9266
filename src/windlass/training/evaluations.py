"""What is measured while training: the validation loss and other suites, and generated texts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from windlass.evaluate.generate import generate
from windlass.evaluate.loss import evaluate_loss
from windlass.evaluate.sampling import Sampling
from windlass.parallel.wrap import autocast

if TYPE_CHECKING:
    from windlass.training.session import Session

Poll = Callable[[], bool]


def evaluate_suites(session: Session, poll: Poll) -> list[dict[str, Any]] | None:
    """Every suite of `eval.suites`, as fields of `eval` lines; None where a stop signal cut one short."""
    lines = []
    for suite in session.recipe.eval.suites:
        line = _suite(session, suite, poll)
        if line is None:
            return None
        lines.append({"suite": suite, **line})
    return lines


def _suite(session: Session, suite: str, poll: Poll) -> dict[str, Any] | None:
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
    from windlass.evaluate.suites import run_suite

    return run_suite(suite, session.model, session.data.tokenizer, recipe, ranks, autocast=context, poll=poll)


def generate_samples(session: Session, poll: Poll) -> list[str] | None:
    """Texts from the recipe's prompt, the same on every rank and world; None where a stop signal cut them short."""
    recipe, tokenizer = session.recipe, session.data.tokenizer
    settings = recipe.eval
    prompt = [int(token) for token in tokenizer.encode(settings.prompt)] if settings.prompt else []
    if not prompt:
        prompt = [tokenizer.eot] if tokenizer.eot is not None else [int(t) for t in tokenizer.encode("\n")[:1]]
    sampling = Sampling(
        max_tokens=settings.sample_tokens, temperature=settings.temperature, top_k=settings.top_k, seed=recipe.run.seed,
        stop=frozenset() if tokenizer.eot is None else frozenset({tokenizer.eot}),
    )  # fmt: skip
    texts = generate(
        session.model, [prompt] * settings.sample_count, sampling, session.ranks, vocab=tokenizer.vocab,
        autocast=partial(autocast, recipe, session.ranks.device), poll=poll,
    )  # fmt: skip
    return None if texts is None else [settings.prompt + tokenizer.decode(text) for text in texts]
