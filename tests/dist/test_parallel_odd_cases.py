"""Layouts with short and ragged rows, masked parts, a fault on one rank, and no memory."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from equivalence import BATCH, built, distance, rows, settings, train, trained
from harness import run_ranks

from windlass.parallel.parallelize import unwrap
from windlass.recipe import Recipe
from windlass.training.batch import open_micro_batch

pytestmark = pytest.mark.dist

MODEL = {"model__heads": 4, "model__kv_heads": 2, "model__position": "rope"}
ONE_ROW = {"train__micro_batch": 1, "train__grad_clip": 0.0}


def keys(layout: dict[str, Any]) -> dict[str, Any]:
    return {f"parallel__{key}": value for key, value in layout.items()}


@pytest.fixture(scope="module")
def one_process():
    lengths = {rows().read(np.array([row]))[0].shape[1] for row in range(BATCH)}
    assert min(lengths) < 4 < max(lengths)
    return run_ranks(trained, 1, settings("fp64", "single", **MODEL, **ONE_ROW))[0]


@pytest.mark.parametrize(
    "layout",
    [
        {"tensor": 2, "context": 2},
        pytest.param({"tensor": 4}, marks=pytest.mark.full),
        pytest.param({"context": 4}, marks=pytest.mark.full),
        pytest.param({"context": 2}, marks=pytest.mark.full),
    ],
)
def test_micro_batches_of_one_row_without_clipping(one_process, layout):
    """Rows of 1 to 11 tokens, fewer than ranks and no multiple of them; in every context layout
    some rank has no unmasked label, and four rows of each step have none at all.
    """
    recipe = settings("fp64", "full_shard", **MODEL, **ONE_ROW, **keys(layout))
    for outcome in run_ranks(trained, 4, recipe, timeout=120):
        assert max(distance(outcome, one_process)) < 1e-9


def struck(join, layout, name, kind):
    """Three steps, of which the second has a NaN on rank 1 alone: in a weight, which is put back,
    or in a gradient. Returns the steps that were bad, and whether the weights changed.
    """
    recipe = settings("fp64", "ddp", **MODEL, **keys(layout), train__on_nonfinite="skip")
    outcomes = []
    with join(recipe) as ranks:
        model, trainer = built(ranks, recipe)
        parameter = dict(unwrap(model).named_parameters())[name]
        for step in range(3):
            before = [p.detach().clone() for p in model.parameters()]
            hook, hit = None, ranks.rank == 1 and step == 1
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
                for a, b in zip(before, model.parameters(), strict=True)
                if b.isfinite().all()
            ]
            if hit and kind == "weight":
                with torch.no_grad():
                    parameter.copy_(
                        before[[n for n, _ in unwrap(model).named_parameters()].index(name)]
                    )
            outcomes.append((bad.bad, any(changed)))
    return outcomes


@pytest.mark.parametrize(
    ("layout", "name", "kind"),
    [
        ({"tensor": 2}, "blocks.0.attn.qkv.weight", "weight"),
        ({"tensor": 2, "sequence": False}, "norm.weight", "weight"),
        ({"tensor": 2, "sequence": False}, "norm.weight", "gradient"),
        ({"tensor": 2}, "embedding.weight", "gradient"),
        ({"context": 2}, "norm.weight", "weight"),
    ],
)
def test_a_nan_on_one_rank_skips_the_update_of_all(layout, name, kind):
    for outcomes in run_ranks(struck, 2, layout, name, kind):
        assert outcomes == [(0, True), (1, False), (0, True)]


def micro_batches(join, recipe: Recipe, free: list[int]) -> int:
    with join(recipe) as ranks:
        plan: Any = SimpleNamespace(recipe=recipe, run=None, resuming=False)
        batch = recipe.batch(join.world, "cuda")
        return open_micro_batch(plan, ranks, batch, 50257, free[join.rank]).micro_batch


def test_ranks_with_unequal_free_memory_have_the_micro_batch_of_the_smallest():
    recipe = Recipe.load("gpt2-124m", ["parallel.device=cpu", "train.precision=bf16"])
    little, much = (run_ranks(micro_batches, 2, recipe, [n, n]) for n in (10**10, 6 * 10**10))
    assert little[0] < much[0]
    for free in ([10**10, 6 * 10**10], [6 * 10**10, 10**10]):
        assert run_ranks(micro_batches, 2, recipe, free) == little
