"""Initial weights as a pure function of the seed and each tensor's name: the same for every world size and strategy."""

from __future__ import annotations

import hashlib
import re
from typing import Any

import torch
from torch import Tensor, nn

_WRAPPERS = re.compile(r"(^|(?<=\.))(module|_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")


def plain_name(name: str) -> str:
    """A parameter's name without what DDP, `torch.compile` and activation checkpointing put into it."""
    return _WRAPPERS.sub("", name)


def generator(seed: int, name: str) -> torch.Generator:
    """A CPU generator of its own for each seed and name."""
    digest = hashlib.blake2b(f"windlass/init/{seed}/{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


@torch.no_grad()
def initialise(model: nn.Module, seed: int) -> None:
    """Give every parameter its initial value.

    Each is made whole, in float32 on the CPU, one at a time; a sharded parameter (a DTensor) keeps its own slice. No rank
    asks another, so any world size and strategy starts from the same bits. Parameters must have storage: after building on
    the meta device, `to_empty` first.

    Args:
        model: Has `initial_value(name, shape, generator) -> Tensor`, as `GPT` has; and, where it has buffers that are not
            saved, `fill_buffers()`. Or has `fill_weights(seed)`, which does all of this in its own way.
        seed: `run.seed`.
    """
    owner: Any = unwrapped(model)
    if hasattr(owner, "fill_weights"):
        owner.fill_weights(seed)
        return
    for wrapped_name, parameter in owner.named_parameters():
        name = plain_name(wrapped_name)
        assert not parameter.is_meta, f"{name} is on the meta device: to_empty first"
        assign(parameter, owner.initial_value(name, parameter.shape, generator(seed, name)))
    if hasattr(owner, "fill_buffers"):
        owner.fill_buffers()


def unwrapped(model: nn.Module) -> nn.Module:
    """The model itself under DDP or `torch.compile`."""
    while not (hasattr(model, "initial_value") or hasattr(model, "fill_weights")):
        inner = getattr(model, "module", None) or getattr(model, "_orig_mod", None)
        assert isinstance(inner, nn.Module), f"{type(model).__name__} does not say what its initial values are"
        model = inner
    return model


@torch.no_grad()
def assign(parameter: Tensor, full: Tensor) -> None:
    """Copy a full tensor into a parameter: all of it, or this rank's slice of a DTensor, without communication."""
    if not hasattr(parameter, "placements"):
        parameter.copy_(full)
        return
    from torch.distributed.tensor import distribute_tensor

    mesh: Any = parameter.device_mesh
    # `src_data_rank=None`: every rank has the whole tensor already, so nothing is sent.
    part = distribute_tensor(full.to(mesh.device_type), mesh, parameter.placements, src_data_rank=None)
    parameter.to_local().copy_(part.to_local())  # type: ignore[attr-defined]
