"""Keeping ranks together where each has different work to do.

A model whose parameters are sharded gathers them in every forward pass, so a rank that makes one pass less than the others
leaves them waiting for ever. What varies from rank to rank (lengths of answers, numbers of items, a stop signal) is
therefore agreed on before each pass.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from windlass.parallel import collectives

if TYPE_CHECKING:
    from windlass.parallel.dist import Ranks

Request = TypeVar("Request")
Answer = TypeVar("Answer")
Result = TypeVar("Result")


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Dropout off inside the context; afterwards each module is as it was."""
    modules = [m for m in model.modules() if m.training] if isinstance(model, nn.Module) else []
    if modules:
        model.eval()
    try:
        yield
    finally:
        for module in modules:
            module.training = True


class StopAgreement:
    """Asks a `poll` function between passes, and lets all ranks act on it after the same pass.

    What is said after one pass is acted on after the next, so that the exchange is never waited for.
    """

    def __init__(self, ranks: Ranks, poll: Callable[[], bool] | None):
        self._poll, self._alone = poll, ranks.world == 1
        self._agreement = collectives.Agreement(ranks)

    def stop(self) -> bool:
        """Whether all ranks are to stop now; every rank calls it after each pass."""
        if self._poll is None:
            return False
        if self._alone:
            return self._poll()
        said = self._agreement.result()
        self._agreement.post([int(self._poll())])
        if said is None or not said[0]:
            return False
        self.finish()
        return True

    def finish(self) -> None:
        """Wait for the last exchange; to be called once after the last pass, when there is nothing left to cut short."""
        self._agreement.result()


def in_lockstep(
    work: Generator[Request, Answer, Result],
    answer: Callable[[Request | None], Answer],
    ranks: Ranks | None,
    poll: Callable[[], bool] | None = None,
) -> Result | None:
    """Run a generator that asks for forward passes, while other ranks run theirs.

    `work` yields requests and gets answers; `answer(request)` makes the pass, and `answer(None)` an idle one, for the sake
    of ranks that still have work. All ranks make the same number of passes. Returns what `work` returns; None where `poll`
    asked to stop on any rank.
    """
    request: Request | None
    result: Result | None = None
    try:
        request = next(work)
    except StopIteration as done:
        request, result = None, done.value
    while True:
        stopping = poll is not None and poll()
        active, stops = _exchange(request is not None, stopping, ranks)
        if stops:
            work.close()
            return None
        if not active:
            return result
        reply = answer(request)
        if request is None:
            continue
        try:
            request = work.send(reply)
        except StopIteration as done:
            request, result = None, done.value


def _exchange(active: bool, stopping: bool, ranks: Ranks | None) -> tuple[bool, bool]:
    if ranks is None or ranks.world == 1:
        return active, stopping
    actives, stops = collectives.sum_async([int(active), int(stopping)], ranks).wait()
    return bool(actives), bool(stops)
