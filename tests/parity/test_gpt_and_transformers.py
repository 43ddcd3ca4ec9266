"""Our GPT beside the GPT-2 and LLaMA of `transformers`, with the same weights: logits, loss and gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from windlass.errors import UserError
from windlass.model.convert import family, from_hf, hf_config, to_hf
from windlass.model.gpt import GPT
from windlass.model.init import initialise
from windlass.recipe import Recipe
from windlass.recipe.settings import ModelSettings

VOCAB, LENGTH = 101, 48
SMALL: dict[str, Any] = {"layers": 3, "heads": 4, "width": 48, "context": 64, "ff_width": 100}

GPT2: dict[str, dict[str, Any]] = {
    "GPT-2 itself": {"activation": "gelu_tanh", "ff_width": 0},
    "nanoGPT's, without biases": {"attn_bias": False, "ff_bias": False, "norm_bias": False},
    "untied, ReLU": {"tie_head": False, "activation": "relu"},
    "squared ReLU": {"activation": "relu2", "norm_bias": False},
}
MODERN = {"position": "rope", "norm": "rmsnorm", "activation": "swiglu"}
LLAMA: dict[str, dict[str, Any]] = {
    "LLaMA itself": {**MODERN, "attn_bias": False, "ff_bias": False, "tie_head": False},
    "grouped queries, tied": {**MODERN, "attn_bias": False, "ff_bias": False, "kv_heads": 2},
    "one key head, biases, another theta": {**MODERN, "kv_heads": 1, "tie_head": False, "rope_theta": 5e5},
}
MODELS = {**GPT2, **LLAMA}


def ours(settings: dict[str, Any]) -> GPT:
    """A model whose every weight matters: biases and norms are not left at 0 and 1."""
    model = GPT(ModelSettings(**{**SMALL, **settings}), VOCAB)
    initialise(model, 11)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def theirs(model: GPT) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = hf_config(model.settings, VOCAB)
    other = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).eval()
    assert type(other).__name__ == config["architectures"][0]
    missing, unexpected = other.load_state_dict(to_hf(model.state_dict(), model.settings), strict=False)
    assert not unexpected
    assert missing == (["lm_head.weight"] if model.settings.tie_head else [])
    other.tie_weights()
    return other


def some_tokens() -> Tensor:
    return torch.randint(VOCAB, (3, LENGTH), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("name", MODELS)
def test_logits_loss_and_gradients(name: str) -> None:
    model = ours(MODELS[name])
    other = theirs(model)
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
    mine = model.embedding.weight.grad
    reference = other.get_input_embeddings().weight.grad
    torch.testing.assert_close(mine, reference, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_there_and_back(name: str) -> None:
    model = ours(MODELS[name])
    there = to_hf(model.state_dict(), model.settings)
    back = from_hf(there, hf_config(model.settings, VOCAB), model.settings, VOCAB)
    assert back.keys() == model.state_dict().keys()
    assert all(torch.equal(back[key], value) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", ["GPT-2 itself", "grouped queries, tied"])
def test_a_directory_that_transformers_wrote(name: str, tmp_path: Path) -> None:
    """Whatever names and extra tensors a file has, it is read; a file's own configuration is understood."""
    import json

    from safetensors.torch import load_file

    model = ours(MODELS[name])
    theirs(model).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    weights = load_file(tmp_path / "model.safetensors")
    bare = {name.removeprefix("transformer.").removeprefix("model."): value for name, value in weights.items()}
    for given in (weights, bare):
        back = from_hf(given, config, model.settings, VOCAB)
        assert all(torch.equal(back[key], value) for key, value in model.state_dict().items())


def test_a_shorter_context_and_a_padded_vocabulary() -> None:
    model = ours(GPT2["GPT-2 itself"])
    settings = model.settings.model_copy(update={"context": 32})
    weights = to_hf(model.state_dict(), model.settings)
    weights["transformer.h.0.attn.bias"] = torch.ones(1, 1, 64, 64)  # the mask that old files hold
    back = from_hf(weights, hf_config(model.settings, VOCAB), settings, vocab=128)
    small = GPT(settings, 128).eval()
    small.load_state_dict(back)
    tokens = some_tokens()[:, :32]
    torch.testing.assert_close(small(tokens)[..., :VOCAB], model(tokens), rtol=0, atol=1e-6)
    torch.testing.assert_close(small(tokens)[..., VOCAB:].mean(-1), model(tokens).mean(-1), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("change", "message"), [
    ({"n_layer": 2}, "n_layer is 2 there and 3 here"),
    ({"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon"),
    ({"activation_function": "gelu"}, "activation_function is 'gelu' there and 'gelu_new' here"),
    ({"tie_word_embeddings": False}, "tie_word_embeddings"),
    ({"model_type": "opt"}, "'opt'"),
])  # fmt: skip
def test_another_model_is_refused(change: dict[str, Any], message: str) -> None:
    model = ours(GPT2["GPT-2 itself"])
    config = hf_config(model.settings, VOCAB) | change
    with pytest.raises(UserError, match=message):
        from_hf(to_hf(model.state_dict(), model.settings), config, model.settings, VOCAB)


def test_weights_that_do_not_fit_are_refused() -> None:
    model = ours(GPT2["GPT-2 itself"])
    config, weights = hf_config(model.settings, VOCAB), to_hf(model.state_dict(), model.settings)

    def read(weights: dict[str, Tensor], vocab: int = VOCAB, **change: Any) -> None:
        from_hf(weights, config, model.settings.model_copy(update=change), vocab)

    with pytest.raises(UserError, match=r"transformer\.wte\.weight has the shape \[101, 48\].* wants \[90, 48\]"):
        read(weights, vocab=90)
    with pytest.raises(UserError, match=r"transformer\.wpe\.weight has the shape \[64, 48\].* wants \[65, 48\]"):
        read(weights, context=65)
    with pytest.raises(UserError, match=r"hold transformer\.h\.0\.attn\.c_attn\.bias"):
        read(weights, attn_bias=False)
    with pytest.raises(UserError, match=r"hold no transformer\.h\.1\.ln_2\.weight"):
        read({name: value for name, value in weights.items() if name != "transformer.h.1.ln_2.weight"})


@pytest.mark.parametrize(("preset", "expected"), [
    ("gpt2-124m", "gpt2"),
    ("shakespeare-char", "gpt2"),
    ("shakespeare-char-cpu", "gpt2"),
])  # fmt: skip
def test_which_presets_can_be_exported(preset: str, expected: str) -> None:
    assert family(Recipe.load(preset).model) == expected


def test_what_no_architecture_has_is_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"model\.final_norm = false.*model\.activation = \"swiglu\""):
        family(Recipe.load("c4-30m").model)
    with pytest.raises(UserError, match=r"nearest is llama, but for model\.qk_norm.*model\.activation = \"relu2\""):
        family(Recipe.load("shakespeare-char-fast").model)
