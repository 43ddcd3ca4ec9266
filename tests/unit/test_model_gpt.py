"""Our GPT: every combination of its choices, causality, cache, dropout, initial weights, sizes."""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import hf_fixtures
from windlass.estimate.rank import checkpoint_bytes
from windlass.model.build import build_model, read_sizes
from windlass.model.gpt import GPT, RotaryEmbedding, initialise
from windlass.model.size import CountedSizes, Parameters, block_matrices, count, flops_per_token
from windlass.recipe import Recipe
from windlass.recipe.network import ModelSettings

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
BIASES: list[dict[str, Any]] = [
    {},
    {"attn_bias": False, "norm_bias": False, "final_norm": False},
    {"attn_bias": False, "ff_bias": False, "logit_cap": 4.0},
]
"""Beside the defaults: every bias, and a final norm."""


def gpt(seed: int = 0, dtype: torch.dtype = torch.float64, **settings: Any) -> GPT:
    model = GPT(ModelSettings(**{**SMALL, **settings}), VOCAB).to(dtype)
    initialise(model, seed)
    return model


def some_tokens(rows: int = 3, length: int = 24, seed: int = 1) -> Tensor:
    return torch.randint(VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.full)])
def test_combinations_are_built_counted_and_trained(stride: int) -> None:
    tokens = some_tokens(2, 8)
    labels = tokens.roll(-1, 1)
    labels[0, -3:] = -100
    values = itertools.islice(itertools.product(*CHOICES.values()), 0, None, stride)
    for chosen, biases in zip(values, itertools.cycle(BIASES), strict=False):
        choice = dict(zip(CHOICES, chosen, strict=True)) | biases
        model = gpt(dtype=torch.float32, **choice, context=8)
        logits = model(tokens)
        assert logits.shape == (2, 8, VOCAB), choice
        loss = model(tokens, labels)
        loss.backward()
        grads = [parameter.grad for parameter in model.parameters()]
        assert all(grad is not None and grad.isfinite().all() for grad in grads), choice
        flat = logits.flatten(0, 1), labels.flatten()
        expected = nn.functional.cross_entropy(*flat, reduction="sum")
        torch.testing.assert_close(loss, expected, msg=str(choice))
        assert float(logits.detach().abs().max()) <= choice.get("logit_cap", math.inf)
        check_count(model)


def check_count(model: GPT) -> None:
    sizes = {name: p.numel() for name, p in model.named_parameters()}

    def part(*words: str) -> int:
        return sum(n for name, n in sizes.items() if any(word in name for word in words))

    norm = sum(n for name, n in sizes.items() if name.startswith("norm."))
    expected = Parameters(
        embedding=part("embedding."),
        positions=part("positions."),
        block=part("blocks.0."),
        norm=norm,
        non_embedding=part("blocks.") + norm,
        head=part("head."),
        tied=model.settings.tie_head,
    )
    assert count(model.settings, VOCAB) == expected and expected.total == sum(sizes.values())
    matrices = [p.numel() for p in model.blocks[0].parameters() if p.ndim == 2]
    assert block_matrices(model.settings) == sum(matrices)


@pytest.mark.parametrize("position", ["learned", "rope", "none"])
def test_a_token_sees_nothing_of_what_follows_and_without_positions_no_order(position: str) -> None:
    model = gpt(position=position, kv_heads=2, layers=1).eval()
    tokens, place = some_tokens(), 11
    changed = tokens.clone()
    changed[:, place:] = (changed[:, place:] + 1) % VOCAB
    before, after, swapped = model(tokens), model(changed), model(tokens[:, [2, 1, 0, 3, 4, 5]])
    torch.testing.assert_close(before[:, :place], after[:, :place], rtol=0, atol=1e-12)
    assert bool((before[:, place:] != after[:, place:]).any(-1).all())
    assert torch.allclose(before[:, 5], swapped[:, 5], rtol=0, atol=1e-12) == (position == "none")


def test_rotation_is_in_float32_for_low_precision() -> None:
    """`test_model_convert.py` compares it with Llama's."""
    low = torch.randn(1, 5, 2, 6).bfloat16()
    rotation = RotaryEmbedding(10_000.0, 6, torch.arange(5), like=low)
    assert (rotation.cos.dtype, rotation(low).dtype) == (torch.float32, torch.bfloat16)


@pytest.mark.parametrize(
    "settings",
    [
        {"position": "learned"},
        {"position": "rope", "qk_norm": True, "kv_heads": 2, "norm": "rmsnorm"},
        {"position": "none", "kv_heads": 1, "tie_head": False, "logit_cap": 3.0},
    ],
)
@pytest.mark.parametrize("cuts", [[1] * 24, [10, *[1] * 14], [5, 7, 1, 11], [24]])
def test_a_cache_gives_the_logits_of_the_whole(settings: dict[str, Any], cuts: list[int]) -> None:
    model = gpt(**settings, dropout=0.5).eval()
    tokens = some_tokens()
    whole, cache = model(tokens), model.new_cache(3, 24)
    for stop, cut in zip(itertools.accumulate(cuts), cuts, strict=True):
        logits = model(tokens[:, stop - cut : stop], cache=cache)
        assert logits.shape == (3, 1, VOCAB)
        torch.testing.assert_close(logits[:, 0], whole[:, stop - 1], rtol=0, atol=1e-12)
    assert cache[0].length == 24
    with pytest.raises(AssertionError):  # it is full
        model(tokens[:, :1], cache=cache)


def test_names_are_stable() -> None:
    """Checkpoints and initial weights depend on them."""
    unbiased = {"norm": "rmsnorm", "attn_bias": False, "ff_bias": False}
    model = gpt(layers=1, activation="swiglu", tie_head=False, **unbiased)
    inside = ["attn_norm", "attn.qkv", "attn.out", "ff_norm", "ff.gate", "ff.up", "ff.down"]
    modules = ["embedding", "positions", *(f"blocks.0.{name}" for name in inside), "norm", "head"]
    assert list(dict(model.named_parameters())) == [f"{module}.weight" for module in modules]
    assert not list(model.buffers()) and model.get_submodule("blocks.0") is model.blocks[0]
    assert "head.weight" not in gpt().state_dict()


# Initial weights


def test_initial_weights_depend_on_seed_and_name_not_on_device_or_other_layers() -> None:
    def weights(
        seed: int, dtype: torch.dtype = torch.float32, layers: int = 3
    ) -> dict[str, Tensor]:
        return gpt(seed, dtype, layers=layers, width=64, tie_head=False).state_dict()

    one, same, other = weights(1), weights(1), weights(2)
    double, deep = weights(1, torch.float64), weights(1, layers=5)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert all(torch.equal(one[name].double(), double[name]) for name in one)
    assert all(torch.equal(deep[n], one[n]) for n in one if "out" not in n and "down" not in n)
    normal = [name for name in one if one[name].ndim == 2]
    assert normal and all(not torch.equal(one[name], other[name]) for name in normal)
    # no two tensors alike
    assert len({tuple(one[name].flatten()[:8].tolist()) for name in normal}) == len(normal)
    drawn = GPT(ModelSettings(**SMALL, init_std=1.0), VOCAB)
    initialise(drawn, 1337)
    first = drawn.embedding.weight.flatten()[:3].tolist()
    assert first == pytest.approx([0.46295, -0.64973, -0.90812], abs=1e-5)  # fixed for ever
    recipe = Recipe.load("quickstart")
    direct, late = GPT(recipe.model, 257), build_model(recipe, 257).to_empty(device="cpu")
    state = torch.get_rng_state()
    for model in (direct, late):
        initialise(model, 7)
    # the default generator is neither read nor moved
    assert torch.equal(state, torch.get_rng_state())
    pairs = zip(direct.parameters(), late.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_spreads_are_those_of_gpt2() -> None:
    model = gpt(3, torch.float32, layers=3, width=256, init_std=0.05)
    for name, value in model.state_dict().items():
        if name.endswith("bias"):
            assert not bool(value.any()), name
        elif "norm" in name:
            assert bool((value == 1).all()), name
        else:
            std = 0.05 / math.sqrt(6) if name.endswith(("out.weight", "down.weight")) else 0.05
            bound = 4 * std / math.sqrt(value.numel())
            assert abs(float(value.mean())) < bound, name
            assert abs(float(value.std()) - std) < bound, name
    model, x = gpt(dtype=torch.float32, zero_init_output=True), torch.randn(2, 5, 32)
    assert all(torch.equal(block(x, None, None, None), x) for block in model.blocks)
    assert bool(model.state_dict()["blocks.0.ff.up.weight"].any())


# Sizes


@pytest.mark.parametrize(
    ("preset", "vocab", "total", "nanogpt"),
    [
        ("c4-29m", 50257, 28_952_064, 28_886_528),
        ("c4-30m", 50257, 29_995_520, 29_929_984),
        ("shakespeare-char", 65, 10_745_088, 10_646_784),
        ("shakespeare-char-cpu", 65, 804_096, 795_904),
        ("gpt2-124m", 50257, 124_439_808, 123_653_376),
        ("gpt2-124m", 50304, 124_475_904, 123_689_472),
    ],
)
def test_parameters_of_the_presets_are_the_published_ones(preset, vocab, total, nanogpt):
    recipe = Recipe.load(preset, [f"model.vocab={vocab}"])
    parameters = count(recipe.model, vocab)
    assert (parameters.total, parameters.total - parameters.positions) == (total, nanogpt)
    assert sum(p.numel() for p in build_model(recipe, vocab=vocab).parameters()) == total


def test_flops_and_bytes_of_known_models() -> None:
    gpt2, recipe = Recipe.load("gpt2-124m").model, Recipe.load("c4-30m")
    c4 = recipe.model
    assert flops_per_token(gpt2, 50304) == 6 * 123_689_472 + 12 * 12 * 768 * 1024
    # An embedding that is not the head is only looked up.
    assert count(c4, 50257).multiplied == 29_995_520 - 50257 * 256 - 256 * 256
    assert checkpoint_bytes(recipe, 50257) == 12 * 29_995_520
    muon = recipe.replace("optim.kind=muon")
    assert checkpoint_bytes(muon, 50257) == 12 * 29_995_520 - 4 * 4 * 1_048_576


@pytest.mark.parametrize(
    "settings",
    [
        {"tie_head": False, "activation": "swiglu", "kv_heads": 2},
        {"position": "rope", "norm": "rmsnorm"},
        {"attn_bias": True, "ff_bias": True},
    ],
)
def test_flops_are_those_that_torch_counts(settings: dict[str, Any]) -> None:
    model, tokens = gpt(dtype=torch.float32, **settings), some_tokens()
    with sdpa_kernel(SDPBackend.MATH):  # torch does not count the CPU's flash kernel
        with FlopCounterMode(display=False) as forward:
            loss = model(tokens, tokens)
        with FlopCounterMode(display=False) as backward:
            loss.backward()
    # The usual convention counts norms and biases as if they were matrices.
    vectors = sum(p.numel() for p in model.parameters() if p.ndim == 1)
    expected = 3 * 24 * (flops_per_token(model.settings, VOCAB) - 6 * vectors)
    assert 3 * forward.get_total_flops() == expected == 1.5 * backward.get_total_flops()


@pytest.mark.parametrize("kind", ["bloom", "llama", "jamba"])
def test_a_model_of_transformers_is_counted_without_its_weights(kind: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    config = hf_fixtures.config(kind)
    config.save_pretrained(tmp_path)
    tree = {"kind": "hf", "name": str(tmp_path), "context": 48}
    total = AutoModelForCausalLM.from_config(config).num_parameters()
    recipe = Recipe.model_validate({"model": tree})
    whole = read_sizes(recipe)
    layers, heads = config.num_hidden_layers, config.num_attention_heads
    network = {"architecture": kind, "layers": layers, "heads": heads, "width": config.hidden_size}
    network["vocab"] = hf_fixtures.VOCAB
    assert whole == CountedSizes(total, total, hf_fixtures.VOCAB, network)
    assert whole.flops_per_token() == 6 * total
    assert checkpoint_bytes(recipe, 0, whole) == 12 * total
    if kind == "llama":
        targets = {"rank": 4, "targets": ["q_proj", "v_proj"]}
        recipe = Recipe.model_validate({"model": {**tree, "lora": targets}})
        lora = read_sizes(recipe)
        adapters = 3 * 4 * (64 + 48)
        assert lora == CountedSizes(total + adapters, adapters, hf_fixtures.VOCAB, network)
        # a frozen matrix has no gradient
        assert lora.flops_per_token() == 4 * (total + adapters) + 2 * adapters
        assert checkpoint_bytes(recipe, 0, lora) == 12 * adapters
        archive = recipe.replace("checkpoint.with_base=true")
        assert checkpoint_bytes(archive, 0, lora) == 4 * (total + adapters) + 8 * adapters
