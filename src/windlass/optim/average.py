"""`train.average`: an average of the weights, updated after the optimizer, and used in evaluations.

The n-th weights enter with `average += w * (weights - average)`:

- `tail`: w = 1 / n, the uniform mean of a run's last part (stochastic weight averaging, arXiv
  1803.05407; for language models arXiv 2306.03241);
- `ema`: w = 1 - min(beta, n / (n + 9)), as TensorFlow's `ExponentialMovingAverage` with
  `num_updates` = n - 1.

The first weights replace what was there (w = 1), so no average contains the initial weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from windlass.model.share import cut_of, is_fsdp, local_part, with_cut
from windlass.optim.adamw import BF16_DROPPED, places, random_bits, rounded
from windlass.recipe.settings import AverageSettings
from windlass.recipe.units import Horizon


class Average:
    """The average of a model's trained parameters, on each rank of the part that it holds, as
    `tensors` by parameter, in its precision, layout and device; empty with the kind `none`."""

    def __init__(
        self, model: nn.Module, settings: AverageSettings, horizon: Horizon, seed: int = 0
    ):
        """`model`: parallelized, not wrapped (see `unwrap`); `seed`: of bf16 averages' rounding."""
        self.settings, self.model, self.seed = settings, model, seed
        self.begin = settings.begin(horizon)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        named = trained if settings.enabled else {}
        self.parameters = list(named.values())
        self.tensors = {name: with_cut(p.detach().clone(), cut_of(p)) for name, p in named.items()}
        device = local_part(next(model.parameters())).device
        self.count = torch.zeros((), dtype=torch.float64, device=device)  # of averaged weights

    @torch.no_grad()
    def update(self, step: int, skipped: Tensor) -> None:
        """After the update of `step`; `skipped` is 1.0 if the device did not make it."""
        if step <= self.begin:
            return
        enters = 1 - skipped.to(self.count)
        n = self.count + enters
        weight = 1 / n
        if self.settings.kind == "ema":
            weight = 1 - torch.clamp(n / (n + 9), max=self.settings.beta)
        # Until the first weights have entered, the average is the present weights.
        weight = torch.where(self.count == 0, 1.0, enters * weight)
        self.count.copy_(n)
        averages, parameters = self._pairs()
        if not all(p.dtype == torch.bfloat16 for p in parameters):
            weights = {p.dtype: weight.to(p.dtype) for p in parameters}
            torch._foreach_lerp_(averages, parameters, [weights[p.dtype] for p in parameters])
            return
        weight = weight.float()  # bf16 would lose small changes to rounding to the nearest
        for name, p, average in zip(self.tensors, self.parameters, averages, strict=True):
            new = average.float().lerp_(local_part(p).float(), weight)
            key = f"{self.seed}/average/{name}/{step}"
            bits = random_bits(key, *places(p)).view(average.shape)
            average.copy_(rounded(new, bits, BF16_DROPPED))

    def begun(self, step: int) -> int:
        """The weights in the average after `step` steps; 0: none. Waits for the device."""
        return int(self.count) if step > self.begin else 0

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
        return [local_part(t) for t in self.tensors.values()], [
            local_part(p) for p in self.parameters
        ]
