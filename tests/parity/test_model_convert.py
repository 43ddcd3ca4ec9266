"""Our GPT beside the GPT-2 and LLaMA of `transformers`, with the same weights: logits, loss and
gradients.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from helpers import refused
from windlass.interop.init_from import fill_from_hf
from windlass.model import convert
from windlass.model.gpt import GPT, initialise
from windlass.recipe.network import ModelSettings

VOCAB, LENGTH = 101, 48
SMALL: dict[str, Any] = {"layers": 3, "heads": 4, "width": 48, "context": 64, "ff_width": 100}

UNBIASED = {"attn_bias": False, "ff_bias": False}
GPT2: dict[str, dict[str, Any]] = {
    "GPT-2 itself": {"activation": "gelu_tanh", "ff_width": 0},
    "nanoGPT's, without biases": {**UNBIASED, "norm_bias": False},
    "untied, ReLU": {"tie_head": False, "activation": "relu"},
    "squared ReLU": {"activation": "relu2", "norm_bias": False},
}
MODERN = {"position": "rope", "norm": "rmsnorm", "activation": "swiglu"}
LLAMA: dict[str, dict[str, Any]] = {
    "LLaMA itself": {**MODERN, **UNBIASED, "tie_head": False},
    "grouped queries, tied": {**MODERN, **UNBIASED, "kv_heads": 2},
    "one key head, biases": {**MODERN, "kv_heads": 1, "tie_head": False, "rope_theta": 5e5},
}
QUICKSTART = {**UNBIASED, "activation": "relu2", "qk_norm": True}
OTHERS: dict[str, dict[str, Any]] = {
    "Qwen3": {**MODERN, "qk_norm": True, "ff_bias": False, "kv_heads": 2, "tie_head": False},
    "Arcee, biased": {**MODERN, "activation": "relu2"},
    "Arcee, GELU": {**MODERN, **UNBIASED, "activation": "gelu", "kv_heads": 1},
    "Apertus, as quickstart": {**MODERN, **QUICKSTART},
    "Apertus, untied": {**MODERN, **QUICKSTART, "activation": "gelu_tanh", "attn_bias": True}
    | {"kv_heads": 2, "tie_head": False},
}
MODELS = {**GPT2, **LLAMA, **OTHERS}


def ours(settings: dict[str, Any]) -> GPT:
    """A model whose every weight matters: biases and norms are not left at 0 and 1."""
    model = GPT(ModelSettings(**{**SMALL, **settings}), VOCAB)
    initialise(model, 11)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def reference_of(model: GPT) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = convert.config(model.settings, VOCAB)
    other = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).eval()
    assert type(other).__name__ == config["architectures"][0]
    missing, unexpected = other.load_state_dict(weights_of(model), strict=False)
    assert not unexpected and missing == (["lm_head.weight"] if model.settings.tie_head else [])
    other.tie_weights()
    return other


def weights_of(model: GPT) -> dict[str, Tensor]:
    return dict(convert.to_hf(model.settings, model.state_dict().__getitem__))


def write(folder: Path, model: GPT, weights: dict[str, Tensor], **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    config = convert.config(model.settings, VOCAB) | changes
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: value.contiguous() for name, value in weights.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def read(folder: Path, settings: ModelSettings, vocab: int = VOCAB) -> dict[str, Tensor]:
    model = GPT(settings, vocab)
    fill_from_hf(model, folder, seed=1)
    return model.state_dict()


def some_tokens() -> Tensor:
    return torch.randint(VOCAB, (3, LENGTH), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("name", MODELS)
def test_logits_loss_and_gradients(name: str) -> None:
    model = ours(MODELS[name])
    other = reference_of(model)
    tokens = some_tokens()
    mine, reference = model(tokens), other(tokens).logits
    torch.testing.assert_close(mine, reference, rtol=0, atol=1e-5)
    assert reference.std().item() > 0.1  # not equal because nothing is there

    labels = tokens.roll(-1, 1)
    labels[:, -1] = -100
    labels[0, 20:30] = -100
    counted = int((labels != -100).sum())
    loss = model(tokens, labels) / counted
    expected = other(tokens, labels=tokens, shift_labels=labels).loss
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-5)
    loss.backward()
    expected.backward()
    reference = other.get_input_embeddings().weight.grad
    torch.testing.assert_close(model.embedding.weight.grad, reference, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["GPT-2 itself", "untied, ReLU", "one key head, biases", "Qwen3"])
def test_the_multipliers_of_mup_are_in_the_weights(name: str, tmp_path: Path) -> None:
    own = {"base_width": 16, "base_head_width": 4, "input_multiplier": 3.0}
    model = ours({**MODELS[name], "mup": {**own, "output_multiplier": 2.0}})
    other, tokens = reference_of(model), some_tokens()
    reference = other(tokens).logits
    torch.testing.assert_close(model(tokens), reference, rtol=1e-5, atol=1e-5)
    plain = ours(MODELS[name])
    assert not torch.allclose(plain(tokens), reference, rtol=0, atol=0.1)
    with refused("model.init_from", "drop model.mup"):
        read(write(tmp_path, plain, weights_of(plain)), model.settings)


@pytest.mark.parametrize("name", MODELS)
def test_there_and_back_whatever_names_a_file_has(name: str, tmp_path: Path) -> None:
    model = ours(MODELS[name])
    reference_of(model).save_pretrained(tmp_path / "whole")
    weights = load_file(tmp_path / "whole" / "model.safetensors")
    bare = {re.sub(r"^(transformer|model)\.", "", name): value for name, value in weights.items()}
    mine = write(tmp_path / "mine", model, weights_of(model))
    for folder in (mine, tmp_path / "whole", write(tmp_path / "bare", model, bare)):
        back = read(folder, model.settings)
        assert back.keys() == model.state_dict().keys()
        assert all(torch.equal(back[key], value) for key, value in model.state_dict().items())


def test_a_shorter_context_and_a_padded_vocabulary(tmp_path: Path) -> None:
    model = ours(GPT2["GPT-2 itself"])
    settings = model.settings.model_copy(update={"context": 32})
    weights = weights_of(model)
    weights["transformer.h.0.attn.bias"] = torch.ones(1, 1, 64, 64)  # the mask that old files hold
    small = GPT(settings, 128).eval()
    small.load_state_dict(read(write(tmp_path, model, weights), settings, vocab=128))
    tokens = some_tokens()[:, :32]
    torch.testing.assert_close(small(tokens)[..., :VOCAB], model(tokens), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"n_layer": 2}, ["model.layers = 2", "it is 3"]),
        ({"layer_norm_epsilon": 1e-6}, ["model.norm_eps = 1e-06"]),
        ({"activation_function": "gelu"}, ['model.activation = "gelu"', '"gelu_tanh"']),
        ({"tie_word_embeddings": False}, ["model.tie_head = false"]),
        ({"scale_attn_by_inverse_layer_idx": True}, ["scale_attn_by_inverse_layer_idx"]),
        ({"scale_attn_weights": False}, ["scale_attn_weights"]),
        ({"model_type": "opt"}, ["opt"]),
    ],
)
def test_another_model_is_refused(change: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    model = ours(GPT2["GPT-2 itself"])
    folder = write(tmp_path, model, weights_of(model), **change)
    with refused("model.init_from", *words):
        read(folder, model.settings)


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    model = ours(GPT2["GPT-2 itself"])
    weights, name, settings = weights_of(model), "transformer.h.1.ln_2.weight", model.settings
    whole = write(tmp_path / "whole", model, weights)
    with refused("model.vocab = 101", "it is 90"):
        read(whole, settings, 90)
    with refused("model.context = 64", "it is 65"):
        read(whole, settings.model_copy(update={"context": 65}))
    with refused("blocks.0.attn.qkv.bias"):
        read(whole, settings.model_copy(update={"attn_bias": False}))
    cut = write(tmp_path / "cut", model, {**weights, name: torch.ones(47)})
    with refused("blocks.1.ff_norm.weight", "[47]", "[48]"):
        read(cut, settings)
    del weights[name]
    with refused(name):
        read(write(tmp_path / "lacking", model, weights), settings)
