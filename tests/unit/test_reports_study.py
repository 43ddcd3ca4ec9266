import numpy as np
import pytest
from report_fixtures import build_run, build_study, edit, loss_at, rows_of

from windlass.recipe import Recipe
from windlass.reports.contents import Contents
from windlass.reports.page import page
from windlass.reports.plots import draw
from windlass.reports.study import StudyView, cell_table, seed_table, sweep_charts
from windlass.run import Run
from windlass.study.study import Study


def best(lr, seed):
    return min(loss_at(s, seed, lr) + 0.06 for s in (0, 50, 100, 150, 200))


def test_the_table_of_cells_in_the_order_of_the_grid(study):
    cells = rows_of(cell_table(study))
    assert list(cells[0])[:4] == ["optim.lr", "optim.schedule.kind", "run.seed", "state"]
    assert [row["state"] for row in cells] == ["finished", "failed", *["finished"] * 9, "waiting"]
    assert cells[0]["eval_loss"] == pytest.approx(loss_at(200, 1, 1e-2) + 0.06)
    assert cells[1]["reason"] == "step 151: loss not finite on rank 0"
    assert cells[11]["tokens"] is None
    assert len(study.views) == 11 and study.views[0].label == "lr=0.01 kind=cosine seed=1"


def test_medians_and_spread_over_the_seeds_that_finished(study):
    rows = rows_of(seed_table(study))
    table = {(row["optim.lr"], row["optim.schedule.kind"]): row for row in rows}
    row, values = table[1e-3, "wsd"], sorted([best(1e-3, 1), best(1e-3, 2)])
    expected = [*values, sum(values) / 2, values[1] - values[0]]
    assert [row[name] for name in ("low", "high", "median", "spread")] == pytest.approx(expected)
    alone = table[1e-2, "cosine"]
    assert alone["median"] == pytest.approx(best(1e-2, 1))
    assert (alone["seeds"], alone["finished"], alone["spread"]) == (2, 1, None)
    assert study.recommendations[0].text == "optim.lr = 0.001, optim.schedule.kind = cosine"


def test_the_loss_against_each_swept_setting(study):
    lr, kind = sweep_charts(study)
    median = (best(1e-3, 1) + best(1e-3, 2)) / 2
    assert (lr.id, lr.x.log) == ("loss-against-lr", True)
    assert (lr.x.values, lr.x.names) == ([1e-4, 1e-3, 1e-2], ["0.0001", "0.001", "0.01"])
    assert (kind.x.log, kind.x.values, kind.x.names) == (False, [0, 1], ["cosine", "wsd"])
    cosine, wsd = [series for series in lr.series if series.name]
    assert (cosine.name, wsd.name) == ("kind=cosine", "kind=wsd")
    assert cosine.y[1] == pytest.approx(median)
    circles = [series for series in lr.series if series.points == "only"]
    assert [len(series.y) for series in circles] == [5, 5], "a circle for each seed"
    lines = draw(lr).axes[0].get_lines()
    medians, seeds, *_ = (line for line in lines if len(line.get_xdata()) > 1)
    assert medians.get_markerfacecolor() != "white" == seeds.get_markerfacecolor()
    assert medians.get_marker() == seeds.get_marker() and "hollow: each seed" in lr.note


def test_settings_with_the_same_last_part_have_names_and_charts_of_their_own(tmp_path):
    axes = ["optim.kind=adamw,muon", "optim.schedule.kind=cosine,wsd", "run.seed=1,2"]
    study = Study.create(Recipe.load("quickstart", ["train.steps=50"]), axes, tmp_path / "study")
    for number, cell in enumerate(study.cells):
        kind, schedule, _ = cell.assignment.values()
        settings = (f"optim.kind={kind}", f"optim.schedule.kind={schedule}")
        build_run(study.run_of(cell).path, *settings, steps=50, seed=number, device="cpu")
    assert study.cells[1].label == "optim.kind=adamw schedule.kind=cosine seed=2"
    assert len({cell.directory.rpartition("-")[0] for cell in study.cells}) == len(study.cells)
    seen = StudyView(study.path)
    of_optimizers, of_schedules = sweep_charts(seen)
    assert (of_optimizers.x.label, of_schedules.x.label) == ("optim.kind", "schedule.kind")
    assert of_optimizers.id == "loss-against-optim-kind"
    assert of_schedules.id == "loss-against-schedule-kind"
    names = [one.name for one in of_optimizers.series if one.name]
    assert names == ["schedule.kind=cosine", "schedule.kind=wsd"]
    assert not np.array_equal(of_optimizers.series[0].y, of_schedules.series[0].y)


def test_a_study_is_compared_by_its_own_measure(tmp_path):
    settings = ("eval.suites=['loss', 'hellaswag']", "checkpoint.best=hellaswag.acc_norm")
    path = build_study(tmp_path / "scored", seeds=(1,), overrides=settings)

    def raise_score(line):  # the best score where the loss is not the lowest
        return line | ({"acc_norm": line["acc_norm"] + 0.2} if "acc_norm" in line else {})

    for run in path.glob("runs/*lr=0.0001*"):
        edit(Run(run), raise_score)
    seen = StudyView(path)
    assert (
        seen.winners.groups[0].assignment["optim.lr"] == 1e-4 and seen.title == "hellaswag.acc_norm"
    )
    lr = sweep_charts(seen)[0]
    assert (lr.id, lr.unit) == ("hellaswag-acc_norm-against-lr", "")
    assert lr.series[0].y == pytest.approx([0.485, 0.285, 0.285])
    assert rows_of(cell_table(seen))[0]["score"] == pytest.approx(0.285)
    assert "hellaswag.acc_norm" in page(Contents(seen.views, seen))


def test_one_cell_is_the_best_for_headline_stars_page_and_api(tmp_path):
    """Each number of layers has a best rate; the best of all cells is in the second group."""
    axes = {"model.layers": (2, 4), "optim.lr": (1e-3, 1e-4)}
    study = Study.create(Recipe.load("quickstart", ["train.steps=50"]), axes, tmp_path / "study")
    for cell, loss in zip(study.cells, (3.2, 3.1, 2.9, 3.0), strict=True):
        layers = f"model.layers={cell.assignment['model.layers']}"
        run = build_run(study.run_of(cell).path, layers, steps=50, ranks=1, device="cpu")
        edit(run, lambda x, own=loss: x | {"loss": own} if x["kind"] == "eval" else x)
    seen = StudyView(study.path)
    contents = Contents(seen.views, seen)
    assert contents.head.answers[1].text == "Best validation loss 2.9000 nats per token"
    assert contents.head.answers[1].remark.startswith("layers=4 lr=0.001")
    assert [best.rows for best in contents.recommendations] == [[2], []]
    assert page(contents).count('<tr class="winner"') == 1
    assert study.best().path == study.run_of(study.cells[2]).path
