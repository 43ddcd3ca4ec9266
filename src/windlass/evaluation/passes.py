"""How a measurement makes the forward passes of a model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from windlass.data.chat import Template, stop_tokens
from windlass.parallel.collectives import max_async
from windlass.parallel.ranks import Ranks, alone


class Interrupted(Exception):
    """A rank was asked to stop; all ranks raise it after the same pass."""


@dataclass
class Passes:
    """A model and the arithmetic of its forward passes; a poll and a report follow each pass."""

    model: Any  # unwrapped
    ranks: Ranks = None  # type: ignore[assignment] # default: this process alone
    tokenizer: Any = None  # for texts; a generated text has only its tokens
    template: Template | None = None  # its ends of turns end a generated text
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext  # a context for each pass
    poll: Callable[[], bool] | None = None  # whether this rank was asked to stop
    progress: Callable[[int, int], object] | None = None  # gets the amount done and the total

    def __post_init__(self) -> None:
        self.ranks = self.ranks or alone(next(self.model.parameters()).device)

    @cached_property
    def stop(self) -> frozenset[int]:
        """The tokens that end a generated text."""
        return stop_tokens(self.tokenizer, self.template)

    def check(self) -> None:
        """Raise Interrupted if any rank was asked to stop; all ranks call it after a pass."""
        if self.poll is not None and max_async([self.poll()], self.ranks.mesh).wait()[0]:
            raise Interrupted

    def show(self, done: int, total: int) -> None:
        if self.progress is not None:
            self.progress(done, total)
