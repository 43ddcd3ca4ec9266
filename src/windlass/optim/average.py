"""`train.average`: an exponential moving average of the weights, updated after the optimizer.

The n-th weights enter with `average += w * (weights - average)`, w = 1 - min(beta, n / (n + 9)), as
TensorFlow's `ExponentialMovingAverage` with `num_updates` = n - 1. The first weights replace what
was there (w = 1), so the average contains no initial weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from windlass.model.sharding import cut_of, is_fsdp, local_part, with_cut


class Average:
    """The average of a model's trained parameters, on each rank of the part that it holds, as
    `tensors` by parameter, in its precision, layout and device; empty without an average."""

    def __init__(self, model: nn.Module, beta: float):
        """`model`: parallelized, not wrapped (see `unwrap`); `beta`: the decay, 0: no average."""
        self.beta, self.model = beta, model
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        named = trained if beta else {}
        self.parameters = list(named.values())
        self.tensors = {name: with_cut(p.detach().clone(), cut_of(p)) for name, p in named.items()}
        device = local_part(next(model.parameters())).device
        self.count = torch.zeros((), dtype=torch.float64, device=device)  # of averaged weights

    @torch.no_grad()
    def update(self, skipped: Tensor) -> None:
        """Take in the weights after a step; `skipped` is 1.0 if the device did not update them."""
        if not self.tensors:
            return
        enters = 1 - skipped.to(self.count)
        n = self.count + enters
        weight = 1 - torch.clamp(n / (n + 9), max=self.beta)
        # Until the first weights have entered, the average is the present weights.
        weight = torch.where(self.count == 0, 1.0, enters * weight)
        self.count.copy_(n)
        averages, parameters = self._pairs()
        weights = {p.dtype: weight.to(p.dtype) for p in parameters}
        torch._foreach_lerp_(averages, parameters, [weights[p.dtype] for p in parameters])

    @torch.no_grad()
    def load(self, count: int) -> None:
        """Continue with `tensors`, the average of `count` weights; 0 starts a new average."""
        self.count.fill_(count)
        if self.tensors and not count:
            # They may have been copied from memory without values, and NaN stays in every average.
            averages, parameters = self._pairs()
            torch._foreach_copy_(averages, parameters)

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """The model has the averaged weights inside, and the trained ones, bit for bit, after."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for module in self.model.modules():
            if is_fsdp(module):
                module.reshard()  # the next pass gathers the other weights
        for average, parameter in zip(*self._pairs(), strict=True):
            trained = parameter.clone()
            parameter.copy_(average)
            average.copy_(trained)

    def _pairs(self) -> tuple[list[Tensor], list[Tensor]]:
        """This rank's parts of averages and parameters."""
        averages = [local_part(average) for average in self.tensors.values()]
        return averages, [local_part(parameter) for parameter in self.parameters]
