"""The state of a training as named tensors, cut into boxes that any other layout can read.

Names do not depend on the model's wrapping: `model/<parameter or buffer>` and
`optim/<parameter>/<key>`, and `average/<parameter>` with `train.average`. Tied weights have one
name; their other names are aliases.

Each rank holds a box of each tensor, or the whole tensor. Ranks that hold the same box divide its
rows, so that each writes about the same number of bytes. A reader asks for boxes of its own layout.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from windlass.checkpoint.format import DTYPES, Damaged
from windlass.checkpoint.load import AVERAGE, MODEL, Checkpoint
from windlass.errors import UserError
from windlass.model.share import (
    cut_of,
    is_fsdp,
    is_sharded,
    local_part,
    whole_shape,
    with_cut,
)
from windlass.optim.library import from_tensors, to_tensors
from windlass.optim.shard import ShardedOptimizer
from windlass.parallel.parallelize import unwrap

OPTIM = "optim/"
TYPE_NAMES = {getattr(torch, name): key for key, (name, _) in DTYPES.items()}
Run = tuple[int, int]  # consecutive indices of a dimension: the first, and their number


@dataclass(frozen=True)
class Slice:
    """A box of a tensor, for one rank to write."""

    name: str
    tensor: Tensor  # the box, a view of the tensor on its device
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]  # of the box in the whole tensor


@dataclass(frozen=True)
class State:
    """The part of the state that this rank writes, and what all ranks have in common."""

    slices: list[Slice]
    aliases: dict[str, str]  # of tied weights: a name, and the name under which it is saved
    total_bytes: int  # of the whole state, each tensor once
    passing: frozenset[str] = frozenset()  # the tensors that a forward pass may change: buffers


def gather_state(
    model: nn.Module,
    optimizer: Any = None,
    rank: int = 0,
    world: int = 1,
    stages: int = 1,
    average: Mapping[str, Tensor] = MappingProxyType({}),
) -> State:
    """The part of model, optimizer and averaged weights that this rank writes, as views.

    Every rank calls it; replicas must be equal, and the ranks do not communicate. Under FSDP2 it
    reshards gathered parameters. In a pipeline `total_bytes` is only of this rank's stages.
    """
    tensors, aliases = named_state(model, optimizer)
    tensors |= {AVERAGE + name: tensor for name, tensor in average.items()}
    for name in getattr(unwrap(model), "copies", ()):
        inside = (f"{MODEL}{name}", f"{AVERAGE}{name}", f"{OPTIM}{name}/")
        tensors = {name: t for name, t in tensors.items() if not name.startswith(inside)}
    passing = frozenset(MODEL + name for name, _ in unwrap(model).named_buffers())
    return replace(state_of(tensors, aliases, rank, world, stages), passing=passing)


def state_of(
    tensors: Mapping[str, Tensor],
    aliases: Mapping[str, str] | None = None,
    rank: int = 0,
    world: int = 1,
    stages: int = 1,
) -> State:
    """The part of named tensors that `rank` of `world` writes."""
    slices = divide(tensors, rank, world, stages)
    return State(slices, dict(aliases or {}), state_bytes(tensors))


def state_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Bytes of whole tensors, over all ranks."""
    return sum(math.prod(whole_shape(t)) * t.element_size() for t in tensors.values())


def divide(tensors: Mapping[str, Tensor], rank: int, world: int, stages: int = 1) -> list[Slice]:
    """The boxes that `rank` of `world` writes, so that each element is written by one rank.

    The ranks of one of the `stages` of a pipeline are neighbours, and hold the same tensors.
    """
    first_rank = rank - rank % (world // stages)
    peers = range(first_rank, first_rank + world // stages)
    groups: dict[tuple[int, ...], dict[str, Tensor]] = {}
    known: dict[Any, tuple[int, ...]] = {}
    for name, tensor in tensors.items():
        place = (tensor.device_mesh, tensor.placements) if is_sharded(tensor) else ()
        key = (*place, cut_of(tensor) is not None)
        if key not in known:
            known[key] = replica_group(tensor, peers)
        groups.setdefault(known[key], {})[name] = tensor
    slices = []
    for ranks, held in groups.items():
        local = {name: local_part(tensor) for name, tensor in held.items()}
        for name, tensor in held.items():
            if not tensor.numel() and rank == ranks[0]:  # its type and shape are saved all the same
                offsets = (0,) * tensor.dim()
                slices.append(Slice(name, local[name], tuple(whole_shape(tensor)), offsets))
        for name, (first, last) in divide_rows(local, ranks.index(rank), len(ranks)).items():
            rows = local[name][first:last] if local[name].dim() else local[name]
            for offsets, box in boxes(rows, held_runs(held[name]), first):
                slices.append(Slice(name, box, tuple(whole_shape(held[name])), offsets))
    return slices


def divide_rows(
    tensors: Mapping[str, Tensor], index: int, count: int
) -> dict[str, tuple[int, int]]:
    """The rows [first, last) of each tensor that number `index` of `count` ranks writes.

    The tensors, laid end to end, make `count` pieces of equal size. A row belongs to the piece in
    which it begins, so few tensors are cut. A scalar is one row.
    """
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


def replica_group(tensor: Tensor, peers: range) -> tuple[int, ...]:
    """The ranks that hold the same box of a tensor as this rank, in order.

    These are all of its `peers`, unless the tensor is cut. A mesh may be a part of the peers, which
    then consist of copies of this mesh. Neighbouring ranks differ in `tp`.
    """
    if cut := cut_of(tensor):
        every = peers[cut.peers.rank :: cut.peers.size]
        return tuple(r for r in _holders(tensor, peers) if r in every)
    return _holders(tensor, peers)


def _holders(tensor: Tensor, peers: range) -> tuple[int, ...]:
    """The same without the cut over `tp`."""
    if not is_sharded(tensor):
        return tuple(peers)
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "this rank is not in the tensor's mesh"
    own = tuple(
        index if _cuts(placement) else slice(None)
        for index, placement in zip(coordinate, tensor.placements, strict=True)
    )
    ranks: list[int] = mesh.mesh[own].reshape(-1).tolist()
    return tuple(sorted(rank + shift for rank in ranks for shift in _copies(mesh, peers)))


def _copies(mesh: DeviceMesh, peers: range) -> list[int]:
    """The distances from this mesh's ranks to the same places in each copy of the mesh, also 0."""
    ranks = sorted(mesh.mesh.reshape(-1).tolist())
    shifts, free = list[int](), set(peers)
    while free:  # the lowest rank that is left is the lowest rank of another copy
        shifts.append(min(free) - ranks[0])
        copy = {rank + shifts[-1] for rank in ranks}
        if not copy <= free:
            raise NotImplementedError(f"a checkpoint of {peers} with the mesh {mesh}")
        free -= copy
    return shifts


def held_runs(tensor: Tensor) -> list[list[Run]]:
    """For each dimension, the indices of the whole tensor that this rank holds, in local order.

    Uneven pieces are cut as torch.chunk cuts them: the last ranks may have fewer indices, or none.
    """
    held = [[(0, size)] for size in tensor.shape]
    if is_sharded(tensor):
        mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
        assert coordinate is not None, "this rank is not in the tensor's mesh"
        for dim, placement in enumerate(tensor.placements):
            if _cuts(placement):
                runs, parts = held[placement.dim], getattr(placement, "split_factor", 1)
                strides = (_piece(runs, i, parts) for i in range(parts))
                pieces = (_piece(stride, coordinate[dim], mesh.size(dim)) for stride in strides)
                held[placement.dim] = _joined(itertools.chain(*pieces))
        shape = tuple(sum(size for _, size in runs) for runs in held)
        assert shape == tensor.to_local().shape, f"{tensor.placements}: {shape}"
    if cut := cut_of(tensor):
        whole = [(part.start, len(part)) for part in cut.ranges]
        windows = (_window(whole, start, start + size) for start, size in held[cut.dim])
        held[cut.dim] = _joined(itertools.chain(*windows))
    return held


def _cuts(placement: Any) -> bool:
    if placement.is_replicate():
        return False
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    if isinstance(placement, Shard | _StridedShard):
        return True
    raise NotImplementedError(f"a checkpoint of a tensor with the placement {placement}")


def _piece(runs: Sequence[Run], index: int, count: int) -> list[Run]:
    """Piece `index` of `count` equal ones, of which the last may be shorter or empty."""
    each = -(-sum(size for _, size in runs) // count)
    return _window(runs, index * each, (index + 1) * each)


def _joined(runs: Iterable[Run]) -> list[Run]:
    joined: list[Run] = []
    for start, size in runs:
        if joined and sum(joined[-1]) == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + size)
        else:
            joined.append((start, size))
    return joined


def _window(runs: Sequence[Run], low: int, high: int) -> list[Run]:
    """The part of some runs from their index number `low` up to number `high`."""
    window, at = list[Run](), 0
    for start, size in runs:
        first, last = max(low - at, 0), min(high - at, size)
        if last > first:
            window.append((start + first, last - first))
        at += size
    return window


def boxes(
    rows: Tensor, runs: Sequence[Sequence[Run]], first: int = 0
) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Local rows from number `first` on as boxes: offsets in the whole tensor, and a view.

    Several boxes exist only if a dimension was cut twice into uneven pieces.
    """
    if runs:
        runs = [_window(runs[0], first, first + rows.shape[0]), *runs[1:]]
    if all(len(of_dim) == 1 for of_dim in runs):
        yield tuple(of_dim[0][0] for of_dim in runs), rows
        return
    ends = [list(itertools.accumulate(size for _, size in of_dim)) for of_dim in runs]
    for places in itertools.product(*(range(len(of_dim)) for of_dim in runs)):
        box = [of_dim[place] for of_dim, place in zip(runs, places, strict=True)]
        stops = [of_dim[place] for of_dim, place in zip(ends, places, strict=True)]
        local = (slice(stop - size, stop) for stop, (_, size) in zip(stops, box, strict=True))
        yield tuple(start for start, _ in box), rows[tuple(local)]


def named_state(
    model: nn.Module, optimizer: Any = None
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Every tensor of model and optimizer by name (a sharded one as a DTensor), and the aliases.

    UserError if a checkpoint cannot hold one.
    """
    tensors, aliases = _model_tensors(model)
    trained = _trained(model, optimizer)
    groups = _groups(optimizer) if trained else {}
    for name, parameter in trained:
        group = groups[id(parameter)]
        state = to_tensors(optimizer.state.get(parameter, {}), group, optimizer.defaults)
        for key in sorted(state):
            tensors[f"{OPTIM}{name}/{key}"] = _as_sharded(state[key].detach(), parameter)
    for name, tensor in tensors.items():
        if tensor.dtype not in TYPE_NAMES or tensor.layout != torch.strided:
            problem = f"a checkpoint cannot hold {name}, of {tensor.dtype}, {tensor.layout}"
            advice = "give it another type; a buffer that is computed may have persistent=False"
            raise UserError(f"{problem}: {advice}")
        if tensor.is_complex() and tensor.is_conj():
            tensors[name] = tensor.resolve_conj()
    return tensors, aliases


def restore(
    checkpoint: Checkpoint,
    model: nn.Module,
    optimizer: Any = None,
    average: Mapping[str, Tensor] = MappingProxyType({}),
) -> None:
    """Fill a model, in its final wrapping, and its optimizer from a checkpoint, bit for bit.

    Each rank reads only its boxes. The optimizer gets exactly the state in the checkpoint.
    `average`: averaged weights by parameter, to be filled, too.
    UserError names all tensors that are missing, left over, or of another shape or type.
    """
    try:
        targets, aliases = _model_tensors(model)
        _check_same_model(checkpoint, targets, aliases.keys() | _elsewhere(model, MODEL))
        for name, tensor in targets.items():
            fill(checkpoint, name, tensor)
        if optimizer is not None:
            _restore_optimizer(checkpoint, model, optimizer)
        for name, tensor in average.items():
            fill(checkpoint, AVERAGE + name, tensor)
    except (Damaged, FileNotFoundError) as error:
        problem = f"checkpoint {checkpoint.path} was damaged after it was chosen: {error}"
        raise UserError(f"{problem}; the same command again uses the newest whole one") from None


def _restore_optimizer(checkpoint: Checkpoint, model: nn.Module, optimizer: Any) -> None:
    saved: dict[str, list[str]] = {}
    for full in checkpoint.names(OPTIM):
        name, _, key = full.removeprefix(OPTIM).rpartition("/")
        saved.setdefault(name, []).append(key)
    trained = _trained(model, optimizer)
    known = {name for name, _ in trained} | _elsewhere(model, "")
    if unknown := sorted(set(saved) - known):
        problem = f"checkpoint {checkpoint.path} has optimizer state for {_some(unknown)}"
        why = "the recipe freezes other weights or has another optimizer"
        raise UserError(f"{problem}, which the optimizer here does not train: {why}")
    groups = _groups(optimizer)
    for name, parameter in trained:
        state, group = optimizer.state[parameter], groups[id(parameter)]
        old, new = to_tensors(state, group, optimizer.defaults), dict[str, Tensor]()
        state.clear()
        for key in saved.get(name, ()):
            full, tensor = f"{OPTIM}{name}/{key}", old.get(key)
            shape, dtype = checkpoint.info(full).shape, checkpoint.dtype(full)
            seen = None if tensor is None else _as_sharded(tensor, parameter)
            if (
                tensor is None
                or seen is None
                or (whole_shape(seen), tensor.dtype) != (shape, dtype)
            ):
                if not shape:  # torch keeps a scalar on the host, except for fused optimizers
                    device = parameter.device if group.get("fused") else torch.device("cpu")
                    tensor = torch.zeros((), dtype=dtype, device=device)
                elif shape == whole_shape(parameter):
                    tensor = torch.zeros_like(parameter.detach(), dtype=dtype)
                else:  # Adafactor, which is not sharded
                    tensor = torch.zeros(shape, dtype=dtype, device=parameter.device)
            fill(checkpoint, full, _as_sharded(tensor.detach(), parameter))
            new[key] = tensor
        from_tensors(new, state, group)


def _groups(optimizer: Any) -> dict[int, dict[str, Any]]:
    """The group of each parameter, by its id."""
    return {id(p): group for group in optimizer.param_groups for p in group["params"]}


def _elsewhere(model: nn.Module, prefix: str) -> set[str]:
    """The names of the parameters on other stages of a pipeline."""
    return {prefix + name for name in getattr(unwrap(model), "elsewhere", ())}


def _check_same_model(
    checkpoint: Checkpoint, targets: Mapping[str, Tensor], others: Set[str]
) -> None:
    saved, problems = set(checkpoint.names(MODEL)), list[str]()
    for name, tensor in targets.items():
        short = name.removeprefix(MODEL)
        if name not in saved | checkpoint.manifest.aliases.keys():
            problems.append(f"{short} is missing")
        elif (shape := checkpoint.info(name).shape) != (here := tuple(whole_shape(tensor))):
            problems.append(f"{short} is {list(shape)} there and {list(here)} here")
        elif (dtype := checkpoint.dtype(name)) != tensor.dtype:
            problems.append(f"{short} is {dtype} there and {tensor.dtype} here")
    extra = sorted(saved - set(targets) - others)
    problems += [f"{name.removeprefix(MODEL)} is not in this model" for name in extra]
    if problems:
        raise UserError(f"checkpoint {checkpoint.path} is of another model: {_some(problems)}")


def fill(checkpoint: Checkpoint, name: str, tensor: Tensor) -> None:
    """Read this rank's part of a tensor into it."""
    for offsets, box in boxes(local_part(tensor), held_runs(tensor)):
        checkpoint.read_into(name, offsets, box)


def _some(items: list[str]) -> str:
    return "; ".join([*items[:6], *([f"and {len(items) - 6} more"] if len(items) > 6 else [])])


def _model_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Parameters and persistent buffers, each once, and the other names of tied ones."""
    model = unwrap(model)
    for module in model.modules():
        if is_fsdp(module):
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
            tensors[first] = with_cut(tensor.detach(), cut_of(tensor))
        else:
            aliases[MODEL + name] = first
    return tensors, aliases


def _trained(model: nn.Module, optimizer: Any) -> list[tuple[str, Tensor]]:
    """The parameters that the optimizer trains, in the model's order.

    An optimizer of this rank's rows trains these in place of the whole parameters.
    """
    groups = optimizer.param_groups if optimizer is not None else ()
    trained = {id(p) for group in groups for p in group["params"]}
    rows = optimizer.rows if isinstance(optimizer, ShardedOptimizer) else {}
    named = [(name, rows.get(p, p)) for name, p in unwrap(model).named_parameters()]
    parameters = [(name, p) for name, p in named if id(p) in trained]
    assert len(parameters) == len(trained), "the optimizer trains parameters that the model lacks"
    return parameters


def _as_sharded(state: Tensor, parameter: Tensor) -> Tensor:
    """Optimizer state like this rank's part of a parameter: cut and sharded as the parameter."""
    if state.shape == parameter.shape:
        with_cut(state, cut_of(parameter))
    if not is_sharded(parameter) or is_sharded(state) or not state.dim():
        return state
    if state.shape != parameter.to_local().shape:
        return state
    from torch.distributed.tensor import DTensor

    whole = {"shape": parameter.shape, "stride": parameter.stride()}
    sharded = DTensor.from_local(
        state, parameter.device_mesh, parameter.placements, run_check=False, **whole
    )
    return with_cut(sharded, cut_of(parameter))
