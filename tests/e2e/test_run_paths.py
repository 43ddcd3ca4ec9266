"""Which run a path is, where its files are, and which recipe it was trained with."""

import shutil
from pathlib import Path

import pytest

from forked import forking
from helpers import refused, tiny_recipe, write_corpus
from windlass import evaluate, plan, sweep, train
from windlass.checkpoint.listing import list_checkpoints
from windlass.ledger import read_lines
from windlass.recipe import Recipe
from windlass.run import Run
from windlass.study.study import Study

FLAT = {"optim__schedule__kind": "constant", "checkpoint__every": 4}


def steps(run: Path | Run) -> int:
    path = run.path if isinstance(run, Run) else run
    return max(line["step"] for line in read_lines(path / "metrics.jsonl"))


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A directory with a corpus and a finished run, both named by relative paths."""
    home = tmp_path / "project"
    write_corpus(home / "text.txt", 800)
    monkeypatch.chdir(home)
    own = {"data__dir": "", "train__steps": 8, "data__tokenizer": "char", **FLAT}
    train(tiny_recipe(Path("text.txt"), Path("runs/first"), **own))
    return home


def test_a_run_is_at_the_path_that_the_user_gave(project, tmp_path, monkeypatch):
    """After `cp -r`, `mv`, through a link, from another directory, in every verb and the API."""
    first, backup = Path("runs/first"), Path("runs/backup")
    shutil.copytree(first, backup)
    assert train(str(backup), extend_to=12).path == backup
    assert train(Run(backup), extend_to=16).path == backup
    assert (steps(first), steps(backup)) == (8, 16)
    monkeypatch.chdir(tmp_path)
    moved, link = tmp_path / "elsewhere" / "first", tmp_path / "link"
    moved.parent.mkdir()
    (project / first).rename(moved)
    link.symlink_to(moved)
    extended = train(str(link), extend_to=10)
    assert extended.path == link and steps(moved) == 10 and not (project / first).exists()
    assert plan(link).run_dir == str(link) and list_checkpoints(link).run == link
    assert evaluate(link, ["loss"], {"data.val_fraction": 0.1}).path.is_relative_to(link)
    assert Recipe.load(link / "recipe.toml").run_dir == link
    for weights in (moved, f"{link}@8"):  # the weights would move with the old run
        with refused("model.init_from", "fresh=True", "run.dir"):
            train(Recipe.load(link, {"model.init_from": str(weights)}), fresh=True)
    with monkeypatch.context() as patch, refused("fresh=True", str(moved), "another"):
        patch.chdir(moved)
        train(".", fresh=True)
    fresh = train(str(link), fresh=True)
    assert fresh.path == link and (tmp_path / "link.old-1").resolve() == moved
    branch = Recipe.load(moved, {"run.dir": str(tmp_path / "branch"), "train.steps": 12})
    assert steps(train(branch, branch_from=f"{moved}@8")) == 12
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == [
        *("branch", "elsewhere", "link", "link.old-1", "project")
    ], "nothing was prepared or trained in the working directory"


def test_what_is_typed_starts_from_the_working_directory(project, tmp_path, monkeypatch):
    other = tmp_path / "other"
    write_corpus(other / "more.txt", 400, seed=1)
    monkeypatch.chdir(other)
    first = project / "runs/first"
    recipe = Recipe.load(first, {"data.eval_source": "more.txt"})
    assert recipe.data.source == str(project / "text.txt")
    assert recipe.data.eval_source == str(other / "more.txt")
    assert Run(first).recipe.replace("data.eval_source=more.txt").data == recipe.data
    assert recipe.flat()["data.source"] == "text.txt", "its hash is as before"
    (other / "next.toml").write_text(f'extends = "{first}"\n[data]\nsource = "more.txt"\n')
    extended = Recipe.load(other / "next.toml")
    assert extended.run.dir == "" and extended.data.source == "more.txt"


def test_a_run_on_another_machine_starts_from_the_working_directory(project, tmp_path, monkeypatch):
    """There the directory where the run began does not exist; the fingerprint guards the data."""
    there = tmp_path / "there"
    shutil.copytree(project / "runs/first", there / "first")
    project.rename(tmp_path / "gone")
    monkeypatch.chdir(there)
    with refused("data.source", "text.txt"):
        train("first", extend_to=10)
    write_corpus(there / "text.txt", 800, seed=1)
    with refused("fingerprint"):
        train("first", extend_to=10)
    shutil.rmtree(there / "data")
    write_corpus(there / "text.txt", 800)
    assert steps(train("first", extend_to=10)) == 10


def test_a_moved_study_continues(project, tmp_path, monkeypatch):
    shutil.rmtree("runs")
    axes = {"optim.lr": [1e-3, 1e-2]}
    recipe = tiny_recipe(Path("text.txt"), Path("x"), data__dir="", train__steps=3)
    Study.create(recipe.replace({"run.dir": ""}), axes, Path("study"))
    Path("study").rename(tmp_path / "moved")
    monkeypatch.chdir(tmp_path)
    with forking():
        study = sweep("moved")
    assert [result.state for result in study.results()] == ["finished"] * 2
    assert not (tmp_path / "data").exists() and not (project / "study").exists()


def test_an_edited_recipe_follows_the_rules_of_overrides(project):
    run = Run("runs/first")
    text = run.recipe_path.read_text()
    run.recipe_path.write_text(text.replace("lr = 0.01", "lr = 0.02"))
    with refused("optim.lr", "0.01", "0.02"):
        train("runs/first", extend_to=10)
    assert Run(run.path).recipe.optim.lr == 0.01, "what it was trained with"
    run.recipe_path.write_text(text.replace("sample_count = 1", "sample_count = 2"))
    train("runs/first", extend_to=10)
    (changed,) = [e["settings"] for e in run.events if e["event"] == "settings_changed"]
    assert changed == {"eval.sample_count": [1, 2]}
    assert Run(run.path).recipe.eval.sample_count == 2
    run.recipe_path.unlink()
    assert steps(train("runs/first", extend_to=12)) == 12
    assert "steps = 12" in run.recipe_path.read_text(), "it is written again"
    run.recipe_path.write_text("[run")
    with refused("recipe.toml", "TOML", "delete it"):
        train("runs/first", extend_to=14)
