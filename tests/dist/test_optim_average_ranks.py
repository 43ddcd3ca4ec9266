"""Averaged weights on two ranks, in every layout: their definition, and an evaluation with them in
the model. `test_checkpoint_reshard.py` has their checkpoints.
"""

import pytest
import torch
from equivalence import BATCH, STEPS, built, gathered, rows, settings, train
from harness import run_ranks

from windlass.evaluation.likelihood import evaluate_loss
from windlass.evaluation.passes import Passes
from windlass.model.sharding import unwrap

pytestmark = pytest.mark.dist
BETA = 0.6
LAYOUTS = [
    *({"strategy": name} for name in ("ddp", "shard_optim", "full_shard", "shard_grad_op")),
    {"tensor": 2},
    {"pipeline": 2},
]


def recipe_of(world: int, layout: dict):
    average = {"train__average": BETA}
    return settings(world=world, accumulation=2, **average, **layout)


def whole(model, tensors) -> dict[str, torch.Tensor]:
    """Tensors of this rank's parameters as whole ones."""
    return {name: gathered(tensors[name]) for name, _ in unwrap(model).named_parameters()}


def defined(history: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The average of the weights after each step, by its definition."""
    average = history[0]
    for n, now in enumerate(history[1:], start=1):
        beta = min(BETA, (1 + n) / (10 + n))
        average = {name: beta * average[name] + (1 - beta) * now[name] for name in now}
    return average


def outcomes(join, recipes):
    """For each layout: how far the average is from its definition, the losses before, with and after
    it, and the average.
    """
    results = []
    for recipe in recipes:
        with join(recipe) as ranks:
            model, trainer = built(ranks, recipe)
            parameters, history = dict(unwrap(model).named_parameters()), []
            for step in range(STEPS):
                train(ranks, recipe, trainer, range(step, step + 1))
                history.append(whole(model, parameters))
            exact, held = defined(history), whole(model, trainer.average.tensors)
            off = max(float((held[n] - exact[n]).abs().max()) for n in exact)
            losses = [evaluate_loss(Passes(unwrap(model), ranks), rows(), 4, 2 * BATCH)["loss"]]
            with trainer.average.in_model():
                losses.append(
                    evaluate_loss(Passes(unwrap(model), ranks), rows(), 4, 2 * BATCH)["loss"]
                )
            after = whole(model, dict(unwrap(model).named_parameters()))
            assert all(torch.equal(after[name], history[-1][name]) for name in after)
            losses.append(evaluate_loss(Passes(unwrap(model), ranks), rows(), 4, 2 * BATCH)["loss"])
            results.append((off, losses, held))
    return results


def test_every_layout_averages_as_one_process():
    [[(off, losses, wanted)]] = run_ranks(outcomes, 1, [recipe_of(1, {"strategy": "single"})])
    assert off < 1e-14 and losses[0] == losses[2] != losses[1]
    recipes = [recipe_of(2, layout) for layout in LAYOUTS]
    for per_rank in run_ranks(outcomes, 2, recipes, timeout=120):
        for layout, (off, own, held) in zip(LAYOUTS, per_rank, strict=True):
            assert off < 1e-14, layout
            assert own == pytest.approx(losses, rel=1e-9), layout
            for name, tensor in held.items():
                torch.testing.assert_close(tensor, wanted[name], rtol=0, atol=1e-9)
