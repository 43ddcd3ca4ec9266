"""The loss in chunks is the loss: values and gradients, in every precision, with every option."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from windlass.model.gpt import GPT, initialise
from windlass.model.hf import wrap
from windlass.model.loss import (
    SourceSums,
    TiedLookup,
    chunk_loss,
    cross_entropy_sum,
    head_logits,
)
from windlass.model.size import CHUNK_BYTES
from windlass.recipe.network import ModelSettings

N, D, V = 37, 12, 101


class Results(TorchDispatchMode):
    """The names of operations, and the shapes of their results."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.seen.append((func.overloadpacket.__name__, tuple(result.shape)))
        return result


def problem(
    dtype: torch.dtype = torch.float64, masked: int = 9
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    how = {"generator": generator, "dtype": torch.float64}
    draws = [torch.randn(shape, **how) for shape in ((N, D), (V, D), (V,))]
    labels = torch.randint(V, (N,), generator=generator)
    labels[torch.randperm(N, generator=generator)[:masked]] = -100
    x, weight, bias = (draw.to(dtype).requires_grad_() for draw in draws)
    return x, weight, bias, labels


def by_hand(
    x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, cap: float = 0.0
) -> Tensor:
    logits = x @ weight.T if bias is None else x @ weight.T + bias
    if cap:
        logits = cap * (logits / cap).tanh()
    unmasked = labels >= 0
    return -logits[unmasked].log_softmax(-1).gather(1, labels[unmasked].unsqueeze(1)).sum()


def compare_gradients(one: Tensor, other: Tensor, inputs: list[Tensor]) -> None:
    grads = (torch.autograd.grad(loss, inputs) for loss in (one, other))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("cap", [0.0, 5.0])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("tail", [None, chunk_loss])
@pytest.mark.parametrize("chunk", [0, 1, 5, 37, 1000])
def test_value_and_gradients_in_float64(chunk: int, tail: Any, biased: bool, cap: float) -> None:
    x, weight, bias, labels = problem()
    expected = by_hand(x, weight, bias if biased else None, labels, cap)
    how = {"cap": cap, "chunk": chunk, "compiled": tail}
    loss = cross_entropy_sum(x, weight, labels, bias if biased else None, **how)
    assert loss.dtype == torch.float64
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)
    compare_gradients(loss / 7, expected / 7, [x, weight, *([bias] if biased else [])])


@pytest.mark.parametrize(("chunk", "tail"), [(0, None), (8, None), (8, chunk_loss)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_are_float32_and_gradients_have_their_tensors_dtype(chunk, tail, dtype):
    x, weight, bias, labels = problem(torch.float32)
    expected = by_hand(x, weight, bias, labels)
    with torch.autocast("cpu", dtype):
        assert head_logits(x, weight, bias).dtype == dtype
        loss = cross_entropy_sum(x, weight, labels, bias, chunk=chunk, compiled=tail)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=3e-2, atol=0)
    grads = torch.autograd.grad(loss, [x, weight, bias])
    for a, b in zip(grads, torch.autograd.grad(expected, [x, weight, bias]), strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=0, atol=0.05 * float(b.abs().max()))
    # As under FSDP2's mixed precision: the parameters are low, and the stream may still be float32.
    half = weight.detach().to(dtype).requires_grad_()
    loss = cross_entropy_sum(x, half, labels, chunk=chunk, compiled=tail)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, by_hand(x, weight, None, labels), rtol=3e-2, atol=0)
    assert [g.dtype for g in torch.autograd.grad(loss, [x, half])] == [torch.float32, dtype]


def test_masked_rows_count_nothing_whatever_is_in_them() -> None:
    for chunk in (0, 8):
        x, weight, bias, labels = problem(masked=N)
        loss = cross_entropy_sum(x, weight, labels, bias, chunk=chunk)
        assert loss.item() == 0.0
        assert all(not bool(g.any()) for g in torch.autograd.grad(loss, [x, weight, bias]))
    x, weight, _, labels = problem()
    spoiled = x.detach().clone()
    spoiled[labels == -100] = 1e300
    a, b = (cross_entropy_sum(t, weight, labels, chunk=8) for t in (x, spoiled))
    assert a.item() == b.item()


def test_only_what_is_asked_for_gets_a_gradient_and_gradients_add_up() -> None:
    x, weight, bias, labels = problem()
    fixed, frozen = x.detach(), weight.detach()
    one = cross_entropy_sum(x, frozen, labels, chunk=8)
    compare_gradients(one, by_hand(x, frozen, None, labels), [x])
    one = cross_entropy_sum(fixed, frozen, labels, bias, chunk=8)
    other = by_hand(fixed, frozen, bias, labels)
    compare_gradients(one, other, [bias])
    with torch.no_grad():
        assert not cross_entropy_sum(x, weight, labels, chunk=8).requires_grad
    halves = (x[:10], weight, labels[:10]), (x[10:], weight, labels[10:])
    parts = [cross_entropy_sum(*part, chunk=4) for part in halves]
    compare_gradients(parts[0] + parts[1], by_hand(x, weight, None, labels), [x, weight])


def test_logits_are_held_a_chunk_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CHUNK_BYTES, "cpu", 4 * V * 10)
    x, weight, _, labels = problem()

    def rows_of_logits(tokens: int, **how: Any) -> list[int]:
        with Results() as results:
            cross_entropy_sum(x[:tokens], weight, labels[:tokens], **how).backward()
        return [shape[0] for name, shape in results.seen if name == "mm" and shape[1] == V]

    rows = rows_of_logits(N, compiled=chunk_loss)  # in their own precision
    assert len(rows) == 8 and max(rows) <= 5
    rows = rows_of_logits(N)  # even chunks
    assert len(rows) == 4 and max(rows) <= 10 and max(rows) - min(rows) <= 4
    assert rows_of_logits(9) == [9]


@pytest.mark.parametrize(("chunk", "tail"), [(0, None), (5, None), (36, None), (5, chunk_loss)])
def test_the_loss_by_source_is_that_of_its_rows(chunk, tail):
    """Rows [4, 9] of three sources, one of which has no row."""
    x, weight, bias, labels = problem()
    rows, sums = torch.tensor([2, 0, 0, 2]), torch.zeros(3, 2, dtype=torch.float64)
    x, labels = x[:36].detach().requires_grad_().view(4, 9, D), labels[:36].view(4, 9)
    own = {"by_source": SourceSums(rows, sums)}
    for _ in range(2):  # the sums grow
        total = cross_entropy_sum(
            x, weight, labels, bias, cap=3.0, chunk=chunk, compiled=tail, **own
        )
    expected = [by_hand(x[rows == i], weight, bias, labels[rows == i], 3.0) for i in (0, 2)]
    counts = [float((labels[rows == i] >= 0).sum()) for i in (0, 2)]
    torch.testing.assert_close(sums[1], torch.zeros(2, dtype=torch.float64))
    torch.testing.assert_close(
        sums[[0, 2], 0], 2 * torch.stack(expected).detach(), rtol=1e-12, atol=0
    )
    assert sums[[0, 2], 1].tolist() == [2 * count for count in counts]
    compare_gradients(total, sum(expected), [x, weight, bias])


def test_ranks_with_parts_of_other_sizes_reduce_as_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 161 rows two ranks hold 80 and 81; another number of chunks would mix up collectives."""
    monkeypatch.setitem(CHUNK_BYTES, "cpu", 4 * 80 * 100)
    counts = []
    for rows in (80, 81):
        calls: list[int] = []
        shard: Any = SimpleNamespace(first=0, most=81, gather_input=lambda x: x)
        shard.reduce = lambda tensor, op=None, calls=calls: calls.append(tensor.numel())
        labels = torch.arange(100) % rows
        cross_entropy_sum(torch.ones(100, 8), torch.ones(rows, 8), labels, shard=shard)
        counts.append(calls)
    assert counts[0] == counts[1] and len(counts[0]) > 3


# A table that is also the head's matrix: one gradient, equal to the sum of autograd's two


def check_tied(model, plain, rtol: float, atol: float, several: bool = False) -> None:
    """The gradients are those of the logits of `plain`, whose lookup and head have one each."""
    tokens = torch.randint(2, V, (3, 6), generator=torch.Generator().manual_seed(1))
    labels = tokens.roll(-1, 1)
    F.cross_entropy(plain(tokens).flatten(0, 1), labels.flatten(), reduction="sum").backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    with Results() as results:
        model(tokens, labels).backward()
    # A lookup's own gradient is made of zeros.
    assert (("embedding_dense_backward", (V, 8)) in results.seen) == several
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], rtol=rtol, atol=atol)


def test_the_gradient_is_the_sum_of_both_uses() -> None:
    table = torch.randn(V, 8, dtype=torch.float64, requires_grad=True)
    tokens = torch.tensor([[3, 1, 3], [0, 3, 39]])

    def loss(rows, head):
        return (rows.tanh() @ head.T).logsumexp(-1).sum()

    (expected,) = torch.autograd.grad(loss(F.embedding(tokens, table), table), table)
    (found,) = torch.autograd.grad(loss(*TiedLookup.apply(table, tokens)), table)
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("chunked", [False, True])
def test_gpt_makes_one_gradient_of_its_table(chunked: bool, monkeypatch) -> None:
    if chunked:
        monkeypatch.setitem(CHUNK_BYTES, "cpu", 4 * V * 5)
    settings = ModelSettings(layers=1, heads=2, width=8, context=6, position="rope")
    gpt = GPT(settings, V).double()
    initialise(gpt, 0)
    check_tied(gpt, gpt, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", ["gpt2", "bloom", "opt"])
def test_models_of_transformers_make_one_gradient_of_their_table(kind: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2}
    if kind == "opt":
        sizes = {"hidden_size": 8, "ffn_dim": 16, "num_hidden_layers": 1}
        sizes |= {"num_attention_heads": 2, "word_embed_proj_dim": 8, "dropout": 0.0}
    config = AutoConfig.for_model(kind, vocab_size=V, **sizes)
    model = wrap(AutoModelForCausalLM.from_config(config), 8).double().train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    # OPT's table has a row for padding, whose gradient transformers leaves out.
    several = kind == "opt"
    check_tied(model, lambda tokens: model.model(tokens).logits, 1e-8, 1e-10, several)
