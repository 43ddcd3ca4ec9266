"""Products in float8: torchao's, on a CPU by its emulation, against bf16 and across a resume."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from helpers import curve, refused, tiny_recipe, write_corpus
from windlass import errors, train
from windlass.errors import installed
from windlass.model.build import build_model
from windlass.model.quantised import TrainedInFloat8, use_float8
from windlass.recipe import Recipe

CPU = torch.device("cpu")
SMALL = {"model__width": 128, "model__layers": 1, "model__ff_width": 200}
needs_torchao = pytest.mark.skipif(not installed("torchao"), reason="torchao is not installed")


def linear(inputs: int, outputs: int, bias: bool = True) -> nn.Module:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(inputs, outputs, bias=bias))
    use_float8([block], CPU)
    return block[0]


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.detach().double() - wanted.detach()).norm() / wanted.detach().norm())


@needs_torchao
def test_the_three_products_round_their_operands_to_float8():
    """Rounding to 3 bits errs by up to 2^-4 of a number, to 2 bits (gradients) by up to 2^-3."""
    layer, x = linear(128, 192), torch.randn(3, 15, 128, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    grad = torch.randn_like(y)
    y.backward(grad)
    rows, weight = x.detach().double().flatten(0, 1), layer.weight.detach().double()
    g = grad.double().flatten(0, 1)
    wanted = (rows @ weight.T + layer.bias.double()).unflatten(0, (3, 15))
    assert y.dtype == torch.bfloat16 and 2**-7 < relative(y, wanted) < 2**-4
    assert x.grad.dtype == layer.weight.grad.dtype == torch.float32
    assert 2**-6 < relative(x.grad.flatten(0, 1), g @ weight) < 2**-3
    assert 2**-6 < relative(layer.weight.grad, g.T @ rows) < 2**-3
    assert relative(layer.bias.grad, g.sum(0)) < 2**-7


@needs_torchao
def test_zeros_stay_and_what_is_not_finite_shows():
    layer = linear(128, 128, bias=False)
    for value in (0.0, math.inf, math.nan):
        x = torch.full((16, 128), value, requires_grad=True)
        y = layer(x)
        y.backward(torch.full_like(y, value))
        for result in (y, x.grad, layer.weight.grad):
            assert not result.any() if value == 0 else not result.isfinite().any()
        layer.weight.grad = None


@needs_torchao
def test_evaluation_is_in_bf16_and_frozen_weights_get_no_gradient():
    layer, x = linear(128, 128), torch.randn(16, 128, requires_grad=True)
    layer.weight.requires_grad_(False)
    layer(x).sum().backward()
    assert layer.weight.grad is None and x.grad is not None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(layer.eval()(x), F.linear(x, layer.weight, layer.bias))


@needs_torchao
def test_wide_linear_layers_of_blocks_are_in_float8():
    sizes = {key.replace("__", "."): value for key, value in SMALL.items()} | {"model.heads": 4}
    model = build_model(Recipe().replace(sizes), 64, device="cpu")
    names, parameters = set(model.state_dict()), list(model.parameters())
    use_float8(list(model.blocks), CPU)
    kinds = {name for name, module in model.named_modules() if isinstance(module, TrainedInFloat8)}
    assert kinds == {"blocks.0.attn.qkv", "blocks.0.attn.out"}  # 16 does not divide 200
    assert set(model.state_dict()) == names
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    with refused("train.precision", "linear layer"):
        use_float8([nn.Sequential(nn.Linear(64, 128))], CPU)  # too narrow


@needs_torchao
def test_a_run_follows_bf16_and_resumes_bit_for_bit(tmp_path):
    corpus, runs = write_corpus(tmp_path / "text.txt"), {}
    for name in ("bf16", "float8", "stopped"):
        precision = {"train__precision": "bf16" if name == "bf16" else "float8"}
        recipe = tiny_recipe(corpus, tmp_path / name, **SMALL, **precision)
        if name == "stopped":
            train(recipe, stop_at=6)
        runs[name] = curve(train(recipe))
    assert runs["stopped"] == runs["float8"] != runs["bf16"]
    losses = {name: [loss for _, loss, *_ in lines] for name, lines in runs.items()}
    assert losses["bf16"][-1] < 0.8 * losses["bf16"][0]
    assert losses["float8"] == pytest.approx(losses["bf16"], rel=0.03)


def test_it_needs_its_package_and_whole_matrices(monkeypatch):
    with refused("parallel.tensor", "train.precision"):
        Recipe().replace({"train.precision": "float8", "parallel.tensor": 2})
    monkeypatch.setattr(errors, "installed", lambda package: package != "torchao")
    with refused("train.precision", "pip install torchao"):
        Recipe().replace({"train.precision": "float8"}).check_packages()
