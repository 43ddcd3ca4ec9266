import json
import math
import shutil

import pytest
from report_fixtures import build_run, build_study, loss_at

from windlass.errors import UserError
from windlass.recipe import Recipe
from windlass.reports.charts import LOSS, ceiling, wild
from windlass.reports.plots import draw, late_loss, styled
from windlass.reports.study import (
    Cell,
    StudyView,
    by_seed,
    cell_table,
    read_study,
    score,
    seed_table,
    winner,
    winner_command,
    winner_text,
)
from windlass.reports.study_page import study_page
from windlass.reports.study_plots import heat_figure, sweep_figure
from windlass.reports.swept import heat, heats, sweeps
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
    assert row[-2:] == (2, 2)
    alone = next(r for r in table.rows if r[:2] == (1e-2, "cosine"))
    assert (alone[2], *alone[-2:]) == (pytest.approx(best(1e-2, 1)), 2, 1)
    assert alone[5] is None  # one seed has no spread
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
    assert winner_text(only)[1].startswith("median of the best evaluation loss over 1 of 2 seeds: ")


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
    verdict = {listed[-1]["key"]: {"state": "failed", "reason": "bad input: no such corpus"}}
    (path / "statuses.json").write_text(json.dumps(verdict))
    last = read_study(path).cells[-1]
    assert (last.view, last.state, last.reason) == (None, "failed", "bad input: no such corpus")
    study = Study.open(path)
    assert (study.results()[-1].state, study.results()[-1].reason) == (last.state, last.reason)


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


def test_a_damaged_or_missing_study_is_said(folder):
    with pytest.raises(UserError, match=r"no study\.json"):
        read_study(folder)
    (folder / "broken").mkdir()
    (folder / "broken" / "study.json").write_text(json.dumps({"cells": [{"run": "x"}]}))
    with pytest.raises(UserError, match="damaged"):
        read_study(folder / "broken")


def diverge(run, step):
    """Let a made-up run's losses blow up and end at `step`, as a divergence leaves them."""
    lines = [json.loads(line) for line in run.metrics_path.read_text().splitlines()]
    kept = [line for line in lines if line["step"] <= step]
    for line in kept:
        if line["kind"] == "train" and line["step"] >= step - 20:
            line["loss"] = 40.0 if line["step"] < step else math.nan
        if line["kind"] == "eval" and line["suite"] == "loss" and line["step"] >= step - 20:
            line["loss"] = math.nan
    run.metrics_path.write_text("".join(json.dumps(line) + "\n" for line in kept))


@pytest.fixture(scope="module")
def troubled(folder):
    """Three rates, two schedules, two seeds: a cell failed, one diverged, one waits; of the slowest both seeds differ."""
    path = build_study(folder / "troubled")
    listed = json.loads((path / "study.json").read_text())["cells"]
    for cell in listed[2:4]:  # both seeds of 1e-2 with wsd
        shutil.rmtree(path / cell["run"])
        run = build_run(
            path / cell["run"], "optim.schedule.kind=wsd", steps=200, ranks=1, lr=1e-2, device="cpu", finished=False,
            seed=cell["assignment"]["run.seed"],
        )  # fmt: skip
        diverge(run, 120)
    verdicts = {cell["key"]: {"state": "diverged", "reason": "loss nan at step 120"} for cell in listed[2:4]}
    (path / "statuses.json").write_text(json.dumps(verdicts))
    lines = Run(path / listed[4]["run"]).metrics_path.read_text().splitlines()
    changed = [json.loads(line) for line in lines]
    for line in changed:  # overfitting: the final loss is above the best
        if line["kind"] == "eval" and line["suite"] == "loss" and line["step"] == 200:
            line["loss"] += 0.5
    Run(path / listed[4]["run"]).metrics_path.write_text("".join(json.dumps(line) + "\n" for line in changed))
    return read_study(path)


def test_final_and_best_loss_against_the_rate_with_cells_that_did_not_finish(troubled):
    assert [cell.state for cell in troubled.cells].count("diverged") == 2
    lr = next(s for s in sweeps(troubled.cells) if s.key == "optim.lr")
    cosine, wsd = lr.lines
    assert [v for v, _ in wsd.median] == [1e-4, 1e-3]  # no cell of 1e-2 finished
    assert wsd.final == []  # the final losses are the best ones
    final, median = dict(cosine.final), dict(cosine.median)
    late = [loss_at(200, 1, 1e-3) + 0.56, loss_at(200, 2, 1e-3) + 0.06]
    assert final[1e-3] == pytest.approx(sum(late) / 2)
    early = [min(loss_at(s, 1, 1e-3) + 0.06 for s in (0, 50, 100, 150)), best(1e-3, 2)]
    assert median[1e-3] == pytest.approx(sum(early) / 2)
    with styled():
        axes = sweep_figure(lr).axes[0]
    assert axes.get_xscale() == "log"
    names = axes.get_legend_handles_labels()[1]
    assert names == ["best, kind cosine", "final, kind cosine", "best and final, kind wsd"]
    best_line, final_line = (line for line in axes.lines if line.get_label() in names[:2])
    assert final_line.get_ydata()[1] == pytest.approx(sum(late) / 2) != best_line.get_ydata()[1]


def test_two_maps_where_the_final_loss_is_not_the_best_and_a_hole_where_nothing_finished(troubled, study):
    first, final = heats(troubled.cells)
    assert (first.title, final.title) == ("Best evaluation loss", "Final evaluation loss")
    assert first.loss[1][2] is None and final.loss[1][2] is None
    assert final.loss[0][1] > first.loss[0][1]
    assert len(heats(study.cells)) == 1
    with styled():
        texts = [text.get_text() for text in heat_figure(first).axes[0].texts]
    assert texts[5] == "–" and not any("nan" in text.lower() for text in texts)
    page = study_page(troubled)
    assert "Final evaluation loss</h3>" in page and '<td class="cell" style="">–</td>' in page


def test_the_curves_with_and_without_their_beginning_are_not_squeezed_by_what_diverged(troubled):
    everything = ceiling(troubled.views)
    assert 3 < everything < 40
    late = ceiling(troubled.views, 60)
    assert late < everything
    calm = [v for v in troubled.views if not wild(v)]
    assert len(calm) == 9 and ceiling(calm) is None
    with styled():
        whole, cut = draw(LOSS, troubled.views), late_loss(troubled.views, skip=60)
    assert whole.axes[0].get_ylim()[1] < 40
    assert "cut off" in whole.axes[0].get_title(loc="right")
    for line in cut.axes[0].lines:
        assert min(line.get_xdata(), default=60) >= 60
    assert cut.axes[0].get_title(loc="left") == "Loss from step 60 on"
    assert "what diverged is cut off above" in study_page(troubled)
