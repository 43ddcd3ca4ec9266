"""A study's directory: what is written down is what counts."""

import math
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from helpers import write_ledger
from windlass.errors import UserError
from windlass.recipe import Recipe
from windlass.study.study import Study, diverged
from windlass.study.sweep import Halving

AXES = ["optim.lr=1e-2,1e-3", "run.seed=1,2"]


@pytest.fixture
def study(tmp_path):
    return Study.create(Recipe.load("quickstart"), AXES, tmp_path / "study")


def test_given_again_it_is_opened(study):
    recipe = Recipe.load("quickstart")
    for axes in (["optim.lr=0.01,0.001", "run.seed=1,2"], {"optim.lr": [1e-2, 1e-3], "run.seed": [1, 2]}):
        assert Study.create(recipe, axes, study.path).cells == study.cells
    assert Study.open(study.path) == study


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


@pytest.mark.parametrize(
    ("name", "before", "after"), [("recipe.toml", "layers = 4", "layers = 3"), ("study.json", '"key"', '"other"')]
)
def test_a_study_with_other_cells_or_damage_is_one_error(study, name, before, after):
    (study.path / name).write_text((study.path / name).read_text().replace(before, after))
    with pytest.raises(UserError, match=name):
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
    run = study.run_of(cell)

    def state(event="", attempt=0, step=0):
        if event:
            write_ledger(run, {"kind": "event", "step": step, "attempt": attempt, "event": event, "reason": "r"})
        result = study.result(cell)
        return result.state, result.reason

    study.set_status(cell, "interrupted", "killed by signal 9")
    assert state() == ("interrupted", "killed by signal 9")
    write_ledger(run)
    run.heartbeat_path.touch()
    assert state("started") == ("running", "")
    run.heartbeat_path.unlink()
    assert state("failed", 0, 9) == ("failed", "r")
    assert state("resumed", 1, 5)[0] == "interrupted"  # killed after it was tried again
    assert state("finished", 1, 9) == ("finished", "")


@pytest.mark.parametrize(
    ("first", "last", "answer"),
    [(0.8, 1.1, False), (4.0, 5.0, False), (4.0, 5.1, True), (4.0, math.nan, True), (4.0, math.inf, True)],
)
def test_one_rule_for_divergence(first, last, answer):
    assert diverged(first, last) == answer


def test_winner_and_halving_go_by_the_measure_of_checkpoint_best(tmp_path):
    """The best F1 wins, though its loss is the worst."""
    pytest.importorskip("optuna")
    recipe = Recipe.load("gpt-squad", ["checkpoint.best=squad.f1"])
    study = Study.create(recipe, ["optim.lr=1e-2,1e-3,1e-4"], tmp_path / "f1")
    for number, (loss, f1) in enumerate([(1.0, 20.0), (3.0, 80.0), (2.0, 40.0)]):
        run, line = study.run_of(study.cells[number]), {"kind": "eval", "step": 9}
        scores = line | {"suite": "loss", "loss": loss}, line | {"suite": "squad", "f1": f1}
        write_ledger(run, *scores, {"kind": "event", "event": "finished", "step": 9})
    best = study.winner()
    assert (best.assignment, best.median, study.results()[1].best_loss) == ({"optim.lr": 1e-3}, 80.0, 3.0)
    halving = Halving(study)
    assert [bool(halving.prune(result)) for result in study.results()] == [False, False, True]


def test_speed_is_work_divided_by_time(study):
    """Windows of 1 step at 1,000 and of 9 at 100 tokens/s, 100 ms a step: 190 in all, not the mean of the rates."""
    lines = [
        {"kind": "train", "loss": 4.0, "step_ms": 100.0, "step": s, "tokens_per_s": v}
        for s, v in ((1, 5.0), (2, 1000.0), (11, 100.0))
    ]
    write_ledger(study.run_of(study.cells[0]), *lines)
    assert study.results()[0].tokens_per_s == pytest.approx(190)
