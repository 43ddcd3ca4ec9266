"""Text from a saved model: the verb `sample`, as an iterator of pieces or as whole texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from windlass.data.chat import prompt_tokens, stop_tokens
from windlass.errors import UserError
from windlass.evaluation.generate import Sampling, generate_events, in_order, prompt_ids
from windlass.evaluation.source import Source, alone, find_source, open_model
from windlass.parallel.parallelize import autocast, unwrap
from windlass.recipe import Changes
from windlass.run import Run


class TextSampler:
    """A saved model on one device, for many samples. Arguments as `sample`."""

    def __init__(
        self,
        run: str | Path | Run | Source,
        device: str = "",
        *,
        model: nn.Module | None = None,
        weights: str = "raw",
        overrides: Changes = (),
        **settings: Any,
    ):
        if not isinstance(run, Source):
            run = find_source(run, overrides, model, weights)
        self.source = run
        default = {"max_tokens": 256, "temperature": 0.8, "seed": self.source.recipe.run.seed}
        self.sampling, self.ranks = Sampling(**default | settings), alone(device or None)
        self.model = open_model(self.source, self.ranks)
        has_tokenizer = self.source.tokenizer is not None
        if not has_tokenizer or not hasattr(unwrap(self.model), "new_cache"):
            lack = "a model without new_cache" if has_tokenizer else "data without a tokenizer"
            needs = "text needs a tokenizer and new_cache(batch, length)"
            raise UserError(f"{self.source.name} is the run of {lack}: {needs}")
        stop = stop_tokens(self.source.tokenizer, self.source.template)
        self.sampling = replace(self.sampling, stop=stop)
        self.messages: list[dict[str, str]] = []  # the conversation so far, of `reply`

    def pieces(self, prompts: list[list[int]], after: Sequence[int]) -> Iterator[tuple[int, str]]:
        """The continuations of prompts, as (number of the text, next piece), text after text."""
        tokenizer, ranks = self.source.tokenizer, self.ranks
        arithmetic, vocab = partial(autocast, self.source.recipe, ranks.device), tokenizer.vocab
        how: dict[str, Any] = {"vocab": vocab, "autocast": arithmetic}
        events = generate_events(self.model, prompts, self.sampling, ranks, **how)
        return in_order(events, tokenizer, len(prompts), after)

    def reply(self, message: str) -> Iterator[str]:
        """The pieces of the model's answer to the next message, by its chat template."""
        self.messages.append({"role": "user", "content": message})
        ids = prompt_tokens(self.messages, self.source.template, self.source.tokenizer)
        answer = ""
        for _, piece in self.pieces([ids], after=ids):
            answer += piece
            yield piece
        self.messages.append({"role": "assistant", "content": answer.strip()})


def sample(
    run: str | Path | Run | Source,
    prompt: str = "",
    n: int = 1,
    device: str = "",
    *,
    model: nn.Module | None = None,
    weights: str = "raw",
    overrides: Changes = (),
    **settings: Any,
) -> Iterator[tuple[int, str]]:
    """`n` texts after a prompt, as (number of the text, next piece); a function of the seed.

    `run`, `model`, `weights` and `overrides` are as in `load_model`.

    Args:
        prompt: Not part of the pieces; empty: a text from its beginning.
        n: Number of texts; they are generated together, with a KV cache.
        device: `cpu` or `cuda`; default: cuda if available.
        settings: Fields of `Sampling`: `max_tokens` (default 256), `temperature` (0.8), `top_k`,
            `top_p`, `seed` (the run's).

    Raises:
        UserError: The model does not exist, or a setting is out of its range.
    """
    how: dict[str, Any] = {"model": model, "weights": weights, "overrides": overrides}
    sampler = TextSampler(run, device, **how, **settings)
    ids = prompt_ids(sampler.model, sampler.source.tokenizer, prompt)
    return sampler.pieces([ids] * n, after=ids if prompt else ())


def generate(
    run: str | Path | Run | Source, prompt: str = "", n: int | None = None, **options: Any
) -> str | list[str]:
    """The text that continues a prompt, or with `n` a list of texts; arguments as in `sample`."""
    texts = [""] * (n or 1)
    for number, piece in sample(run, prompt, n or 1, **options):
        texts[number] += piece
    return texts[0] if n is None else texts
