"""What is read off a run while it trains and from its ledger: the loss of training data, counts,
speeds, epochs.
"""

import json
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from small_runs import curve, recipe_of, settings, start, stopped, untouched

from helpers import each_step
from windlass import train
from windlass.data.open import open_data
from windlass.data.order import permute
from windlass.evaluation.source import find_source, open_model
from windlass.model.size import count, flops_per_token
from windlass.parallel.ranks import alone
from windlass.reports.charts import charts
from windlass.reports.view import RunView
from windlass.run import Run
from windlass.training import rank


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
    monkeypatch.setattr(rank, "peak_flops", lambda *_, **__: 1e12)
    optimum = {"train.steps": "compute-optimal", "train.tokens_per_parameter": 0.02}
    recipe = recipe_of(corpus, tmp_path / "run", **{"model.vocab": 2000}, **optimum)
    run, model = train(recipe), recipe.model
    flops = flops_per_token(model, 2000)
    assert flops > 2 * flops_per_token(model, 100)
    for line in run.lines("train"):
        assert line["mfu"] == pytest.approx(line["tokens_per_s"] * flops / 1e12)
    tokens = 0.02 * count(model, 2000).total
    assert run.summary["steps"] == int(tokens / model.context / recipe.train.global_batch)


def test_mfu_of_padded_rows_counts_attention_inside_the_items(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank, "peak_flops", lambda *_, **__: 1e12)
    talks = [{"prompt": "x" * n, "completion": "y" * n} for n in (2, 3, 30)]
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, talks * 4)))
    own = {"data.source": f"'{tmp_path / 'chat.jsonl'}'", "data.format": "chat"}
    own |= {"data.tokenizer": "byte", "data.val_fraction": 0, "eval.every": 0}
    own |= {"model.context": 256, "train.steps": 2}
    recipe = recipe_of(tmp_path, tmp_path / "run", **own)
    run, sizes = train(recipe), open_data(recipe).train.sizes  # type: ignore[union-attr]
    attended = float((sizes**2).sum() / sizes.sum())
    assert 40 < attended < 100
    flops = flops_per_token(recipe.model, 257, attended)
    for line in run.lines("train"):
        assert line["mfu"] == pytest.approx(line["tokens_per_s"] * flops / 1e12)


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


def test_a_training_in_a_notebook_counts_its_own_time_alone(corpus, tmp_path):
    """The process may be days old, and may have trained before."""
    began = time.time()
    run = train(recipe_of(corpus, tmp_path / "run", **{"train.steps": 2}))
    assert began - psutil.Process().create_time() > 1
    assert 0 < run.summary["wall_time"]["total"] < time.time() - began
