"""Sums, agreement and exchanges between ranks, and the bounds of a group."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from harness import Join, recipe, run_ranks

from windlass.errors import RunFailed, UserError
from windlass.parallel.env import DistEnv
from windlass.parallel.dist import choose_device, shard_size, shared_device, init_ranks
from windlass.parallel.collectives import Agreement, global_grad_norm, sum_async, sum_over_ranks

pytestmark = pytest.mark.dist


def exchange(join: Join) -> dict[str, Any]:
    with join(recipe()) as ranks:
        first, second = sum_async([2**53 + ranks.rank, 1], ranks), sum_async([0.1 * (ranks.rank + 1)], ranks)
        agreement, said = Agreement(ranks), []
        for step in range(4):
            said.append(agreement.result())
            agreement.post([int(step == 2 and ranks.rank == 1), step])
        said.append(agreement.result())
        return {
            "ints": first.wait(),
            "again": first.wait(),
            "floats": second.wait(),
            "tensor": sum_over_ranks(torch.full((2,), 1.5, dtype=torch.float64), ranks),
            "said": said,
            "now": agreement.now([ranks.rank]),
            "gathered": [ranks.all_gather_object("x", {"rank": ranks.rank}), ranks.all_gather_object("x", ranks.rank * 10)],
            "shared": [ranks.broadcast_object("y", ranks.rank), ranks.broadcast_object("y", f"from {ranks.rank}")],
            "hosts": len(ranks.hosts),
        }


@pytest.mark.parametrize("world", [1, 3])
def test_what_ranks_tell_each_other(world: int):
    for found in run_ranks(exchange, world):
        assert found["ints"] == found["again"] == [world * 2**53 + sum(range(world)), world]  # exact beyond float64
        assert found["floats"] == pytest.approx([0.1 * sum(range(1, world + 1))])
        assert found["tensor"].tolist() == [1.5 * world] * 2
        flag = int(world > 1)
        assert found["said"] == [None, [0, 0], [0, 1], [flag, 2], [0, 3]]  # one step later, on every rank
        assert found["now"] == [world - 1]
        assert found["gathered"] == [[{"rank": r} for r in range(world)], [10 * r for r in range(world)]]
        assert found["shared"] == [0, "from 0"]
        assert found["hosts"] == world


def test_the_norm_is_as_exact_as_float64_sums_of_float32_gradients():
    draw = torch.Generator().manual_seed(0)
    big, small = torch.randn(3000, 512, generator=draw), 1e-3 * torch.randn(70, generator=draw)
    parameters = [torch.nn.Parameter(torch.zeros_like(t)) for t in (big, small)]
    for parameter, grad in zip(parameters, (big, small), strict=True):
        parameter.grad = grad
    frozen, tied = torch.nn.Parameter(torch.zeros(3)), parameters[0]
    with init_ranks(DistEnv(), recipe()) as ranks:
        norm = global_grad_norm([*parameters, frozen, tied], ranks)
    exact = (big.double().square().sum() + small.double().square().sum()).sqrt()
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(exact.item(), rel=2e-7)


def test_a_single_process_needs_no_process_group():
    with init_ranks(DistEnv(), recipe()) as ranks:
        assert not torch.distributed.is_initialized()
        assert (ranks.rank, ranks.world, ranks.main, ranks.strategy, ranks.mesh) == (0, 1, True, "single", None)
        assert ranks.all_gather_object("x", 1) == [1]
        ranks.set_timeout(1.0)


@pytest.mark.parametrize("strategy", ["ddp", "full_shard", "hybrid_shard"])
def test_a_world_of_one_can_be_wrapped_like_many(strategy: str):
    def one(join: Join) -> tuple[Any, ...]:
        with join(recipe(parallel__strategy=strategy)) as ranks:
            return ranks.strategy, ranks.mesh.shape if ranks.mesh else None

    shape = {"ddp": None, "full_shard": (1,), "hybrid_shard": (1, 1)}[strategy]
    assert run_ranks(one, 1) == [(strategy, shape)]


def test_single_on_many_ranks_is_refused():
    with pytest.raises(UserError, match="is for one rank, and there are 2"):
        init_ranks(DistEnv(world=2, local_world=2), recipe(parallel__strategy="single"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_where_there_is_none_is_refused():
    with pytest.raises(UserError, match="finds no CUDA device"):
        init_ranks(DistEnv(), recipe(parallel__device="cuda"))
    assert choose_device("auto", DistEnv()) == torch.device("cpu")


def test_two_ranks_on_one_device_are_seen():
    assert shared_device([["a", "gpu-1"], ["a", "gpu-2"], ["b", "gpu-1"]]) is None
    assert shared_device([["a", ""], ["a", ""]]) is None
    assert "ranks 0 and 2 on a" in str(shared_device([["a", "gpu-1"], ["b", "gpu-1"], ["a", "gpu-1"]]))


@pytest.mark.parametrize(
    ("wanted", "place", "size"),
    [
        (0, DistEnv(world=1), 1),
        (0, DistEnv(world=2, local_world=2), 1),
        (0, DistEnv(world=4, local_world=4), 2),
        (0, DistEnv(world=6, local_world=6), 3),
        (0, DistEnv(world=3, local_world=3), 1),
        (0, DistEnv(world=8, local_world=4, nodes=2), 4),
        (8, DistEnv(world=8, local_world=4, nodes=2), 8),
        (2, DistEnv(world=8, local_world=4, nodes=2), 2),
    ],
)
def test_size_of_a_sharding_group(wanted: int, place: DistEnv, size: int):
    assert shard_size(wanted, place) == size


def test_a_sharding_group_that_does_not_divide_is_refused():
    with pytest.raises(UserError, match="shard_size = 3 does not divide the 4 ranks; the nearest that does is"):
        shard_size(3, DistEnv(world=4, local_world=4))


def test_a_meeting_that_nobody_comes_to_ends_in_time():
    def alone(join: Join) -> str:
        place = dataclasses.replace(
            join.place, rank=1, world=2, local_world=2, local_rank=1, port=9, launcher="environment"
        )
        with pytest.raises(RunFailed) as failed:
            init_ranks(place, recipe(parallel__startup_timeout_seconds=1))
        return str(failed.value)

    (text,) = run_ranks(alone, 1)
    assert text.startswith("rank 1 of 2 did not meet the others at 127.0.0.1:9: ")
