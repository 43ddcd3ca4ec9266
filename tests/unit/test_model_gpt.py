"""The network: every combination of its choices, causality, dropout, the cache."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from windlass.errors import UserError
from windlass.model.build import build_model
from windlass.model.gpt import GPT, Rotation, initialise
from windlass.recipe import Recipe
from windlass.recipe.settings import ModelSettings

SMALL: dict[str, Any] = {"layers": 2, "heads": 4, "width": 32, "context": 24}
VOCAB = 19

CHOICES: dict[str, list[Any]] = {
    "norm": ["layernorm", "rmsnorm"],
    "position": ["learned", "rope", "none"],
    "activation": ["gelu", "gelu_tanh", "relu", "relu2", "swiglu"],
    "kv_heads": [0, 2, 1],
    "qk_norm": [False, True],
    "tie_head": [True, False],
}
BIASES = [
    {"attn_bias": True, "ff_bias": True, "norm_bias": True, "head_bias": True, "final_norm": True},
    {"attn_bias": False, "ff_bias": True, "norm_bias": False, "head_bias": False, "final_norm": False},
    {"attn_bias": False, "ff_bias": False, "norm_bias": True, "head_bias": True, "final_norm": True, "logit_cap": 4.0},
]


def made(seed: int = 0, dtype: torch.dtype = torch.float64, **settings: Any) -> GPT:
    model = GPT(ModelSettings(**{**SMALL, **settings}), VOCAB).to(dtype)
    initialise(model, seed)
    return model


def some_tokens(rows: int = 3, length: int = 24, seed: int = 1) -> Tensor:
    return torch.randint(VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def combinations(stride: int) -> list[dict[str, Any]]:
    every = [dict(zip(CHOICES, values, strict=True)) for values in itertools.product(*CHOICES.values())]
    return [{**choice, **BIASES[i % len(BIASES)]} for i, choice in enumerate(every[::stride])]


def test_a_few_combinations_have_each_pair_of_choices() -> None:
    seen = {
        pair for choice in combinations(7) for pair in itertools.combinations(list(choice.items())[: len(CHOICES)], 2)
    }
    for (a, these), (b, those) in itertools.combinations(CHOICES.items(), 2):
        assert all(((a, x), (b, y)) in seen for x in these for y in those), (a, b)


@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.full)])
def test_combinations_are_built_and_trained(stride: int) -> None:
    tokens = some_tokens(2, 8)
    labels = tokens.roll(-1, 1)
    labels[0, -3:] = -100
    for choice in combinations(stride):
        model = made(dtype=torch.float32, **choice, context=8)
        logits = model(tokens)
        assert logits.shape == (2, 8, VOCAB), choice
        loss = model(tokens, labels)
        loss.backward()
        missing = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
        assert not missing, (choice, missing)
        expected = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        torch.testing.assert_close(loss, expected, msg=str(choice))
        assert bool((logits.abs() <= choice["logit_cap"]).all()) if "logit_cap" in choice else True


@pytest.mark.parametrize("position", ["learned", "rope", "none"])
def test_a_token_sees_nothing_of_what_follows(position: str) -> None:
    model = made(position=position, kv_heads=2).eval()
    tokens, place = some_tokens(), 11
    changed = tokens.clone()
    changed[:, place:] = (changed[:, place:] + 1) % VOCAB
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :place], after[:, :place], rtol=0, atol=1e-12)
    assert bool((before[:, place:] != after[:, place:]).any(-1).all())


@pytest.mark.parametrize("position", ["learned", "rope"])
def test_places_matter_and_without_positions_only_the_order_of_the_past_does_not(position: str) -> None:
    tokens = some_tokens(1, 6)
    swapped = tokens[:, [2, 1, 0, 3, 4, 5]]
    last = [made(position=position)(t)[:, -1] for t in (tokens, swapped)]
    assert not torch.allclose(*last)
    last = [made(position="none", layers=1)(t)[:, -1] for t in (tokens, swapped)]
    torch.testing.assert_close(*last, rtol=0, atol=1e-12)


def test_rotation_turns_pairs_by_their_place() -> None:
    x = torch.randn(1, 5, 2, 6, dtype=torch.float64)
    turned = Rotation(100.0, 6, 3, 5, like=x)(x)
    for t, h, i in itertools.product(range(5), range(2), range(3)):
        pair = torch.complex(x[0, t, h, i], x[0, t, h, i + 3])
        angle = torch.tensor((t + 3) * 100.0 ** (-2 * i / 6), dtype=torch.float64)
        expected = pair * torch.polar(torch.ones((), dtype=torch.float64), angle)
        torch.testing.assert_close(turned[0, t, h, i], expected.real)
        torch.testing.assert_close(turned[0, t, h, i + 3], expected.imag)


def test_rotation_keeps_its_tables_in_float32_and_its_input_in_half() -> None:
    x = torch.randn(1, 4, 1, 8, dtype=torch.bfloat16)
    rotation = Rotation(10_000.0, 8, 0, 4, like=x)
    assert rotation.cos.dtype == torch.float32
    assert rotation(x).dtype == torch.bfloat16


class TestCache:
    """Incremental passes give the logits of the whole pass."""

    @pytest.mark.parametrize("settings", [
        {"position": "learned"},
        {"position": "rope", "qk_norm": True, "kv_heads": 2, "norm": "rmsnorm"},
        {"position": "none", "kv_heads": 1, "tie_head": False, "head_bias": True, "logit_cap": 3.0},
    ])  # fmt: skip
    @pytest.mark.parametrize("cuts", [[1] * 24, [10, *[1] * 14], [5, 7, 1, 11], [24]])
    def test_logits_are_those_of_the_whole(self, settings: dict[str, Any], cuts: list[int]) -> None:
        model = made(**settings, dropout=0.5).eval()
        tokens = some_tokens()
        whole = model(tokens)
        cache = model.new_cache(3, 24)
        for stop, cut in zip(itertools.accumulate(cuts), cuts, strict=True):
            logits = model(tokens[:, stop - cut : stop], cache=cache)
            assert logits.shape == (3, 1, VOCAB)
            torch.testing.assert_close(logits[:, 0], whole[:, stop - 1], rtol=0, atol=1e-12)
        assert cache.length == 24

    def test_it_holds_only_what_it_was_made_for(self) -> None:
        model = made().eval()
        cache = model.new_cache(3, 4)
        model(some_tokens(3, 4), cache=cache)
        with pytest.raises(AssertionError, match="as much as it was made for"):
            model(some_tokens(3, 1), cache=cache)

    def test_in_bfloat16_it_holds_bfloat16(self) -> None:
        model = made(dtype=torch.float32).eval()
        cache = model.new_cache(3, 4)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            model(some_tokens(3, 4), cache=cache)
        assert cache.layers[0].keys is not None and cache.layers[0].keys.dtype == torch.bfloat16


class TestDropout:
    """Dropout is on in training, off in evaluation, and fixed by the default generator's seed."""

    def test_off_in_evaluation(self) -> None:
        tokens = some_tokens()
        plain, dropping = made(), made(dropout=0.3)
        assert torch.equal(plain.eval()(tokens), dropping.eval()(tokens))
        assert torch.equal(plain.train()(tokens), plain.eval()(tokens))

    def test_the_seed_fixes_it(self) -> None:
        model, tokens = made(dropout=0.3), some_tokens()
        results = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            results.append(model(tokens))
        assert torch.equal(results[0], results[1])
        assert not torch.equal(results[0], results[2])

    def test_activation_checkpointing_repeats_it(self) -> None:
        model, tokens = made(dropout=0.3, position="rope"), some_tokens()
        torch.manual_seed(5)
        model(tokens, tokens).backward()
        expected = [p.grad for p in model.parameters()]
        model.zero_grad()
        for block in model.blocks():
            inner = block.forward
            block.forward = lambda *args, inner=inner: checkpoint(inner, *args, use_reentrant=False)
        torch.manual_seed(5)
        model(tokens, tokens).backward()
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), expected, strict=True))


class TestBuild:
    """From a recipe to a network."""

    def test_names_are_stable(self) -> None:
        model = made(layers=1, norm="rmsnorm", activation="swiglu", attn_bias=False, ff_bias=False, tie_head=False)
        assert [name for name, _ in model.named_parameters()] == [
            "embedding.weight",
            "positions.weight",
            "blocks.0.attn_norm.weight",
            "blocks.0.attn.qkv.weight",
            "blocks.0.attn.out.weight",
            "blocks.0.ff_norm.weight",
            "blocks.0.ff.gate.weight",
            "blocks.0.ff.up.weight",
            "blocks.0.ff.down.weight",
            "norm.weight",
            "head.weight",
        ]
        assert not list(model.buffers())
        assert model.get_submodule("blocks.0") is model.blocks()[0]
        assert "head.weight" not in made().state_dict()

    def test_a_vocabulary_that_is_too_small_is_refused(self) -> None:
        recipe = Recipe.load("shakespeare-char", ["model.vocab=60"])
        with pytest.raises(UserError, match="60 rows are too few for the tokenizer's vocabulary of 65"):
            build_model(recipe, vocab=65)
        assert build_model(Recipe.load("shakespeare-char", ["model.vocab=70"]), vocab=65).vocab == 70

    def test_a_longer_text_than_the_context_is_no_accident(self) -> None:
        with pytest.raises(AssertionError, match="25 tokens do not fit into a context of 24"):
            made()(some_tokens(1, 25))

    def test_dtype_and_device(self) -> None:
        recipe = Recipe.load("quickstart")
        assert {p.dtype for p in build_model(recipe, 257, dtype=torch.float64).parameters()} == {torch.float64}
        assert {p.device.type for p in build_model(recipe, 257).parameters()} == {"meta"}
        assert {p.device.type for p in build_model(recipe, 257, "cpu").parameters()} == {"cpu"}

    def test_autocast_gives_a_float32_loss_near_the_true_one(self) -> None:
        model, tokens = made(dtype=torch.float32, position="rope", qk_norm=True, norm="rmsnorm"), some_tokens()
        with torch.autocast("cpu", torch.bfloat16):
            half = model(tokens, tokens)
        assert half.dtype == torch.float32
        torch.testing.assert_close(half, model(tokens, tokens), rtol=2e-2, atol=0)
