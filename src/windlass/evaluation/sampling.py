"""The verb `sample`: text from a saved model, streamed; and a conversation with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from windlass.data.chat import prompt_tokens
from windlass.evaluation.generate import Event, Sampling, generate_events, in_order, prompt_ids
from windlass.evaluation.source import Source, alone, find_source, open_model, stop_tokens
from windlass.parallel.parallelize import autocast
from windlass.run import Run


def sample(
    model: str | Path | Run | Source, prompt: str = "", n: int = 1, device: str = "", **settings: Any
) -> Iterator[tuple[int, str]]:
    """`n` texts that continue a prompt, as (number of the text, next piece of it), text after text.

    They are a function of the seed: the same call gives the same texts. They are generated together, with a KV cache.

    Args:
        model: A run (its newest checkpoint), RUN@STEP, RUN@best, a checkpoint, a directory of `transformers`, `hf:NAME`.
        prompt: Not part of the pieces; empty: a text from its beginning.
        n: How many texts.
        device: `cpu` or `cuda`; default: cuda where there is one.
        settings: Fields of `Sampling`: `max_tokens` (default 256), `temperature` (0.8), `top_k`, `top_p`, `seed` (the run's).

    Raises:
        UserError: There is no such model, or a setting is out of its range.
    """
    return TextSampler(model, device, **settings).texts(prompt, n)


class TextSampler:
    """A saved model opened on one device, to be sampled many times. Arguments as `sample`."""

    def __init__(self, model: str | Path | Run | Source, device: str = "", **settings: Any):
        self.source = model if isinstance(model, Source) else find_source(model)
        settings = {"max_tokens": 256, "temperature": 0.8, "seed": self.source.recipe.run.seed} | settings
        self.sampling = Sampling(**settings)
        self.ranks = alone(device or None)
        self.model = open_model(self.source, self.ranks)
        self.sampling = replace(self.sampling, stop=stop_tokens(self.source, self.model))
        self.messages: list[dict[str, str]] = []
        """The conversation so far, of `reply`."""

    def texts(self, prompt: str = "", n: int = 1) -> Iterator[tuple[int, str]]:
        """`n` continuations of a prompt, as (number of the text, next piece of it), text after text."""
        tokenizer = self.source.tokenizer
        ids = prompt_ids(self.model, tokenizer, prompt)
        return in_order(self._events([ids] * n), tokenizer, n, after=ids if prompt else ())

    def reply(self, message: str) -> Iterator[str]:
        """The pieces of the model's answer to the next message of a conversation, in the layout of its chat template."""
        source = self.source
        self.messages.append({"role": "user", "content": message})
        ids = prompt_tokens(self.messages, source.template, source.tokenizer)
        answer = ""
        for _, piece in in_order(self._events([ids]), source.tokenizer, 1, after=ids):
            answer += piece
            yield piece
        self.messages.append({"role": "assistant", "content": answer.strip()})

    def _events(self, prompts: list[list[int]]) -> Iterator[Event]:
        context = partial(autocast, self.source.recipe, self.ranks.device)
        return generate_events(
            self.model, prompts, self.sampling, self.ranks, vocab=self.source.tokenizer.vocab, autocast=context
        )
