"""Every strategy, world and accumulation is one process with the whole batch, in float64, to 1e-9.

The reference shares nothing with the trained path but the network itself: one batch, one backward
pass, torch's own AdamW and clipping.
"""

import math

import pytest
import torch
from equivalence import VOCAB, distance, reference, settings, trained
from harness import run_ranks

from windlass.errors import UserError

ACCUMULATIONS = (1, 2, 4)
CELLS = {
    2: ("ddp", "shard_optim", "full_shard", "shard_grad_op"),
    4: ("ddp", "shard_optim", "full_shard", "shard_grad_op", "hybrid_shard"),
}


def every_cell(join, world: int, precision: str):
    return {
        (strategy, accumulation): trained(join, settings(precision, strategy, world, accumulation))
        for strategy in CELLS[world]
        for accumulation in ACCUMULATIONS
    }


@pytest.fixture(scope="module")
def plain():
    return reference()


@pytest.mark.parametrize("accumulation", ACCUMULATIONS)
def test_one_process_in_float64(plain, accumulation):
    (outcome,) = run_ranks(trained, 1, settings("fp64", "single", 1, accumulation))
    assert max(distance(outcome, plain)) < 1e-9


@pytest.mark.dist
@pytest.mark.parametrize("world", [2, 4])
def test_every_strategy_in_float64(plain, world):
    for per_rank in run_ranks(every_cell, world, world, "fp64", timeout=240):
        for cell, outcome in per_rank.items():
            assert max(distance(outcome, plain)) < 1e-9, cell


def assert_exact(outcomes, wanted) -> None:
    for strategy, outcome in zip(CELLS[2], outcomes, strict=True):
        assert max(distance(outcome, wanted)) < 1e-9, strategy


def frozen_cells(join):
    freeze = {"model__freeze": ["blocks.0.*", "norm.*"]}
    return [trained(join, settings("fp64", strategy, 2, 2, **freeze)) for strategy in CELLS[2]]


@pytest.mark.dist
def test_frozen_parts_stay_and_the_rest_trains_as_in_one_process():
    wanted = reference(frozen=("blocks.0.", "norm."))
    for per_rank in run_ranks(frozen_cells, 2):
        assert_exact(per_rank, wanted)


UNTIED = {"model__tie_head": False, "model__final_norm": False}


def untied_cells(join):
    return [trained(join, settings("fp64", strategy, 2, 2, **UNTIED)) for strategy in CELLS[2]]


@pytest.mark.dist
def test_an_untied_head_without_a_norm_before_it():
    """As in c4-30m: FSDP2 shards the head as a unit of one module."""
    wanted = reference(**UNTIED)
    for per_rank in run_ranks(untied_cells, 2):
        assert_exact(per_rank, wanted)


def torch_cells(join):
    adamw = {"optim__kind": "torch.optim.AdamW", "optim__options": {"betas": [0.9, 0.95]}}
    outcomes = [trained(join, settings("fp64", strategy, 2, 2, **adamw)) for strategy in CELLS[2]]
    with pytest.raises(UserError, match=r"optim\.kind.*ddp"):
        trained(join, settings("fp64", "full_shard", 2, 2, optim__kind="torch.optim.Adafactor"))
    return outcomes


@pytest.mark.dist
def test_an_optimizer_of_torch_by_its_name_on_every_strategy_and_one_that_cannot_be_sharded(plain):
    for per_rank in run_ranks(torch_cells, 2):
        assert_exact(per_rank, plain)


@pytest.mark.dist
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.full)])
def test_every_strategy_in_float32(plain, world):
    """Within the rounding that was measured: losses to 5e-7 relative, parameters to 1.4e-5."""
    results = run_ranks(every_cell, world, world, "fp32", timeout=240)
    for cell, outcome in results[0].items():
        losses, norms, parameters = distance(outcome, plain)
        assert losses < 5e-7, cell
        assert norms < 1e-5, cell
        assert parameters < 1.4e-5, cell
        for other in results[1:]:
            assert other[cell][0] == outcome[0], "ranks disagree on the loss"
            for name, parameter in outcome[2].items():
                assert torch.equal(other[cell][2][name], parameter), "ranks disagree on parameters"


@pytest.mark.dist
def test_a_wrong_divisor_is_seen(plain):
    for outcome in run_ranks(trained, 2, settings("fp64", "ddp", 2, 2), 1.1):
        assert distance(outcome, plain)[0] > 1e-3
    assert math.isclose(plain[0][0], math.log(VOCAB), rel_tol=0.02)
