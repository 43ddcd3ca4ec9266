"""Sums, agreement and exchanges between ranks; the device, its settings, and the size of a sharding
group.
"""

import math
from typing import Any

import pytest
import torch
from harness import Join, grad_norm, recipe, run_ranks

from windlass.errors import RunFailed, UserError
from windlass.parallel.collectives import (
    max_async,
    norm_and_sum,
    sum_async,
    sum_over_ranks,
)
from windlass.parallel.ranks import choose_device, init_ranks
from windlass.parallel.env import DistEnv
from windlass.parallel.parallelize import resolve_precision
from windlass.recipe import Recipe
from windlass.recipe.strategies import STRATEGIES

pytestmark = pytest.mark.dist


def ones_on(rank: int) -> torch.nn.Parameter:
    """A parameter that all ranks hold, whose gradient is not finite on rank 2."""
    parameter = torch.nn.Parameter(torch.zeros(4))
    parameter.grad = torch.full((4,), math.inf if rank == 2 else 1.0)
    return parameter


def exchange(join: Join) -> dict[str, Any]:
    with join(recipe()) as ranks:
        first = sum_async([2**53 + ranks.rank, 1], ranks)
        second = sum_async([0.1 * (ranks.rank + 1)], ranks)
        flags = max_async([ranks.rank == 1, ranks.rank], ranks)
        return {
            "ints": first.wait(),
            "again": first.wait(),
            "floats": second.wait(),
            "tensor": sum_over_ranks(torch.full((2,), 1.5, dtype=torch.float64), ranks),
            "flags": flags.wait(),
            "norm": norm_and_sum([ones_on(ranks.rank)], torch.tensor(ranks.rank), ranks),
            "gathered": [ranks.all_gather_object("x", n * ranks.rank) for n in (1, 10)],
            "broadcast": [ranks.broadcast_object("y", {"from": [n, ranks.rank]}) for n in (1, 2)],
        }


@pytest.mark.parametrize("world", [1, 3])
def test_what_ranks_tell_each_other(world: int):
    for seen in run_ranks(exchange, world):
        ints = [world * 2**53 + sum(range(world)), world]  # exact beyond float64
        assert seen["ints"] == seen["again"] == ints
        assert seen["floats"] == pytest.approx([0.1 * sum(range(1, world + 1))])
        assert seen["tensor"].tolist() == [1.5 * world] * 2
        assert [float(x) for x in seen["norm"]] == ([math.inf, 3.0] if world == 3 else [2.0, 0.0])
        assert seen["flags"] == [world > 1, world - 1]  # the largest, on every rank
        assert seen["gathered"] == [[n * rank for rank in range(world)] for n in (1, 10)]
        assert seen["broadcast"] == [{"from": [n, 0]} for n in (1, 2)]


def test_the_norm_is_as_exact_as_float64_sums_of_float32_gradients():
    draw = torch.Generator().manual_seed(0)
    sizes = (3000 * 512, 2**16 + 1, 2**16, 2**12, 70, 1, 0)
    grads = [torch.randn(n, generator=draw) / (i + 1) for i, n in enumerate(sizes)]
    grads[0] = grads[0].view(3000, 512).T  # not contiguous
    parameters = [torch.nn.Parameter(torch.zeros_like(t)) for t in grads]
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad
    others = [torch.nn.Parameter(torch.zeros(3)), parameters[0]]  # no gradient; tied
    with init_ranks(DistEnv(), recipe()) as ranks:
        norm = grad_norm([*parameters, *others], ranks)
    exact = torch.nn.utils.get_total_norm([grad.double() for grad in grads])
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(exact.item(), rel=2e-7)


def test_what_does_not_go_together_is_refused():
    with pytest.raises(UserError, match=r"parallel.strategy"):
        init_ranks(DistEnv(world=2, local_world=2), recipe(parallel__strategy="single"))
    with pytest.raises(UserError, match=r"parallel.shard_size = 3"):
        STRATEGIES["hybrid_shard"].sizes(4, 3)
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match=r"parallel.device"):
            init_ranks(DistEnv(), recipe(parallel__device="cuda"))
        assert choose_device("auto", DistEnv()) == torch.device("cpu")


@pytest.mark.parametrize(
    ("wanted", "world", "ranks_of_host", "size"),
    [
        *((0, world, 0, size) for world, size in ((1, 1), (2, 1), (3, 1), (4, 2), (6, 3))),
        *((wanted, 8, 4, size) for wanted, size in ((0, 4), (8, 8), (2, 2))),
    ],
)
def test_size_of_a_sharding_group(wanted: int, world: int, ranks_of_host: int, size: int):
    sizes = STRATEGIES["hybrid_shard"].sizes(world, wanted, ranks_of_host)
    assert (sizes.dp_replicate, sizes.dp_shard) == (world // size, size)


def test_a_store_that_nobody_holds_is_given_up_in_time():
    def alone(_: Join) -> str:
        env = DistEnv(rank=1, world=2, local_rank=1, local_world=2, port=9, launcher="environment")
        with pytest.raises(RunFailed) as failed:
            init_ranks(env, recipe(parallel__startup_timeout_seconds=1))
        return str(failed.value)

    assert "rank 1 of 2 did not meet the others at 127.0.0.1:9" in run_ranks(alone, 1)[0]


def test_precision_follows_the_device_and_tf32_is_asked_for():
    settings = Recipe.model_validate({}).train
    assert settings.precision == "auto" and not settings.tf32
    assert resolve_precision(settings.precision, torch.device("cpu")) == "fp32"
    with init_ranks(DistEnv(), recipe(train__tf32=True, parallel__device="cpu")):
        assert torch.get_float32_matmul_precision() == "highest"  # a CPU has none: its bits stay
