"""bf16 weights and 8-bit moments on several ranks: one process's update bit for bit.

`test_checkpoint_reshard.py` has their checkpoints.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Join, recipe, run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import hf_fixtures
from bare_trainer import bare_trainer, full_rows
from windlass.checkpoint.state_dict import named_state
from windlass.model.build import build_model
from windlass.model.gpt import initialise
from windlass.model.sharding import Cut, Peers, unwrap, with_cut
from windlass.optim.adamw import places, random_bits
from windlass.optim.build import build_optimizer
from windlass.optim.schedule import set_lr
from windlass.parallel.parallelize import parallelize
from windlass.recipe import Recipe
from windlass.recipe.settings import OptimSettings

pytestmark = pytest.mark.dist
LAYOUTS = [("ddp", 1), ("full_shard", 2), ("full_shard", 3), ("shard_optim", 2)]


class Model(nn.Module):
    """Rows that no world divides, and a vector."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(70, 128, generator=draw).bfloat16())
        self.bias = nn.Parameter(torch.randn(96, generator=draw).bfloat16())


def build(strategy: str, world: int) -> tuple[nn.Module, Any]:
    model: nn.Module = Model()
    mesh = init_device_mesh("cpu", (world,))
    if strategy == "full_shard":
        fully_shard(model, mesh=mesh)
    settings = OptimSettings(kind="adamw8bit", lr=0.01)
    return model, build_optimizer(model, settings, "cpu", mesh, strategy == "shard_optim", seed=5)


def update(model: nn.Module, optimizer: Any, number: int) -> None:
    """One update by gradients that do not depend on the ranks."""
    draw = torch.Generator().manual_seed(number)
    for p in model.parameters():
        grad = torch.randn(p.shape, generator=draw).to(p.dtype)
        sharded = isinstance(p, DTensor)
        p.grad = distribute_tensor(grad, p.device_mesh, p.placements) if sharded else grad
    set_lr(optimizer, 1.0, number)
    optimizer.step()


def whole(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    tensors = {name: tensor.float() for name, tensor in named_state(model, optimizer)[0].items()}
    return {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in tensors.items()}


def updated(join: Join, strategy: str) -> dict[str, Tensor]:
    """The state after three updates."""
    dist.init_process_group(
        "gloo", store=join.store or dist.HashStore(), rank=join.rank, world_size=join.world
    )
    model, optimizer = build(strategy, join.world)
    for number in range(3):
        update(model, optimizer, number)
    return whole(model, optimizer)


def test_every_layout_makes_the_same_update():
    states = [state for strategy, n in LAYOUTS for state in run_ranks(updated, n, strategy)]
    assert any(name.endswith("exp_avg_scale") for name in states[0])
    assert len(states) == 8
    for state in states:
        assert state.keys() == states[0].keys()
        for name, tensor in states[0].items():
            assert torch.equal(state[name], tensor), name


@pytest.mark.parametrize("dim", [0, 1])
def test_a_part_of_a_matrix_has_the_random_bits_of_its_place(dim):
    """Of tensor parallelism: parts in any order."""
    every = random_bits("key", *places(torch.empty(12, 10)))
    for ranges in ((range(3), range(6, 8)), (range(3, 6), range(8, 10))):
        cut = Cut(dim, every.shape[dim], ranges, Peers("", 0, 2))
        shape = [len(range(5)) if d == dim else n for d, n in enumerate(every.shape)]
        part = with_cut(torch.empty(shape), cut)
        assert torch.equal(random_bits("key", *places(part)), cut.take(every))


def losses(join: Join, settings: Recipe, vocab: int) -> list[float]:
    """The loss of each step on one batch."""
    with join(settings) as ranks:
        model = parallelize(build_model(settings, vocab), ranks, settings)
        initialise(unwrap(model), 0)
        trainer, batch = bare_trainer(model, settings, ranks), full_rows(settings, vocab, 2, 1)
        trained = [p.dtype for p in model.parameters() if p.requires_grad]
        assert set(trained) == {MASTER[settings.train.master]}
        return [float(trainer.step(batch, 1.0).loss) for _ in range(12)]


MASTER = {"fp32": torch.float32, "bf16": torch.bfloat16}


@pytest.mark.parametrize(
    "kind", ["gpt", pytest.param("llama", marks=pytest.mark.full), "gpt2", "gemma2"]
)
def test_every_strategy_trains_bf16_weights_as_float32_ones(kind, tmp_path):
    """Our GPT, LayerNorm, RMSNorm, and an embedding with a factor."""
    how = {"train__precision": "bf16", "train__micro_batch": 2, "train__global_batch": 2}
    how |= {"model__context": 16, "optim__lr": 1e-3}
    if kind == "gpt":
        how |= {"model__layers": 2, "model__width": 64, "model__heads": 4}
    else:
        hf_fixtures.save(kind, tmp_path)
        how |= {"model__kind": "hf", "model__name": str(tmp_path)}
    [wide] = run_ranks(losses, 1, recipe(**how), hf_fixtures.VOCAB)
    how["train__master"] = "bf16"
    [alone] = run_ranks(losses, 1, recipe(**how), hf_fixtures.VOCAB)
    assert alone == pytest.approx(wide, rel=0.02) and alone[-1] < 0.95 * alone[0]
    for strategy in ("ddp", "full_shard", "shard_optim") if kind == "gpt" else ("full_shard",):
        settings = recipe(**how | {"train__global_batch": 4, "parallel__strategy": strategy})
        each = run_ranks(losses, 2, settings, hf_fixtures.VOCAB)
        # Each rank has the same rows, and its part of the mean.
        assert each[0] == pytest.approx(each[1], rel=1e-3), strategy
        scale = alone[0] / each[0][0]
        assert [scale * x for x in each[0]] == pytest.approx(alone, rel=0.02), strategy
