"""The loss in chunks is the loss: values and gradients, in every precision, with every option."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from windlass.model import loss as module
from windlass.model.loss import cross_entropy_sum, head_logits

N, D, V = 37, 12, 101


def problem(dtype: torch.dtype = torch.float64, masked: int = 9) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(N, D, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(V, D, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    bias = torch.randn(V, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    labels = torch.randint(V, (N,), generator=generator)
    labels[torch.randperm(N, generator=generator)[:masked]] = -100
    return x, weight, bias, labels


def by_hand(x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, cap: float) -> Tensor:
    logits = x @ weight.T
    if bias is not None:
        logits = logits + bias
    if cap:
        logits = cap * (logits / cap).tanh()
    counted = labels >= 0
    return -logits[counted].log_softmax(-1)[torch.arange(int(counted.sum())), labels[counted]].sum()


@pytest.mark.parametrize("cap", [0.0, 5.0])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("chunk", [0, 1, 5, 37, 1000])
def test_value_and_gradients_in_float64(chunk: int, biased: bool, cap: float) -> None:
    x, weight, bias, labels = problem()
    inputs = [x, weight, *([bias] if biased else [])]
    expected = by_hand(x, weight, bias if biased else None, labels, cap)
    given = cross_entropy_sum(x, weight, labels, bias if biased else None, cap=cap, chunk=chunk)
    assert given.dtype == torch.float64
    torch.testing.assert_close(given, expected, rtol=1e-13, atol=0)
    expected_grads = torch.autograd.grad(expected / 7, inputs)
    for a, b in zip(torch.autograd.grad(given / 7, inputs), expected_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


def test_in_float32_chunks_and_autograd_agree() -> None:
    x, weight, bias, labels = problem(torch.float32)
    one = cross_entropy_sum(x, weight, labels, bias, chunk=0)
    other = cross_entropy_sum(x, weight, labels, bias, chunk=8)
    assert one.dtype == other.dtype == torch.float32
    torch.testing.assert_close(one, other, rtol=1e-6, atol=0)
    for a, b in zip(*(torch.autograd.grad(t, [x, weight, bias]) for t in (one, other)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk", [0, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_the_sum_is_float32_and_the_gradients_have_their_tensors_dtype(
    chunk: int, dtype: torch.dtype
) -> None:
    x, weight, bias, labels = problem(torch.float32)
    expected = by_hand(x, weight, bias, labels, 0.0)
    with torch.autocast("cpu", dtype):
        assert head_logits(x, weight, bias).dtype == dtype
        given = cross_entropy_sum(x, weight, labels, bias, chunk=chunk)
    assert given.dtype == torch.float32
    torch.testing.assert_close(given, expected, rtol=3e-2, atol=0)
    grads = torch.autograd.grad(given, [x, weight, bias])
    for a, b in zip(grads, torch.autograd.grad(expected, [x, weight, bias]), strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=0, atol=0.05 * float(b.abs().max()))


@pytest.mark.parametrize("chunk", [0, 8])
def test_half_precision_parameters(chunk: int) -> None:
    """As under FSDP2's mixed precision, where the stream may still be float32."""
    x, weight, _, labels = problem(torch.float32)
    half = weight.detach().to(torch.bfloat16).requires_grad_()
    given = cross_entropy_sum(x, half, labels, chunk=chunk)
    assert given.dtype == torch.float32
    torch.testing.assert_close(given, by_hand(x, weight, None, labels, 0.0), rtol=3e-2, atol=0)
    dx, dw = torch.autograd.grad(given, [x, half])
    assert (dx.dtype, dw.dtype) == (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("chunk", [0, 8])
def test_nothing_counted_gives_zero_and_no_gradient(chunk: int) -> None:
    x, weight, bias, labels = problem(masked=N)
    given = cross_entropy_sum(x, weight, labels, bias, chunk=chunk)
    assert given.item() == 0.0
    assert all(not bool(g.any()) for g in torch.autograd.grad(given, [x, weight, bias]))


def test_a_masked_row_cannot_spoil_the_sum() -> None:
    x, weight, _, labels = problem()
    spoiled = x.detach().clone()
    spoiled[labels == -100] = 1e300
    a, b = (cross_entropy_sum(t, weight, labels, chunk=8) for t in (x, spoiled))
    assert a.item() == b.item()


def test_only_what_is_asked_for_gets_a_gradient() -> None:
    x, weight, bias, labels = problem()
    frozen = weight.detach()
    (dx,) = torch.autograd.grad(cross_entropy_sum(x, frozen, labels, chunk=8), [x])
    (expected,) = torch.autograd.grad(by_hand(x, frozen, None, labels, 0.0), [x])
    torch.testing.assert_close(dx, expected, rtol=1e-11, atol=1e-13)
    (db,) = torch.autograd.grad(cross_entropy_sum(x.detach(), frozen, labels, bias, chunk=8), [bias])
    (expected,) = torch.autograd.grad(by_hand(x.detach(), frozen, bias, labels, 0.0), [bias])
    torch.testing.assert_close(db, expected, rtol=1e-11, atol=1e-13)
    with torch.no_grad():
        assert not cross_entropy_sum(x, weight, labels, chunk=8).requires_grad


def test_leading_dimensions_are_free() -> None:
    x, weight, _, labels = problem()
    flat = cross_entropy_sum(x[:36], weight, labels[:36], chunk=5)
    shaped = cross_entropy_sum(x[:36].view(4, 9, D), weight, labels[:36].view(4, 9), chunk=5)
    assert flat.item() == shaped.item()


def test_accumulated_gradients_add_up() -> None:
    x, weight, _, labels = problem()
    for part in (slice(0, 10), slice(10, N)):
        cross_entropy_sum(x[part], weight, labels[part], chunk=4).backward()
    expected = torch.autograd.grad(by_hand(x, weight, None, labels, 0.0), [x, weight])
    for a, b in zip((x.grad, weight.grad), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


def test_the_size_of_a_chunk() -> None:
    assert module._chunk(768, 65, "cpu") == 0  # small vocabulary: all at once
    chunk = module._chunk(4096, 50257, "cpu")
    assert 0 < chunk * 50257 * 4 <= module.CHUNK_BYTES["cpu"]
    assert chunk * -(-4096 // chunk) - 4096 < -(-4096 // chunk)  # the chunks are even
    assert module._chunk(5, 2**40, "cpu") == 1
    assert module._chunk(0, 50257, "cpu") == 0


def test_the_logits_are_never_all_there(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []
    real = F.linear

    def watched(*args: Tensor | None) -> Tensor:
        out = real(*args)  # type: ignore[arg-type]
        held.append(out.numel())
        return out

    monkeypatch.setitem(module.CHUNK_BYTES, "cpu", 4 * V * 10)
    monkeypatch.setattr(module.F, "linear", watched)
    x, weight, _, labels = problem()
    cross_entropy_sum(x, weight, labels).backward()
    assert len(held) == 4
    assert max(held) <= 10 * V
