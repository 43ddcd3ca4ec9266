"""A fault on one rank, and ranks with unequal memory."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from equivalence import built, settings, train
from harness import run_ranks

from windlass.model.sharding import unwrap
from windlass.recipe import Recipe
from windlass.training.rank import batch_of

pytestmark = pytest.mark.dist

MODEL = {"model__heads": 4, "model__kv_heads": 2, "model__position": "rope"}


def struck(join, layout, name, kind):
    """Three steps, of which the second has a NaN on rank 1 alone or on one stage: in a weight, which
    is put back, or in a gradient. Returns the steps that were bad, and whether the weights changed.
    """
    recipe = settings("fp64", "ddp", 2, 2, **MODEL, **layout, train__on_nonfinite="skip")
    outcomes = []
    with join(recipe) as ranks:
        model, trainer = built(ranks, recipe)
        parameter = dict(unwrap(model).named_parameters()).get(name)
        culprit = parameter is not None and (ranks.rank == 1 or ranks.mesh.pp is not None)
        for step in range(3):
            before = {n: p.detach().clone() for n, p in unwrap(model).named_parameters()}
            hook, hit = None, culprit and step == 1
            if hit and kind == "weight":
                with torch.no_grad():
                    parameter.view(-1)[0] = torch.nan
            elif hit:
                hook = parameter.register_hook(lambda grad: grad * torch.nan)
            train(ranks, recipe, trainer, range(step, step + 1))
            bad = trainer.bad_steps.read()
            if hook is not None:
                hook.remove()
            changed = [
                not torch.equal(a, b)
                for a, b in zip(before.values(), model.parameters(), strict=True)
                if b.isfinite().all()
            ]
            if hit and kind == "weight":
                with torch.no_grad():
                    parameter.copy_(before[name])
            outcomes.append((bad.bad, any(changed)))
    return outcomes


@pytest.mark.parametrize(
    ("layout", "name", "kind"),
    [
        ({"tensor": 2}, "norm.weight", "gradient"),
        ({"context": 2}, "norm.weight", "weight"),
        ({"pipeline": 2}, "blocks.0.attn.qkv.weight", "weight"),
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
