"""What is read off a run while it trains and from its ledger: the loss of training data, counts,
speeds, epochs.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_runs import corpus, curve, recipe_of, settings, start, stopped, untouched  # noqa: F401 - a fixture

from forked import launch
from helpers import each_step, refused
from windlass import train
from windlass.data.open import open_data
from windlass.data.order import permute
from windlass.errors import OutOfMemory, RunFailed
from windlass.evaluation.source import alone, find_source, open_model
from windlass.model.build import build_model
from windlass.model.gpt import GPT, Block, initialise
from windlass.model.size import count, flops_per_token
from windlass.optim import build
from windlass.reports.charts import charts
from windlass.reports.view import RunView
from windlass.run import STARTS, Run
from windlass.training import record


def test_the_loss_of_a_sample_of_the_training_data(corpus: Path, tmp_path: Path) -> None:
    more = {"micro": 4, "eval.train_batches": 2, "eval.batches": 1, "checkpoint.every": 4}
    recipe = recipe_of(corpus, tmp_path / "run", **more)
    run = train(recipe)
    lines = run.lines("eval")
    assert [line["step"] for line in lines] == [0, 4, 8, 12]
    data = open_data(recipe)
    order = permute(np.arange(16), len(data.train), "windlass/evaluation/train/1337")
    tokens, labels, *_ = data.train.read(order)
    # by hand: these 16 rows, through each checkpoint's model, without dropout
    for line in lines[1:]:
        model = open_model(find_source(f"{run.path}@{line['step']}"), alone("cpu")).eval()
        with torch.no_grad():
            loss = float(model(torch.from_numpy(tokens), torch.from_numpy(labels))) / labels.size
        assert line["train_loss"] == pytest.approx(loss, rel=1e-5)
        assert line["train_loss"] != line["loss"]
        assert (line["train_samples"], line["train_tokens"]) == (16, labels.size)
        samples = line.get("full_samples", line["samples"]) + 16
        assert line["samples_per_s"] == pytest.approx(samples / line["runtime_s"])
    assert f"train loss {lines[-1]['train_loss']:.4f} | val loss" in run.log_path.read_text()
    seen = RunView(run)
    assert "a sample of the training data" in [one.name for one in charts([seen])[0].series]
    samples = sum(line.get("full_samples", line["samples"]) + 16 for line in lines)
    seconds = sum(line["runtime_s"] for line in lines)
    assert seen.values["eval_samples_per_s"] == pytest.approx(samples / seconds)

    # it leaves no trace in the training, and takes the same samples at any world size
    assert curve(untouched(recipe, "eval.train_batches=0")) == curve(run)
    assert start(2, settings(corpus, tmp_path / "two", "full_shard", **more)) == 0
    two = Run(tmp_path / "two")
    losses = [line["train_loss"] for line in two.lines("eval")]
    assert losses == pytest.approx([line["train_loss"] for line in lines], rel=1e-5)
    for one in (run, two):
        groups = one.events[0]["optimizer_groups"]  # of all shards
        assert [(g["tensors"], g["parameters"]) for g in groups] == [(9, 6288), (5, 80)]
    mean = run.summary["train_loss_mean"]
    assert mean == pytest.approx(two.summary["train_loss_mean"], rel=1e-5)
    assert mean == pytest.approx(np.mean([x[1] for x in curve(run)]), rel=1e-6)


def lines_of(run: Run, word: str) -> list[str]:
    """The lines of the log that have a word, without their time."""
    lines = run.log_path.read_text().splitlines()
    return [line.partition(" ")[2] for line in lines if word in line]


def test_mfu_and_compute_optimal_steps_count_all_rows_of_the_model(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokenizer has about ten tokens; the head multiplies by all 2,000 rows."""
    monkeypatch.setattr(record, "peak_flops", lambda *_, **__: 1e12)
    optimum = {"train.steps": "compute-optimal", "train.tokens_per_parameter": 0.02}
    recipe = recipe_of(corpus, tmp_path / "run", **{"model.vocab": 2000}, **optimum)
    run, model = train(recipe), recipe.model
    flops = flops_per_token(model, 2000)
    assert flops > 2 * flops_per_token(model, 100)
    for line in run.lines("train"):
        assert line["mfu"] == pytest.approx(line["tokens_per_s"] * flops / 1e12)
    tokens = 0.02 * count(model, 2000).total
    assert run.summary["steps"] == int(tokens / model.context / recipe.train.global_batch)


def test_the_mean_of_the_losses_and_epochs_over_a_resume(corpus: Path, tmp_path: Path) -> None:
    """transformers' `train_loss` is the mean over all steps; 14 steps of 8 of 48 samples are 2
    epochs and a third.
    """
    more = {"train.steps": 14, "telemetry.every": 5, "eval.every": "'1 epoch'"}
    more |= {"checkpoint.every": 4, "eval.train_batches": 0}
    recipe = recipe_of(corpus, tmp_path / "run", **more)
    losses: list[float] = []
    whole = untouched(recipe, callbacks=[each_step(lambda now: losses.append(now.loss))])
    assert len(losses) == 14
    assert whole.summary["train_loss_mean"] == pytest.approx(np.mean(losses), rel=1e-6)
    stopped(recipe, 6)  # in the middle of a window of 5 steps, at the end of an epoch
    run = train(recipe)
    assert lines_of(run, "work ")[-1].endswith("tokens, resumed after step 6")
    assert run.summary["train_loss_mean"] == whole.summary["train_loss_mean"], "bit for bit"

    numbers, summary = RunView(run).values, run.summary
    assert numbers["train_loss_mean"] == summary["train_loss_mean"] != numbers["train_loss"]
    seconds, speed = summary["wall_time"], numbers["samples_per_s_whole_run"]
    assert speed == pytest.approx(112 / (seconds["total"] - seconds["startup"]))
    assert speed < numbers["train_samples_per_s"], "evaluations and saves take time too"
    assert summary["steps_per_epoch"] > 0 and summary["startup_s"] > 0
    assert summary["steps_per_epoch"] == numbers["steps_per_epoch"]
    assert summary["eval_samples_per_s"] == pytest.approx(numbers["eval_samples_per_s"])
    by_epoch = {line["step"]: line["loss"] for line in run.lines("eval")}
    losses = [numbers.get(f"eval_loss_epoch_{k}") for k in (0, 1, 2, 3)]
    assert losses == [None, by_epoch[6], by_epoch[12], None]


@pytest.fixture
def memory_for(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Has the model run out of memory in training passes of more than so many sequences."""

    def limit(most: int) -> None:
        forward = GPT.forward

        def limited(self: GPT, tokens: torch.Tensor, *rest: Any, **more: Any) -> Any:
            if self.training and len(tokens) > most:
                torch.empty(2**58)  # a CPU's allocator raises a RuntimeError
            return forward(self, tokens, *rest, **more)

        monkeypatch.setattr(GPT, "forward", limited)

    return limit


def test_a_smaller_micro_batch_where_memory_runs_out(corpus, tmp_path, memory_for):
    recipe = recipe_of(corpus, tmp_path / "run")
    small = untouched(recipe, "train.micro_batch=2")
    memory_for(3)
    stopped(recipe, 4)
    run = train(recipe)  # which has dropout, so that each micro-batch has masks of its own
    assert curve(run) == curve(small), "bit for bit the run with that micro-batch, resumed or not"
    assert [e["micro_batch"] for e in run.events if e["event"] == "out_of_memory"] == [4, 2], (
        "and not again at the resume"
    )
    assert run.recipe.train.micro_batch == 0
    assert lines_of(run, "train.micro_batch=2") and not lines_of(run, "dropout draws")


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
    sizes = [e["micro_batch"] for e in run.events if e["event"] in STARTS]
    assert run.state == "finished" and sizes == [8, 4]


def test_what_to_write_where_memory_runs_out(corpus: Path, tmp_path: Path, memory_for: Any) -> None:
    memory_for(3)
    with refused(
        "step 1 (forward)",
        "micro-batches of 8",
        "train.micro_batch=4",
        "activation_checkpointing",
        error=RunFailed,
    ):
        train(recipe_of(corpus, tmp_path / "given", micro=8))
    later = recipe_of(corpus, tmp_path / "later", micro=2)
    with refused("step 5 (forward)", "train.micro_batch=1", error=RunFailed):
        train(later, callbacks=[each_step(lambda now: memory_for(1) if now.step == 4 else None)])
    assert Run(tmp_path / "later").events[-1]["event"] == "failed"
    memory_for(0)
    with refused("micro-batches of 1", "activation_checkpointing", error=RunFailed):
        train(recipe_of(corpus, tmp_path / "none"))


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

    def rank() -> None:
        forward = Block.forward

        def limited(self, x, *rest, **how):
            count.append(1)
            too_many = self.training and len(x) > 4 and len(count) > calls
            if os.environ["RANK"] == "1" and too_many:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return forward(self, x, *rest, **how)

        Block.forward = limited
        train(recipe)

    assert launch([rank], 2) == 0
    run = Run(tmp_path / "run")
    assert [e["micro_batch"] for e in run.events if e["event"] in STARTS] == [8, 4]
    assert [e["micro_batch"] for e in run.events if e["event"] == "out_of_memory"] == [4]
    assert run.state == "finished" and run.summary["steps"] == 6
    assert len({line["step"] for line in run.lines("train")}) == len(run.lines("train")) == 6
    assert "memory ran out in step" in capfd.readouterr().err


def test_memory_that_the_optimizers_state_takes_is_taken_before_the_first_forward_pass(
    corpus, tmp_path, monkeypatch
):
    """Else a forward pass that fits in the first step may run out of memory in the second one."""
    held = []

    class Counted(build.MuonAdamW):
        def __init__(self, *arguments: Any, **more: Any):
            super().__init__(*arguments, **more)
            held.append(self)

    forward = GPT.forward

    def limited(self: GPT, tokens: torch.Tensor, *rest: Any, **more: Any) -> Any:
        if self.training and held[-1].state and len(tokens) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return forward(self, tokens, *rest, **more)

    recipe = recipe_of(corpus, tmp_path / "run")
    small = untouched(recipe, "train.micro_batch=2")
    monkeypatch.setattr(build, "MuonAdamW", Counted)
    monkeypatch.setattr(GPT, "forward", limited)
    run = train(recipe)
    assert [e["micro_batch"] for e in run.events if e["event"] == "out_of_memory"] == [4, 2]
    assert run.state == "finished" and curve(run) == curve(small)


def test_ddp_on_one_rank_takes_a_smaller_micro_batch_after_a_backward_pass_that_failed(
    corpus, tmp_path, monkeypatch
):
    backward, calls = torch.Tensor.backward, []

    def limited(self: torch.Tensor, *rest: Any, **more: Any) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        backward(self, *rest, **more)

    recipe = recipe_of(corpus, tmp_path / "run").replace(
        "parallel.strategy=ddp", "train.compile=true"
    )
    monkeypatch.setattr(torch, "compile", lambda forward, **how: forward)
    resets = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: resets.append(1))
    monkeypatch.setattr(torch.Tensor, "backward", limited)
    run = train(recipe)
    assert run.state == "finished" and [e["event"] for e in run.events].count("out_of_memory") == 1
    assert run.events[0]["compiles"] is True
    assert resets == [1], (
        "else the blocks are compiled for a batch that varies, and a resume compiles them otherwise"
    )


def test_a_single_rank_starts_again_before_the_first_save(corpus, tmp_path, monkeypatch):
    forward, calls = GPT.forward, []

    def limited(self: GPT, tokens: torch.Tensor, *rest: Any, **more: Any) -> Any:
        calls.append(self.training)
        if self.training and sum(calls) > 3 and len(tokens) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return forward(self, tokens, *rest, **more)

    more = {"model.dropout": 0, "eval.every": 0, "checkpoint.every": 10}
    recipe = recipe_of(corpus, tmp_path / "run", **more)
    whole = untouched(recipe)
    monkeypatch.setattr(GPT, "forward", limited)
    run = train(recipe)
    sizes = [(e["step"], e["micro_batch"]) for e in run.events if e["event"] == "out_of_memory"]
    assert sizes == [(0, 4)] and len(run.lines("train")) == len(whole.lines("train"))
    losses = [[line["loss"] for line in one.lines("train")] for one in (run, whole)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
