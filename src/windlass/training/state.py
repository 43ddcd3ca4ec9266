"""A training's state besides weights and optimizer: counters, fp16's loss scale, buffers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from windlass.model.quantised import Linear4bit
from windlass.model.sharding import unwrap
from windlass.parallel.mesh import Mesh
from windlass.recipe import Horizon

SCALE_START = 65536.0  # the first fp16 loss scale
SCALE_GROWS_AFTER = 2000  # steps without overflow that double it, as in torch's GradScaler


@dataclass
class TrainState:
    """The counters of a training after `step` optimizer steps. With the tensors they are the whole
    state: data order, dropout and initialisation follow from the seed and these counters."""

    step: int = 0  # optimizer steps completed, skipped updates included
    samples: int = 0  # sequences trained on
    tokens: int = 0  # tokens trained on, without padding
    label_tokens: int = 0  # tokens that counted in the loss; masked prompts do not
    updates_skipped: int = 0  # because of non-finite steps
    skips_in_a_row: int = 0  # non-finite steps since the last good one
    loss_scale: float = 0.0  # of fp16; 0: before the first step, and in other precisions
    scale_good_steps: int = 0  # steps without an overflow since the scale last changed
    loss_sum: float = 0.0  # over all steps with a finite loss
    losses: int = 0  # the number of these steps
    averaged: int = 0  # weights in the checkpoint's average (`train.average`)
    # The stages of a mixture (`data.mixture.Stage`), past ones as they were; else empty
    mixture: list[list[Any]] = field(default_factory=list)

    def epochs(self, horizon: Horizon) -> float:
        """Completed epochs of the training data."""
        return self.samples / horizon.samples_per_epoch

    @staticmethod
    def from_json(saved: dict[str, Any]) -> TrainState:
        """The reverse of `asdict`; raises KeyError if a counter is missing."""
        return TrainState(**{name: saved[name] for name in TrainState.__dataclass_fields__})


@dataclass(frozen=True)
class StepResult:
    """The numbers of a step. The tensors are on the device; nothing has waited for them."""

    loss: Tensor  # scalar: over all ranks, per unmasked label
    grad_norm: Tensor  # scalar: the global norm before clipping
    tokens: int  # over all ranks, without padding
    label_tokens: int  # over all ranks, unmasked
    padded_tokens: int  # over all ranks, with padding


class LossScaler:
    """fp16's loss scale, on the device. An overflow halves it, 2,000 good steps double it."""

    def __init__(self, device: torch.device, state: TrainState, precision: str):
        self.enabled = precision == "fp16"
        self.scale: Tensor | None = None  # in other precisions
        self._zero = torch.zeros((), dtype=torch.float32, device=device)
        if self.enabled:
            self.scale = self._zero + (state.loss_scale or SCALE_START)
            self.good_steps = self._zero + state.scale_good_steps

    def save(self, state: TrainState) -> None:
        """Put the scale into the counters. Waits for the device."""
        state.loss_scale, state.scale_good_steps = 0.0, 0
        if self.scale is not None:
            state.loss_scale, state.scale_good_steps = float(self.scale), int(self.good_steps)

    def update(self, bad: Tensor) -> None:
        """Adapt the scale after a step; `bad` is 1.0 if it overflowed."""
        if self.scale is None:
            return
        overflow, good = bad > 0, self.good_steps + 1
        grows = ~overflow & (good >= SCALE_GROWS_AFTER)
        grown = torch.where(grows, self.scale * 2.0, self.scale)
        self.scale = torch.where(overflow, self.scale * 0.5, grown)
        self.good_steps = torch.where(overflow | grows, self._zero, good)


def set_divisor(optimizer: torch.optim.Optimizer, divisor: Tensor | None) -> bool:
    """Have the next update divide the gradients by a scalar; False if the caller must do it."""
    optimizer.grad_scale = None  # type: ignore[attr-defined]
    if divisor is None:
        return True
    able = getattr(optimizer, "_step_supports_amp_scaling", False)
    if not able or divisor.dtype != torch.float32:  # as the kernel takes it
        return False
    if optimizer.param_groups[0]["params"][0].device != divisor.device:
        return False  # torch would copy it to offloaded parameters without waiting
    optimizer.grad_scale = divisor.detach()  # type: ignore[attr-defined]
    return True


def share_buffers(model: nn.Module, mesh: Mesh) -> None:
    """Give all ranks rank 0's persistent buffers, such as statistics of BatchNorm, which differ
    because the ranks see different samples. DDP does the same: a mean of counters or codes would
    not be valid. Every rank calls it after the same step."""
    if mesh.all_ranks is None:
        return
    for module in unwrap(model).modules():
        if isinstance(module, Linear4bit):  # its codes are weights
            continue
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                dist.broadcast(buffer.detach(), src=0)
