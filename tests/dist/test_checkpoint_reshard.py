"""A checkpoint of any world and strategy, loaded on any other: parameters and moments equal bit for
bit.
"""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Join, run_ranks
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from toy import micro_batch, toy

from windlass.checkpoint.choose import choose_checkpoint
from windlass.checkpoint.load import open_checkpoint
from windlass.checkpoint.save import Writer
from windlass.checkpoint.state_dict import gather_shard, named_state, restore
from windlass.optim.muon import MuonAdamW
from windlass.optim.shard import ShardedOptimizer, own_rows, placement

HYBRID_MESH = {1: (1, 1), 2: (2, 1), 3: (1, 3), 4: (2, 2)}
Layout = tuple[str, int]  # a strategy and its ranks
ONE, FULL, HYBRID = ("ddp", 1), ("full_shard", 4), ("hybrid_shard", 4)


def build(variant: str, strategy: str, world: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model with rows of 29, 6 and 2, uneven over 3 and 4 ranks, of which some have none; a
    buffer, an empty one, an unused parameter.
    """
    model: nn.Module = toy(3, torch.float32, width=2, tied=variant == "tied")
    model.register_buffer("empty", torch.empty(0, 4))
    if variant == "frozen":
        model.layers[1].requires_grad_(False)
        model.embedding.requires_grad_(False)
    if strategy in ("ddp", "shard_optim"):
        model = nn.parallel.DistributedDataParallel(model) if world > 1 else model
    else:
        mesh = init_device_mesh("cpu", (world,))
        if strategy == "hybrid_shard":
            names = ("replicate", "shard")
            mesh = init_device_mesh("cpu", HYBRID_MESH[world], mesh_dim_names=names)
        for block in model.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    trained, rows = [p for p in model.parameters() if p.requires_grad], {}
    if strategy == "shard_optim":
        mesh = init_device_mesh("cpu", (world,))
        rows = {
            p: nn.Parameter(own_rows(p, mesh, placement(p, mesh, any_row=p.dim() == 2)))
            for p in trained
        }
        trained = list(rows.values())
    if variant == "muon":
        how = {"lr": 1e-2, "weight_decay": 0.1}
        matrices = {"params": [p for p in trained if p.ndim == 2], "muon": True}
        vectors = {"params": [p for p in trained if p.ndim != 2], "muon": False}
        optimizer: Any = MuonAdamW([matrices | how, vectors | how])
    else:
        optimizer = torch.optim.AdamW(trained, lr=1e-2, fused=strategy != "ddp")
    return model, ShardedOptimizer(rows, optimizer, mesh) if rows else optimizer


def whole(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Every tensor of the state, gathered by torch itself."""
    tensors, _ = named_state(model, optimizer)
    gathered = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in tensors.items()}
    return {name: tensor.clone() for name, tensor in gathered.items()}


def write(rank: int, world: int, folder: str, variant: str, strategy: str) -> None:
    model, optimizer = build(variant, strategy, world)
    for step in range(2):
        optimizer.zero_grad()
        model(*micro_batch(world * step + rank)).backward()
        optimizer.step()
    writer = Writer(Path(folder) / "checkpoints", rank, world, deadline=60, piece_bytes=64)
    shard = gather_shard(model, optimizer, rank, world)
    sizes: list[Any] = [None] * world
    dist.all_gather_object(sizes, sum(box.tensor.nbytes for box in shard.boxes))
    assert world == 1 or max(sizes) < 0.75 * sum(sizes), "a rank writes much more than its part"
    writer.write(2, shard, {"step": 2})
    [outcome] = writer.wait()
    assert not outcome.error, outcome
    gathered = whole(model, optimizer)
    if rank == 0:
        save_file(gathered, Path(folder) / "whole.safetensors")


def read(rank: int, world: int, folders: list[str], variant: str, strategy: str) -> int:
    """Restore each checkpoint and compare every tensor with what was saved; how many were equal."""
    equal = 0
    for folder in folders:
        expected = load_file(Path(folder) / "whole.safetensors")
        choice = choose_checkpoint(folder)
        assert choice is not None
        checkpoint = open_checkpoint(choice.path)
        model, optimizer = build(variant, strategy, world)
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(float("nan"))
        for _ in range(2):  # the second time in place, with the state that is there now
            restore(checkpoint, model, optimizer)
            restored = whole(model, optimizer)
            assert restored.keys() == expected.keys(), (folder, restored.keys() ^ expected.keys())
            for name, tensor in expected.items():
                assert tensor.dtype == restored[name].dtype, (folder, name)
                for found in (restored[name], checkpoint.tensor(name)):
                    assert torch.equal(tensor, found), (folder, name)
        equal += len(expected)
        model(*micro_batch(0)).backward()  # and the optimizer steps from there
        optimizer.step()
    return equal


def in_group(join: Join, fn: Callable[..., Any], *args: Any) -> Any:
    """Run `fn(rank, world, *args)` in a process group, also in a world of 1, which FSDP2 needs."""
    ranks = {"rank": join.rank, "world_size": join.world}
    dist.init_process_group("gloo", store=join.store or dist.HashStore(), **ranks)
    result = fn(join.rank, join.world, *args)
    dist.barrier()
    return result


def check_matrix(folder: Path, variant: str, saved: list[Layout], loaded: list[Layout]) -> None:
    """Every layout saved, and read by every other; each rank of each reader compares the same
    number of tensors.
    """
    folders: list[str] = []
    for strategy, world in saved:
        (folder / f"{strategy}-{world}").mkdir()
        folders.append(str(folder / f"{strategy}-{world}"))
        run_ranks(in_group, world, write, folders[-1], variant, strategy, timeout=120)
    equal = []
    for strategy, world in loaded:
        equal += run_ranks(in_group, world, read, folders, variant, strategy, timeout=120)
    assert len(equal) == sum(world for _, world in loaded)
    assert min(equal) == max(equal) >= 5 * len(saved)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("variant", "saved", "loaded"),
    [
        ("untied", [FULL, HYBRID, ("shard_optim", 2)], [ONE, FULL]),
        ("tied", [("ddp", 2), ("full_shard", 3)], [HYBRID, ("shard_optim", 3)]),
        ("frozen", [("full_shard", 2)], [ONE, FULL]),
        ("muon", [HYBRID, ("shard_optim", 3)], [ONE, FULL, ("shard_optim", 2)]),
    ],
)
def test_sample(tmp_path: Path, variant: str, saved: list[Layout], loaded: list[Layout]) -> None:
    check_matrix(tmp_path, variant, saved, loaded)


@pytest.mark.dist
@pytest.mark.full
@pytest.mark.parametrize("variant", ["untied", "tied", "frozen", "muon"])
def test_every_world_and_strategy_to_every_other(tmp_path: Path, variant: str) -> None:
    strategies = ("ddp", "shard_optim", "full_shard", "hybrid_shard")
    cells = list(itertools.product(strategies, (1, 2, 3, 4)))
    check_matrix(tmp_path, variant, cells, cells)
