"""One optimizer step: forward, backward, clip, update.

The loss is the sum over the step's valid tokens on all ranks divided once by their global number, so that world size,
accumulation and padding change nothing but rounding.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from windlass.optim.build import set_lr
from windlass.parallel import collectives
from windlass.parallel.parallelize import autocast, resolve_precision, sync_gradients

if TYPE_CHECKING:
    from windlass.data.loader import StepBatch
    from windlass.parallel.dist import Ranks
    from windlass.recipe import Recipe
    from windlass.telemetry.timing import StepTimer
    from windlass.training.state import TrainState

SCALE_START = 65536.0
"""Initial fp16 loss scale (torch.amp.GradScaler's own)."""
SCALE_GROWS_AFTER = 2000
"""Steps without an overflow after which the scale doubles (torch.amp.GradScaler's own)."""


def step_seed(seed: int, step: int, micro: int) -> int:
    """The seed of the default generators for micro-batch `micro` of step `step`: the same on every rank and world."""
    text = f"windlass/dropout/{seed}/{step}/{micro}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


@dataclass(frozen=True)
class StepResult:
    """What a step leaves behind, on the device: nothing here was waited for."""

    loss: Tensor
    """This rank's share of the step's loss: summed over ranks it is the loss per valid token. Scalar."""
    grad_norm: Tensor
    """Global gradient norm before clipping, the same on every rank. Scalar."""
    valid_tokens: int
    """Tokens of the step that count, over all ranks."""
    padded_tokens: int
    """Tokens of the step with padding and what is masked, over all ranks: what was computed."""


class Step:
    """Makes optimizer steps on a wrapped model.

    On a CPU a non-finite gradient is seen at once, before the update. On CUDA looking would stop the device, so the
    update is made conditional on the device itself (the fused optimizers' `found_inf`), and `trouble` is read at the
    next log: the weights are then still those of before the bad step.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        ranks: Ranks,
        recipe: Recipe,
        timer: StepTimer,
        deferred: bool | None = None,
    ):
        self.model, self.optimizer, self.ranks, self.recipe, self.timer = model, optimizer, ranks, recipe, timer
        self.device = ranks.device
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.reseeds = any(drops(module) for module in model.modules())
        self.fp16 = resolve_precision(recipe.train.precision, self.device) == "fp16"
        conditional = getattr(optimizer, "_step_supports_amp_scaling", False)
        self.deferred = (self.device.type == "cuda" and conditional) if deferred is None else deferred
        self.latch = recipe.train.on_nonfinite == "stop" and not self.fp16
        """Whether updates stay off after a bad step until someone looks."""
        zero = torch.zeros((), dtype=torch.float32, device=self.device)
        self.bad, self.bad_steps, self.loss_bad = zero.clone(), zero.clone(), zero.clone()
        self.scale, self.good = torch.ones_like(zero), zero.clone()
        self.is_spike: Callable[[float], bool] | None = None
        """Asked with each step's loss before the update, where spikes have a policy: then the host waits at each step."""
        self.spiked = False
        self.loss_kind = torch.float64 if recipe.train.precision == "fp64" else torch.float32

    def __call__(self, batch: StepBatch, lr_factor: float) -> StepResult:
        """One step on this rank's micro-batches of `batch`; every rank calls it with the same factor.

        Its phases are marked as the host comes to them, for the message about a rank that is lost there.
        """
        mark = self.ranks.mark
        positions = sum(micro.tokens.numel() for micro in batch.micro)
        counts = collectives.sum_async(
            [batch.valid_tokens, positions], self.ranks
        )  # on its way during the first forward pass
        loss = torch.zeros((), dtype=self.loss_kind, device=self.device)
        for micro in batch.micro:
            if self.reseeds:
                torch.manual_seed(step_seed(self.recipe.run.seed, batch.step, micro.k))
            mark(batch.step, "forward")
            with sync_gradients(self.model, micro is batch.micro[-1]):
                with self.timer.phase("forward"), autocast(self.recipe, self.device):
                    loss_sum = self.model(micro.tokens, micro.labels)
                share = loss_sum / max(1, counts.wait()[0])
                mark(batch.step, "backward")
                with self.timer.phase("backward"):
                    (share * self.scale if self.fp16 else share).backward()
            loss += share.detach()
        mark(batch.step, "optimizer")
        with self.timer.phase("optimizer"):
            grad_norm = self._update(loss, lr_factor)
        valid, padded = counts.wait()
        mark(batch.step, "step")  # what comes with it: counting, logging
        return StepResult(loss, grad_norm, int(valid), int(padded))

    def _update(self, loss: Tensor, lr_factor: float) -> Tensor:
        scaled = collectives.global_grad_norm(self.parameters, self.ranks)
        grad_norm = scaled / self.scale if self.fp16 else scaled
        self.spiked = self.is_spike is not None and self.is_spike(
            float(collectives.sum_over_ranks(loss.clone(), self.ranks))
        )
        if self._judge(grad_norm, loss) and not self.spiked:
            self._rescale_and_clip(grad_norm)
            set_lr(self.optimizer, lr_factor)
            self.optimizer.step()
        if self.fp16:
            self._adjust_scale()
        self.optimizer.zero_grad(set_to_none=True)
        return grad_norm.detach()

    def _judge(self, grad_norm: Tensor, loss: Tensor) -> bool:
        """Whether to go on to the update; in deferred mode the device decides, and this is always so."""
        loss_bad = (~torch.isfinite(loss)).float()
        self.loss_bad = torch.maximum(self.loss_bad, loss_bad)
        # The norm is the same on all ranks, a loss is not; and a loss may be infinite where its gradient is finite.
        now = torch.maximum(
            (~torch.isfinite(grad_norm)).float(), collectives.sum_over_ranks(loss_bad.clone(), self.ranks).clamp(max=1)
        )
        self.bad = torch.maximum(self.bad, now) if self.latch else now
        self.bad_steps += self.bad
        if self.deferred:
            self.optimizer.found_inf = self.bad  # type: ignore[attr-defined]
            return True
        return not bool(self.bad)

    def _rescale_and_clip(self, grad_norm: Tensor) -> None:
        """Multiply the gradients by 1 / scale and by the clipping factor, in one pass, or not at all."""
        factor = torch.ones_like(grad_norm)
        if (limit := self.recipe.train.grad_clip) > 0:
            factor = torch.clamp(limit / (grad_norm + 1e-6), max=1.0)
        if self.fp16:
            factor = factor / self.scale
        if self.device.type == "cpu" and float(factor) == 1.0:
            return
        collectives.scale_gradients(self.parameters, factor)

    def _adjust_scale(self) -> None:
        """Halve after an overflow, double after 2,000 steps without one; without looking at the values."""
        overflow = self.bad > 0
        good = torch.where(overflow, torch.zeros_like(self.good), self.good + 1)
        grows = good >= SCALE_GROWS_AFTER
        self.scale = torch.where(overflow, self.scale * 0.5, torch.where(grows, self.scale * 2.0, self.scale))
        self.good = torch.where(grows, torch.zeros_like(good), good)

    def load(self, state: TrainState) -> None:
        """Take over the loss scaler's state."""
        if self.fp16:
            self.scale.fill_(state.loss_scale if state.step else SCALE_START)
            self.good.fill_(state.scale_good_steps)

    def save(self, state: TrainState) -> None:
        """Put the loss scaler's state into the counters (waits for the device)."""
        if self.fp16:
            state.loss_scale, state.scale_good_steps = float(self.scale), int(self.good)

    def trouble(self) -> tuple[int, bool]:
        """How many bad steps there were since the last call, and whether this rank's loss was among what was not finite.

        Waits for the device; the loop calls it when it logs or saves, and on a CPU after every step.
        """
        count, loss_bad = int(self.bad_steps), bool(self.loss_bad)
        self.bad_steps.zero_()
        self.loss_bad = torch.zeros_like(self.loss_bad)
        return count, loss_bad


def drops(module: nn.Module) -> bool:
    """Whether the module draws random numbers in training."""
    rates = [v for k, v in vars(module).items() if "dropout" in k or (k == "p" and "Dropout" in type(module).__name__)]
    return any(isinstance(rate, float) and rate > 0 for rate in rates)
