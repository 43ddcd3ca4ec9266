"""Products in float8 against the same rounding written out in float64."""

import math
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from helpers import refused
from windlass.model.build import build_model
from windlass.model.gpt import initialise
from windlass.model.quantised import Float8Linear, use_float8
from windlass.parallel.env import DistEnv
from windlass.parallel.parallelize import autocast, parallelize
from windlass.parallel.ranks import init_ranks
from windlass.recipe import Recipe

CPU = torch.device("cpu")
E4M3, E5M2 = (3, -6, 448.0), (2, -14, 57344.0)  # bits, smallest normal exponent, largest number


def on_grid(x: Tensor, bits: int, lowest: int, largest: float) -> Tensor:
    """The nearest numbers of a format after scaling, scaled back, in float64."""
    scale = x.float().abs().max() / largest
    scaled = (x.float() / scale).double()  # the division is float32's
    exponent = torch.floor(torch.log2(scaled.abs().clamp(min=1e-30))).clamp(min=lowest)
    step = torch.exp2(exponent - bits)
    return torch.round(scaled / step) * step * scale.double()


def linear(inputs: int, outputs: int, bias: bool = True) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.Linear(inputs, outputs, bias=bias)
    use_float8([layer], CPU)
    return layer


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.detach().double() - wanted.detach()).norm() / wanted.detach().norm())


def test_the_three_products_are_those_of_rounded_numbers():
    layer, rows = linear(128, 192), (3, 16)
    x = torch.randn(*rows, 128) * torch.logspace(-3, 1, rows[1]).unsqueeze(1)
    x.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    grad = torch.randn_like(y)
    y.backward(grad)
    a = on_grid(x.detach().bfloat16(), *E4M3).flatten(0, 1)
    w, g = on_grid(layer.weight.detach().bfloat16(), *E4M3), on_grid(grad, *E5M2).flatten(0, 1)
    wanted = (a @ w.T).unflatten(0, rows) + layer.bias.double()
    bf16 = 2.0**-7  # two roundings
    assert y.dtype == torch.bfloat16 and relative(y, wanted) < bf16
    assert x.grad.dtype == torch.float32
    assert relative(x.grad, (g @ w).unflatten(0, rows)) < bf16
    assert layer.weight.grad.dtype == torch.float32 and relative(layer.weight.grad, g.T @ a) < bf16
    assert relative(layer.bias.grad, grad.double().sum((0, 1))) < bf16
    # Rounding to 3 bits errs by up to 2^-4 of a number, to 2 bits by up to 2^-3.
    exact, weight = x.detach().double().flatten(0, 1), layer.weight.detach().double()
    assert 2**-7 < relative(a @ w.T, exact @ weight.T) < 2**-4
    assert 2**-6 < relative(g @ w, grad.double().flatten(0, 1) @ weight) < 2**-3


def test_the_operands_are_those_that_the_kernel_takes():
    """torch's shape function for `_scaled_mm` checks sizes and strides as its kernel does."""
    layer = linear(128, 192).to("meta")
    x = torch.empty(128, 32, device="meta").T.requires_grad_()  # neither it nor its gradient is
    y = layer(x)  # in rows
    y.backward(torch.empty(192, 32, device="meta", dtype=torch.bfloat16).T)
    assert y.shape == (32, 192) and y.dtype == torch.bfloat16
    assert x.grad.shape == x.shape and layer.weight.grad.shape == layer.weight.shape


def test_zeros_stay_and_what_is_not_finite_shows():
    layer, x = linear(128, 128, bias=False), torch.zeros(16, 128, requires_grad=True)
    y = layer(x)
    y.backward(torch.zeros_like(y))
    assert not y.any() and not x.grad.any() and not layer.weight.grad.any()
    for bad in (math.inf, math.nan):
        x = torch.ones(16, 128, requires_grad=True)
        y = layer(x)
        y.backward(torch.full_like(y, bad))
        assert not x.grad.isfinite().any() and not layer.weight.grad.isfinite().any()
        with torch.no_grad():
            x[3, 3] = bad
        assert not layer(x).isfinite().any()


def test_evaluation_and_odd_numbers_of_tokens_are_in_bf16_and_frozen_weights_get_no_gradient():
    layer, x = linear(128, 128), torch.randn(16, 128, requires_grad=True)
    layer.weight.requires_grad_(False)
    layer(x).sum().backward()
    assert layer.weight.grad is None and x.grad is not None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(layer(x[:7]), F.linear(x[:7], layer.weight, layer.bias))
        assert torch.equal(layer.eval()(x), F.linear(x, layer.weight, layer.bias))


def test_wide_linear_layers_of_blocks_are_in_float8():
    recipe = Recipe().replace(
        {"model.layers": 1, "model.heads": 4, "model.width": 128, "model.ff_width": 200}
    )
    model = build_model(recipe, 64, device="cpu")
    names = set(model.state_dict())
    use_float8(list(model.blocks), CPU)
    kinds = {name for name, module in model.named_modules() if isinstance(module, Float8Linear)}
    assert kinds == {"blocks.0.attn.qkv", "blocks.0.attn.out"}  # 16 does not divide 200
    assert set(model.state_dict()) == names
    with refused("train.precision", "linear layer"):
        use_float8([nn.Linear(64, 128)], CPU)  # too narrow
    with refused("parallel.tensor", "train.precision"):
        Recipe().replace({"train.precision": "float8", "parallel.tensor": 2})


@cache
def losses(precision: str, **settings) -> list[float]:
    """The losses of a short training on one batch."""
    small = {"layers": 2, "heads": 4, "width": 128, "context": 32}
    recipe = Recipe().replace(
        {f"model.{key}": value for key, value in small.items()}
        | {"train.precision": precision, "parallel.device": "cpu"}
        | {key.replace("__", "."): value for key, value in settings.items()}
    )
    found = []
    with init_ranks(DistEnv(), recipe) as ranks:
        model = parallelize(build_model(recipe, 64), ranks, recipe)
        initialise(model, 0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)
        tokens = torch.randint(64, (4, 33), generator=torch.Generator().manual_seed(0))
        for _ in range(25):
            with autocast(recipe, ranks.device):
                loss = model(tokens[:, :-1], tokens[:, 1:]) / 128
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(float(loss.detach()))
    return found


def test_the_loss_follows_that_of_bf16():
    low, bf16 = losses("float8"), losses("bf16")
    assert bf16[-1] < 0.5 * bf16[0]
    assert low != bf16
    assert low == pytest.approx(bf16, rel=0.03)
