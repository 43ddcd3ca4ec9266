"""What is read off a run while it trains and from its ledger: the loss of training data, counts, speeds, epochs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from small_runs import corpus, curve, recipe_of, settings, start, untouched  # noqa: F401 - a fixture

from windlass import train
from windlass.data.order import permute
from windlass.data.prepare import open_data
from windlass.evaluation.source import alone, find_source, open_model
from windlass.reports.charts import charts
from windlass.reports.tables import measures
from windlass.reports.view import view
from windlass.run import Run


def test_the_loss_of_a_sample_of_the_training_data(corpus: Path, tmp_path: Path) -> None:  # noqa: F811
    more = {"micro": 4, "eval.train_batches": 2, "eval.batches": 1, "checkpoint.every": 4}
    recipe = recipe_of(corpus, tmp_path / "run", **more)
    run = train(recipe)
    lines = run.lines("eval")
    assert [line["step"] for line in lines] == [0, 4, 8, 12]
    data = open_data(recipe)
    tokens, labels = data.train.read(permute(np.arange(16), len(data.train), "windlass/evaluation/train/1337"))
    for line in lines[1:]:  # by hand: these 16 rows, through each checkpoint's model, without dropout
        model = open_model(find_source(f"{run.path}@{line['step']}"), alone("cpu")).eval()
        with torch.no_grad():
            loss = float(model(torch.from_numpy(tokens), torch.from_numpy(labels))) / labels.size
        assert line["train_loss"] == pytest.approx(loss, rel=1e-5) and line["train_loss"] != line["loss"]
        assert (line["train_samples"], line["train_tokens"]) == (16, labels.size)
        samples = line.get("full_samples", line["samples"]) + 16
        assert line["samples_per_s"] == pytest.approx(samples / line["runtime_s"])
    assert f"train loss {lines[-1]['train_loss']:.4f} | val loss" in (run.path / "log.txt").read_text()
    seen = view(run)
    assert "a sample of the training data" in [one.name for one in charts([seen])[0].series]
    samples = sum(line.get("full_samples", line["samples"]) + 16 for line in lines)
    assert measures(seen)["eval_samples_per_s"] == pytest.approx(samples / sum(line["runtime_s"] for line in lines))

    assert curve(untouched(recipe, "eval.train_batches=0")) == curve(run), "it leaves no trace in the training"
    assert start(2, settings(corpus, tmp_path / "two", **more)) == 0
    two = [line["train_loss"] for line in Run(tmp_path / "two").lines("eval")]
    assert two == pytest.approx([line["train_loss"] for line in lines], rel=1e-5), "the same samples at any world size"
