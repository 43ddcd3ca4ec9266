"""A run whose memory runs out starts again with smaller micro-batches, or says what to change."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import curve, recipe_of, stopped, untouched

from forked import launch
from helpers import each_step, refused
from windlass import train
from windlass.data.open import open_data
from windlass.errors import OutOfMemory, RunFailed
from windlass.ledger import STARTS
from windlass.model.build import build_model
from windlass.model.gpt import GPT, Block, initialise
from windlass.optim import build
from windlass.run import Run
from windlass.training import rank


def sizes(run: Run, *events: str) -> list[int]:
    """The micro-batches that some events have."""
    return [e["micro_batch"] for e in run.events if e["event"] in events]


def exhausted() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


@pytest.fixture
def memory_for(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Has training passes of more than so many sequences run out of memory, if `when()`."""

    def limit(most: int, when: Callable[[], bool] = lambda: True) -> None:
        forward = GPT.forward

        def limited(self: GPT, tokens: torch.Tensor, *rest: Any, **more: Any) -> Any:
            if self.training and when() and len(tokens) > most:
                torch.empty(2**58)  # a CPU's allocator raises a RuntimeError
            return forward(self, tokens, *rest, **more)

        monkeypatch.setattr(GPT, "forward", limited)

    return limit


def test_a_smaller_micro_batch_where_memory_runs_out(corpus, tmp_path, memory_for, monkeypatch):
    resets = []
    monkeypatch.setattr(torch, "compile", lambda forward, **how: forward)
    monkeypatch.setattr(torch.compiler, "reset", lambda: resets.append(1))
    recipe = recipe_of(corpus, tmp_path / "run", strategy="ddp", **{"train.compile": True})
    small = untouched(recipe, "train.micro_batch=2")
    memory_for(3)
    stopped(recipe, 4)
    run = train(recipe)  # which has dropout, so that each micro-batch has masks of its own
    assert curve(run) == curve(small), "bit for bit the run with that micro-batch, resumed or not"
    assert sizes(run, "out_of_memory") == [4, 2], "and not again at the resume"
    assert run.recipe.train.micro_batch == 0
    # else the blocks are compiled for a batch that varies, and a resume compiles them otherwise
    assert resets == [1, 1]
    log = run.log_path.read_text()
    assert "train.micro_batch=2" in log and "dropout draws" not in log


def test_a_users_module_takes_a_smaller_micro_batch_in_the_next_start(corpus, tmp_path, memory_for):
    """Its first weights are gone, so the same process cannot start again."""
    recipe = recipe_of(corpus, tmp_path / "run")

    def module() -> torch.nn.Module:
        model = build_model(recipe, open_data(recipe).vocab, "cpu")
        initialise(model, 0)
        return model

    memory_for(5)
    with refused("micro-batches of 8", "micro-batches of 4", error=OutOfMemory):
        train(recipe, model=module())
    run = train(recipe, model=module())
    assert run.state == "finished" and sizes(run, *STARTS) == [8, 4]


def test_what_to_write_where_memory_runs_out(corpus: Path, tmp_path: Path, memory_for: Any) -> None:
    memory_for(3)
    remedies = ("train.micro_batch=4", "activation_checkpointing")
    with refused("step 1 (forward)", "micro-batches of 8", *remedies, error=RunFailed):
        train(recipe_of(corpus, tmp_path / "given", micro=8))
    later = recipe_of(corpus, tmp_path / "later", micro=2)
    with refused("step 5 (forward)", "train.micro_batch=1", error=RunFailed):
        train(later, callbacks=[each_step(lambda now: memory_for(1) if now.step == 4 else None)])
    assert Run(tmp_path / "later").events[-1]["event"] == "failed"
    memory_for(0)
    with refused("micro-batches of 1", "activation_checkpointing", error=RunFailed):
        train(recipe_of(corpus, tmp_path / "none"))


def test_memory_that_an_evaluation_lacks_halves_the_micro_batch(corpus, tmp_path, monkeypatch):
    forward = GPT.forward

    def limited(self: GPT, tokens: torch.Tensor, *rest: Any, **more: Any) -> Any:
        if not self.training and len(tokens) > 4:
            torch.empty(2**58)
        return forward(self, tokens, *rest, **more)

    monkeypatch.setattr(GPT, "forward", limited)
    run = train(recipe_of(corpus, tmp_path / "run"))
    assert run.state == "finished" and sizes(run, "out_of_memory") == [4]
    assert "step 1 (evaluation)" in next(e["reason"] for e in run.events if e["event"] == "failed")


def test_a_model_that_does_not_fit_is_one_message(corpus, tmp_path, monkeypatch):
    """cuBLAS and torch's allocator for a CPU have other errors than torch's allocator for CUDA."""
    failed = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
    for error in (exhausted(), RuntimeError(failed)):

        def build_optimizer(*_: Any, error: Exception = error, **__: Any) -> None:
            raise error

        monkeypatch.setattr(rank, "build_optimizer", build_optimizer)
        with refused("before the first step", "parallel.strategy=full_shard", error=RunFailed):
            train(recipe_of(corpus, tmp_path / "run"))


@pytest.mark.dist
@pytest.mark.parametrize(
    ("strategy", "tensor", "calls"),
    [
        ("full_shard", 1, 1),
        pytest.param("ddp", 1, 5, marks=pytest.mark.full),
        pytest.param("ddp", 2, 7, marks=pytest.mark.full),
    ],
)
def test_every_layout_starts_again_with_smaller_micro_batches(
    corpus, tmp_path, capfd, strategy, tensor, calls
):
    """Rank 1 runs out of memory inside the blocks of a step, while rank 0 may wait for it."""
    more = {"parallel.tensor": tensor, "eval.every": 0, "checkpoint.every": 6, "train.steps": 6}
    more |= {"train.threads": 1, "model.dropout": 0, "train.global_batch": 16 // tensor}
    recipe, count = recipe_of(corpus, tmp_path / "run", strategy=strategy, **more), []

    def one_rank() -> None:
        forward = Block.forward

        def limited(self, x, *rest, **how):
            count.append(1)
            too_many = self.training and len(x) > 4 and len(count) > calls
            if os.environ["RANK"] == "1" and too_many:
                raise exhausted()
            return forward(self, x, *rest, **how)

        Block.forward = limited
        train(recipe)

    assert launch([one_rank], 2) == 0
    run = Run(tmp_path / "run")
    assert (sizes(run, *STARTS), sizes(run, "out_of_memory")) == ([8, 4], [4])
    assert run.state == "finished" and run.summary["steps"] == 6
    assert len({line["step"] for line in run.lines("train")}) == len(run.lines("train")) == 6
    assert "memory ran out in step" in capfd.readouterr().err


def test_memory_that_the_optimizers_state_takes_is_taken_before_the_first_forward_pass(
    corpus, tmp_path, monkeypatch, memory_for
):
    """Else a forward pass that fits in the first step may run out of memory in the second one."""
    held = []

    class Counted(build.MuonAdamW):
        def __init__(self, *arguments: Any, **more: Any):
            super().__init__(*arguments, **more)
            held.append(self)

    recipe = recipe_of(corpus, tmp_path / "run")
    small = untouched(recipe, "train.micro_batch=2")
    monkeypatch.setattr(build, "MuonAdamW", Counted)
    memory_for(2, when=lambda: bool(held[-1].state))
    run = train(recipe)
    assert sizes(run, "out_of_memory") == [4, 2]
    assert run.state == "finished" and curve(run) == curve(small)
