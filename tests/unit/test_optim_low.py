"""Weights in bf16 and moments in 8 bits: the rounding, and AdamW with it against a reference."""

import hashlib

import numpy as np
import pytest
import torch
from torch import nn

from windlass.estimate import memory as planned
from windlass.model.sharding import Cut, Peers, with_cut
from windlass.optim import adamw, muon
from windlass.optim.adamw import BF16_DROPPED, FP8_DROPPED, places, random_bits, rounded
from windlass.optim.build import build_optimizer
from windlass.optim.schedule import set_lr
from windlass.recipe.settings import OptimSettings


def bits_of(shape: tuple[int, ...], key: str = "key") -> torch.Tensor:
    return random_bits(key, *places(torch.empty(shape))).view(shape)


@pytest.mark.parametrize(
    ("dropped", "dtype"), [(BF16_DROPPED, torch.bfloat16), (FP8_DROPPED, torch.float8_e4m3fn)]
)
def test_rounding_takes_a_neighbour_and_its_mean_error_is_zero(dropped, dtype):
    draw = torch.Generator().manual_seed(0)
    x = torch.rand(400, 500, generator=draw) + 1  # one binade: neighbours are `step` apart
    x = x * torch.where(torch.rand(x.shape, generator=draw) < 0.5, -1.0, 1.0)
    bits = bits_of((400, 500))
    y, step = rounded(x, bits >> 12, dropped), 2.0 ** (dropped - 23)
    assert torch.equal(y.to(dtype).float(), y)  # the format holds it
    assert ((y - x).abs() < step).all() and (y != x).any()
    # A uniform error of one step, up or down, has at most half a step of deviation.
    error, bound = (y - x).double(), 5 * step / 2 / x.numel() ** 0.5
    assert abs(float(error.mean())) < bound and abs(float((error * x.sign()).mean())) < bound
    assert torch.equal(rounded(y, bits, dropped), y)  # what fits stays


def test_random_bits_are_those_of_the_published_hash_and_look_uniform():
    """lowbias32 in numpy's uint32, and counts of each bit."""
    key = np.frombuffer(hashlib.blake2b(b"windlass/round/k", digest_size=8).digest())
    first, second = key.view("<u4")
    with np.errstate(over="ignore"):
        x = np.arange(6 * 7, dtype=np.uint32).reshape(6, 7) + first
        x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
        x = (x ^ (x >> np.uint32(15)) ^ second) * np.uint32(0x846CA68B)
        x = x ^ (x >> np.uint32(16))
    got = bits_of((6, 7), "k").numpy().view(np.uint32)
    np.testing.assert_array_equal(got, x)
    many, other = bits_of((300, 1000)), bits_of((300, 1000), "other")
    for bit in range(32):
        ones, both = (many >> bit & 1).float(), (many >> bit & 1) == (other >> bit & 1)
        neighbours = ones[:, 1:] == ones[:, :-1]
        for share in (ones.mean(), both.float().mean(), neighbours.float().mean()):
            assert abs(float(share) - 0.5) < 5 * 0.5 / 300_000**0.5


def step_of(model: nn.Module, kind: str, seed: int = 0, lr: float = 0.01) -> torch.optim.Optimizer:
    how = OptimSettings(kind=kind, lr=lr, muon_lr=lr, weight_decay=0.1)
    return build_optimizer(model, how, "cpu", seed=seed)


class Matrix(nn.Module):
    def __init__(self, rows: int, columns: int, dtype: torch.dtype = torch.float32):
        super().__init__()
        draw = torch.Generator().manual_seed(1)
        self.weight = nn.Parameter(torch.randn(rows, columns, generator=draw).to(dtype))
        self.bias = nn.Parameter(torch.randn(rows, generator=draw).to(dtype))


def train_on_noise(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    draw = torch.Generator().manual_seed(2)
    for number in range(steps):
        for p in model.parameters():
            grad = torch.randn(p.shape, generator=draw) * torch.linspace(0.1, 10, p.shape[-1])
            p.grad = grad.to(p.dtype)
        set_lr(optimizer, 1.0, number)
        optimizer.step()


def movement(kind: str, seeds: int, steps: int = 4) -> float:
    """The mean movement of bf16 weights as a part of the movement of float32 ones.

    Each update is below half of the last bit of most weights.
    """

    def trained(seed: int, dtype: torch.dtype) -> torch.Tensor:
        model = Matrix(64, 128, dtype)
        start = model.weight.detach().clone()
        train_on_noise(model, step_of(model, kind, seed, lr=0.001), steps)
        return model.weight.detach().double() - start.double()

    exact = trained(0, torch.float32)
    every = [trained(seed, torch.bfloat16) for seed in range(seeds)]
    assert seeds == 1 or not torch.equal(every[0], every[1])
    return float((torch.stack(every).mean(0) * exact).sum() / exact.square().sum())


@pytest.mark.parametrize("kind", ["adamw", "adamw8bit", "muon"])
def test_bf16_weights_move_as_float32_ones_in_the_mean(kind, monkeypatch):
    monkeypatch.setattr(Matrix, "blocks", lambda self: [self], raising=False)
    assert movement(kind, seeds=20) == pytest.approx(1, abs=0.04)
    for module in (adamw, muon):
        monkeypatch.setattr(module, "rounded", lambda x, bits, dropped: x.bfloat16().float())
    assert movement(kind, seeds=1) < 0.5, "rounding to the nearest loses most of it"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_8_bit_moments_are_near_those_of_float32(dtype):
    ours, plain = Matrix(96, 320, dtype), Matrix(96, 320, dtype)
    low, full = step_of(ours, "adamw8bit"), step_of(plain, "adamw")
    train_on_noise(ours, low, 20)
    train_on_noise(plain, full, 20)
    state, exact = low.state[ours.weight], full.state[plain.weight]
    assert state["exp_avg"].dtype == torch.float8_e4m3fn and state["exp_avg_scale"].shape == (96, 5)
    assert "exp_avg" in low.state[ours.bias] and low.state[ours.bias]["exp_avg"].dtype == dtype
    first, root = (adamw.moment(state, key) for key in ("exp_avg", adamw.ROOT))
    # A number has 3 bits behind the first: two steps of 1/8 at most, half of one in the mean.
    error = (root / exact["exp_avg_sq"].float().sqrt() - 1).abs()
    assert float(error.mean()) < 0.15 and float(error.max()) < 0.8
    assert abs(float((root / exact["exp_avg_sq"].float().sqrt()).mean()) - 1) < 0.02
    slope = (first * exact["exp_avg"].float()).sum() / exact["exp_avg"].float().square().sum()
    assert float(slope) == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_parts_of_a_tensor_of_three_dimensions_have_the_places_of_the_whole(dim):
    whole = torch.empty(4, 6, 8)
    rows, columns = places(whole)
    expected = (rows.unsqueeze(1) + columns).view(4, 6, 8)
    size = whole.shape[dim]
    cut = Cut(dim, size, (range(1, 2), range(3, size)), Peers("", 1, 2))
    rows, columns = places(with_cut(cut.take(whole).clone(), cut))
    part = cut.take(expected)
    assert torch.equal((rows.unsqueeze(1) + columns).view(part.shape), part)


def test_chunks_of_rows_change_nothing(monkeypatch):
    assert planned.CHUNK == adamw.CHUNK
    results = []
    for chunk in (adamw.CHUNK, 1):
        monkeypatch.setattr(adamw, "CHUNK", chunk)
        model = Matrix(70, 128, torch.bfloat16)
        train_on_noise(model, step_of(model, "adamw8bit"), 3)
        results.append(model.weight.detach())
    assert torch.equal(*results)
