"""An optimizer's state of a parameter as named tensors, for a checkpoint, and back.

Most state is tensors by name. Libraries also keep numbers, lists of matrices (one for each
dimension, or `[]`), and a count of steps in the parameter group. These have marked names:

    Q[1]          item 1 of the list `Q`; `Q[1]:none` if it is empty
    beta:float    the number `beta`, as float64 or int64
    group.step    the group's count `step`, which every parameter of the group has
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

NAME = re.compile(r"(\w+?)(?:\[(\d+)\])?(?::(int|float|none))?")


def to_tensors(
    state: Mapping[str, Any], group: Mapping[str, Any], defaults: Mapping[str, Any]
) -> dict[str, Tensor]:
    """The state of a parameter of `group`; `defaults` are the optimizer's settings."""
    tensors = dict[str, Tensor]()
    for key, value in state.items():
        if isinstance(value, Tensor):
            tensors[key] = value
        elif type(value) in (int, float):
            tensors[f"{key}:{type(value).__name__}"] = _number(value)
        elif isinstance(value, list):
            for i, item in enumerate(value):
                is_tensor = isinstance(item, Tensor)
                name = f"{key}[{i}]" if is_tensor else f"{key}[{i}]:none"
                tensors[name] = item if is_tensor else _number(0)
    for key, value in group.items() if state else ():
        if type(value) is int and key not in defaults:
            tensors[f"group.{key}"] = _number(value)
    return tensors


def from_tensors(
    tensors: Mapping[str, Tensor], state: dict[str, Any], group: dict[str, Any]
) -> None:
    """Put tensors of `to_tensors` into an empty state, and the counts into the group."""
    items = dict[str, dict[int, Any]]()
    for name, tensor in tensors.items():
        if name.startswith("group."):
            group[name.removeprefix("group.")] = int(tensor)
            continue
        match = NAME.fullmatch(name)
        assert match is not None, name
        key, place, kind = match.groups()
        if place is not None:
            items.setdefault(key, {})[int(place)] = [] if kind == "none" else tensor
        else:
            state[key] = tensor if kind is None else tensor.item()
    for key, places in items.items():
        state[key] = [places[i] for i in range(len(places))]


def is_savable(
    state: Mapping[str, Any], group: Mapping[str, Any], before: Mapping[str, Any]
) -> bool:
    """Whether these functions keep all of a state, and what steps changed in its group `before`."""
    whole = all(re.fullmatch(r"\w+", key) for key in (*state, *group)) and all(
        isinstance(value, Tensor)
        or type(value) in (int, float)
        or (isinstance(value, list) and all(isinstance(x, Tensor) or x == [] for x in value))
        for value in state.values()
    )
    new = {key: value for key, value in group.items() if before.get(key) is not value}
    return whole and all(type(value) is int and key not in before for key, value in new.items())


def _number(value: int | float) -> Tensor:
    return torch.tensor(value, dtype=torch.int64 if isinstance(value, int) else torch.float64)
