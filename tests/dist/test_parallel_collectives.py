"""Sums, agreement and exchanges between ranks, also with a fault on one, and with unequal memory; the
device, and the size of a sharding group.
"""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from equivalence import built, settings, train
from harness import Join, grad_norm, recipe, run_ranks

from windlass.errors import RunFailed, UserError
from windlass.model.sharding import unwrap
from windlass.parallel.collectives import (
    max_async,
    norm_and_sum,
    sum_async,
    sum_over_ranks,
)
from windlass.parallel.env import DistEnv
from windlass.parallel.parallelize import resolve_precision
from windlass.parallel.ranks import choose_device, init_ranks
from windlass.recipe import Recipe
from windlass.recipe.strategies import STRATEGIES
from windlass.training.rank import batch_of

pytestmark = pytest.mark.dist


def ones_on(rank: int) -> torch.nn.Parameter:
    """A parameter that all ranks hold, whose gradient is not finite on rank 2."""
    parameter = torch.nn.Parameter(torch.zeros(4))
    parameter.grad = torch.full((4,), math.inf if rank == 2 else 1.0)
    return parameter


def exchange(join: Join) -> dict[str, Any]:
    with join(recipe()) as ranks:
        first = sum_async([2**53 + ranks.rank, 1], ranks.mesh)
        second = sum_async([0.1 * (ranks.rank + 1)], ranks.mesh)
        flags = max_async([ranks.rank == 1, ranks.rank], ranks.mesh)
        return {
            "ints": first.wait(),
            "again": first.wait(),
            "floats": second.wait(),
            "tensor": sum_over_ranks(torch.full((2,), 1.5, dtype=torch.float64), ranks.mesh),
            "flags": flags.wait(),
            "norm": norm_and_sum([ones_on(ranks.rank)], torch.tensor(ranks.rank), ranks.mesh),
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
    assert resolve_precision("auto", torch.device("cpu")) == "fp32"
    with init_ranks(DistEnv(), recipe(train__tf32=True, parallel__device="cpu")):
        assert torch.get_float32_matmul_precision() == "highest"  # a CPU has none: its bits stay


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


MODEL = {"model__heads": 4, "model__kv_heads": 2, "model__position": "rope"}


def struck(join, layout, name, kind):
    """Three steps, of which the second has a NaN on rank 1 alone or on one stage: in a gradient, or
    in the output of a module. Returns the steps that were bad, and whether the weights changed.
    """
    recipe = settings("fp64", "ddp", 2, 2, **MODEL, **layout, train__on_nonfinite="skip")
    outcomes = []
    with join(recipe) as ranks:
        model, trainer = built(ranks, recipe)
        parameters = dict(unwrap(model).named_parameters())
        culprit = name in parameters and (ranks.rank == 1 or ranks.mesh.pp is not None)
        for step in range(3):
            before, hook = [p.detach().clone() for p in parameters.values()], None
            if culprit and step == 1 and kind == "gradient":
                hook = parameters[name].register_hook(lambda grad: grad * math.nan)
            elif culprit and step == 1:
                module = unwrap(model).get_submodule(name.removesuffix(".weight"))
                hook = module.register_forward_hook(lambda _, __, output: output * math.nan)
            train(ranks, recipe, trainer, range(step, step + 1))
            if hook is not None:
                hook.remove()
            changed = not all(map(torch.equal, before, parameters.values()))
            outcomes.append((trainer.bad_steps.read().bad, changed))
    return outcomes


@pytest.mark.parametrize(
    ("layout", "name", "kind"),
    [
        ({"tensor": 2}, "norm.weight", "gradient"),
        ({"context": 2}, "norm.weight", "output"),
        ({"pipeline": 2}, "blocks.0.attn.qkv.weight", "output"),
    ],
)
def test_a_nan_on_one_rank_skips_the_update_of_all(layout, name, kind):
    for outcomes in run_ranks(struck, 2, layout, name, kind):
        assert outcomes == [(0, True), (1, False), (0, True)]


def micro_batches(join, recipe: Recipe, free: list[int]) -> int:
    with join(recipe) as ranks:
        plan: Any = SimpleNamespace(recipe=recipe, run=None, resuming=False)
        return batch_of(plan, ranks, 50257, free[join.rank]).micro_batch


def test_ranks_with_unequal_free_memory_have_the_micro_batch_of_the_smallest():
    recipe = Recipe.load("gpt2-124m", ["parallel.device=cpu", "train.precision=bf16"])
    little, much = (run_ranks(micro_batches, 2, recipe, [n, n]) for n in (10**10, 6 * 10**10))
    assert little[0] < much[0]
    for free in ([10**10, 6 * 10**10], [6 * 10**10, 10**10]):
        assert run_ranks(micro_batches, 2, recipe, free) == little
