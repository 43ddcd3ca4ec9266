"""Tiny Shakespeare, the real file: what the presets reach. Minutes each, so only in `make
test-full`.
"""

import pytest

from windlass import train
from windlass.recipe import Recipe


def overrides(data_files, tmp_path) -> list[str]:
    source = data_files / "tinyshakespeare" / "input.txt"
    folders = [f"data.dir='{tmp_path / 'data'}'", f"run.dir='{tmp_path / 'run'}'"]
    return [f"data.source='{source}'", "data.sha256=''", *folders]


@pytest.mark.full
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("preset", "reaches"), [("shakespeare-char-cpu", 1.93), ("shakespeare-char-fast", 1.72)]
)
def test_the_validation_loss_of_2000_steps(data_files, tmp_path, preset, reaches):
    """Over the whole validation split. nanoGPT's own train.py at these settings, over 400 random
    batches: 1.912.
    """
    recipe = Recipe.load(preset, overrides(data_files, tmp_path))
    assert (recipe.train.steps, recipe.train.global_batch) == (2000, 12)
    assert (recipe.model.context, recipe.eval.batches) == (64, 0)
    last = train(recipe).lines("eval")[-1]
    assert last["tokens"] == 111_539, "every token of the split that has one before it"
    assert last["loss"] <= reaches
