"""Optimizers of `torch.optim` and `pytorch_optimizer` by name, and their state in a checkpoint.

A checkpoint holds tensors and numbers of a parameter, and counts of its group (`group.step`). An
optimizer with other state is rejected. A recipe names no other library: an import runs its code.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from windlass.errors import UserError, did_you_mean, first_line, require
from windlass.recipe.settings import OptimSettings

# The base; needs a closure; needs sparse gradients; evaluates other weights than it trains.
EXCLUDED = ("Optimizer", "LBFGS", "SparseAdam", "ScheduleFree")
ELEMENTWISE = {
    "torch.optim": "ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop SGD",
    "pytorch_optimizer": "AdEMAMix AdaBelief Lion Tiger",
}
"""Each element's update follows from this element alone, so ranks may divide the parameters."""


def library_optimizer(settings: OptimSettings, divided: bool = False) -> type[Any] | None:
    """The class in `torch.optim` or `pytorch_optimizer`; None for ours.

    `divided`: whether ranks divide the parameters. UserError for a bad name or option, a missing
    package, and an optimizer that a checkpoint cannot hold or that needs whole parameters.
    """
    library, _, name = settings.kind.rpartition(".")
    if not library:
        return None
    if library != "torch.optim":
        require(library, f'optim.kind = "{settings.kind}"')
    optimizers: dict[str, Any] = {
        name: one
        for name, one in vars(importlib.import_module(library)).items()
        if inspect.isclass(one) and issubclass(one, torch.optim.Optimizer)
        if not name.startswith(EXCLUDED)
    }
    if (optimizer := optimizers.get(name)) is None:
        instead = did_you_mean(name, optimizers, cutoff=0.3)
        raise UserError(f"optim.kind: {library} has no {name} that can be used here; {instead}")
    parameters = inspect.signature(optimizer).parameters.values()
    taken = {p.name for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD}
    taken -= {"params", "lr", "weight_decay"}
    for option in settings.options:
        if option not in taken:
            instead = did_you_mean(option, taken)
            raise UserError(f"optim.options: {settings.kind} takes no {option}; {instead}")
    try:  # the class checks the values
        problem = unsavable(optimizer, settings)
    except Exception as error:  # a library may raise anything
        text = first_line(error)
        raise UserError(f"optim.options: {settings.kind} rejects them: {text}") from None
    if problem:
        problem = f"a checkpoint cannot hold the state of {settings.kind}: {problem}"
        raise UserError(f"optim.kind: {problem}; write another optimizer")
    if divided and name not in ELEMENTWISE[library].split():
        why = f"{settings.kind} may need whole parameters, and here ranks divide them"
        advice = 'parallel.strategy = "ddp" with parallel.tensor=1, or take one of '
        raise UserError(f"optim.kind: {why}: write {advice}{ELEMENTWISE[library]}")
    return optimizer


def unsavable(optimizer: type[Any], settings: OptimSettings) -> str:
    """The state, after one step of a small matrix, that a checkpoint cannot hold; else empty."""
    parameter = nn.Parameter(torch.ones(3, 2))
    group = {"params": [parameter], "lr": settings.lr, "weight_decay": settings.weight_decay}
    built = optimizer([group], lr=settings.lr, **settings.options)
    before, parameter.grad = dict(built.param_groups[0]), torch.zeros(3, 2)
    with torch.random.fork_rng(devices=[]):
        built.step()
    if set(built.state) - {parameter}:
        return "a part of it belongs to no parameter"
    for key, value in built.state[parameter].items():
        if not isinstance(value, Tensor) and type(value) not in (int, float):
            return f"its {key} is a {type(value).__name__}"
    for key, value in built.param_groups[0].items():
        if before.get(key) is not value and (key in before or type(value) is not int):
            return f"a step changes {key} of the parameter group"
    return ""


def to_tensors(
    state: Mapping[str, Any], group: Mapping[str, Any], defaults: Mapping[str, Any]
) -> dict[str, Tensor]:
    """The state of a parameter of `group`; `defaults` are the optimizer's settings.

    A number becomes a scalar of float64 or int64, which optimizers do not use for tensors.
    """
    counts = {
        f"group.{key}": value
        for key, value in group.items()
        if state and type(value) is int and key not in defaults
    }
    return {
        key: value
        if isinstance(value, Tensor)
        else torch.tensor(value, dtype=torch.int64 if type(value) is int else torch.float64)
        for key, value in {**state, **counts}.items()
    }


def from_tensors(
    tensors: Mapping[str, Tensor], state: dict[str, Any], group: dict[str, Any]
) -> None:
    """Put tensors of `to_tensors` into an empty state, and the counts into the group."""
    for key, tensor in tensors.items():
        if key.startswith("group."):
            group[key.removeprefix("group.")] = int(tensor)
        else:
            is_number = not tensor.dim() and tensor.dtype in (torch.int64, torch.float64)
            state[key] = tensor.item() if is_number else tensor
