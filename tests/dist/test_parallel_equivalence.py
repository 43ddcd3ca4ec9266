"""Every strategy, world and accumulation is one process with the whole batch, in float64, to 1e-9.

The reference shares nothing with the trained path but the network itself: one batch, one backward
pass, torch's own AdamW and clipping.
"""

import dataclasses
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
from windlass.recipe import Horizon, dotted

STEPS, BATCH, CONTEXT, VOCAB = 5, 16, 12, 37
ACCUMULATIONS = (1, 2, 4)
CELLS = {
    2: ("ddp", "shard_optim", "full_shard", "shard_grad_op"),
    4: ("ddp", "shard_optim", "full_shard", "shard_grad_op", "hybrid_shard"),
}


def rows() -> Rows:
    """Rows of 2 to 12 tokens with ragged marks.

    Four rows in a row of each 16, perhaps all rows of a rank, have no unmasked label.
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
    model = {"layers": 2, "heads": 2, "width": 16, "context": CONTEXT, "vocab": VOCAB}
    train = {"steps": STEPS, "global_batch": BATCH, "grad_clip": 0.5, "precision": precision}
    train["micro_batch"] = BATCH // world // accumulation
    schedule = {"kind": "wsd", "warmup": 2, "decay": 2}
    sections = {
        "model": model,
        "data": {"source": "none", "order": "sequential", "tokenizer": "char"},
        "train": train,
        "optim": {"lr": 3e-3, "weight_decay": 0.1, "schedule": schedule},
        "parallel": {"strategy": strategy},
    }
    return make_recipe(**dotted(sections), **more)


def reference(frozen=(), **more):
    """Losses, gradient norms and final parameters of a plain loop over whole batches."""
    recipe = settings(**more)
    model = build_model(recipe, VOCAB, device="cpu").to(torch.float64)
    initialise(model, recipe.run.seed)
    parameters = model.named_parameters()
    trained = [p for name, p in parameters if not name.startswith(tuple(frozen))]
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
    """The same by the parts of `windlass train`; `divisor` falsifies the count of valid tokens."""
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
            valid = int(micro_batches.valid_tokens * divisor)
            micro_batches = dataclasses.replace(micro_batches, valid_tokens=valid)
            result = step(micro_batches, lr_multiplier(recipe.optim.schedule, horizon, number))
            losses.append(float(collectives.sum_over_ranks(result.loss, ranks)))
            norms.append(float(result.grad_norm))
        loader.close()
        whole = {
            n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
            for n, p in unwrap(model).named_parameters()
        }
        return losses, norms, whole


def every_cell(join, world: int, precision: str):
    return {
        (strategy, accumulation): trained(join, settings(precision, strategy, world, accumulation))
        for strategy in CELLS[world]
        for accumulation in ACCUMULATIONS
    }


def distance(outcome, wanted) -> tuple[float, float, float]:
    """The largest relative difference of losses and norms, and absolute one of parameters."""
    losses, norms = (
        max(abs(a - b) / abs(b) for a, b in zip(outcome[i], wanted[i], strict=True)) for i in (0, 1)
    )
    own, expected = outcome[2], wanted[2]
    assert set(own) == set(expected)
    parameters = max(float((own[n].double() - p).abs().max()) for n, p in expected.items())
    return losses, norms, parameters


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
