import math

import pytest

from windlass.errors import UserError
from windlass.estimate.optimum import (
    CHINCHILLA,
    CHINCHILLA_REFIT,
    count_parameters,
    for_compute,
    known_vocab,
    optimal_tokens,
    resolve_steps,
)
from windlass.recipe import Recipe

C4_30M = {
    "model": {
        "layers": 4, "width": 256, "heads": 4, "vocab": 50257, "context": 256, "final_norm": False,
        "activation": "swiglu", "attn_bias": False, "ff_bias": False, "norm_bias": True, "tie_head": False,
    },
    "train": {"steps": "compute-optimal", "global_batch": 512},
}  # fmt: skip


def recipe(tree=None, **overrides):
    return Recipe.model_validate(tree or C4_30M).with_overrides(**overrides)


def test_c4_30m_exactly():
    r = recipe()
    assert count_parameters(r) == 29_995_520
    assert optimal_tokens(29_995_520) == 599_910_400
    assert resolve_steps(r) == 4576


def test_tokens_are_whole_and_exact_for_any_ratio():
    assert optimal_tokens(10**15 + 1, 20.0) == 20 * 10**15 + 20
    assert optimal_tokens(10, 0.1) == 1
    assert optimal_tokens(29_995_520, 1.5) == 44_993_280


def test_steps_round_down_and_count_real_tokens():
    r = recipe()
    assert resolve_steps(r, tokens_per_sample=128) == 9153  # 599,910,400 / (512 x 128) = 9,153.9
    assert resolve_steps(r, tokens_per_sample=255.5) == 4585
    assert resolve_steps(r, parameters=1_000_000) == 152
    assert resolve_steps(r, parameters=1) == 1


def test_steps_as_they_are_written():
    assert resolve_steps(recipe(**{"train.steps": 77})) == 77
    r = recipe(**{"train.steps": "2.5 epochs"})
    assert resolve_steps(r, samples_per_epoch=1000) == 5  # 2,500 samples at 512 a step
    assert resolve_steps(r, samples_per_epoch=1) == 1


def test_what_is_not_known_yet_is_said():
    with pytest.raises(UserError, match="windlass prepare"):
        resolve_steps(recipe(**{"train.steps": "1 epoch"}))
    with pytest.raises(UserError, match=r"model\.vocab"):
        resolve_steps(recipe(**{"model.vocab": 0, "data.tokenizer": "char"}))
    with pytest.raises(UserError, match="Hugging Face"):
        resolve_steps(recipe(**{"model.kind": "hf", "model.name": "somewhere"}))


@pytest.mark.parametrize(
    ("settings", "vocab"),
    [
        ({"data.tokenizer": "byte"}, 257),
        ({"data.tokenizer": "gpt2:dir"}, 50257),
        ({"data.tokenizer": "bpe", "data.tokenizer_vocab": 999}, 999),
        ({"data.tokenizer": "char"}, None),
        ({"data.tokenizer": "gpt2", "model.vocab": 50304}, 50304),
    ],
)
def test_vocabularies_known_from_the_recipe(settings, vocab):
    assert known_vocab(recipe(**{"model.vocab": 0, **settings})) == vocab


@pytest.mark.parametrize("law", [CHINCHILLA, CHINCHILLA_REFIT])
@pytest.mark.parametrize("flops", [1e15, 5.76e23])
def test_the_optimum_is_where_the_loss_is_lowest(law, flops):
    n, d = law.optimum(flops)
    assert 6 * n * d == pytest.approx(flops)
    around = [law.loss(n * f, d / f) for f in (0.9, 0.99, 1.01, 1.1)]
    assert min(around) > law.loss(n, d)


def test_published_numbers():
    """The Chinchilla paper's own: about 40B parameters for Gopher's 5.76e23 FLOPs by the fit (its figure 4), and by the
    rule of thumb about 70B and 1.4T tokens. The refit agrees with the rule."""
    n, _ = CHINCHILLA.optimum(5.76e23)
    assert 30e9 < n < 45e9
    rule, fit, refit = for_compute(5.76e23)
    assert rule.parameters == pytest.approx(69e9, rel=0.01) and rule.tokens == pytest.approx(20 * rule.parameters)
    assert fit.parameters == n and refit.tokens / refit.parameters == pytest.approx(20, rel=0.4)
    assert rule.loss is None and CHINCHILLA.loss(70e9, 1.4e12) == pytest.approx(1.94, abs=0.01)


@pytest.mark.parametrize("flops", [0, -1, math.inf, math.nan])
def test_compute_must_be_a_number_of_flops(flops):
    with pytest.raises(UserError, match="--compute"):
        for_compute(flops)
