"""Generation: choosing tokens, the same text in any batch, sliding windows, streaming, stopping."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from windlass.evaluation import generate as module
from windlass.evaluation.generate import (
    Sampling,
    batches,
    generate,
    generate_events,
    next_tokens,
    uniform,
)
from windlass.evaluation.passes import Interrupted, Passes


class Toy(nn.Module):
    """A decoder whose logits depend on every token of its window and its place in it, in float64."""

    def __init__(self, vocab: int = 13, context: int = 16):
        super().__init__()
        self.vocab, self.context, self.passes = vocab, context, 0
        generator = torch.Generator().manual_seed(1)
        self.weight = nn.Parameter(torch.randn(vocab, 8, generator=generator, dtype=torch.float64))
        self.head = nn.Parameter(torch.randn(8, vocab, generator=generator, dtype=torch.float64))

    def new_cache(self, batch: int, length: int) -> dict[str, Tensor]:
        return {"seen": torch.zeros(batch, 0, dtype=torch.int64), "length": torch.tensor(length)}

    def forward(self, tokens: Tensor, cache: dict[str, Tensor] | None = None) -> Tensor:
        self.passes += 1
        seen = tokens
        if cache is not None:
            seen = cache["seen"] = torch.cat([cache["seen"], tokens], 1)
            assert seen.shape[1] <= cache["length"] <= self.context
        place = torch.cos(torch.arange(seen.shape[1], dtype=torch.float64) + 1)
        hidden = torch.tanh((self.weight[seen] * place[:, None]).cumsum(1))
        return (hidden @ self.head)[:, -tokens.shape[1] :]


def plain(model: Toy, prompt: list[int], index: int, sampling: Sampling) -> list[int]:
    """One text, without cache or batch: the definition."""
    row, start = list(prompt), max(0, len(prompt) - model.context)
    while len(row) - len(prompt) < sampling.max_tokens:
        if len(row) - start > model.context:
            start = len(row) - 1 - model.context // 2
        logits = model(torch.tensor([row[start:]]))[0, -1:]
        draw = uniform(sampling.seed, index, len(row) - len(prompt))
        token = int(next_tokens(logits, sampling, [draw]))
        if token in sampling.stop:
            break
        row.append(token)
    return row[len(prompt) :]


def prompts(count: int, longest: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(0, 13, (n,), generator=generator).tolist() for n in lengths]


@pytest.mark.parametrize("longest", [5, 16, 40])
@pytest.mark.parametrize("temperature", [0.0, 1.3])
@pytest.mark.parametrize("batch", [1, 4, 64])
def test_each_text_is_that_of_the_definition(batch, temperature, longest, monkeypatch) -> None:
    monkeypatch.setattr(module, "BATCH", batch)
    model, given = Toy(), prompts(11, longest)
    sampling = Sampling(max_tokens=30, temperature=temperature, seed=5, stop=frozenset([3]))
    texts = generate(Passes(model), given, sampling)
    assert texts == [plain(model, prompt, i, sampling) for i, prompt in enumerate(given)]
    some = generate(Passes(model), [given[4], given[1]], sampling, indices=[4, 1])
    assert some == [texts[4], texts[1]]  # the index and the seed determine a text, not its company
    assert any(len(text) < 30 for text in texts)
    assert temperature == 0 or len({len(text) for text in texts}) > 3


def test_unequal_prompts_share_a_batch_unless_a_window_slides_and_are_read_once(monkeypatch):
    model = Toy(context=64)
    generate(Passes(model), [[1] * 20, [2] * 22], Sampling(max_tokens=10, temperature=0))
    # the shorter prompt, what the longer has more, and a column for each token
    assert model.passes == 1 + (22 - 20) + 9
    assert batches([5, 9, 5, 7], context=64, max_tokens=10) == [[0, 2, 3, 1]]
    assert batches([5, 60, 5, 61, 60], context=64, max_tokens=10) == [[0, 2], [1, 4], [3]]
    monkeypatch.setattr(module, "BATCH", 2)
    assert batches([5, 9, 5, 7], context=64, max_tokens=10) == [[0, 2], [3, 1]]


def test_tokens_are_streamed_in_order_and_an_end_is_told_once() -> None:
    model, told, prompts = Toy(), {0: [], 1: [], 2: []}, [[1], [5, 6], [7]]
    sampling = Sampling(max_tokens=20, seed=3, stop=frozenset([2]))
    for index, token in generate_events(Passes(model), prompts, sampling):
        told[index].append(token)
        # whoever reads the events between two passes computes as before
        assert torch.is_grad_enabled()
    assert list(told.values()) == [
        [*text, None] for text in generate(Passes(model), prompts, sampling)
    ]


class Casts(TorchDispatchMode):
    """Counts the casts of matrices to low precision."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") is torch.bfloat16:
            self.count += isinstance(args[0], nn.Parameter)
        return func(*args, **(kwargs or {}))


def test_weights_are_cast_to_low_precision_once_and_dropped_at_the_end() -> None:
    class Linear(Toy):
        def forward(self, tokens: Tensor, cache: Any = None) -> Tensor:
            return F.linear(self.weight.float()[tokens], self.table)

    model, low = Linear(), partial(torch.autocast, "cpu", torch.bfloat16)
    model.table = nn.Parameter(torch.randn(13, 8))
    tokens, sampling = torch.tensor([[1]]), Sampling(max_tokens=9, temperature=0)
    with Casts() as casts:
        events = generate_events(Passes(model, autocast=low), [[1]], sampling)
        assert len([next(events) for _ in range(8)]) == 8 and casts.count == 1
        with low():  # in between
            model(tokens)
        assert len(list(events)) == 2 and casts.count == 2
    with torch.no_grad():
        model.table.zero_()
    with low():
        assert not model(tokens).any(), "no stale weight"
        model(tokens).sum().backward()
    assert model.table.grad is not None


def test_progress_counts_complete_texts() -> None:
    seen, sampling = list[tuple[int, int]](), Sampling(max_tokens=3, temperature=0)
    passes = Passes(Toy(), progress=lambda *now: seen.append(now))
    generate(passes, prompts(5, 6), sampling)
    assert seen == [(done, 5) for done in range(1, 6)]


def test_padding_of_the_vocabulary_is_never_chosen_modes_stay_and_a_poll_ends_it() -> None:
    model, answers = Toy(), iter([False, False, False, True])
    passes = Passes(model, poll=lambda: next(answers))
    with pytest.raises(Interrupted):
        generate(passes, [[1]], Sampling(max_tokens=50))
    assert model.passes == 3
    model.inner = nn.Dropout(0.5).eval()
    passes = Passes(model, tokenizer=SimpleNamespace(vocab=4))
    texts = generate(passes, [[1]] * 8, Sampling(max_tokens=20, temperature=5.0))
    assert max(max(text) for text in texts) < 4 and len({tuple(text) for text in texts}) == 8
    assert model.training and not model.inner.training


def test_draws_are_fixed_for_ever() -> None:
    assert (uniform(0, 0, 0), uniform(1337, 4, 17)) == (0.2392922395374626, 0.7414650227874517)


def test_tokens_come_with_the_probabilities_of_the_softmax() -> None:
    logits = torch.tensor([[1.0, 0.0, -2.0, 3.0]]).repeat(20_000, 1)
    sampling = Sampling(temperature=1.5)
    chosen = next_tokens(logits, sampling, [uniform(9, i, 0) for i in range(len(logits))])
    expected = torch.softmax(logits[0] / 1.5, -1) * len(logits)
    counts = torch.bincount(chosen, minlength=4)
    # chi-squared, 3 degrees of freedom, p = 0.001
    assert ((counts - expected).square() / expected).sum() < 16.3


@pytest.mark.parametrize(
    ("top_k", "top_p", "left"),
    [
        (2, 1.0, [1, 3]),
        (9, 1.0, [0, 1, 2, 3]),
        (0, 1.0, [0, 1, 2, 3]),
        (0, 0.01, [1]),
        (0, 0.6, [1, 3]),
        (0, 0.75, [1, 2, 3]),
        (2, 0.5, [1]),  # after top-k the likeliest has 4/7
    ],
)
def test_top_k_and_top_p_leave_the_likeliest(top_k: int, top_p: float, left: list[int]) -> None:
    logits = torch.log(torch.tensor([[0.1, 0.4, 0.2, 0.3]])).repeat(100, 1)
    draws = [draw / 100 for draw in range(100)]
    chosen = next_tokens(logits, Sampling(top_k=top_k, top_p=top_p), draws)
    assert chosen.unique().tolist() == left
