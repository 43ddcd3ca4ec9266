"""Optimizers on several ranks: every strategy makes the update of one process or of `ddp`, bit for
bit where its docstring says so. `test_checkpoint_reshard.py` has the checkpoints of their state.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Join, grad_norm, recipe, run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from toy import micro_batch, toy

import hf_fixtures
from bare_trainer import bare_trainer, full_rows
from windlass.checkpoint.state_dict import named_state
from windlass.model.build import build_model
from windlass.model.gpt import initialise
from windlass.model.sharding import unwrap
from windlass.optim import shard
from windlass.optim.build import build_optimizer
from windlass.optim.schedule import set_lr
from windlass.parallel.collectives import scale_gradients
from windlass.parallel.parallelize import parallelize
from windlass.recipe import Recipe, dotted
from windlass.recipe.settings import OptimSettings

pytestmark = pytest.mark.dist
FULL = pytest.mark.full


def update(model: nn.Module, optimizer: Any, number: int) -> None:
    """One update by gradients that do not depend on the ranks."""
    draw = torch.Generator().manual_seed(number)
    for p in model.parameters():
        grad = torch.randn(p.shape, generator=draw).to(p.dtype)
        sharded = isinstance(p, DTensor)
        p.grad = distribute_tensor(grad, p.device_mesh, p.placements) if sharded else grad
    set_lr(optimizer, 1.0, number)
    optimizer.step()


def whole_state(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Parameters and optimizer state, whole and in float32, because gloo sends no float8."""
    wide = {name: t.float() for name, t in named_state(model, optimizer)[0].items()}
    return {n: t.full_tensor() if isinstance(t, DTensor) else t.clone() for n, t in wide.items()}


def check_equal(states: list[dict[str, Tensor]], wanted: dict[str, Tensor]) -> None:
    for state in states:
        assert state.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert torch.equal(state[name], tensor), name


# Muon: a matrix is orthogonalised whole, wherever its rows lie

# Rows that 2, 3 and 4 ranks share unevenly, and 12 matrices.
SIZES = {"layers": 3, "heads": 2, "width": 10, "context": 4, "ff_width": 14}
MODEL = dotted({"model": SIZES, "optim": {"kind": "muon", "weight_decay": 0.1}})


def matrices(join: Join, cells: list[tuple[str, int]]) -> list[dict[str, Tensor]]:
    """The blocks' matrices after a few updates with the same gradients on every rank."""
    found = []
    for strategy, at_once in cells:
        r = recipe(**MODEL, parallel__strategy=strategy)
        with join(r) as ranks:
            model = parallelize(build_model(r, 7), ranks, r)
            initialise(unwrap(model), 0)
            replicas = ranks.mesh.replicas if strategy == "ddp" else None
            optimizer = build_optimizer(unwrap(model), r.optim, "cpu", replicas)
            optimizer.at_once = at_once
            for number in range(3):
                update(unwrap(model), optimizer, number)
            state = whole_state(unwrap(model), None)
            found.append({n: p for n, p in state.items() if p.ndim == 2 and "blocks" in n})
    return found


@pytest.mark.parametrize(
    ("world", "cells"),
    [  # stacks of more than one number, as a GPU makes them; 700 are two matrices of a rank
        (2, [("ddp", 1), ("ddp", 2**20), ("full_shard", 700)]),
        (3, [("full_shard", 1), ("full_shard", 2**20)]),
        (4, [("hybrid_shard", 1), ("shard_grad_op", 1)]),
    ],
)
def test_every_strategy_makes_muons_update_of_one_process(world, cells):
    """Bit for bit, but for the rounding of stacks."""
    [[alone]] = run_ranks(matrices, 1, [("single", 1)])
    for per_rank in run_ranks(matrices, world, cells):
        for (strategy, at_once), found in zip(cells, per_rank, strict=True):
            assert found.keys() == alone.keys() and len(found) == 12, strategy
            for name, value in found.items():
                torch.testing.assert_close(value, alone[name], rtol=0, atol=1e-5 * (at_once > 1))


# bf16 weights and 8-bit moments

LAYOUTS = [("ddp", 1), ("full_shard", 2), ("full_shard", 3), ("shard_optim", 2)]
MASTER = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Low(nn.Module):
    """Rows that no world divides, and a vector."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(70, 128, generator=draw).bfloat16())
        self.bias = nn.Parameter(torch.randn(96, generator=draw).bfloat16())


def low_state(join: Join, strategy: str) -> dict[str, Tensor]:
    """The state after three updates."""
    store = join.store or dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=join.rank, world_size=join.world)
    model, mesh = Low(), init_device_mesh("cpu", (join.world,))
    if strategy == "full_shard":
        fully_shard(model, mesh=mesh)
    how, shards = OptimSettings(kind="adamw8bit", lr=0.01), strategy == "shard_optim"
    optimizer = build_optimizer(model, how, "cpu", mesh, shards, seed=5)
    for number in range(3):
        update(model, optimizer, number)
    return whole_state(model, optimizer)


def test_every_layout_makes_the_same_update_of_low_weights_and_moments():
    states = [state for strategy, n in LAYOUTS for state in run_ranks(low_state, n, strategy)]
    assert any(name.endswith("exp_avg_scale") for name in states[0]) and len(states) == 8
    check_equal(states, states[0])


def losses(join: Join, recipes: list[Recipe]) -> list[list[float]]:
    """The loss of each step on one batch, by each recipe."""
    found, vocab = [], hf_fixtures.VOCAB
    for settings in recipes:
        with join(settings) as ranks:
            model = parallelize(build_model(settings, vocab), ranks, settings)
            initialise(unwrap(model), 0)
            trainer, batch = bare_trainer(model, settings, ranks), full_rows(settings, vocab, 2, 1)
            trained = [p.dtype for p in model.parameters() if p.requires_grad]
            assert set(trained) == {MASTER[settings.train.master]}
            found.append([float(trainer.step(batch, 1.0).loss) for _ in range(12)])
    return found


@pytest.mark.parametrize("kind", ["gpt", pytest.param("llama", marks=FULL), "gpt2", "gemma2"])
def test_every_strategy_trains_bf16_weights_as_float32_ones(kind, tmp_path):
    """Our GPT, LayerNorm, RMSNorm, and an embedding with a factor."""
    how = {"train__precision": "bf16", "train__micro_batch": 2, "train__global_batch": 2}
    how |= {"model__context": 16, "optim__lr": 1e-3}
    if kind == "gpt":
        how |= {"model__layers": 2, "model__width": 64, "model__heads": 4}
    else:
        hf_fixtures.save(kind, tmp_path)
        how |= {"model__kind": "hf", "model__name": str(tmp_path)}
    low = how | {"train__master": "bf16"}
    [[wide, alone]] = run_ranks(losses, 1, [recipe(**how), recipe(**low)])
    assert alone == pytest.approx(wide, rel=0.02) and alone[-1] < 0.95 * alone[0]
    strategies = ("ddp", "full_shard", "shard_optim") if kind == "gpt" else ("full_shard",)
    low["train__global_batch"] = 4
    recipes = [recipe(**low, parallel__strategy=strategy) for strategy in strategies]
    for strategy, *each in zip(strategies, *run_ranks(losses, 2, recipes), strict=True):
        # Each rank has the same rows, and its part of the mean.
        assert each[0] == pytest.approx(each[1], rel=1e-3), strategy
        scale = alone[0] / each[0][0]
        assert [scale * x for x in each[0]] == pytest.approx(alone, rel=0.02), strategy


# ZeRO-1 (`shard_optim`): the updates of `ddp`, with the state divided over the ranks

KINDS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "muon": {"optim__kind": "muon"},
    "nadam": {"optim__kind": "torch.optim.NAdam"},
    "sgd": {"optim__kind": "torch.optim.SGD", "optim__options": {"momentum": 0.9}},
}


def with_a_scalar() -> nn.Module:
    """Rows that no world divides, vectors that are cut at a multiple of 64 bytes or not, tied and
    frozen weights, and a scalar in the place of a buffer.
    """
    model = toy(3, width=16, layers=2)
    del model.shift
    model.shift = nn.Parameter(torch.tensor(-1.0))
    return model


def updates(join: Join, more: dict[str, Any]) -> dict[str, dict[str, Tensor]]:
    """Parameters and optimizer state after clipped steps, one of which the device leaves out."""
    shard.GATHER_BYTES = 4000  # several messages
    results = {}
    for strategy in ("ddp", "shard_optim"):
        settings = recipe(parallel__strategy=strategy, optim__weight_decay=0.1, **more)
        with join(settings) as ranks:
            model = with_a_scalar()
            # A matrix that lies in columns, whose rows are not consecutive numbers.
            if strategy == "shard_optim":
                model.layers[0].up.weight.data = model.layers[0].up.weight.data.T.contiguous().T
            model = parallelize(model, ranks, settings)
            how, shards = settings.optim, ranks.strategy.shards_optimizer
            optimizer = build_optimizer(unwrap(model), how, "cpu", ranks.mesh.replicas, shards)
            parameters = [p for p in model.parameters() if p.requires_grad]
            if strategy == "shard_optim":
                kinds = {p.dim(): own.placements[0].is_shard() for p, own in optimizer.rows.items()}
                assert kinds[2] and not kinds[0] and len(optimizer.buckets) > 2
            for number in range(4):
                model(*micro_batch(number * join.world + join.rank)).backward()
                norm = grad_norm(parameters, ranks)
                scale_gradients(parameters, (0.5 / norm).clamp(max=1.0))
                set_lr(optimizer, 1.0 - 0.1 * number)
                if getattr(optimizer, "_step_supports_amp_scaling", False):
                    # as on CUDA after a bad loss
                    optimizer.found_inf = torch.tensor(float(number == 2))
                optimizer.step()
                optimizer.zero_grad()
                assert all(p.grad is None for p in parameters)
            results[strategy] = whole_state(model, optimizer)
    return results


@pytest.mark.parametrize(
    ("kind", "world"),
    [
        ("adamw", 2),
        ("muon", 3),
        *(pytest.param(kind, world, marks=FULL) for kind in KINDS for world in (1, 4)),
        pytest.param("nadam", 3, marks=FULL),
        pytest.param("sgd", 2, marks=FULL),
    ],
)
def test_the_update_of_zero_1_is_that_of_ddp_bit_for_bit(kind: str, world: int) -> None:
    everyone = run_ranks(updates, world, KINDS[kind])
    wanted, before = everyone[0]["ddp"], with_a_scalar().state_dict()
    assert any(name.startswith("optim/") for name in wanted)
    for name in ("shift", "layers.0.up.weight"):
        assert not torch.equal(wanted[f"model/{name}"], before[name])
    check_equal([results["shard_optim"] for results in everyone], wanted)
