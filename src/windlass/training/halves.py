"""The two halves of a micro-batch's rows, side by side on two threads: for small models on a CPU.

Threads that share an operation wait for each other at its end, and a small model's step has a
thousand short operations. The threads of two halves meet once. The gradients of the second halves
stay apart until the end of the step, so no sum depends on which thread is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from windlass.data.loader import MicroBatch
from windlass.model.gpt import GPT
from windlass.parallel.dist import Ranks
from windlass.recipe import Recipe

MOST_PARAMETERS = 2**24  # a larger model's operations are long, and its second gradient is large
# Parameters times tokens. In shorter passes the threads wait for Python's lock as long as threads of
# one operation wait for each other (docs/LOG.md).
LEAST_WORK = 2**29


def open_halves(
    recipe: Recipe, model: nn.Module, ranks: Ranks, dropout: bool, stack: ExitStack
) -> Halves | None:
    """Made if a training gains by it and can compute halves; `stack` ends the thread.

    Dropout draws the masks of all rows at once, and the sources of a mixture have common sums.
    """
    if ranks.device.type != "cpu" or ranks.world > 1 or type(model) is not GPT:
        return None
    recomputes = recipe.parallel.activation_checkpointing != "none"
    if dropout or recipe.data.mix or recipe.train.compile is True or recomputes:
        return None
    if sum(p.numel() for p in model.parameters()) > MOST_PARAMETERS:
        return None
    halves = Halves(p for p in model.parameters() if p.requires_grad)
    stack.callback(halves.close)
    return halves


class Halves:
    """A thread for the second half; each half has half of the threads of an operation."""

    def __init__(self, parameters: Iterable[nn.Parameter]):
        self.parameters = list(parameters)
        self.size = sum(p.numel() for p in self.parameters)
        self._pool = ThreadPoolExecutor(1, "windlass-half")
        self.close = self._pool.shutdown

    def train(
        self,
        micro_batches: Sequence[MicroBatch],
        forward: Callable[[MicroBatch], Tensor],
        backward: Callable[[Tensor], None],
        compute_loss: Callable[[MicroBatch], Tensor],
        loss: Tensor,
        scale: Tensor | None = None,
    ) -> None:
        """Forward and backward of all micro-batches; leaves the gradients in `p.grad`.

        Args:
            forward, backward: Of the first half, in this thread. `forward` adds to `loss`, and
                returns its part times `scale`.
            compute_loss: Of the second half, in the other thread, without side effects.
        """
        threads, sums = torch.get_num_threads(), list[Tensor]()
        for micro in micro_batches:
            rows, work = len(micro.batch.tokens), self.size * micro.batch.tokens.numel()
            if threads == 1 or rows == 1 or work < LEAST_WORK:
                backward(forward(micro))
                continue
            parts = (slice(rows // 2), slice(rows // 2, rows))
            first, second = (
                MicroBatch(micro.k, micro.batch.map(lambda field, part=part: field[part]))  # type: ignore[misc]
                for part in parts
            )
            # OpenMP has a number for each thread, and MKL one for all.
            torch.set_num_threads(threads // 2)
            given = (second, compute_loss, scale, threads // 2)
            other = self._pool.submit(self._compute_gradients, *given)
            try:
                backward(forward(first))
            finally:
                wait([other])
                torch.set_num_threads(threads)
            second_loss, gradients = other.result()
            loss.add_(second_loss)
            sums = list(torch._foreach_add(sums, gradients)) if sums else gradients
        if sums:
            torch._foreach_add_([p.grad for p in self.parameters], sums)

    def _compute_gradients(
        self,
        micro: MicroBatch,
        compute_loss: Callable[[MicroBatch], Tensor],
        scale: Tensor | None,
        threads: int,
    ) -> tuple[Tensor, list[Tensor]]:
        torch.set_num_threads(threads)
        loss = compute_loss(micro)
        gradients = torch.autograd.grad(loss if scale is None else loss * scale, self.parameters)
        return loss.detach(), list(gradients)
