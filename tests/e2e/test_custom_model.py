"""`train` as a function: a model, samples and a callback of the user's own, as the page on training shows them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from helpers import refused
from windlass import Recipe, train
from windlass.errors import Stopped
from windlass.run import Run

PAGE = Path(__file__).parents[2] / "docs" / "train.md"


@pytest.fixture
def page() -> dict:
    """What the page's longest example defines, up to where it trains."""
    example = max(re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL), key=len)
    names: dict = {}
    exec(example[: example.index("recipe =")], names)
    return names


def recipe(folder: Path, *more: str) -> Recipe:
    small = ["train.steps=6", "train.global_batch=8", "model.context=16", "eval.every=3", "telemetry.every=1"]
    return Recipe.load("quickstart", [*small, f"run.dir='{folder}'", *more])


def test_a_model_and_samples_of_ones_own(tmp_path, page):
    losses = []
    run = train(
        recipe(tmp_path / "run"), page["MyModel"](), page["data"],
        lambda step, result: losses.append((step, float(result.loss))),
    )  # fmt: skip
    lines, evaluated = run.lines("train"), run.lines("eval")
    assert run.state == "finished" and losses == [(line["step"], line["loss"]) for line in lines]
    assert evaluated[-1]["loss"] < evaluated[0]["loss"]
    assert run.lines("sample") == [], "there is no tokenizer, and the model has no cache"
    assert all("mfu" not in line for line in lines), "its FLOPs are not known"


def test_what_cannot_be_with_a_model_of_ones_own_is_refused(tmp_path, page):
    model = page["MyModel"]()
    table = next(m for m in model.modules() if isinstance(m, torch.nn.Embedding))
    assert not hasattr(model, "vocab")
    table.weight, table.num_embeddings = torch.nn.Parameter(table.weight[:3].detach().clone()), 3
    with refused("3 token embeddings", "vocab"):
        train(recipe(tmp_path / "run"), model, page["data"])
    with refused("is for a recipe's own model"):
        train(recipe(tmp_path / "other", 'train.steps="compute-optimal"'), model, page["data"])


def test_it_stops_and_resumes_to_the_same_end(tmp_path, page):
    def model() -> torch.nn.Module:
        torch.manual_seed(0)
        return page["MyModel"]()

    train(recipe(tmp_path / "whole"), model(), page["data"])
    with pytest.raises(Stopped):
        train(recipe(tmp_path / "halves"), model(), page["data"], stop_at=3)
    train(recipe(tmp_path / "halves"), model(), page["data"])
    whole, halves = ([x["loss"] for x in Run(tmp_path / name).lines("train")] for name in ("whole", "halves"))
    assert whole == halves


def test_samples_of_ones_own_for_the_recipes_model(tmp_path, page):
    run = train(recipe(tmp_path / "run", "model.vocab=0", "model.layers=1", "model.width=16"), data=page["data"])
    assert run.state == "finished"


def test_a_loss_that_is_no_sum_is_refused_before_the_first_step(tmp_path, page):
    class Mean(page["MyModel"]):
        def forward(self, tokens, labels):
            return super().forward(tokens, labels) / max(1, int((labels != -100).sum()))

    for model in (Mean(), page["MyModel"]()):
        where = recipe(tmp_path / type(model).__name__)
        if isinstance(model, Mean):
            with refused("forward(tokens, labels)", 'reduction="sum"', "train.startup_checks=false"):
                train(where, model, page["data"])
            assert not Run(where.run_dir).lines("train")
            train(where.with_overrides("train.startup_checks=false", "train.steps=1"), model, page["data"], fresh=True)
        else:
            assert train(where, model, page["data"]).state == "finished"
