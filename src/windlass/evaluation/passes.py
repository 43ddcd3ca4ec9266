"""How a measurement makes its forward passes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from windlass.parallel.collectives import max_async
from windlass.parallel.ranks import Ranks


@dataclass(frozen=True)
class Passes:
    """The arithmetic of forward passes; a poll and a report follow each pass."""

    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext  # a context for each pass
    poll: Callable[[], bool] | None = None  # whether this rank was asked to stop
    progress: Callable[[int, int], object] | None = None  # gets the amount done and the total

    def stopped(self, ranks: Ranks) -> bool:
        """Whether any rank was asked to stop; all ranks call it after the same pass."""
        return self.poll is not None and bool(max_async([self.poll()], ranks).wait()[0])

    def show(self, done: int, total: int) -> None:
        if self.progress is not None:
            self.progress(done, total)


PLAIN = Passes()
