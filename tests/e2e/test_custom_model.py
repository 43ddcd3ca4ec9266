"""`train` as a function: a model, samples and a callback of the user's own, as the page on training shows them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from windlass import Recipe, train
from windlass.errors import UserError
from windlass.run import Run

PAGE = Path(__file__).parents[2] / "docs" / "train.md"


def shown() -> dict:
    """What the page's longest example defines, up to where it trains."""
    example = max(re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL), key=len)
    names: dict = {}
    exec(example[: example.index("recipe =")], names)
    return names


def recipe(place: Path, *more: str) -> Recipe:
    small = ["train.steps=6", "train.global_batch=8", "model.context=16", "eval.every=3", "telemetry.every=1"]
    return Recipe.load("quickstart", [*small, f"run.dir='{place}'", *more])


def test_a_model_and_samples_of_ones_own(tmp_path):
    page, seen = shown(), []
    mine = page["MyModel"]()
    run = train(
        recipe(tmp_path / "run"), mine, page["data"], lambda step, result: seen.append((step, float(result.loss)))
    )
    lines = run.lines("train")
    assert run.state == "finished"
    assert seen == [(line["step"], line["loss"]) for line in lines]
    assert run.lines("eval")[-1]["loss"] < run.lines("eval")[0]["loss"]
    assert run.lines("sample") == [], "there is no tokenizer, and the model has no cache"
    assert all("mfu" not in line for line in lines), "its FLOPs are not known"


def test_ids_past_the_embedding_of_a_model_of_ones_own(tmp_path):
    """A model without `vocab` cannot be checked before it starts."""
    import torch

    page = shown()
    mine = page["MyModel"]()
    table = next(m for m in mine.modules() if isinstance(m, torch.nn.Embedding))
    assert not hasattr(mine, "vocab")
    table.weight, table.num_embeddings = torch.nn.Parameter(table.weight[:3].detach().clone()), 3
    with pytest.raises(UserError) as error:
        train(recipe(tmp_path / "run"), mine, page["data"])
    assert "3 token embeddings" in str(error.value) and "vocab" in str(error.value)


def test_it_stops_and_goes_on_to_the_same_end(tmp_path):
    import torch

    page = shown()

    def model():
        torch.manual_seed(0)
        return page["MyModel"]()

    train(recipe(tmp_path / "whole"), model(), page["data"])
    with pytest.raises(Exception, match="--stop-at 3"):
        train(recipe(tmp_path / "halves"), model(), page["data"], stop_at=3)
    train(recipe(tmp_path / "halves"), model(), page["data"])
    whole, halves = ([x["loss"] for x in Run(tmp_path / name).lines("train")] for name in ("whole", "halves"))
    assert whole == halves


def test_samples_of_ones_own_for_the_recipes_model(tmp_path):
    run = train(recipe(tmp_path / "run", "model.vocab=0", "model.layers=1", "model.width=16"), data=shown()["data"])
    assert run.state == "finished"


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["train.precision=fp16", "train.compile=true", "parallel.device=auto"], "fp16 on a CPU"),
        (['train.steps="compute-optimal"'], "is for a recipe.s own model"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_written(tmp_path, more, says):
    import torch

    if torch.cuda.is_available() and "compile" in " ".join(more):
        pytest.skip("there is a GPU, which has fp16")
    page = shown()
    with pytest.raises(UserError, match=says):
        train(recipe(tmp_path / "run", *more), page["MyModel"](), page["data"])
    assert not (tmp_path / "run").exists()


def test_a_world_inside_another_launchers_is_refused(tmp_path, monkeypatch, capsys):
    from windlass.cli import main

    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29599"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as end:
        main(["train", "quickstart", f"run.dir='{tmp_path / 'run'}'", "--world", "2"])
    assert end.value.code == 2
    assert "leave --world out" in capsys.readouterr().err
