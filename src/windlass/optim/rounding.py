"""Stochastic rounding of float32 to fewer bits (arXiv 2010.06192), as a pure function.

A number is rounded up with the probability of its distance from the lower neighbour, so the mean
error is 0 and an update smaller than the last bit counts in the mean. The random bits are a hash of
a key and of an element's place in the whole tensor: each sharding rounds equally, and so does a
resumed run.
"""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from windlass.model.share import cut_of, is_sharded, local_part, rows_of_rank, whole_shape
from windlass.seeds import seed_bytes

BF16_DROPPED = 16  # bits of a float32's mantissa that bf16 lacks
FP8_DROPPED = 20  # and that float8_e4m3fn lacks


def places(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The place in a whole tensor of each of this rank's rows, and of each column in its row.

    They are int64 on the tensor's device. Further dimensions count as columns.
    """
    shape, cut = whole_shape(tensor) or torch.Size([1]), cut_of(tensor)
    rows, columns = torch.arange(shape[0]), torch.arange(shape[1:].numel())
    if cut is not None and cut.dim == 0:
        rows = cut.take(rows)
    elif cut is not None:
        columns = replace(cut, dim=cut.dim - 1).take(columns.view(shape[1:])).flatten()
    if is_sharded(tensor):
        for dim, placement in enumerate(tensor.placements):
            if placement.is_shard(0):
                mesh = tensor.device_mesh
                part = rows_of_rank(len(rows), mesh.size(dim), mesh.get_local_rank(dim))
                rows = rows[part.start : part.stop]
    device = local_part(tensor).device
    width = shape[1:].numel()
    return (rows * width).to(device, non_blocking=True), columns.to(device, non_blocking=True)


def rounding_key(group: dict[str, Any], name: str) -> str:
    """The key of the random bits for a parameter's update, in a group of the optimizer."""
    return f"{group['seed']}/{name}/{group['number']}"


def random_bits(key: str, rows: Tensor, columns: Tensor) -> Tensor:
    """32 random bits for each element of some `places`, as int32 [rows, columns].

    The hash is lowbias32 (C. Wellons), with a part of the key between its rounds. int32 arithmetic
    wraps, and a right shift needs a mask because it repeats the sign.
    """
    first, second = struct.unpack("<2i", seed_bytes(f"windlass/round/{key}", 8))
    x = (rows + first).to(torch.int32).unsqueeze(1) + columns.to(torch.int32)
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(0x7FEB352D)
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).bitwise_xor_(second).mul_(0x846CA68B - 2**32)
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))


def rounded(x: Tensor, bits: Tensor, dropped: int) -> Tensor:
    """float32 numbers that end with `dropped` zero bits, rounded by random `bits`."""
    low = (1 << dropped) - 1
    whole = x.view(torch.int32) + bits.bitwise_and(low)
    return whole.bitwise_and_(~low).view(torch.float32)
