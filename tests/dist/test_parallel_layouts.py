"""Layouts with tensor and context parallelism: first weights, logits and compiled blocks.

`test_parallel_equivalence.py` has their trainings.
"""

import pytest
import torch
from equivalence import VOCAB, logits_of, settings
from harness import run_ranks
from test_parallel_equivalence import FOUR, NEW, OLD

import hf_fixtures
from windlass.model.build import build_model
from windlass.model.gpt import initialise
from windlass.model.share import local_part, whole_shape
from windlass.parallel.parallelize import parallelize, unwrap


def initial_values(join, layouts):
    """For each layout: whether weights are those of a rank alone, and the numbers drawn for them."""
    outcomes, normal = [], torch.Tensor.normal_
    for strategy, layout in layouts:
        recipe = settings("fp32", strategy, 1, **{"train__micro_batch": 2, **layout})
        with join(recipe) as ranks:
            model = unwrap(parallelize(build_model(recipe, VOCAB), ranks, recipe))
            initialise(model, 3)
            alone, drawn = [local_part(p).clone() for p in model.parameters()], []
            torch.Tensor.normal_ = lambda x, *how, drawn=drawn, **kwargs: normal(
                drawn.append(x.numel()) or x, *how, **kwargs
            )
            try:
                initialise(model, 3)
            finally:
                torch.Tensor.normal_ = normal
            pairs = zip(alone, map(local_part, model.parameters()), strict=True)
            held = sum(whole_shape(p).numel() for p in model.parameters() if p.dim() > 1)
            outcomes.append((all(torch.equal(*pair) for pair in pairs), sum(drawn), held))
    return outcomes


@pytest.mark.dist
def test_ranks_share_the_work_of_drawing_initial_values(tmp_path):
    """Each number once in all; ranks of `tensor` draw the same numbers, stages draw their own."""
    directory = hf_fixtures.save("llama", tmp_path)
    hf = {"model__kind": "hf", "model__name": str(directory), "model__from_scratch": True}
    layouts = [("ddp", {}), ("full_shard", {}), ("full_shard", hf)]
    for strategy in ("ddp", "full_shard"):
        layouts += [(strategy, {"tensor": 2}), (strategy, {"context": 2})]
    layouts += [("ddp", {"pipeline": 2}), ("hybrid_shard", {"shard_size": 2})]
    for i, outcomes in enumerate(zip(*run_ranks(initial_values, 4, layouts), strict=True)):
        assert all(equal for equal, _, _ in outcomes), layouts[i]
        parts = 2 if {"tensor", "pipeline"} & set(layouts[i][1]) else 1
        drawn, held = (sum(one[n] for one in outcomes) for n in (1, 2))
        assert 0.9 * held <= drawn * 4 / parts <= 1.1 * held, (layouts[i], outcomes)


@pytest.mark.dist
@pytest.mark.parametrize("model", [OLD, NEW], ids=["old", "new"])
def test_logits_and_a_cache_are_those_of_one_process(model):
    """The tokens do not divide by the ranks, and the vocabulary of 37 does not either."""
    [[(wanted, cached)]] = run_ranks(logits_of, 1, [settings("fp64", "single", **model)])
    recipes = [settings("fp64", "full_shard", **model, **layout) for layout in FOUR]
    for per_rank in run_ranks(logits_of, 4, recipes):
        for whole, parts_of_it in per_rank:
            torch.testing.assert_close(whole, wanted, rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(parts_of_it, cached, rtol=1e-9, atol=1e-12)
