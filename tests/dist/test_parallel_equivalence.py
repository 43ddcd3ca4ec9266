"""Every strategy, world and accumulation is one process with the whole batch, in float64, to 1e-9.

The reference shares nothing with the trained path but the network itself: one batch, one backward
pass, torch's own AdamW and clipping.
"""

import math

import numpy as np
import pytest
import torch
from harness import recipe as make_recipe
from harness import run_ranks

from bare_trainer import bare_trainer
from windlass.data.loader import Loader
from windlass.data.samples import Rows
from windlass.errors import UserError
from windlass.model.build import build_model
from windlass.model.gpt import initialise
from windlass.optim.schedule import lr_multiplier
from windlass.parallel import collectives
from windlass.parallel.parallelize import parallelize, unwrap
from windlass.recipe import Horizon

STEPS, BATCH, CONTEXT, VOCAB = 5, 16, 12, 37
ACCUMULATIONS = (1, 2, 4)
CELLS = {
    2: ("ddp", "shard_optim", "full_shard", "shard_grad_op"),
    4: ("ddp", "shard_optim", "full_shard", "shard_grad_op", "hybrid_shard"),
}


def rows() -> Rows:
    """Rows of 2 to 12 tokens with ragged marks; of each 16, four in a row count nothing at all (one
    rank's whole share).
    """
    draw = np.random.default_rng(0)
    examples = []
    for number in range(STEPS * BATCH):
        length = int(draw.integers(2, CONTEXT + 1))
        marks = draw.random(length) < 0.7
        if (number % BATCH) // 4 == 1:
            marks[:] = False
        examples.append((draw.integers(0, VOCAB, length).tolist(), marks.tolist()))
    return Rows(examples, pad=0)


def settings(
    precision: str = "fp64", strategy: str = "auto", world: int = 1, accumulation: int = 1, **more
):
    return make_recipe(
        model__layers=2,
        model__heads=2,
        model__width=16,
        model__context=CONTEXT,
        model__vocab=VOCAB,
        data__source="none",
        data__order="sequential",
        data__tokenizer="char",
        train__steps=STEPS,
        train__global_batch=BATCH,
        train__micro_batch=BATCH // world // accumulation,
        train__precision=precision,
        train__grad_clip=0.5,
        optim__lr=3e-3,
        optim__weight_decay=0.1,
        optim__schedule__kind="wsd",
        optim__schedule__warmup=2,
        optim__schedule__decay=2,
        parallel__strategy=strategy,
        **more,
    )


def reference(dtype=torch.float64, frozen=()):
    """Losses, gradient norms and final parameters of a plain loop over whole batches."""
    recipe = settings()
    model = build_model(recipe, VOCAB, device="cpu").to(dtype)
    initialise(model, recipe.run.seed)
    trained = (
        [p for name, p in model.named_parameters() if not name.startswith(frozen)]
        if frozen
        else [*model.parameters()]
    )
    decayed, others = [p for p in trained if p.dim() >= 2], [p for p in trained if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), eps=1e-8, fused=False)
    data, losses, norms = rows(), [], []
    for step, rate in enumerate([0.5, 1.0, 1.0, 1.0, 0.5]):
        tokens, labels, *_ = data.read(np.arange(step * BATCH, (step + 1) * BATCH))
        logits = model(torch.from_numpy(tokens))
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), torch.from_numpy(labels).flatten()
        )
        model.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, 0.5)))
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * rate
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, norms, {n: p.detach().clone() for n, p in model.named_parameters()}


def trained(join, recipe, divisor: float = 1.0):
    """The same by way of everything that `windlass train` uses; `divisor` falsifies the count of
    valid tokens.
    """
    with join(recipe) as ranks:
        model = build_model(recipe, VOCAB, device="meta")
        if recipe.train.precision == "fp64":
            model = model.double()
        model = parallelize(model, ranks, recipe)
        initialise(unwrap(model), recipe.run.seed)
        step = bare_trainer(model, recipe, ranks).step
        batch, data = recipe.batch(ranks.world), rows()
        loader = Loader(
            data, batch, ranks.rank, seed=1, kind="sequential", device=ranks.device, prefetch=1
        )
        horizon = Horizon(STEPS, len(data), BATCH)
        losses, norms = [], []
        for number, micro_batches in zip(range(STEPS), loader, strict=False):
            if divisor != 1.0:
                object.__setattr__(
                    micro_batches, "valid_tokens", int(micro_batches.valid_tokens * divisor)
                )
            result = step(micro_batches, lr_multiplier(recipe.optim.schedule, horizon, number))
            losses.append(float(collectives.sum_over_ranks(result.loss, ranks)))
            norms.append(float(result.grad_norm))
        loader.close()
        whole = {
            n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach()
            for n, p in unwrap(model).named_parameters()
        }
        return losses, norms, {n: p.clone() for n, p in whole.items()}


def every_cell(join, world: int, precision: str):
    return {
        (strategy, accumulation): trained(join, settings(precision, strategy, world, accumulation))
        for strategy in CELLS[world]
        for accumulation in ACCUMULATIONS
    }


def distance(outcome, wanted) -> tuple[float, float, float]:
    """The largest relative difference of losses and norms, and the largest absolute one of
    parameters.
    """
    losses = max(abs(a - b) / abs(b) for a, b in zip(outcome[0], wanted[0], strict=True))
    norms = max(abs(a - b) / abs(b) for a, b in zip(outcome[1], wanted[1], strict=True))
    assert set(outcome[2]) == set(wanted[2])
    return (
        losses,
        norms,
        max(float((outcome[2][n].double() - wanted[2][n].double()).abs().max()) for n in wanted[2]),
    )


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


def frozen_cells(join):
    freeze = {"model__freeze": ["blocks.0.*", "norm.*"]}
    return [trained(join, settings("fp64", strategy, 2, 2, **freeze)) for strategy in CELLS[2]]


@pytest.mark.dist
def test_frozen_parts_stay_and_the_rest_trains_as_in_one_process():
    wanted = reference(frozen=("blocks.0.", "norm."))
    for per_rank in run_ranks(frozen_cells, 2):
        assert [max(distance(outcome, wanted)) < 1e-9 for outcome in per_rank] == [True] * len(
            CELLS[2]
        )


def torch_cells(join):
    adamw = {"optim__kind": "torch.optim.AdamW", "optim__options": {"betas": [0.9, 0.95]}}
    outcomes = [trained(join, settings("fp64", strategy, 2, 2, **adamw)) for strategy in CELLS[2]]
    with pytest.raises(UserError, match=r"optim\.kind.*ddp"):
        trained(join, settings("fp64", "full_shard", 2, 2, optim__kind="torch.optim.Adafactor"))
    return outcomes


@pytest.mark.dist
def test_an_optimizer_of_torch_by_its_name_on_every_strategy_and_one_that_cannot_be_sharded(plain):
    for per_rank in run_ranks(torch_cells, 2):
        assert [max(distance(outcome, plain)) < 1e-9 for outcome in per_rank] == [True] * len(
            CELLS[2]
        )


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
            assert all(torch.equal(other[cell][2][n], outcome[2][n]) for n in outcome[2]), (
                "ranks disagree on parameters"
            )


@pytest.mark.dist
def test_a_wrong_divisor_is_seen(plain):
    for outcome in run_ranks(trained, 2, settings("fp64", "ddp", 2, 2), 1.1):
        assert distance(outcome, plain)[0] > 1e-3
    assert math.isclose(plain[0][0], math.log(VOCAB), rel_tol=0.02)
