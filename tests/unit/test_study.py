"""A study's directory: what is written down is what counts."""

from __future__ import annotations

import json
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from windlass.errors import UserError
from windlass.recipe import Recipe
from windlass.run import Run
from windlass.study.study import Study

AXES = ["optim.lr=1e-2,1e-3", "run.seed=1,2"]


@pytest.fixture
def study(tmp_path):
    return Study.create(Recipe.load("quickstart"), AXES, tmp_path / "study")


def test_the_runs_are_where_the_study_says(study):
    """Studies on disk from before the key keep their directories and verdicts."""
    file = study.path / "study.json"
    known = json.loads(file.read_text())
    for number, cell in enumerate(known["cells"]):
        del cell["key"]
        cell["run"] = f"runs/cell-{number}"
    file.write_text(json.dumps(known))
    (study.path / "verdicts.json").write_text(
        json.dumps({known["cells"][2]["digest"]: {"state": "diverged", "reason": "loss nan at step 3"}})
    )
    there = Study.open(study.path)
    assert [there.run_of(cell).name for cell in there.cells] == ["cell-0", "cell-1", "cell-2", "cell-3"]
    assert there.state_of(there.cells[2]) == ("diverged", "loss nan at step 3")
    assert [c.assignment for c in there.cells] == [c.assignment for c in study.cells]
    assert Study.create(Recipe.load("quickstart"), AXES, study.path).cells == there.cells


def test_a_cell_that_would_be_another_recipe_is_one_error(study):
    file = study.path / "recipe.toml"
    file.write_text(file.read_text().replace("layers = 4", "layers = 3"))
    assert Recipe.load(file).model.layers == 3
    with pytest.raises(UserError, match="another recipe now than when the study was begun"):
        Study.open(study.path)


def test_a_damaged_study_is_said(study):
    (study.path / "study.json").write_text('{"axes": [], "cells": [{"run": "x"}]}')
    with pytest.raises(UserError, match="damaged"):
        Study.open(study.path)


def judge(path, number):
    study = Study.open(path)
    study.judge(study.cells[number], "failed", f"by task {number}")


def test_verdicts_written_at_the_same_time_are_all_kept(tmp_path):
    study = Study.create(Recipe.load("quickstart"), ["run.seed=1:16:lin:16"], tmp_path / "study")
    with ProcessPoolExecutor(4, mp_context=get_context("fork")) as pool:
        list(pool.map(judge, [study.path] * 16, range(16)))
    assert [study.state_of(cell) for cell in study.cells] == [("failed", f"by task {n}") for n in range(16)]


def test_an_interruption_is_told_but_leaves_the_cell_open(study):
    cell = study.cells[0]
    study.judge(cell, "interrupted", "killed by signal 9")
    assert study.state_of(cell) == ("interrupted", "killed by signal 9")
    run = Run(study.run_of(cell).path)
    run.path.mkdir(parents=True)

    def event(name, attempt, step=0):
        with run.metrics_path.open("a") as file:
            file.write(
                json.dumps({"kind": "event", "step": step, "attempt": attempt, "event": name, "reason": "r"}) + "\n"
            )

    event("started", 0)
    run.heartbeat_path.touch()
    assert study.state_of(cell) == ("running", "")
    run.heartbeat_path.unlink()
    event("failed", 0, step=9)
    assert study.state_of(cell) == ("failed", "r")
    event("resumed", 1, step=5)
    assert study.state_of(cell)[0] == "interrupted"  # killed after it was tried again
    event("finished", 1, step=9)
    assert study.state_of(cell) == ("finished", "")
