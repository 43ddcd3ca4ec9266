"""Keeping ranks together where each has different work to do.

A model whose parameters are sharded gathers them in every forward pass, so a rank that makes one pass less than the others
leaves them waiting for ever. What varies from rank to rank (lengths of answers, numbers of items, a stop signal) is
therefore agreed on before each pass.

Arguments that many functions of this room have:
    ranks: The process group; all its ranks call the function together.
    autocast: Makes the context of the forward pass's arithmetic.
    poll: Asked between passes whether to stop; when it says so on any rank, all ranks stop, and the result is None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn

from windlass.parallel import collectives

if TYPE_CHECKING:
    from windlass.parallel.dist import Ranks


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

    What is posted after one pass is acted on after the next, so that the exchange is never waited for.
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
        answer = self._agreement.result()
        self._agreement.post([int(self._poll())])
        if answer is None or not answer[0]:
            return False
        self.finish()
        return True

    def finish(self) -> None:
        """Wait for the last exchange; called once after the last pass, when there is nothing left to cut short."""
        self._agreement.result()


def agree_on_pass(active: bool, stopping: bool, ranks: Ranks | None) -> tuple[bool, bool]:
    """Whether any rank still has work, and whether any is to stop; every rank calls it before each pass."""
    if ranks is None or ranks.world == 1:
        return active, stopping
    actives, stops = collectives.sum_async([int(active), int(stopping)], ranks).wait()
    return bool(actives), bool(stops)
