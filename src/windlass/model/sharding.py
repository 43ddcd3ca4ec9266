"""Parts of parameters, which FSDP2 or tensor parallelism divides, and the blocks of a model."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

# torch's functional collectives, which `torch.compile` traces.
collective = torch.ops._c10d_functional
T_ = TypeVar("T_", bound=Tensor)


def is_sharded(tensor: Tensor | None) -> TypeGuard[DTensor]:
    """Whether a tensor is a DTensor, without the import of DTensor, which takes long."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_fsdp(module: nn.Module) -> TypeGuard[FSDPModule]:
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def local_part(tensor: Tensor) -> Tensor:
    return tensor.to_local() if is_sharded(tensor) else tensor


def unwrap(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


class Peers(NamedTuple):
    group: str  # torch's name of their process group
    rank: int  # this rank's place
    size: int

    def own_range(self, count: int) -> range:
        """This rank's part of `count` indices; the parts differ by one index at most."""
        return range(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def add_up(self, x: Tensor) -> Tensor:
        done = collective.all_reduce(x.contiguous(), "sum", self.group)
        return collective.wait_tensor(done)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Cut:
    """The indices of one dimension of a parameter that this rank of `tp` holds, in local order."""

    dim: int
    size: int  # of the whole dimension
    ranges: tuple[range, ...]
    peers: Peers

    def within(self, start: int, stop: int) -> Iterator[range]:
        """The indices in the whole of the local ones from `start` to before `stop`."""
        for r in self.ranges:
            if part := r[max(start, 0) : max(stop, 0)]:
                yield part
            start, stop = start - len(r), stop - len(r)

    def take(self, whole: Tensor) -> Tensor:
        parts = [whole.narrow(self.dim, r.start, len(r)) for r in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    def gather(self, part: Tensor) -> Tensor:
        """The whole tensor from the parts of all ranks, which may differ in size; a collective."""
        shape = list(part.shape)
        shape[self.dim] = self.size
        whole, start = part.new_zeros(shape), 0
        for r in self.ranges:
            rows = part.narrow(self.dim, start, len(r))
            whole.narrow(self.dim, r.start, len(r)).copy_(rows)
            start += len(r)
        return self.peers.add_up(whole)


def cut_of(tensor: Tensor) -> Cut | None:
    """How a parameter, or a tensor like it, is cut over `tp`; None if each rank has all of it."""
    return getattr(tensor, "cut", None)


def with_cut(tensor: T_, cut: Cut | None) -> T_:
    """The same tensor, with its cut written on it. (FSDP2 replaces parameters but keeps names.)"""
    if cut is not None:
        tensor.cut = cut  # type: ignore[attr-defined]
    return tensor


def whole_shape(tensor: Tensor) -> torch.Size:
    shape, cut = list(tensor.shape), cut_of(tensor)
    if cut is not None:
        shape[cut.dim] = cut.size
    return torch.Size(shape)


def rows_of_rank(rows: int, ranks: int, rank: int) -> range:
    """A rank's rows, as `torch.chunk` cuts them: the last rank may have none."""
    each = -(-rows // ranks)
    return range(rows)[rank * each : (rank + 1) * each]


def blocks_of(model: Any) -> list[nn.Module] | None:
    """The parts that repeat, by a model's method `blocks()` or its list of modules `blocks`."""
    blocks = getattr(model, "blocks", None)
    if isinstance(blocks, nn.Module):
        return list(blocks) if isinstance(blocks, nn.ModuleList | nn.Sequential) else None
    return list(blocks()) if callable(blocks) else None


def sharding_dim(tensor: DTensor) -> int | None:
    """The dimension of its mesh that divides a tensor's rows; None: every rank has them all."""
    dims = [dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    if not dims:
        return None
    if len(dims) > 1 or not tensor.placements[dims[0]].is_shard(0):
        raise NotImplementedError(f"a part of a tensor with {tensor.placements}")
    return dims[0]


def boxes_of(
    tensor: Tensor, first: int = 0, last: int | None = None
) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """This rank's rows `first` to `last` of a tensor as boxes: offsets in the whole, and a view.
    Several boxes exist only if tensor parallelism cut the tensor into several ranges."""
    local, cut, start = local_part(tensor), cut_of(tensor), first
    if not local.dim():
        yield (), local
        return
    if is_sharded(tensor) and (dim := sharding_dim(tensor)) is not None:
        mesh = tensor.device_mesh
        rows = rows_of_rank(tensor.shape[0], mesh.size(dim), mesh.get_local_rank(dim))
        assert len(local) == len(rows), f"other rows of {tensor.shape}"
        start += rows.start
    part, offsets = local[first:last], [start, *[0] * (local.dim() - 1)]
    if cut is None:
        yield tuple(offsets), part
        return
    at = 0
    for box in cut.ranges if cut.dim else cut.within(start, start + len(part)):
        offsets[cut.dim] = box.start
        yield tuple(offsets), part.narrow(cut.dim, at, len(box))
        at += len(box)


@torch.no_grad()
def assign(parameter: Tensor, full: Tensor) -> None:
    """Copy a full tensor, or this rank's part of it, into a parameter, without communication."""
    assert full.shape == whole_shape(parameter), f"{full.shape} for {whole_shape(parameter)}"
    for offsets, box in boxes_of(parameter):
        box.copy_(full[place_of(offsets, box)])


def place_of(offsets: tuple[int, ...], box: Tensor) -> tuple[slice, ...]:
    """The indices of a box in the whole tensor."""
    return tuple(slice(at, at + size) for at, size in zip(offsets, box.shape, strict=True))


def materialise(model: nn.Module, device: torch.device, buffer_device: torch.device) -> None:
    """Move parameters and buffers in place; meta tensors get storage without values."""
    moved: dict[Tensor, Any] = {}
    for module in model.modules():
        for tensors, target in ((module._parameters, device), (module._buffers, buffer_device)):
            for name, tensor in tensors.items():
                if tensor is None or tensor.device == target:
                    continue
                if tensor not in moved:
                    data = tensor.data
                    if not data.is_meta:
                        new = data.to(target)
                    elif is_sharded(data):
                        new = torch.empty_like(data, device=target)
                    else:  # `empty_like` of a meta tensor imports sympy
                        how: Any = {"dtype": data.dtype, "device": target}
                        new = torch.empty_strided(data.shape, data.stride(), **how)
                    if isinstance(tensor, nn.Parameter):
                        new = nn.Parameter(new, tensor.requires_grad)
                    moved[tensor] = new
                tensors[name] = moved[tensor]


def add_mixin(module: nn.Module, mixin: type[nn.Module]) -> None:
    """Put a class before the module's own in the order of inheritance."""
    module.__class__ = subclass(mixin, type(module))  # type: ignore[arg-type]


@functools.cache
def subclass(mixin: type, kind: type) -> type:
    """One class for all modules of one class and mixin, so that Dynamo compiles a block once."""
    return type(kind.__name__, (mixin, kind), {"__module__": kind.__module__})
