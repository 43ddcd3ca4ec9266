"""From the recipe's `[optim]` to an optimizer over a model's parameters: each in exactly one group, a tied one once."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from windlass.recipe.settings import OptimSettings

FUSED_DEVICES = {"cpu", "cuda", "mps", "xpu"}  # with PyTorch's AdamW in one kernel for all tensors, 4 to 5 times faster
Group = dict[str, Any]  # `name`, `params`, `base_lr`, `lr`, `weight_decay`, and `muon` where the optimizer is Muon


def build_optimizer(
    model: nn.Module, settings: OptimSettings, device_type: str, group: torch.distributed.ProcessGroup | None = None
) -> torch.optim.Optimizer:
    """The optimizer of a recipe, for a model that is already parallelized; `set_lr` sets its learning rate.

    Args:
        model: Not wrapped (see `unwrap`), its parameters plain tensors or DTensors (FSDP2); for `muon` it has `blocks()`.
        settings: The recipe's `optim`.
        device_type: Where the training computes (`"cpu"`, `"cuda"`); with offloaded parameters not where they lie.
        group: With `muon` and plain tensors that every rank of a group holds alike (DDP): the ranks share the work.
    """
    devices = {p.device.type for p in model.parameters() if p.requires_grad}
    assert devices, "a model without trained parameters"
    adam: dict[str, Any] = {"betas": settings.betas, "eps": settings.eps, "fused": devices <= FUSED_DEVICES}
    if settings.kind == "muon":
        from windlass.optim.muon import Muon

        groups, momentum = muon_groups(model, settings), settings.muon_momentum
        return Muon(groups, momentum=momentum, **adam, device_type=device_type, group=group)
    return torch.optim.AdamW(adamw_groups(model, settings), lr=settings.lr, **adam)


def set_lr(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Give every group its peak learning rate times `factor`; a host-side number, so nothing waits or recompiles."""
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * factor


def adamw_groups(model: nn.Module, settings: OptimSettings) -> list[Group]:
    """At most two groups, `decay` and `no_decay`."""
    return _split_by_decay([p for p in model.parameters() if p.requires_grad], settings, settings.lr, "")


def muon_groups(model: Any, settings: OptimSettings) -> list[Group]:
    """The blocks' matrices for Muon (`muon.decay`), and the rest for AdamW (`adamw.decay`, `adamw.no_decay`).

    Embeddings, positions, the head, biases and norms are no linear maps between hidden spaces and stay with AdamW, as the
    author of Muon advises; he also advises to orthogonalise queries, keys and values separately where one matrix holds all
    three. The model lists its blocks with `blocks()` and says with `matrix_parts(name)`, if it has it, how many rows each of
    the matrices stacked in one parameter has.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    inside = {id(p) for block in model.blocks() for p in block.parameters() if p.ndim == 2}
    matrices, rest = ([p for p in parameters if (id(p) in inside) == muon] for muon in (True, False))
    names = {id(p): name for name, p in model.named_parameters()}
    split = getattr(model, "matrix_parts", lambda name: ())
    groups = _split_by_decay(matrices, settings, settings.muon_lr, "muon.")
    for g in groups:
        g["muon"] = True
        g["parts"] = [tuple(split(names[id(p)])) or (p.shape[0],) for p in g["params"]]
    return [*groups, *({**g, "muon": False} for g in _split_by_decay(rest, settings, settings.lr, "adamw."))]


def _split_by_decay(parameters: list[nn.Parameter], settings: OptimSettings, lr: float, prefix: str) -> list[Group]:
    """One or two groups; with `optim.decay_on = "matrices"` weight decay is for two and more (global) dimensions."""
    groups = []
    for name, weight_decay in (("decay", settings.weight_decay), ("no_decay", 0.0)):
        params = [p for p in parameters if (settings.decay_on == "all" or p.ndim >= 2) == (name == "decay")]
        if params:
            groups.append(
                {"name": prefix + name, "params": params, "base_lr": lr, "lr": lr, "weight_decay": weight_decay}
            )
    return groups
