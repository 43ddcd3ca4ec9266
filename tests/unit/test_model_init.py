"""Initial weights: a pure function of seed and name, with GPT-2's spreads."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from windlass.model.build import build_model
from windlass.model.gpt import GPT, generator, initialise
from windlass.recipe import Recipe
from windlass.recipe.settings import ModelSettings

GOLDEN = [0.46295, -0.64973, -0.90812]
SETTINGS: dict[str, Any] = {"layers": 3, "heads": 4, "width": 64, "context": 32, "head_bias": True, "tie_head": False}


def weights(seed: int, dtype: torch.dtype = torch.float32, **settings: Any) -> dict[str, torch.Tensor]:
    model = GPT(ModelSettings(**{**SETTINGS, **settings}), 50).to(dtype)
    initialise(model, seed)
    return dict(model.state_dict())


def test_the_same_seed_gives_the_same_bits_and_another_seed_others() -> None:
    one, same, other = weights(1), weights(1), weights(2)
    assert all(torch.equal(one[name], same[name]) for name in one)
    normal = [name for name in one if one[name].ndim == 2]
    assert normal
    assert all(not torch.equal(one[name], other[name]) for name in normal)
    values = [tuple(one[name].flatten()[:8].tolist()) for name in normal]
    assert len(set(values)) == len(values)  # no two tensors share their numbers


def test_the_default_generator_is_neither_read_nor_moved() -> None:
    torch.manual_seed(0)
    first = weights(1)
    torch.manual_seed(99)
    model = GPT(ModelSettings(**SETTINGS), 50)
    before = torch.get_rng_state()
    initialise(model, 1)
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(first[name], value) for name, value in model.state_dict().items())


def test_from_meta_and_directly() -> None:
    recipe = Recipe.load("quickstart")
    direct = GPT(recipe.model, 257)
    initialise(direct, 7)
    for late in (build_model(recipe, 257).to_empty(device="cpu"), build_model(recipe, 257, "cpu")):
        initialise(late, 7)
        assert all(torch.equal(a, b) for a, b in zip(direct.parameters(), late.parameters(), strict=True))


def test_float64_has_the_numbers_of_float32() -> None:
    one, double = weights(1), weights(1, torch.float64)
    assert all(torch.equal(one[name].double(), double[name]) for name in one)


def test_the_layers_do_not_depend_on_each_other() -> None:
    """A deeper model begins with the same first block, a larger vocabulary changes only its own tables."""
    deep, wide = weights(1, layers=5), weights(1)
    same = [n for n in wide if n.startswith("blocks.0") and "out" not in n and "down" not in n]
    assert all(torch.equal(deep[name], wide[name]) for name in same)


def test_spreads_are_those_of_gpt2() -> None:
    found = weights(3, width=256, init_std=0.05)
    for name, value in found.items():
        if name.endswith("bias"):
            assert not bool(value.any()), name
        elif "norm" in name:
            assert bool((value == 1).all()), name
        else:
            std = 0.05 / math.sqrt(6) if name.endswith(("out.weight", "down.weight")) else 0.05
            spread = std / math.sqrt(value.numel())
            assert abs(float(value.mean())) < 4 * spread, name
            assert abs(float(value.std()) - std) < 4 * spread, name


def test_zero_outputs_make_each_block_the_identity() -> None:
    settings = ModelSettings(**{**SETTINGS, "zero_init_output": True})
    model = GPT(settings, 50)
    initialise(model, 1)
    x = torch.randn(2, 5, 64)
    assert all(torch.equal(block(x), x) for block in model.blocks())
    assert bool(model.state_dict()["blocks.0.ff.up.weight"].any())


def test_forgotten_storage_is_noticed() -> None:
    with pytest.raises(AssertionError, match="meta device"):
        initialise(build_model(Recipe.load("quickstart"), 257), 0)


def test_the_generator_is_fixed_for_ever() -> None:
    """A change here would change every run's first step."""
    drawn = torch.empty(64).normal_(generator=generator(1337, "embedding.weight"))
    assert drawn[:3].tolist() == pytest.approx(GOLDEN, abs=1e-5)
