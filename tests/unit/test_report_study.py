import json

import pytest
from report_fixtures import build_run, build_study, loss_at

from windlass.errors import UserError
from windlass.recipe import Recipe
from windlass.report.study import (
    Cell,
    StudyView,
    by_seed,
    cell_table,
    cells_of,
    heat,
    read_study,
    score,
    seed_table,
    sweeps,
    winner,
    winner_command,
)
from windlass.run import Run
from windlass.study.study import Study


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("studies")


@pytest.fixture(scope="module")
def study(folder):
    return read_study(build_study(folder / "study"))


def best(lr, seed):
    return min(loss_at(s, seed, lr) + 0.06 for s in (0, 50, 100, 150, 200))


def test_the_cells_in_the_order_of_the_grid_with_their_states(study):
    states = [cell.state for cell in study.cells]
    assert states == ["finished", "failed", *["finished"] * 9, "waiting"]
    assert study.cells[1].reason == "step 151: loss not finite on rank 0"
    assert study.cells[0].label == "lr 0.01, kind cosine, seed 1"
    assert study.cells[0].label_without_seed == "lr 0.01, kind cosine"
    assert study.keys == ["optim.lr", "optim.schedule.kind", "run.seed"]
    assert len(study.views) == 11


def test_the_table_of_cells_shows_the_failed_and_the_waiting(study):
    table = cell_table(study.cells)
    assert table.columns[:4] == ("optim.lr", "optim.schedule.kind", "run.seed", "state")
    assert len(table.rows) == 12
    assert table.rows[0][7] == pytest.approx(loss_at(200, 1, 1e-2) + 0.06)
    assert table.rows[11][3:5] == ("waiting", None)
    assert table.rows[1][-1] == "step 151: loss not finite on rank 0"
    assert cell_table([c for c in study.cells if not c.reason]).columns[-1] == "device_hours"


def test_medians_and_spread_over_the_seeds_that_finished(study):
    table = seed_table(study.cells)
    row = next(r for r in table.rows if r[:2] == (1e-3, "wsd"))
    values = sorted([best(1e-3, 1), best(1e-3, 2)])
    assert row[2:6] == pytest.approx((sum(values) / 2, *values, values[1] - values[0]))
    assert row[-1] == 2
    alone = next(r for r in table.rows if r[:2] == (1e-2, "cosine"))
    assert (alone[2], alone[-1]) == (pytest.approx(best(1e-2, 1)), 1)
    assert len(by_seed(study.cells)) == 6


def test_the_winner_is_the_lowest_median_and_failed_cells_do_not_count(study):
    found = winner(study.cells)
    assert found.assignment == {"optim.lr": 1e-3, "optim.schedule.kind": "cosine"}
    assert found.loss == pytest.approx((best(1e-3, 1) + best(1e-3, 2)) / 2)
    assert len(found.cells) == 2
    assert winner([c for c in study.cells if c.state != "finished"]) is None


def test_a_winner_with_all_its_seeds_goes_before_a_better_one_with_some(study):
    best = [c for c in study.cells if c.assignment["optim.lr"] == 1e-3]
    lost = min((c for c in best if c.assignment["optim.schedule.kind"] == "cosine"), key=lambda c: -score(c))
    cells = [Cell(c.assignment, c.view, "interrupted") if c is lost else c for c in best]
    found = winner(cells)
    assert (found.assignment["optim.schedule.kind"], found.seeds) == ("wsd", "2 seeds")
    only = winner([c for c in cells if c.assignment["optim.schedule.kind"] == "cosine"])
    assert only.seeds == "1 of 2 seeds"


def test_the_command_has_the_ranks():
    study = StudyView("s", [], Recipe.load("quickstart"))
    assert winner_command(study, {}, 2)[0] == "windlass train quickstart --world 2"
    assert winner_command(study, {"parallel.world": 4}, 2)[0] == "windlass train quickstart --world 4"
    assert winner_command(study, {"parallel.world": 1}, 2)[0] == "windlass train quickstart"


def test_the_command_trains_the_winner_in_full(study):
    command, remark = winner_command(study, winner(study.cells).assignment)
    assert command == "windlass train quickstart optim.lr=0.001 optim.schedule.kind=cosine"
    assert "200 steps" in remark
    assert "400" in remark


def test_the_command_repeats_what_the_study_changed_and_quotes_it(study):
    recipe = Recipe.load(
        "quickstart",
        ["model.width=64", "data.text_key=it's a", "eval.every=7", "train.steps=800", "optim.betas=[0.9, 0.99]"],
    )
    command, remark = winner_command(StudyView("s", [], recipe), {"optim.lr": 1e-4})
    assert "model.width=64" in command
    assert "train.steps=800" in command
    assert "'data.text_key=it'\"'\"'s a'" in command
    assert "'optim.betas=[0.9, 0.99]'" in command
    assert "eval.every" not in command
    assert remark == ""
    assert command.endswith("optim.lr=0.0001")


@pytest.mark.parametrize("steps", ["compute-optimal", "2 epochs"])
def test_the_command_repeats_steps_that_are_no_number(steps):
    recipe = Recipe.load("quickstart", [f"train.steps={steps}"])
    command, remark = winner_command(StudyView("s", [], recipe), {"optim.lr": 1e-4})
    assert f"train.steps={steps}" in command
    assert remark == ""


def test_a_cell_that_failed_before_it_began_shows_its_reason(folder):
    path = build_study(folder / "early", rates=(1e-2, 1e-3), seeds=(1,))
    listed = json.loads((path / "study.json").read_text())["cells"]
    verdict = {listed[-1]["digest"]: {"state": "failed", "reason": "bad input: no such corpus"}}
    (path / "verdicts.json").write_text(json.dumps(verdict))
    last = read_study(path).cells[-1]
    assert (last.view, last.state, last.reason) == (None, "failed", "bad input: no such corpus")
    study = Study.open(path)
    assert study.state_of(study.cells[-1]) == (last.state, last.reason)


def test_a_recipe_of_ones_own_is_named_by_its_file():
    recipe = Recipe(preset="mine")
    command, _ = winner_command(StudyView("s", [], recipe, "studies/s"), {"optim.lr": 1e-4})
    assert command == "windlass train studies/s/recipe.toml optim.lr=0.0001"


def test_the_loss_against_each_swept_setting(study):
    found = {s.key: s for s in sweeps(study.cells)}
    assert list(found) == ["optim.lr", "optim.schedule.kind"]
    lr, kind = found["optim.lr"], found["optim.schedule.kind"]
    assert (lr.numeric, lr.log, lr.values) == (True, True, [1e-4, 1e-3, 1e-2])
    assert (kind.numeric, kind.log) == (False, False)
    assert kind.x("wsd") == 1
    assert [line.name for line in lr.lines] == ["kind cosine", "kind wsd"]
    assert [v for v, _ in lr.lines[0].median] == [1e-4, 1e-3, 1e-2]
    assert len(lr.lines[0].every) == 5


def test_the_heat_map_of_two_swept_settings(study):
    found = heat(study.cells)
    assert (found.row_key, found.rows) == ("optim.schedule.kind", ["cosine", "wsd"])
    assert (found.column_key, found.columns) == ("optim.lr", [1e-4, 1e-3, 1e-2])
    assert found.loss[0][1] == pytest.approx((best(1e-3, 1) + best(1e-3, 2)) / 2)
    one_axis = [c for c in study.cells if c.assignment["optim.schedule.kind"] == "wsd"]
    assert heat(one_axis) is None


def test_cells_from_pairs_of_assignment_and_run(folder):
    run = build_run(folder / "pair", steps=50)
    cells = cells_of([({"optim.lr": 1e-3}, run), ({"optim.lr": 1.0}, Run(folder / "none"))])
    assert [c.state for c in cells] == ["finished", "waiting"]
    assert cells[1].view is None


def test_verdicts_from_outside_are_told(folder):
    run = build_run(folder / "judged", steps=50, finished=False)
    verdict = {run.recipe.digest: {"state": "diverged", "reason": "loss nan at step 30"}}
    assert [(c.state, c.reason) for c in cells_of([({}, run)], verdict)] == [("diverged", "loss nan at step 30")]
    assert cells_of([({}, run)])[0].state == "interrupted"


def test_a_damaged_or_missing_study_is_said(folder):
    with pytest.raises(UserError, match=r"no study\.json"):
        read_study(folder)
    (folder / "broken").mkdir()
    (folder / "broken" / "study.json").write_text(json.dumps({"cells": [{"run": "x"}]}))
    with pytest.raises(UserError, match="damaged"):
        read_study(folder / "broken")
