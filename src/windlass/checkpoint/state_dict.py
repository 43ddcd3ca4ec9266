"""The state of a training as named tensors, to the shard of a checkpoint that a rank writes, and back.

Names do not depend on the model's wrapping: `model/<parameter or buffer>`,
`optim/<parameter>/<key>`, and `average/<parameter>` with `train.average`. Tied weights have one
name; their other names are aliases. A shard has boxes of tensors. Every element of a tensor is in one
box of one rank, although several ranks may hold it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from windlass.checkpoint.format import AVERAGE, DTYPES, MODEL, Checkpoint, Damaged
from windlass.errors import UserError
from windlass.model.sharding import (
    boxes_of,
    cut_of,
    is_fsdp,
    is_sharded,
    local_part,
    sharding_dim,
    unwrap,
    whole_shape,
    with_cut,
)
from windlass.optim.shard import ShardedOptimizer
from windlass.parallel.pipeline import stage_of

if TYPE_CHECKING:
    from windlass.parallel.ranks import Ranks

TYPE_NAMES = {getattr(torch, name): key for key, (name, _) in DTYPES.items()}
ALIGNMENT = 64  # bytes, of the first number in a file
OPTIM = "optim/"


def gather_shard(
    model: nn.Module,
    optimizer: Any = None,
    ranks: Ranks | None = None,
    average: Mapping[str, Tensor] = MappingProxyType({}),
    base: Collection[str] = (),
) -> Shard:
    """The part of model, optimizer and averaged weights that this rank writes, as views, without
    the tensors in `base`. Replicas must be equal, and the ranks do not communicate."""
    tensors, aliases = named_state(model, optimizer)
    tensors |= {AVERAGE + name: tensor for name, tensor in average.items()}
    tensors = {name: tensor for name, tensor in tensors.items() if name not in base}
    aliases = {alias: name for alias, name in aliases.items() if name in tensors}
    stage = stage_of(model)
    for name in stage.copies if stage else ():
        inside = (f"{MODEL}{name}", f"{AVERAGE}{name}", f"{OPTIM}{name}/")
        tensors = {name: t for name, t in tensors.items() if not name.startswith(inside)}
    if ranks is None:
        return shard_of(tensors, aliases)
    return shard_of(tensors, aliases, ranks.rank, ranks.world, ranks.mesh.sizes.pp)


def named_state(
    model: nn.Module, optimizer: Any = None
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Every tensor of model and optimizer by name (a sharded one as a DTensor), and the aliases;
    UserError if a checkpoint cannot hold one."""
    tensors, aliases = _model_tensors(model)
    for name, parameter, group in _trained(model, optimizer):
        state = to_tensors(optimizer.state.get(parameter, {}), group, optimizer.defaults)
        for key in sorted(state):
            tensors[f"{OPTIM}{name}/{key}"] = _cut_like(state[key].detach(), parameter)
    for name, tensor in tensors.items():
        if tensor.dtype not in TYPE_NAMES or tensor.layout != torch.strided:
            problem = f"a checkpoint cannot hold {name}, of {tensor.dtype}, {tensor.layout}"
            advice = "give it another type; a buffer that is computed may have persistent=False"
            raise UserError(f"{problem}: {advice}")
    return tensors, aliases


def restore(
    checkpoint: Checkpoint,
    model: nn.Module,
    optimizer: Any = None,
    average: Mapping[str, Tensor] = MappingProxyType({}),
) -> None:
    """Fill a wrapped model, its optimizer and an average from a checkpoint, bit for bit.

    Each rank reads only its boxes. Weights of the checkpoint's base stay (see `fill_base`).
    UserError names all tensors that are missing, left over, or of another shape or type.
    """
    targets, aliases = _model_tensors(model)
    if base := checkpoint.manifest.base:
        targets = {name: t for name, t in targets.items() if name not in base.weights}
    saved, problems = set(checkpoint.names(MODEL)), list[str]()
    present = saved | checkpoint.manifest.aliases.keys()
    for name, tensor in targets.items():
        short = name.removeprefix(MODEL)
        if name not in present:
            problems.append(f"{short} is missing")
            continue
        shape, dtype = checkpoint.info(name).shape, checkpoint.dtype(name)
        if shape != (here := tuple(whole_shape(tensor))):
            problems.append(f"{short} is {list(shape)} there and {list(here)} here")
        elif dtype != tensor.dtype and {dtype, tensor.dtype} != {torch.float32, torch.bfloat16}:
            problems.append(f"{short} is {dtype} there and {tensor.dtype} here")
    extra = saved - targets.keys() - aliases.keys() - _elsewhere(model, MODEL)
    problems += [f"{name.removeprefix(MODEL)} is not in this model" for name in sorted(extra)]
    if problems:
        raise UserError(f"checkpoint {checkpoint.path} is of another model: {_some(problems)}")
    targets |= {AVERAGE + name: tensor for name, tensor in average.items()}
    try:
        for name, tensor in targets.items():
            fill(checkpoint, name, tensor)
        if optimizer is not None:
            _restore_optimizer(checkpoint, model, optimizer)
    except (Damaged, FileNotFoundError) as error:
        problem = f"checkpoint {checkpoint.path} was damaged after it was chosen: {error}"
        raise UserError(f"{problem}; the same command again uses the newest whole one") from None


def fill(checkpoint: Checkpoint, name: str, tensor: Tensor) -> None:
    """Read this rank's part of a tensor into it, in the tensor's precision."""
    dtype = checkpoint.dtype(name)
    for offsets, box in boxes_of(tensor):
        part = box if dtype == box.dtype else torch.empty_like(box, dtype=dtype)
        checkpoint.read_into(name, offsets, part)
        if part is not box:
            box.detach().copy_(part)


def _restore_optimizer(checkpoint: Checkpoint, model: nn.Module, optimizer: Any) -> None:
    saved: dict[str, list[str]] = {}
    for full in checkpoint.names(OPTIM):
        name, _, key = full.removeprefix(OPTIM).rpartition("/")
        saved.setdefault(name, []).append(key)
    trained = _trained(model, optimizer)
    if unknown := sorted(saved.keys() - {name for name, *_ in trained} - _elsewhere(model, "")):
        problem = f"checkpoint {checkpoint.path} has optimizer state for {_some(unknown)}"
        why = "the recipe freezes other weights or has another optimizer"
        raise UserError(f"{problem}, which the optimizer here does not train: {why}")
    for name, parameter, group in trained:
        before = dict(optimizer.state[parameter])
        optimizer.state[parameter].clear()
        tensors = dict[str, Tensor]()
        for key in saved.get(name, ()):
            full = f"{OPTIM}{name}/{key}"
            shape, kind = checkpoint.info(full).shape, {"dtype": checkpoint.dtype(full)}
            like = parameter if shape == whole_shape(parameter) else before.get(key)
            if like is not None and shape == whole_shape(like):
                tensor = torch.zeros_like(like.detach(), **kind)
            else:  # torch keeps a scalar on the host, except for fused optimizers
                on_host = not shape and not group.get("fused")
                tensor = torch.zeros(shape, device="cpu" if on_host else parameter.device, **kind)
            fill(checkpoint, full, _cut_like(tensor, parameter))
            tensors[key] = tensor
        from_tensors(tensors, optimizer.state[parameter], group)


def to_tensors(
    state: Mapping[str, Tensor], group: Mapping[str, Any], defaults: Mapping[str, Any]
) -> dict[str, Tensor]:
    """The state of a parameter of `group`, with the counts that `pytorch_optimizer` holds in the
    group; `defaults` are the optimizer's settings."""
    counts = {key: n for key, n in group.items() if type(n) is int and key not in defaults}
    tensors = {f"group.{key}": torch.tensor(n) for key, n in counts.items()} if state else {}
    return {**state, **tensors}


def from_tensors(
    tensors: Mapping[str, Tensor], state: dict[str, Any], group: dict[str, Any]
) -> None:
    """Put tensors of `to_tensors` into an empty state, and the counts into the group."""
    for key, tensor in tensors.items():
        if key.startswith("group."):
            group[key.removeprefix("group.")] = int(tensor)
        else:
            state[key] = tensor


def _some(items: list[str]) -> str:
    return "; ".join([*items[:6], *([f"and {len(items) - 6} more"] if len(items) > 6 else [])])


def _elsewhere(model: nn.Module, prefix: str) -> set[str]:
    """The names of the parameters on other stages of a pipeline."""
    stage = stage_of(model)
    return {prefix + name for name in stage.elsewhere} if stage else set()


def _model_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Parameters and persistent buffers, each once, and the other names of tied ones."""
    model, temporary = unwrap(model), set[str]()
    for prefix, module in model.named_modules(remove_duplicate=False):
        if is_fsdp(module):
            module.reshard()  # an evaluation under `shard_grad_op` leaves parameters gathered
        names = (f"{prefix}.{name}" for name in module._non_persistent_buffers_set)
        temporary |= {name.removeprefix(".") for name in names}
    named: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    buffers = model.named_buffers(remove_duplicate=False)
    named |= {name: buffer for name, buffer in buffers if name not in temporary}
    first_names, tensors, aliases = dict[int, str](), dict[str, Tensor](), dict[str, str]()
    for name, tensor in named.items():
        first = first_names.setdefault(id(tensor), MODEL + name)
        if first == MODEL + name:
            tensors[first] = _cut_like(tensor.detach(), tensor)
        else:
            aliases[MODEL + name] = first
    return tensors, aliases


def _trained(model: nn.Module, optimizer: Any) -> list[tuple[str, Tensor, dict[str, Any]]]:
    """The parameters that the optimizer trains, or this rank's rows of them, in the model's order,
    each with its group."""
    groups = optimizer.param_groups if optimizer is not None else ()
    group_of = {id(p): group for group in groups for p in group["params"]}
    rows = optimizer.rows if isinstance(optimizer, ShardedOptimizer) else {}
    named = [(name, rows.get(p, p)) for name, p in unwrap(model).named_parameters()]
    trained = [(name, p, group_of[id(p)]) for name, p in named if id(p) in group_of]
    assert len(trained) == len(group_of), "the optimizer trains parameters that the model lacks"
    return trained


def _cut_like(state: Tensor, parameter: Tensor) -> Tensor:
    """A tensor, cut over `tp` like a parameter if it has the parameter's shape."""
    return with_cut(state, cut_of(parameter)) if state.shape == parameter.shape else state


@dataclass(frozen=True)
class Box:
    name: str
    tensor: Tensor  # the box, a view of the tensor on its device
    shape: tuple[int, ...]  # of the whole tensor
    offsets: tuple[int, ...]  # of the box in it


@dataclass(frozen=True)
class Shard:
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
    groups: dict[tuple[tuple[int, int, int], ...], dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(divisions(tensor), {})[name] = tensor
    boxes = list[Box]()
    for divided, held in groups.items():
        ranks = list(peers)  # that hold the same box of these tensors
        for apart, size, own in divided:
            ranks = [peer for peer in ranks if (peer - first_rank) // apart % size == own]
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


def divisions(tensor: Tensor) -> tuple[tuple[int, int, int], ...]:
    """For each dimension of the mesh that divides a tensor: the ranks from one part to the next, the
    number of parts, and this rank's part."""
    parts = list[tuple[int, int, int]]()
    if (cut := cut_of(tensor)) is not None:
        parts.append((1, cut.peers.size, cut.peers.rank))  # neighbours differ in `tp`
    if is_sharded(tensor) and (dim := sharding_dim(tensor)) is not None:
        mesh = tensor.device_mesh
        if (size := mesh.size(dim)) > 1:
            first, second = mesh.mesh.movedim(dim, 0).reshape(size, -1)[:2, 0].tolist()
            parts.append((second - first, size, mesh.get_local_rank(dim)))
    return tuple(parts)
