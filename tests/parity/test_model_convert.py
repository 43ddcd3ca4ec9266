"""Our GPT beside the GPT-2 and LLaMA of `transformers`, with the same weights: logits, loss and
gradients.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from windlass.model import convert
from windlass.model.gpt import GPT, initialise
from windlass.recipe import Recipe, presets
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


def test_the_networks_of_presets_have_an_architecture() -> None:
    """The others are exported with their code."""
    names = {name: convert.architecture(Recipe.load(name).model) for name in presets()}
    assert names["gpt2-124m"] == "gpt2" and names["quickstart"] == "apertus" and not names["c4-30m"]


@pytest.mark.parametrize("name", ["GPT-2 itself", "untied, ReLU", "one key head, biases", "Qwen3"])
def test_the_factor_of_mup_is_in_the_weights(name: str) -> None:
    model = ours({**MODELS[name], "mup_base_width": 16})
    other, tokens = reference_of(model), some_tokens()
    reference = other(tokens).logits
    torch.testing.assert_close(model(tokens), reference, rtol=1e-5, atol=1e-5)
    plain = ours(MODELS[name])
    assert not torch.allclose(plain(tokens), reference, rtol=0, atol=0.1)
