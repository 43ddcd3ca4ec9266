"""The halves of a micro-batch on two threads: the gradients of the whole, always with equal bits."""

from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest
import torch
from torch import Tensor

from helpers import tiny_recipe, write_corpus
from windlass import train
from windlass.data.loader import MicroBatch
from windlass.data.samples import Batch
from windlass.errors import Stopped
from windlass.model.gpt import GPT, initialise
from windlass.parallel.dist import Ranks
from windlass.parallel.env import DistEnv
from windlass.recipe import Recipe
from windlass.training import halves
from windlass.training.halves import Halves, open_halves

CPU = torch.device("cpu")
SMALL = {"layers": 2, "heads": 2, "width": 16, "context": 8}


@pytest.fixture(autouse=True)
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(halves, "LEAST_WORK", 0)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)


def network(dtype: torch.dtype = torch.float64) -> GPT:
    model = GPT(Recipe.model_validate({"model": SMALL}).model, 11)
    initialise(model, 0)
    model.positions.weight.requires_grad_(False)  # frozen
    return model.to(dtype)


def micro_batches(rows: int, count: int) -> list[MicroBatch]:
    draw = torch.Generator().manual_seed(rows)
    tokens = torch.randint(0, 11, (count, rows, 9), generator=draw)
    return [MicroBatch(k, Batch(t[:, :-1], t[:, 1:])) for k, t in enumerate(tokens)]


def gradients(model: GPT, micro: list[MicroBatch], halves: Halves | None) -> list[Tensor]:
    """The loss, and every gradient; the loss scale is 4."""
    loss, scale = torch.zeros((), dtype=torch.float64), torch.tensor(4.0)

    def compute_loss(part: MicroBatch) -> Tensor:
        return model(part.batch.tokens, part.batch.labels)  # type: ignore[no-any-return]

    def forward(part: MicroBatch) -> Tensor:
        result = compute_loss(part)
        loss.add_(result.detach())
        return result * scale

    if halves is not None:
        halves.train(micro, forward, Tensor.backward, compute_loss, loss, scale)
    else:
        for part in micro:
            forward(part).backward()
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    return [loss, *grads]


@pytest.mark.parametrize(("rows", "count"), [(4, 1), (5, 3), (1, 2)])
def test_loss_and_gradients_are_those_of_whole_micro_batches(rows: int, count: int) -> None:
    model, micro = network(), micro_batches(rows, count)
    halves = Halves(p for p in model.parameters() if p.requires_grad)
    wanted, actual = gradients(model, micro, None), gradients(model, micro, halves)
    halves.close()
    assert len(actual) == len(wanted) == len(list(model.parameters()))  # the frozen one: the loss
    for a, b in zip(actual, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_no_bit_depends_on_which_thread_is_faster() -> None:
    model, micro = network(torch.float32), micro_batches(6, 3)
    halves = Halves(p for p in model.parameters() if p.requires_grad)
    first = gradients(model, micro, halves)
    for _ in range(20):
        for a, b in zip(gradients(model, micro, halves), first, strict=True):
            assert torch.equal(a, b)
    halves.close()


def test_a_short_pass_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    both = Halves(p for p in model.parameters() if p.requires_grad)
    tokens, seen = torch.arange(16).view(2, 8) % 11, list[int]()

    def compute_loss(micro: MicroBatch) -> Tensor:
        seen.append(len(micro.batch.tokens))
        return model(micro.batch.tokens, micro.batch.labels)

    for least in (both.size * 16, both.size * 16 + 1):
        monkeypatch.setattr(halves, "LEAST_WORK", least)
        micro = [MicroBatch(0, Batch(tokens, tokens))]
        zero = torch.zeros((), dtype=torch.float64)
        both.train(micro, compute_loss, Tensor.backward, compute_loss, zero)
    both.close()
    assert seen == [1, 1, 2]


@pytest.mark.parametrize("row", [0, 3])
def test_an_error_in_either_half_reaches_the_loop_after_both_have_ended(row: int) -> None:
    model, micro = network(), micro_batches(4, 1)
    micro[0].batch.tokens[row] = 11  # outside the vocabulary
    halves = Halves(p for p in model.parameters() if p.requires_grad)
    with pytest.raises(IndexError):
        gradients(model, micro, halves)
    model.zero_grad()
    assert len(gradients(model, micro_batches(4, 1), halves)) > 1
    halves.close()


@pytest.mark.parametrize(
    ("settings", "dropout", "used"),
    [
        ({}, False, True),
        ({}, True, False),
        ({"train": {"compile": True}}, False, False),
        ({"parallel": {"activation_checkpointing": "full"}}, False, False),
    ],
)
def test_what_trains_in_halves(settings: dict, dropout: bool, used: bool) -> None:
    recipe, ranks = Recipe.model_validate({"model": SMALL, **settings}), Ranks(DistEnv(), CPU)
    with ExitStack() as stack:
        assert (open_halves(recipe, network(), ranks, dropout, stack) is not None) == used
        assert open_halves(recipe, torch.nn.Linear(2, 2), ranks, dropout, stack) is None


def test_a_run_on_two_threads_resumes_exactly_and_equals_one_thread_to_rounding(tmp_path) -> None:
    corpus = write_corpus(tmp_path / "text.txt")
    how = {"train__steps": 6, "train__micro_batch": 4, "train__precision": "fp32"}

    def curve(name: str, threads: int, *stops: int) -> list[tuple[float, float]]:
        for stop_at in (*stops, 0):
            recipe = tiny_recipe(corpus, tmp_path / name, train__threads=threads, **how)
            with suppress(Stopped):
                run = train(recipe, stop_at=stop_at)
        return [(line["loss"], line["grad_norm"]) for line in run.ledger() if "grad_norm" in line]

    whole, resumed, one = curve("whole", 2), curve("resumed", 2, 3), curve("one", 1)
    assert len(whole) == 6 and resumed == whole
    assert one != whole  # the halves were in use
    for a, b in zip(one, whole, strict=True):
        assert a == pytest.approx(b, rel=1e-4)
