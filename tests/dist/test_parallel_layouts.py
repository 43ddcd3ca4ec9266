"""Layouts with tensor and context parallelism: logits and compiled blocks.

`test_parallel_equivalence.py` has their trainings.
"""

import pytest
import torch
from equivalence import logits_of, settings
from harness import run_ranks
from test_parallel_equivalence import FOUR, NEW, OLD


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
