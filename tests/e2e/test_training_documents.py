"""Packed rows of documents in a whole training: a resume, the evaluation, other modules."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from helpers import curve, refused, tiny_recipe
from windlass import evaluate, train
from windlass.run import Run


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200 documents of 2 to 60 letters."""
    folder, draw = tmp_path_factory.mktemp("documents"), np.random.default_rng(2)
    with (folder / "texts.jsonl").open("w") as file:
        for size in draw.integers(2, 60, 200).tolist():
            file.write(json.dumps({"text": "".join(draw.choice(list("abcdef "), size))}) + "\n")
    return folder / "texts.jsonl"


def recipe_of(texts: Path, run: Path, **more: Any) -> Any:
    own = {"data__document_mask": "auto", "train__precision": "fp64", "model__context": 48}
    own |= {"train__steps": 6, "eval__every": 6, "eval__batches": 0, "checkpoint__every": 3}
    return tiny_recipe(texts, run, **own | more)


def test_a_run_resumes_and_evaluates_as_it_trained(texts, tmp_path):
    straight = train(recipe_of(texts, tmp_path / "straight"))
    recipe = recipe_of(texts, tmp_path / "stopped")
    train(recipe, stop_at=3)
    assert curve(train(recipe)) == curve(straight)
    start = straight.lines("event")[0]["data"]["train"]
    assert start["attended"] < 40 and start["label_tokens"] % 48 == 0
    assert "within documents" in straight.log_path.read_text()

    last = straight.lines("eval")[-1]
    own = evaluate(straight, ["loss"]).results["loss"]
    assert own["loss"] == pytest.approx(last["loss"], rel=1e-10)
    assert own["tokens"] == last["tokens"]
    plain = evaluate(straight, ["loss"], {"data.document_mask": False}).results["loss"]
    assert plain["tokens"] == last["tokens"] and abs(plain["loss"] / last["loss"] - 1) > 1e-8


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(257, 257)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        logits = self.table(tokens).flatten(0, 1)
        return nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")


class Aware(Own):
    def forward(self, tokens: Tensor, labels: Tensor, documents: Any = None) -> Tensor:
        assert documents is None or documents.positions.shape == tokens.shape
        return super().forward(tokens, labels)


def test_your_own_module_may_take_documents(texts, tmp_path):
    torch.manual_seed(0)
    for number, model in enumerate((Own(), Aware())):
        recipe = recipe_of(texts, tmp_path / str(number), train__precision="fp32")
        assert isinstance(train(recipe, model=model), Run)
    recipe = recipe_of(texts, tmp_path / "refused", data__document_mask=True)
    with refused("data.document_mask", "forward takes no `documents`", "false"):
        train(recipe.replace("train.precision=fp32"), model=Own())
