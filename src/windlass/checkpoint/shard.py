"""The shard of a checkpoint that a rank writes: boxes of tensors, and their places in its file.

Every element of a tensor is in one box of one rank, although several ranks may hold it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from windlass.checkpoint.format import DTYPES
from windlass.model.sharding import (
    boxes_of,
    cut_of,
    is_sharded,
    local_part,
    sharding_dim,
    whole_shape,
)

TYPE_NAMES = {getattr(torch, name): key for key, (name, _) in DTYPES.items()}
ALIGNMENT = 64  # bytes, of the first number in a file


@dataclass(frozen=True)
class Box:
    """A box of a tensor."""

    name: str
    tensor: Tensor  # the box, a view of the tensor on its device
    shape: tuple[int, ...]  # of the whole tensor
    offsets: tuple[int, ...]  # of the box in it


@dataclass(frozen=True)
class Shard:
    """The boxes that this rank writes."""

    boxes: list[Box]
    aliases: dict[str, str]  # of tied weights: a name, and the name under which it is saved

    @property
    def device(self) -> torch.device | None:
        """The CUDA device of the boxes; None if they are on the host."""
        return next((box.tensor.device for box in self.boxes if box.tensor.is_cuda), None)

    def layout(self, rank: int) -> tuple[bytes, list[tuple[Box, int]], int]:
        """The header of this rank's file, the place of each box, and the size of the file."""
        header: dict[str, Any] = {"__metadata__": {"format": "pt", "windlass": f"rank {rank}"}}
        places, end = list[tuple[Box, int]](), 0
        for box in sorted(self.boxes, key=lambda box: -box.tensor.element_size()):  # all aligned
            begin, end = end, end + box.tensor.nbytes
            name = box.name  # further boxes of a tensor need other names
            while name in header:
                name = f"{box.name}@{','.join(map(str, box.offsets))}"
            dtype, shape = TYPE_NAMES[box.tensor.dtype], list(box.tensor.shape)
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
            places.append((box, begin))
        text = json.dumps(header, separators=(",", ":")).encode()
        start = -(-(8 + len(text)) // ALIGNMENT) * ALIGNMENT
        text = text.ljust(start - 8)  # the format allows spaces after the header's JSON
        head = len(text).to_bytes(8, "little") + text
        return head, [(box, start + begin) for box, begin in places], start + end


def shard_of(
    tensors: Mapping[str, Tensor],
    aliases: Mapping[str, str] | None = None,
    rank: int = 0,
    world: int = 1,
    stages: int = 1,
) -> Shard:
    """The boxes that `rank` of `world` writes, so that each element is written by one rank. The
    ranks of one of the `stages` of a pipeline are neighbours, and hold the same tensors."""
    first_rank = rank - rank % (world // stages)
    peers = range(first_rank, first_rank + world // stages)
    groups: dict[tuple[int, ...], dict[str, Tensor]] = {}
    ranks_of: dict[Any, tuple[int, ...]] = {}
    for name, tensor in tensors.items():
        place = (tensor.device_mesh, tensor.placements) if is_sharded(tensor) else ()
        key = (*place, cut_of(tensor) is not None)
        if key not in ranks_of:
            ranks_of[key] = holders(tensor, peers)
        groups.setdefault(ranks_of[key], {})[name] = tensor
    boxes = list[Box]()
    for ranks, held in groups.items():
        local = {name: local_part(tensor) for name, tensor in held.items()}
        rows = divide_rows(local, ranks.index(rank), len(ranks))
        for name, tensor in held.items():
            shape = tuple(whole_shape(tensor))
            if name in rows:
                parts = boxes_of(tensor, *rows[name])
                boxes += [Box(name, part, shape, offsets) for offsets, part in parts]
            elif 0 in shape and rank == ranks[0]:  # type and shape are saved all the same
                boxes.append(Box(name, local[name], shape, (0,) * len(shape)))
    return Shard(boxes, dict(aliases or {}))


def divide_rows(
    tensors: Mapping[str, Tensor], index: int, count: int
) -> dict[str, tuple[int, int]]:
    """The rows [first, last) of each tensor that number `index` of `count` ranks writes. The
    tensors, laid end to end, make equal pieces; a row belongs to the piece in which it begins."""
    sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
    low, high = (sum(sizes.values()) * i // count for i in (index, index + 1))
    at, result = 0, dict[str, tuple[int, int]]()
    for name, tensor in tensors.items():
        if sizes[name]:
            rows = tensor.shape[0] if tensor.dim() else 1
            row_bytes = sizes[name] // rows
            first, last = (min(max(-(-(end - at) // row_bytes), 0), rows) for end in (low, high))
            if last > first:
                result[name] = (first, last)
            at += sizes[name]
    return result


def holders(tensor: Tensor, peers: range) -> tuple[int, ...]:
    """The ranks of `peers` that hold the same box of a tensor as this rank, in order. The peers may
    consist of copies of the tensor's mesh."""
    cut = cut_of(tensor)
    alike = peers[cut.peers.rank :: cut.peers.size] if cut else peers  # neighbours differ in `tp`
    if not is_sharded(tensor):
        return tuple(alike)
    mesh, place = tensor.device_mesh, [slice(None)] * tensor.device_mesh.ndim
    if (dim := sharding_dim(tensor)) is not None:
        place[dim] = (mesh.get_coordinate() or ())[dim]
    ranks, free, same = mesh.mesh.reshape(-1).tolist(), set(peers), list[int]()
    while free:  # the lowest rank that is left is the lowest rank of another copy
        shift = min(free) - min(ranks)
        if not (copy := {rank + shift for rank in ranks}) <= free:
            raise NotImplementedError(f"a checkpoint of {peers} with the mesh {mesh}")
        free -= copy
        same += [rank + shift for rank in mesh.mesh[tuple(place)].reshape(-1).tolist()]
    return tuple(sorted(rank for rank in same if rank in alike))
