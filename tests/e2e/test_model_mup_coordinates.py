"""The coordinate check of muP (arXiv 2203.03466, appendix D.1): with muP, twelve steps change the
activations of a model equally at any width. Initial logits shrink with the width, so the changes count.
"""

from typing import Any

import numpy as np
import pytest
import torch

from helpers import tiny_recipe, write_corpus
from windlass import load_model, train
from windlass.data.open import open_data
from windlass.model.build import build_model
from windlass.model.gpt import initialise
from windlass.optim import build
from windlass.recipe import Recipe

BASE, WIDTHS = 32, (32, 128)
QUICKSTART = Recipe.load("quickstart")


def changes(recipe) -> dict[str, float]:
    """The mean absolute change of each block's output and of the logits."""
    data, outputs = open_data(recipe), list[dict[str, Any]]()
    first = build_model(recipe, data.vocab, "cpu")
    initialise(first, recipe.run.seed)
    tokens = torch.from_numpy(data.train.read(np.arange(8))[0])
    for model in (first.eval(), load_model(train(recipe))):
        out = dict[str, Any]()
        for number, block in enumerate(model.blocks):
            name = f"block {number}"
            block.register_forward_hook(lambda _, __, x, name=name, out=out: out.update({name: x}))
        with torch.no_grad():
            out["logits"] = model(tokens)
        outputs.append(out)
    return {name: float((outputs[1][name] - x).abs().mean()) for name, x in outputs[0].items()}


@pytest.mark.parametrize("case", ["muP", "standard", "undivided rate"])
def test_changes_are_equal_at_all_widths_with_mup_alone(tmp_path, monkeypatch, case):
    if case == "undivided rate":
        monkeypatch.setattr(build, "blocks_of", lambda model: [])
    corpus, sizes = write_corpus(tmp_path / "text.txt", 4000), list[dict[str, float]]()
    for width in WIDTHS:
        changed = {"model.width": width, "model.heads": width // 16, "model.dropout": 0.0}
        changed |= {"optim.lr": QUICKSTART.optim.lr, "optim.schedule.kind": "constant"}
        if case != "standard":
            changed |= {"model.mup_base_width": BASE}
        changed |= {"optim.schedule.warmup": 2, "train.threads": 1, "checkpoint.every": 0}
        recipe = tiny_recipe(corpus, tmp_path / f"{case}-{width}").replace(changed)
        sizes.append(changes(recipe))
    low, high = sizes
    powers = [np.log(high[name] / low[name]) / np.log(WIDTHS[1] / WIDTHS[0]) for name in low]
    steepest = max(map(abs, powers))
    assert steepest < 0.4 if case == "muP" else steepest > 0.5, powers
