"""`train.fit`: the layout is chosen before the first step, stored, and chosen again on a resume."""

from dataclasses import replace

import pytest

from helpers import refused, tiny_recipe, windlass, write_corpus
from windlass import train
from windlass.run import Run
from windlass.training import fit


def test_a_run_stores_the_layout(tmp_path, capsys, monkeypatch):
    recipe = tiny_recipe(write_corpus(tmp_path / "text.txt"), tmp_path / "run")
    recipe = recipe.replace({"train.fit": True, "train.micro_batch": 0})
    run = train(recipe, stop_at=1)
    assert capsys.readouterr().out.startswith("train.fit: ")
    stored = run.recipe
    assert not stored.train.fit and stored.train.micro_batch == stored.train.global_batch
    assert stored.config_hash == recipe.config_hash
    run = train(recipe)
    assert run.state == "finished" and "settings changed" not in capsys.readouterr().out
    # nothing is tried on a device without memory
    device = fit.this_device()
    monkeypatch.setattr(fit, "this_device", lambda *_, **__: replace(device, memory_bytes=1000))
    with refused("train.fit", "closest", "GB too much"):
        train(recipe.replace({"run.dir": str(tmp_path / "other")}))
    assert not (tmp_path / "other" / "recipe.toml").exists()
    with refused("train.fit", "own model"):
        train(recipe.replace({"run.dir": str(tmp_path / "other")}), data=object())


@pytest.mark.dist
def test_several_ranks_agree(tmp_path):
    recipe = tiny_recipe(write_corpus(tmp_path / "text.txt"), tmp_path / "run")
    settings = {"train.fit": True, "train.micro_batch": 0, "parallel.strategy": "full_shard"}
    (tmp_path / "recipe.toml").write_text(recipe.replace(settings).toml(), encoding="utf-8")
    output = windlass("train", tmp_path / "recipe.toml", "--world", 2)
    run = Run(tmp_path / "run")
    assert run.state == "finished" and "train.fit: " in str(output)
    assert run.recipe.parallel.strategy == "ddp" and not run.recipe.train.fit
