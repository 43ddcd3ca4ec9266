"""ZeRO-1 (`shard_optim`): the updates of `ddp` bit for bit, with the state divided over the ranks."""

from typing import Any

import pytest
import torch
from harness import Join, grad_norm, recipe, run_ranks
from torch import Tensor, nn
from toy import micro_batch, toy

from windlass.checkpoint.state_dict import named_state
from windlass.model.build import build_model
from windlass.model.gpt import initialise
from windlass.model.sharding import unwrap
from windlass.optim import shard
from windlass.optim.build import build_optimizer
from windlass.optim.schedule import set_lr
from windlass.parallel.collectives import scale_gradients
from windlass.parallel.parallelize import parallelize
from windlass.parallel.ranks import Ranks
from windlass.recipe import Recipe

pytestmark = pytest.mark.dist

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


def optimizer_of(model: nn.Module, settings: Recipe, ranks: Ranks) -> Any:
    shards = ranks.strategy.shards_optimizer
    return build_optimizer(unwrap(model), settings.optim, "cpu", ranks.mesh.replicas, shards)


def updates(join: Join, how: dict[str, Any]) -> dict[str, dict[str, Tensor]]:
    """Parameters and optimizer state after clipped steps, one of which the device leaves out."""
    shard.GATHER_BYTES = 4000  # several messages
    results = {}
    for strategy in ("ddp", "shard_optim"):
        settings = recipe(parallel__strategy=strategy, optim__weight_decay=0.1, **how)
        with join(settings) as ranks:
            model = with_a_scalar()
            # A matrix that lies in columns, whose rows are not consecutive numbers.
            if strategy == "shard_optim":
                model.layers[0].up.weight.data = model.layers[0].up.weight.data.T.contiguous().T
            model = parallelize(model, ranks, settings)
            optimizer = optimizer_of(model, settings, ranks)
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
            state = named_state(model, optimizer)[0].items()
            results[strategy] = {
                n: t.full_tensor() if hasattr(t, "full_tensor") else t.clone() for n, t in state
            }
    return results


@pytest.mark.parametrize(
    ("kind", "world"),
    [
        ("adamw", 2),
        ("muon", 3),
        *(pytest.param(kind, world, marks=pytest.mark.full) for kind in KINDS for world in (1, 4)),
        pytest.param("nadam", 3, marks=pytest.mark.full),
        pytest.param("sgd", 2, marks=pytest.mark.full),
    ],
)
def test_the_update_is_that_of_ddp_bit_for_bit(kind: str, world: int) -> None:
    everyone = run_ranks(updates, world, KINDS[kind])
    wanted, before = everyone[0]["ddp"], with_a_scalar().state_dict()
    assert any(name.startswith("optim/") for name in wanted)
    for name in ("shift", "layers.0.up.weight"):
        assert not torch.equal(wanted[f"model/{name}"], before[name])
    for results in everyone:
        state = results["shard_optim"]
        assert state.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert torch.equal(state[name], tensor), name


def state_bytes(join: Join, how: dict[str, Any]) -> dict[str, int]:
    """What this rank's optimizer holds after a step of a GPT."""
    held = {}
    for strategy in ("ddp", "shard_optim"):
        settings = recipe(parallel__strategy=strategy, model__width=96, model__layers=2, **how)
        with join(settings) as ranks:
            model = parallelize(build_model(settings, 301), ranks, settings)
            initialise(unwrap(model), 0)
            optimizer = optimizer_of(model, settings, ranks)
            tokens = torch.arange(16).view(1, 16)
            model(tokens, tokens).backward()
            optimizer.step()
            values = [value for state in optimizer.state.values() for value in state.values()]
            local = [v.to_local() if hasattr(v, "to_local") else v for v in values]
            held[strategy] = sum(tensor.nbytes for tensor in local)
    return held


@pytest.mark.parametrize("kind", ["adamw", pytest.param("muon", marks=pytest.mark.full)])
def test_a_rank_holds_its_share_of_the_state_and_no_more(kind: str) -> None:
    for rank, held in enumerate(run_ranks(state_bytes, 3, KINDS[kind])):
        assert held["shard_optim"] == pytest.approx(held["ddp"] / 3, rel=0.03), rank
