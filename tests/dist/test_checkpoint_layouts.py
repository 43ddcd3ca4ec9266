"""Tensors cut in one or two dimensions: saved in one layout, read in every other, equal bit for
bit.
"""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Join, run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from windlass.checkpoint.choose import choose_checkpoint
from windlass.checkpoint.load import Checkpoint, open_checkpoint
from windlass.checkpoint.save import Writer
from windlass.checkpoint.shard import shard_of
from windlass.checkpoint.state_dict import fill, gather_shard, restore

SHAPES = {
    "even": (8, 4, 4),
    "uneven": (7, 5),
    "tall": (13, 1),
    "wide": (1, 11),  # empty on most ranks
    "empty": (0, 4),
    "vector": (3,),
    "scalar": (),
}
R, S0, S1 = Replicate(), Shard(0), Shard(1)
INNER_FIRST = _StridedShard(0, split_factor=2)  # FSDP2 of rows that tensor parallelism has cut
LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[Any, ...]]] = {
    "whole": ((), ()),
    "rows": ((2,), (S0,)),
    "columns": ((2,), (S1,)),
    "rows of 4": ((4,), (S0,)),
    "columns of 4": ((4,), (S1,)),
    "rows, columns": ((2, 2), (S0, S1)),
    "columns, rows": ((2, 2), (S1, S0)),
    "rows twice": ((2, 2), (S0, S0)),
    "rows twice, inner first": ((2, 2), (INNER_FIRST, S0)),
    "columns twice, inner first": ((2, 2), (_StridedShard(1, split_factor=2), S1)),
    "replicated columns": ((2, 2), (R, S1)),
    "columns, replicated": ((2, 2), (S1, R)),
    "a part of the mesh": ((2, 2), (S1,)),
    "rows on one, columns on the other": ((2, 2), (S0, R, S1)),
}


def numbers(name: str) -> Tensor:
    shape = SHAPES[name]
    return torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape) + 100 * len(name)


def tensors(layout: str) -> dict[str, Tensor]:
    """Every tensor cut by torch; dimensions that a tensor lacks leave it whole."""
    sizes, placements = LAYOUTS[layout]
    if not sizes:
        return {name: numbers(name) for name in SHAPES}
    cut: dict[str, Tensor] = {}
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("a", "b")[: len(sizes)])
    for number, name in enumerate(SHAPES):
        whole, part, wanted = numbers(name), mesh, list(placements)
        if layout == "a part of the mesh":
            part = mesh["b"]
        elif len(wanted) > len(sizes):  # tensors with other replica groups, in turns
            wanted = wanted[number % 2 :][:2]
        wanted = [p if p.is_replicate() or p.dim < whole.dim() else R for p in wanted]
        cut[name] = distribute_tensor(whole, part, wanted, src_data_rank=None)
    return cut


def opened(folder: str | Path) -> Checkpoint:
    choice = choose_checkpoint(folder)
    assert choice is not None
    return open_checkpoint(choice.path, deep=False)


def in_group(join: Join) -> None:
    ranks = {"rank": join.rank, "world_size": join.world}
    dist.init_process_group("gloo", store=join.store or dist.HashStore(), **ranks)


def save(folder: str | Path, state: Any, rank: int, world: int) -> int:
    writer = Writer(Path(folder) / "checkpoints", rank, world, deadline=60, background=False)
    writer.write(1, state, {})
    [outcome] = writer.poll()
    assert not outcome.error, (folder, outcome.error)
    return sum(box.tensor.nbytes for box in state.boxes)


def write(join: Join, folder: str, layouts: list[str]) -> dict[str, int]:
    """Save every layout; the bytes that this rank has written."""
    in_group(join)
    ranks = join.rank, join.world
    states = {layout: shard_of(tensors(layout), {}, *ranks) for layout in layouts}
    return {
        layout: save(f"{folder}/{layout}-{join.world}", state, *ranks)
        for layout, state in states.items()
    }


def read(join: Join, folders: list[str], layouts: list[str]) -> int:
    """Read every checkpoint in every layout and compare with torch's own cut."""
    in_group(join)
    compared = 0
    cut = [(name, tensor) for layout in layouts for name, tensor in tensors(layout).items()]
    for checkpoint in map(opened, folders):
        for name, expected in cut:
            target = expected.clone().fill_(math.nan)
            fill(checkpoint, name, target)
            pair = (t.to_local() if isinstance(t, DTensor) else t for t in (target, expected))
            assert torch.equal(*pair), (checkpoint.path, name, target)
            compared += 1
    return compared


def layouts_of(world: int) -> list[str]:
    return [name for name, (sizes, _) in LAYOUTS.items() if math.prod(sizes) == world or not sizes]


@pytest.mark.dist
def test_every_layout_to_every_other(tmp_path: Path) -> None:
    folders = []
    total = sum(numbers(name).nbytes for name in SHAPES)
    for world in (2, 4):
        layouts = layouts_of(world)
        for layout in layouts:
            (tmp_path / f"{layout}-{world}").mkdir()
            folders.append(str(tmp_path / f"{layout}-{world}"))
        written = run_ranks(write, world, str(tmp_path), layouts, timeout=120)
        for layout in layouts:  # each element once, and no rank writes much more than its part
            sizes = [of_rank[layout] for of_rank in written]
            assert sum(sizes) == total, layout
            assert max(sizes) < total * 0.75, (layout, sizes)
    for checkpoint in map(opened, folders):
        for name in SHAPES:
            assert torch.equal(checkpoint.tensor(name), numbers(name)), (checkpoint.path, name)
    for world in (2, 4):
        layouts = layouts_of(world)
        compared = run_ranks(read, world, folders, layouts, timeout=300)
        assert compared == [len(folders) * len(layouts) * len(SHAPES)] * world


# -- FSDP2 over tensor parallelism


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.norm(x)).relu()).square().sum()


def trained(world: int, layout: str, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model: nn.Module = Net()
    if layout == "fsdp x tp":  # the norm is whole on the ranks of tp
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        model = fully_shard(parallelize_module(model, mesh["tp"], plan), mesh=mesh["dp"])
    else:
        model = fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(4, 6)).backward()
    optimizer.step()
    optimizer.zero_grad()


def cross(join: Join, folder: str) -> int:
    """Restore each layout's checkpoint in both layouts, and save it again: equal bit for bit."""
    in_group(join)

    def saved(name: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> Checkpoint:
        state = gather_shard(model, optimizer, join.rank, join.world)
        save(f"{folder}/{name}", state, join.rank, join.world)
        dist.barrier()
        return opened(f"{folder}/{name}")

    layouts = ("fsdp x tp", "fsdp")
    checkpoints = {layout: saved(layout, *trained(join.world, layout, 2)) for layout in layouts}
    equal = 0
    for (written, checkpoint), layout in itertools.product(checkpoints.items(), layouts):
        model, optimizer = trained(join.world, layout, 0)
        restore(checkpoint, model, optimizer)
        again = saved(f"{written} as {layout}", model, optimizer)
        assert set(again.names()) == set(checkpoint.names())
        for name in again.names():
            assert torch.equal(again.tensor(name), checkpoint.tensor(name)), (layout, name)
            equal += 1
        step(model, optimizer)
    return equal


@pytest.mark.dist
def test_fsdp_over_tensor_parallelism(tmp_path: Path) -> None:
    layouts = ("fsdp x tp", "fsdp")
    for name in (*layouts, *(f"{a} as {b}" for a in layouts for b in layouts)):
        (tmp_path / name).mkdir()
    assert run_ranks(cross, 4, str(tmp_path), timeout=120) == [4 * 6 * 4] * 4
