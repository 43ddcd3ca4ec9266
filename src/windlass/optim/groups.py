"""Which parameters decay, and which ones Muon takes: each parameter in exactly one group, a tied one once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from windlass.recipe.settings import OptimSettings

Group = dict[str, Any]
"""A parameter group: `name`, `params`, `base_lr`, `lr`, `weight_decay`, and `muon` where the optimizer is Muon."""


def unwrapped(model: nn.Module) -> Any:
    """The model itself under DDP and `torch.compile`; FSDP2 wraps nothing."""
    while True:
        inner = getattr(model, "module", None) or getattr(model, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def trained(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that get gradients, in the model's order; a tied one once, at its first name."""
    return [p for p in model.parameters() if p.requires_grad]


def decays(parameter: nn.Parameter, decay_on: str) -> bool:
    """Whether weight decay falls on a parameter: with `"matrices"` on two and more (global) dimensions."""
    return decay_on == "all" or parameter.ndim >= 2


def _groups(parameters: Iterable[nn.Parameter], settings: OptimSettings, lr: float, prefix: str) -> list[Group]:
    parts: dict[str, list[nn.Parameter]] = {"decay": [], "no_decay": []}
    for p in parameters:
        parts["decay" if decays(p, settings.decay_on) else "no_decay"].append(p)
    weight_decay = {"decay": settings.weight_decay, "no_decay": 0.0}
    return [
        {"name": prefix + name, "params": found, "base_lr": lr, "lr": lr, "weight_decay": weight_decay[name]}
        for name, found in parts.items()
        if found
    ]


def adamw_groups(model: nn.Module, settings: OptimSettings) -> list[Group]:
    """At most two groups, `decay` and `no_decay`."""
    return _groups(trained(model), settings, settings.lr, "")


def muon_groups(model: nn.Module, settings: OptimSettings) -> list[Group]:
    """The blocks' matrices for Muon (`muon.decay`), and the rest for AdamW (`adamw.decay`, `adamw.no_decay`).

    Embeddings, positions, the head, biases and norms are no linear maps between hidden spaces and stay with AdamW, as the
    author of Muon advises; so he does to orthogonalise queries, keys and values apart where one matrix holds all three.
    The model says what its blocks are by a method `blocks()`, and which of its matrices are made of several, and of how
    many rows each, by `matrix_parts(name)` if it has one.
    """
    owner = unwrapped(model)
    inside = {id(p) for block in owner.blocks() for p in block.parameters()}
    parameters = trained(model)
    matrices = [p for p in parameters if id(p) in inside and p.ndim == 2]
    taken = {id(p) for p in matrices}
    rest = [p for p in parameters if id(p) not in taken]
    names = {id(p): name for name, p in owner.named_parameters()}
    split = getattr(owner, "matrix_parts", lambda name: ())

    def parts(group: Group) -> list[tuple[int, ...]]:
        return [tuple(split(names[id(p)])) or (p.shape[0],) for p in group["params"]]

    return [
        *({**g, "muon": True, "parts": parts(g)} for g in _groups(matrices, settings, settings.muon_lr, "muon.")),
        *({**g, "muon": False} for g in _groups(rest, settings, settings.lr, "adamw.")),
    ]
