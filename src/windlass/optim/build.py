"""From the recipe's `[optim]` to an optimizer over a model's parameters."""

from __future__ import annotations

import torch
from torch import nn

from windlass.optim.groups import adamw_groups, muon_groups
from windlass.recipe.settings import OptimSettings

FUSED_DEVICES = ("cpu", "cuda", "mps", "xpu")
"""Where PyTorch has a fused AdamW: one kernel for all tensors, 4 to 5 times faster than one operation after another."""


def build_optimizer(
    model: nn.Module,
    settings: OptimSettings,
    device_type: str,
    group: torch.distributed.ProcessGroup | None = None,
) -> torch.optim.Optimizer:
    """The optimizer of a recipe, for a model that is already wrapped and sharded.

    Args:
        model: its parameters may be plain tensors or DTensors (FSDP2), in float32 or float64; only those that require a
            gradient are taken, a tied one once. For `muon` the model inside has a method `blocks()`.
        settings: the recipe's `optim`.
        device_type: where the training computes (`"cpu"`, `"cuda"`); with offloaded parameters not where they lie.
        group: with `muon` and plain tensors that every rank of a group holds alike (DDP): the ranks share the work.

    Returns:
        An optimizer whose groups carry `base_lr`; `set_lr` gives them the learning rate of an update.
    """
    found = {p.device.type for p in model.parameters() if p.requires_grad}
    assert found, "a model without trained parameters"
    fused = found <= set(FUSED_DEVICES)
    if settings.kind == "muon":
        from windlass.optim.muon import Muon

        return Muon(
            muon_groups(model, settings),
            momentum=settings.muon_momentum,
            betas=settings.betas,
            eps=settings.eps,
            fused=fused,
            device_type=device_type,
            group=group,
        )
    groups = adamw_groups(model, settings)
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=fused)


def set_lr(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Give every group its peak learning rate times `factor`; a host-side number, so nothing waits or recompiles."""
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * factor
