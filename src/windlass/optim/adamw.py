"""AdamW's update (arXiv 1711.05101), also of weights in bf16 and of moments in 8 bits.

AdamW converts both to float32, some rows at a time, updates them with torch's kernel, and rounds
them back. An 8-bit moment has float8_e4m3fn numbers. The largest in a block has the format's
largest value. A block is a part of a row, so a shard of rows has whole blocks. The second moment is
held as its square root, with half the number of decades.
"""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from windlass.model.sharding import cut_of, is_sharded, local_part, rows_of_rank, whole_shape
from windlass.model.size import block_of_moments
from windlass.seeds import seed_bytes

BF16_DROPPED = 16  # bits of a float32's mantissa that bf16 lacks
FP8_DROPPED = 20  # and that float8_e4m3fn lacks
CHUNK = 2**24  # numbers that are float32 at a time, at most; or 16 rows, for equal tails of kernels
SMALLEST = 4096  # numbers of a tensor with 8-bit moments; smaller ones save nothing
FP8, LARGEST, LEAST = torch.float8_e4m3fn, 448.0, 2.0**-9
"""The format, its largest number and its smallest above 0."""
SCALE = "_scale"  # after the name of a moment in 8 bits: the factors of its blocks
ROOT = "exp_avg_sq_root"


def places(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The place in a whole tensor of each of this rank's rows, and of each column in its row, as
    int64 on the tensor's device. Further dimensions count as columns."""
    shape, cut = whole_shape(tensor) or torch.Size([1]), cut_of(tensor)
    device = local_part(tensor).device  # not copied from the host, which would wait for the device
    rows = torch.arange(shape[0], device=device)
    columns = torch.arange(shape[1:].numel(), device=device)
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
    return rows * shape[1:].numel(), columns


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


def new_state(p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
    """A parameter's state before its first update: Muon's, torch's AdamW's, or in 8 bits."""
    if group["muon"]:
        return {"momentum_buffer": torch.zeros_like(p)}
    step = torch.zeros((), dtype=torch.float32, device=p.device)
    eight_bit = group["eight_bit"] and p.dim() > 1 and whole_shape(p).numel() >= SMALLEST
    block = block_of_moments(p.shape[-1]) if eight_bit else 0
    if not block:
        return {"step": step, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
    state = {"step": step}
    for name in ("exp_avg", ROOT):
        state[name] = torch.zeros_like(p, dtype=FP8)
        state[name + SCALE] = torch.zeros_like(p[..., ::block], dtype=torch.float32)
    return state


def update(
    group: dict[str, Any],
    named: list[tuple[str, Tensor]],
    states: list[dict[str, Tensor]],
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    """Update parameters of a group that have gradients, on the device."""
    how: dict[str, Any] = {key: group[key] for key in ("lr", "weight_decay", "eps")}
    how |= {"beta1": group["betas"][0], "beta2": group["betas"][1]}
    how |= {"amsgrad": False, "maximize": False, "grad_scale": grad_scale}
    by_kind: dict[Any, list[tuple[str, Tensor, dict[str, Tensor]]]] = {}
    for (name, p), state in zip(named, states, strict=True):
        by_kind.setdefault((p.device, p.dtype, ROOT in state), []).append((name, p, state))
    for (device, dtype, eight_bit), same in by_kind.items():
        steps = [state["step"] for *_, state in same]
        bad = found_inf if found_inf is None else found_inf.to(device)
        torch._foreach_add_(steps, 1)
        how["found_inf"] = bad
        if dtype == torch.bfloat16 or eight_bit:
            for name, p, state in same:
                _update_in_float32(group, name, p, state, how)
        else:
            weights, grads = [p for _, p, _ in same], [p.grad for _, p, _ in same]
            moments = ([s[key] for *_, s in same] for key in ("exp_avg", "exp_avg_sq"))
            torch._fused_adamw_(weights, grads, *moments, [], steps, **how)
        if bad is not None:  # the kernel left the rest as it was
            torch._foreach_sub_(steps, [bad] * len(steps))


def _update_in_float32(
    group: dict[str, Any], name: str, p: Tensor, state: dict[str, Tensor], how: dict[str, Any]
) -> None:
    """Update a bf16 parameter, or one with 8-bit moments, a chunk of rows at a time."""
    rows, columns = places(p)
    tensors = {"weight": p, "grad": p.grad} | state
    local = {key: local_part(x) for key, x in tensors.items() if key != "step"}
    second = ROOT if ROOT in state else "exp_avg_sq"
    each = max(16, CHUNK // max(1, len(columns)) // 16 * 16)
    for start in range(0, len(rows), each):
        part = {key: x.reshape(x.shape or 1)[start : start + each] for key, x in local.items()}
        weight, grad, key = part["weight"], part["grad"], rounding_key(group, name)
        bits = random_bits(key, rows[start : start + each], columns).view(weight.shape)
        wide, m, v = weight.float(), moment(part, "exp_avg"), moment(part, second)
        v = v.square() if second == ROOT else v
        torch._fused_adamw_([wide], [grad.float()], [m], [v], [], [state["step"]], **how)
        if weight.dtype == torch.bfloat16:
            weight.copy_(rounded(wide, bits, BF16_DROPPED))
        store(part, "exp_avg", m, bits >> 12, how["found_inf"])
        store(part, second, v.sqrt() if second == ROOT else v, bits, how["found_inf"])


def moment(state: dict[str, Tensor], key: str) -> Tensor:
    """A moment in float32."""
    x = state[key].float()
    if key + SCALE in state:
        scale = state[key + SCALE].unsqueeze(-1)
        x = (x.unflatten(-1, (scale.shape[-2], -1)) * scale).flatten(-2)
    return x


def store(state: dict[str, Tensor], key: str, x: Tensor, bits: Tensor, bad: Tensor | None) -> None:
    """Round a moment to the precision of its state, unless this step's gradients were `bad`."""
    held = state[key]
    if key + SCALE not in state:
        held.copy_(rounded(x, bits, BF16_DROPPED))
        return
    scale = state[key + SCALE]
    blocks = x.unflatten(-1, (scale.shape[-1], -1))
    new = blocks.abs().amax(-1).div_(LARGEST)
    x = (blocks / new.clamp(min=1e-30).unsqueeze(-1)).clamp_(-LARGEST, LARGEST).flatten(-2)
    if key == ROOT:
        x.clamp_(min=LEAST)  # a root that is rounded to 0 would make a huge update
    x = rounded(x, bits, FP8_DROPPED)
    if bad is not None:
        x, new = torch.where(bad > 0, held.float(), x), torch.where(bad > 0, scale, new)
    held.copy_(x)  # exact, but for the smallest numbers
    scale.copy_(new)
