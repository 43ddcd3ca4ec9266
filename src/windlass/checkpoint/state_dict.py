"""The state of a training as named tensors, cut so that each rank writes its share and any other world can read it.

Names do not depend on how the model is wrapped: `model/<parameter or buffer>` and `optim/<parameter>/<key>`. Weights
that are tied have one name, the others are aliases.

A tensor that is whole on every rank (one process, DDP, scalars, buffers) is written by all of them together: its rows
are divided so that every rank writes about as many bytes. Rows that FSDP2 gave to a rank are written by it, and where a
mesh holds them several times, by its replicas together. Reading needs none of this: each rank asks for its rows by
their numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from windlass.checkpoint.format import Damaged
from windlass.checkpoint.load import Checkpoint
from windlass.errors import UserError
from windlass.optim.shard import ShardedOptimizer
from windlass.parallel.parallelize import unwrap

MODEL, OPTIM = "model/", "optim/"


@dataclass(frozen=True)
class Slice:
    """Rows `start`, `start + 1`, ... (along the first dimension) of a tensor of `global_shape`, for one rank."""

    tensor: Tensor  # the rows, as they lie on the device; a scalar is one row
    global_shape: tuple[int, ...]
    start: int = 0


@dataclass(frozen=True)
class State:
    """This rank's share of the state, and what all ranks together have."""

    slices: dict[str, Slice]
    aliases: dict[str, str]  # names of tied weights, and the name under which they are written
    total_bytes: int  # of the whole state, over all ranks, each tensor once


def gather_state(model: nn.Module, optimizer: Any = None, rank: int = 0, world: int = 1) -> State:
    """The share of model and optimizer that this rank writes. No communication; the tensors are views, not copies.

    Every rank must call it with the same model and optimizer, and replicas must be equal. Under FSDP2 parameters that
    are gathered are resharded first.
    """
    tensors, aliases = named_state(model, optimizer)
    starts: dict[str, int] = {}
    groups: dict[
        tuple[int, int], list[tuple[str, int, int]]
    ] = {}  # what the same ranks hold is divided together
    for name, tensor in tensors.items():
        starts[name], stop, replica, replicas = _row_range(tensor, rank, world)
        row_bytes = math.prod(tensor.shape[1:]) * tensor.element_size()
        groups.setdefault((replica, replicas), []).append((name, stop - starts[name], row_bytes))
    slices: dict[str, Slice] = {}
    for (replica, replicas), sizes in groups.items():
        for name, (first, last) in divide_rows(sizes, replica, replicas).items():
            local = _local(tensors[name])
            rows = local[first:last] if local.dim() else local
            slices[name] = Slice(rows, tuple(tensors[name].shape), starts[name] + first)
    total = sum(math.prod(t.shape) * t.element_size() for t in tensors.values())
    return State(slices, aliases, total)


def divide_rows(
    tensors: Sequence[tuple[str, int, int]], index: int, count: int
) -> dict[str, tuple[int, int]]:
    """Divide tensors (name, rows, bytes of a row) among `count` ranks: the rows [first, last) of rank `index`, by name.

    The tensors are taken as laid end to end and cut into `count` pieces of equal size, each row going to the piece in
    which it begins: every rank writes about as much, and few tensors are cut.
    """
    total = sum(rows * row_bytes for _, rows, row_bytes in tensors)
    low, high, at = total * index // count, total * (index + 1) // count, 0
    mine: dict[str, tuple[int, int]] = {}
    for name, rows, row_bytes in tensors:
        if rows and row_bytes:
            first, last = (min(max(-(-(edge - at) // row_bytes), 0), rows) for edge in (low, high))
            if last > first:
                mine[name] = (first, last)
            at += rows * row_bytes
    return mine


def named_state(
    model: nn.Module, optimizer: Any = None
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Every tensor of model and optimizer by its name (DTensors where they are sharded), and tied weights' aliases."""
    tensors, aliases = _model_tensors(model)
    for name, parameter in _trained(model, optimizer):
        state = optimizer.state.get(parameter, {})
        for key, value in sorted(
            (key, value) for key, value in state.items() if isinstance(value, Tensor)
        ):
            tensors[f"{OPTIM}{name}/{key}"] = _as_sharded(value.detach(), parameter)
    return tensors, aliases


def restore(checkpoint: Checkpoint, model: nn.Module, optimizer: Any = None) -> None:
    """Fill model and optimizer from a checkpoint of any world size and strategy, bit for bit.

    The model, in its final wrapping, is filled in place; the optimizer's state is created where there is none yet, and dropped
    where the checkpoint has none. Each rank reads only its rows. UserError, with their names, where tensors are missing, left
    over, or of another shape or type; or where a file that was whole when the checkpoint was chosen cannot be read now.
    """
    try:
        targets, aliases = _model_tensors(model)
        _check_same_model(checkpoint, targets, aliases.keys())
        for name, tensor in targets.items():
            _fill(checkpoint, name, tensor)
        if optimizer is not None:
            _restore_optimizer(checkpoint, model, optimizer)
    except (Damaged, FileNotFoundError) as error:
        problem = f"checkpoint {checkpoint.path} was whole when it was chosen, and is not any more: {error}"
        raise UserError(
            f"{problem}; give the same command again, and the newest one that is whole is taken"
        ) from None


def _restore_optimizer(checkpoint: Checkpoint, model: nn.Module, optimizer: Any) -> None:
    saved: dict[str, list[str]] = {}
    for full in checkpoint.names(OPTIM):
        name, _, key = full.removeprefix(OPTIM).rpartition("/")
        saved.setdefault(name, []).append(key)
    trained = _trained(model, optimizer)
    if unknown := sorted(set(saved) - {name for name, _ in trained}):
        extra = f"checkpoint {checkpoint.path} has an optimizer's state for {_some(unknown)}"
        why = "which the optimizer here does not train: the recipe freezes other weights or names another optimizer"
        raise UserError(f"{extra}, {why}")
    for name, parameter in trained:
        state = optimizer.state[parameter]
        old = dict(state)
        state.clear()
        for key in saved.get(name, ()):
            full, tensor = f"{OPTIM}{name}/{key}", old.get(key)
            shape, dtype = checkpoint.info(full).shape, checkpoint.dtype(full)
            if (
                tensor is None
                or tensor.dtype != dtype
                or _as_sharded(tensor, parameter).shape != shape
            ):
                tensor = torch.zeros_like(parameter.detach(), dtype=dtype)
                if shape and shape != parameter.shape:  # of Adafactor, which is not sharded
                    tensor = torch.zeros(shape, dtype=dtype, device=parameter.device)
                if (
                    not shape
                ):  # a scalar, which torch keeps on the host, except for fused optimizers
                    groups = (
                        g
                        for g in optimizer.param_groups
                        if any(p is parameter for p in g["params"])
                    )
                    fused = next(groups).get("fused")
                    tensor = torch.zeros(
                        (), dtype=dtype, device=parameter.device if fused else "cpu"
                    )
            _fill(checkpoint, full, _as_sharded(tensor.detach(), parameter))
            state[key] = tensor


def _check_same_model(
    checkpoint: Checkpoint, targets: dict[str, Tensor], aliases: Set[str]
) -> None:
    saved, problems = set(checkpoint.names(MODEL)), list[str]()
    for name, tensor in targets.items():
        short = name.removeprefix(MODEL)
        if name not in saved | checkpoint.manifest.aliases.keys():
            problems.append(f"{short} is missing")
        elif (shape := checkpoint.info(name).shape) != tuple(tensor.shape):
            problems.append(f"{short} is {list(shape)} there and {list(tensor.shape)} here")
        elif (dtype := checkpoint.dtype(name)) != tensor.dtype:
            problems.append(f"{short} is {dtype} there and {tensor.dtype} here")
    problems += [
        f"{n.removeprefix(MODEL)} is not in this model"
        for n in sorted(saved - set(targets) - aliases)
    ]
    if problems:
        raise UserError(f"checkpoint {checkpoint.path} is of another model: {_some(problems)}")


def _fill(checkpoint: Checkpoint, name: str, tensor: Tensor) -> None:
    start, stop, *_ = _row_range(tensor, 0, 1)
    if stop > start:
        checkpoint.read_into(name, start, _local(tensor))


def _some(items: list[str]) -> str:
    return "; ".join([*items[:6], *([f"and {len(items) - 6} more"] if len(items) > 6 else [])])


def _model_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Parameters and persistent buffers, each once, and the other names of those that are tied."""
    model = unwrap(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # an evaluation under `shard_grad_op` leaves parameters gathered
    temporary = {
        f"{prefix}.{name}".removeprefix(".")
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    }
    buffers = {
        name: b for name, b in model.named_buffers(remove_duplicate=False) if name not in temporary
    }
    first_names, tensors, aliases = dict[int, str](), dict[str, Tensor](), dict[str, str]()
    for name, tensor in {**dict(model.named_parameters(remove_duplicate=False)), **buffers}.items():
        first = first_names.setdefault(id(tensor), MODEL + name)
        if first == MODEL + name:
            tensors[first] = tensor.detach()
        else:
            aliases[MODEL + name] = first
    return tensors, aliases


def _trained(model: nn.Module, optimizer: Any) -> list[tuple[str, Tensor]]:
    """The parameters that the optimizer trains, in the order of the model's names; with `shard_optim` this rank's rows."""
    trained = (
        {id(p) for group in optimizer.param_groups for p in group["params"]}
        if optimizer is not None
        else set()
    )
    rows = optimizer.rows if isinstance(optimizer, ShardedOptimizer) else {}
    named = [(name, rows.get(p, p)) for name, p in unwrap(model).named_parameters()]
    parameters = [(name, p) for name, p in named if id(p) in trained]
    assert len(parameters) == len(trained), "the optimizer has parameters that the model has not"
    return parameters


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _as_sharded(state: Tensor, parameter: Tensor) -> Tensor:
    """An optimizer's state that is held as the plain rows of a sharded parameter, seen as sharded like it."""
    if not isinstance(parameter, DTensor) or isinstance(state, DTensor) or not state.dim():
        return state
    if state.shape != parameter.to_local().shape:
        return state
    whole = {"shape": parameter.shape, "stride": parameter.stride()}
    return DTensor.from_local(
        state, parameter.device_mesh, parameter.placements, run_check=False, **whole
    )


def _row_range(tensor: Tensor, rank: int, world: int) -> tuple[int, int, int, int]:
    """What this rank holds of a tensor: rows `start` to `stop`, as number `replica` of `replicas` ranks."""
    rows = tensor.shape[0] if tensor.dim() else 1
    if not isinstance(tensor, DTensor):
        return 0, rows, rank, world
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "this rank is not in the tensor's mesh"
    start, stop, replica, replicas, is_cut = 0, rows, 0, 1, False
    for dim, placement in enumerate(tensor.placements):
        index, size = coordinate[dim], mesh.size(dim)
        if placement.is_replicate():
            replica, replicas = replica * size + index, replicas * size
        elif type(placement) is Shard and placement.dim == 0 and not is_cut:
            each = -(
                -rows // size
            )  # FSDP2 cuts as torch.chunk does: the last ranks may get fewer rows, or none
            start, stop, is_cut = min(index * each, rows), min((index + 1) * each, rows), True
        else:
            raise NotImplementedError(
                f"a checkpoint of tensors with the placement {tensor.placements}"
            )
    local = tensor.to_local()
    assert local.shape[:1] == (stop - start,), f"{tuple(local.shape)} is not rows {start} to {stop}"
    return start, stop, replica, replicas
