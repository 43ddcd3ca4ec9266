"""Sizes by arithmetic, against the published figures, the real modules and torch's own FLOP counter."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import hf_fixtures
from windlass.model.build import build_model
from windlass.model.gpt import initialise
from windlass.model.hf import read_sizes
from windlass.model.size import (
    HfSizes,
    Parameters,
    block_matrices,
    block_parameters,
    checkpoint_bytes,
    count,
    flops_per_token,
    forward_flops,
)
from windlass.recipe import Recipe
from windlass.recipe.load import presets
from windlass.recipe.settings import ModelSettings

# preset, rows of the embedding, parameters in all, parameters as nanoGPT counts them
PUBLISHED = [
    ("c4-29m", 50257, 28_952_064, 28_886_528),
    ("c4-30m", 50257, 29_995_520, 29_929_984),
    ("shakespeare-char", 65, 10_745_088, 10_646_784),
    ("shakespeare-char-cpu", 65, 804_096, 795_904),
    ("gpt2-124m", 50257, 124_439_808, 123_653_376),
    ("gpt2-124m", 50304, 124_475_904, 123_689_472),
]


@pytest.mark.parametrize(("preset", "vocab", "total", "nanogpt"), PUBLISHED)
def test_parameters_of_the_presets(preset: str, vocab: int, total: int, nanogpt: int) -> None:
    recipe = Recipe.load(preset, [f"model.vocab={vocab}"])
    parameters = count(recipe.model, vocab)
    assert parameters.total == total
    assert parameters.total - parameters.positions == nanogpt
    model = build_model(recipe, vocab=vocab)
    assert sum(p.numel() for p in model.parameters()) == total


def test_the_model_that_is_built_has_the_presets_own_vocabulary() -> None:
    assert sum(p.numel() for p in build_model(Recipe.load("gpt2-124m"), vocab=50257).parameters()) == 124_475_904
    assert sum(p.numel() for p in build_model(Recipe.load("c4-30m"), vocab=50257).parameters()) == 29_995_520


def test_every_preset_is_built_and_counted() -> None:
    for preset in presets():
        recipe = Recipe.load(preset)
        if recipe.model.kind == "gpt":
            vocab = recipe.model.vocab or 65
            built = sum(p.numel() for p in build_model(recipe, vocab=min(vocab, 65)).parameters())
            assert count(recipe.model, vocab).total == built, preset


def every_shape() -> list[ModelSettings]:
    """All choices that change the number of parameters, at a small size."""
    choices = itertools.product(
        ["layernorm", "rmsnorm"], [True, False], ["learned", "rope"], ["gelu", "swiglu"], [True, False], [1, 0],
        [True, False],
    )  # fmt: skip
    return [
        ModelSettings(
            layers=2, heads=4, width=16, context=8, norm=norm, final_norm=final, norm_bias=bias, position=position,
            activation=activation, attn_bias=bias, ff_bias=not bias, head_bias=bias, kv_heads=kv, tie_head=tied, ff_width=24,
        )
        for norm, final, position, activation, bias, kv, tied in choices
    ]  # fmt: skip


def test_the_parts_are_those_of_the_modules() -> None:
    recipe = Recipe.load("quickstart")
    for settings in every_shape():
        model = build_model(recipe.model_copy(update={"model": settings}), vocab=11)
        sizes = {name: p.numel() for name, p in model.named_parameters()}

        def part(*words: str, sizes: dict[str, int] = sizes) -> int:
            return sum(n for name, n in sizes.items() if any(word in name for word in words))

        expected = Parameters(
            embedding=part("embedding."),
            positions=part("positions."),
            attention=part(".attn."),
            feed_forward=part(".ff."),
            norms=part("norm."),
            head=part("head."),
            tied=settings.tie_head,
        )
        assert count(settings, 11) == expected
        assert expected.total == sum(sizes.values())
        assert expected.non_embedding == expected.attention + expected.feed_forward + expected.norms
        assert block_parameters(settings) == part("blocks.0.")
        matrices = [p.numel() for n, p in model.named_parameters() if "blocks.0" in n and p.ndim == 2]
        assert block_matrices(settings) == sum(matrices)


def test_gpt2_small_takes_855_mflop_a_token() -> None:
    settings = Recipe.load("gpt2-124m").model
    assert flops_per_token(settings, 50304) == 6 * 123_689_472 + 12 * 12 * 768 * 1024
    assert round(flops_per_token(settings, 50304) / 1e6) == 855
    # half the length: half the attention
    assert flops_per_token(settings, 50304, 512) == 6 * 123_689_472 + 12 * 12 * 768 * 512


def test_an_untied_embedding_is_looked_up_and_costs_nothing() -> None:
    settings = Recipe.load("c4-30m").model
    assert count(settings, 50257).multiplied == 29_995_520 - 50257 * 256 - 256 * 256


@pytest.mark.parametrize("overrides", [
    ["model.tie_head=false", "model.activation=swiglu", "model.kv_heads=2"],
    ["model.position=rope", "model.norm=rmsnorm"],
    ["model.attn_bias=true", "model.ff_bias=true", "model.head_bias=true"],
])  # fmt: skip
def test_flops_are_those_that_torch_counts(overrides: list[str]) -> None:
    recipe = Recipe.load("shakespeare-char", [
        "model.layers=2", "model.heads=4", "model.width=64", "model.context=48", "model.dropout=0", *overrides,
    ])  # fmt: skip
    model = build_model(recipe, vocab=97, device="cpu")
    initialise(model, 0)
    tokens = torch.randint(97, (3, 48))
    with sdpa_kernel(SDPBackend.MATH):  # torch does not count the CPU's flash kernel
        with FlopCounterMode(display=False) as forward:
            loss = model(tokens, tokens)
        with FlopCounterMode(display=False) as backward:
            loss.backward()
    expected = forward_flops(recipe.model, 97, batch=3, length=48)
    assert forward.get_total_flops() == expected
    assert backward.get_total_flops() == 2 * expected
    # The usual convention counts norms and biases as if they were matrices.
    vectors = sum(p.numel() for p in model.parameters() if p.ndim == 1)
    assert 3 * expected == 3 * 48 * (flops_per_token(recipe.model, 97) - 6 * vectors)


def test_the_flops_of_gpt2_small_on_meta() -> None:
    recipe = Recipe.load("gpt2-124m")
    model = build_model(recipe, vocab=50257)
    tokens = torch.zeros(1, 1024, dtype=torch.int64, device="meta")
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens)
    expected = forward_flops(recipe.model, 50304, batch=1, length=1024)
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.01)
    assert 3 * expected == pytest.approx(1024 * flops_per_token(recipe.model, 50304), rel=0.01)


def test_bytes_of_a_checkpoint() -> None:
    settings = Recipe.load("c4-30m").model
    assert checkpoint_bytes(settings, 50257) == 12 * 29_995_520
    assert checkpoint_bytes(settings, 50257, "muon") == 12 * 29_995_520 - 4 * 4 * 1_048_576


def test_sizes_need_no_torch() -> None:
    code = "import sys, windlass.model.size; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("kind", ["bloom", "gpt2", "llama", "jamba"])
def test_a_model_of_transformers_is_counted_without_its_weights(kind: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    hf_fixtures.config(kind).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    tree = {"kind": "hf", "name": str(tmp_path), "context": 48}
    whole = read_sizes(Recipe.model_validate({"model": tree}))
    total = AutoModelForCausalLM.from_config(hf_fixtures.config(kind)).num_parameters()
    assert whole == HfSizes(total, total, hf_fixtures.VOCAB)
    assert (whole.flops_per_token(), whole.checkpoint_bytes()) == (6 * total, 12 * total)
    if kind == "llama":
        targets = {"rank": 4, "targets": ["q_proj", "v_proj"]}
        lora, adapters = read_sizes(Recipe.model_validate({"model": {**tree, "lora": targets}})), 3 * 4 * (64 + 48)
        assert lora == HfSizes(total + adapters, adapters, hf_fixtures.VOCAB)
        assert lora.flops_per_token() == 4 * (total + adapters) + 2 * adapters  # a frozen matrix has no gradient
        assert lora.checkpoint_bytes() == 4 * (total + adapters) + 8 * adapters
