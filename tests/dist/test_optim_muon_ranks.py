"""Muon on several ranks: a matrix is orthogonalised whole, wherever its rows lie, so every strategy
makes the same update.
"""

import pytest
import torch
from harness import recipe, run_ranks
from torch.distributed.tensor import DTensor, distribute_tensor

from windlass.model.build import build_model
from windlass.model.gpt import initialise
from windlass.model.sharding import unwrap
from windlass.optim.build import build_optimizer
from windlass.parallel.parallelize import parallelize
from windlass.recipe import dotted

# Rows that 2, 3 and 4 ranks share unevenly, and 12 matrices.
SIZES = {"layers": 3, "heads": 2, "width": 10, "context": 4, "ff_width": 14}
MODEL = dotted({"model": SIZES, "optim": {"kind": "muon", "weight_decay": 0.1}})


def updated(join, r, shared, at_once=1):
    """The blocks' matrices after a few updates with the same gradients on every rank."""
    with join(r) as ranks:
        model = parallelize(build_model(r, 7), ranks, r)
        initialise(unwrap(model), 0)
        replicas = ranks.mesh.replicas if shared else None
        optimizer = build_optimizer(unwrap(model), r.optim, "cpu", replicas)
        optimizer.at_once = at_once
        generator = torch.Generator().manual_seed(1)
        for _ in range(3):
            for p in unwrap(model).parameters():
                p.grad = torch.randn(p.shape, generator=generator)
                if isinstance(p, DTensor):
                    p.grad = distribute_tensor(p.grad, p.device_mesh, p.placements)
            optimizer.step()
        return {
            name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone().numpy()
            for name, p in unwrap(model).named_parameters()
            if p.ndim == 2 and "blocks" in name
        }


@pytest.fixture(scope="module")
def alone():
    return run_ranks(updated, 1, recipe(**MODEL), False)[0]


@pytest.mark.dist
@pytest.mark.parametrize(
    ("strategy", "world", "shared", "at_once"),
    [
        ("ddp", 2, True, 1),
        ("full_shard", 3, False, 1),
        ("hybrid_shard", 4, False, 1),
        pytest.param("full_shard", 2, False, 1, marks=pytest.mark.full),
        pytest.param("ddp", 3, False, 1, marks=pytest.mark.full),
        pytest.param("shard_grad_op", 4, False, 1, marks=pytest.mark.full),
        # stacks, as a GPU makes them; 700 numbers are two matrices of a rank
        ("ddp", 2, True, 2**20),
        ("full_shard", 3, False, 2**20),
        ("full_shard", 2, False, 700),
    ],
)
def test_every_strategy_makes_the_update_of_one_process(alone, strategy, world, shared, at_once):
    """Bit for bit, but for the rounding of stacks."""
    sharded = recipe(**MODEL, parallel__strategy=strategy)
    for matrices in run_ranks(updated, world, sharded, shared, at_once):
        assert matrices.keys() == alone.keys() and len(matrices) == 12
        for name, value in matrices.items():
            assert value == pytest.approx(alone[name], rel=0, abs=1e-5 * (at_once > 1)), name
