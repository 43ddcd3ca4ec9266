"""The batches of a training, as its loop takes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from windlass.data.loader import Loader, StepBatch
    from windlass.telemetry.timing import StepTimer

WAIT_SECONDS = 0.5
"""How long the data may be late before the run looks around."""


class Batches:
    """A loader whose waits count as `data` time; `waiting` is called while a batch is late."""

    def __init__(self, loader: Loader, timer: StepTimer, waiting: Callable[[], object]):
        self.loader, self.timer, self.waiting, self.close = loader, timer, waiting, loader.close

    def __iter__(self) -> Iterator[StepBatch]:
        while True:
            with self.timer.phase("data"):
                batch = self.loader.poll(WAIT_SECONDS)
            if batch is None:
                self.waiting()
            else:
                yield batch
