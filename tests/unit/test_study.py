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


def test_given_again_it_is_opened(study):
    assert (
        Study.create(Recipe.load("quickstart"), ["optim.lr=0.01,0.001", "run.seed=1,2"], study.path).cells
        == study.cells
    )
    assert Study.open(study.path) == study
    mapping = Study.create(Recipe.load("quickstart"), {"optim.lr": [1e-2, 1e-3], "run.seed": [1, 2]}, study.path)
    assert mapping.cells == study.cells


@pytest.mark.parametrize(
    "setting",
    ["optim.weight_decay=0.2", "eval.every=7", "parallel.device=cpu", "checkpoint.every=9", "telemetry.every=3"],
)
def test_given_again_with_another_setting_it_is_refused_with_the_key(study, setting):
    """Also settings that are not in the config hash."""
    with pytest.raises(UserError) as error:
        Study.create(Recipe.load("quickstart", [setting]), AXES, study.path)
    assert setting in str(error.value) and "--dir" in str(error.value)
    with pytest.raises(UserError) as error:
        Study.create(Recipe.load("quickstart"), AXES[:1], study.path)
    assert AXES[1] in str(error.value) and "--dir" in str(error.value)


def test_a_cell_that_would_be_another_recipe_is_one_error(study):
    file = study.path / "recipe.toml"
    file.write_text(file.read_text().replace("layers = 4", "layers = 3"))
    assert Recipe.load(file).model.layers == 3
    with pytest.raises(UserError, match="--dir"):
        Study.open(study.path)


def test_a_damaged_study_is_said(study):
    (study.path / "study.json").write_text('{"axes": [], "cells": [{"run": "x"}]}')
    with pytest.raises(UserError, match="damaged"):
        Study.open(study.path)


def fail(path, number):
    study = Study.open(path)
    study.set_status(study.cells[number], "failed", f"by task {number}")


def test_statuses_written_at_the_same_time_are_all_kept(tmp_path):
    study = Study.create(Recipe.load("quickstart"), ["run.seed=1:16:lin:16"], tmp_path / "study")
    with ProcessPoolExecutor(4, mp_context=get_context("fork")) as pool:
        list(pool.map(fail, [study.path] * 16, range(16)))
    assert [(r.state, r.reason) for r in study.results()] == [("failed", f"by task {n}") for n in range(16)]


def test_an_interruption_is_shown_but_leaves_the_cell_open(study):
    cell = study.cells[0]

    def state():
        result = study.result(cell)
        return result.state, result.reason

    study.set_status(cell, "interrupted", "killed by signal 9")
    assert state() == ("interrupted", "killed by signal 9")
    run = Run(study.run_of(cell).path)
    run.path.mkdir(parents=True)

    def event(name, attempt, step=0):
        with run.metrics_path.open("a") as file:
            file.write(
                json.dumps({"kind": "event", "step": step, "attempt": attempt, "event": name, "reason": "r"}) + "\n"
            )

    event("started", 0)
    run.heartbeat_path.touch()
    assert state() == ("running", "")
    run.heartbeat_path.unlink()
    event("failed", 0, step=9)
    assert state() == ("failed", "r")
    event("resumed", 1, step=5)
    assert state()[0] == "interrupted"  # killed after it was tried again
    event("finished", 1, step=9)
    assert state() == ("finished", "")
