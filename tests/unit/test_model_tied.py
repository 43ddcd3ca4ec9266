"""A table that is also the head's matrix: one gradient, equal to the sum of autograd's two."""

import pytest
import torch
import torch.nn.functional as F

from windlass.model.gpt import GPT, initialise
from windlass.model.hf import wrap
from windlass.model.loss import look_up
from windlass.model.size import CHUNK_BYTES
from windlass.recipe.network import ModelSettings

VOCAB = 40


def zeros_made(run) -> list[tuple[int, ...]]:
    """The shapes of the gradients that the lookups of a backward pass make of zeros."""
    from torch.utils._python_dispatch import TorchDispatchMode

    shapes = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if "embedding_dense_backward" in str(function):
                shapes.append(tuple(result.shape))
            return result

    with Watch():
        run()
    return shapes


def test_the_gradient_is_the_sum_of_both_uses() -> None:
    table = torch.randn(VOCAB, 8, dtype=torch.float64, requires_grad=True)
    tokens = torch.tensor([[3, 1, 3], [0, 3, 39]])

    def loss(rows, head):
        return (rows.tanh() @ head.T).logsumexp(-1).sum()

    (expected,) = torch.autograd.grad(loss(F.embedding(tokens, table), table), table)
    (found,) = torch.autograd.grad(loss(*look_up(table, tokens)), table)
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("chunked", [False, True])
def test_gpt_makes_one_gradient_of_its_table(chunked: bool, monkeypatch) -> None:
    if chunked:
        monkeypatch.setitem(CHUNK_BYTES, "cpu", 4 * VOCAB * 5)
    settings = ModelSettings(layers=1, heads=2, width=8, context=6, position="rope")
    gpt = GPT(settings, VOCAB).double()
    initialise(gpt, 0)
    tokens = torch.randint(0, VOCAB, (3, 6), generator=torch.Generator().manual_seed(1))
    labels = tokens.roll(-1, 1)

    logits = gpt(tokens)  # without labels the lookup and the head have a gradient each
    F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    expected = {name: p.grad for name, p in gpt.named_parameters()}
    gpt.zero_grad(set_to_none=True)
    assert zeros_made(lambda: gpt(tokens, labels).backward()) == []
    for name, p in gpt.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", ["gpt2", "bloom", "opt"])
def test_models_of_transformers_make_one_gradient_of_their_table(kind: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2} if kind != "opt" else {}
    if kind == "opt":
        sizes = {"hidden_size": 8, "ffn_dim": 16, "num_hidden_layers": 1}
        sizes |= {"num_attention_heads": 2, "word_embed_proj_dim": 8, "dropout": 0.0}
    config = AutoConfig.for_model(kind, vocab_size=VOCAB, **sizes)
    model = wrap(AutoModelForCausalLM.from_config(config), 8).double().train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    tokens = torch.randint(2, VOCAB, (2, 8), generator=torch.Generator().manual_seed(1))
    labels = tokens.roll(-1, 1)

    logits = model.model(tokens).logits
    F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    shapes = zeros_made(lambda: model(tokens, labels).backward())
    # OPT's table has a row for padding, whose gradient transformers leaves out.
    assert ((VOCAB, 8) in shapes) == (kind == "opt")
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], rtol=1e-8, atol=1e-10)
