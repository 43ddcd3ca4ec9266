"""The report of a study: tables, charts and the page, made from ledgers alone."""

import csv
import io

import numpy as np
import pytest
from report_fixtures import build_run, build_study, edit, loss_at, rows_of
from scaling_fixtures import build_scaling, phases, worlds

from windlass.recipe import Recipe
from windlass.reports.page import Contents, page
from windlass.reports.plots import draw
from windlass.reports.study import (
    StudyView,
    cell_table,
    recommended,
    scaling_charts,
    seed_table,
    setup_table,
    sweep_charts,
)
from windlass.reports.write import report
from windlass.run import Run
from windlass.study.grid import WORLD
from windlass.study.setups import read_setups
from windlass.study.study import Scaling, Study
from windlass.telemetry.measures import SETUP


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


# ---------------------------------------------------------------- scaling


@pytest.fixture(scope="module")
def strong(tmp_path_factory):
    """Worlds 1, 2, 4; the cell of the fourth world failed."""

    def step(a):
        took = 80 / a[WORLD] + 12 * (a[WORLD] > 1) + 4
        return phases(took) | {"peak_mb": 400 + 100 / a[WORLD]}

    return build_scaling(
        tmp_path_factory.mktemp("studies") / "strong",
        Scaling("strong"),
        worlds(1, 2, 4, 8),
        step,
        probe=lambda a: phases(82 / a[WORLD]),
        failed=[3],
        settings=["train.global_batch=64"],
        device="NVIDIA X1",
    )


@pytest.fixture(scope="module")
def strategies(tmp_path_factory):
    took = {"ddp": (100.0, 900.0), "shard_grad_op": (101.0, 500.0), "full_shard": (150.0, 400.0)}

    def step(a):
        ms, mb = took[a["parallel.strategy"]]
        on = a["parallel.activation_checkpointing"] == "full"
        return phases(ms * (1.3 if on else 1)) | {"peak_mb": mb * (0.7 if on else 1)}

    cells = [
        {WORLD: 4, "parallel.strategy": kind, "parallel.activation_checkpointing": how}
        for kind in took
        for how in ("none", "full")
    ]
    path = tmp_path_factory.mktemp("studies") / "strategies"
    return build_scaling(path, Scaling("strategies"), cells, step, device="NVIDIA A100")


def test_the_tables_have_every_setup_with_its_state_and_reasons(strong, tmp_path):
    written = report(strong.path, tmp_path / "out", plots=False)
    table = list(csv.DictReader(io.StringIO((tmp_path / "out" / "scaling.csv").read_text())))
    failed = "exit code 1: out of memory"
    assert [row["state"] for row in table] == ["finished"] * 3 + ["failed"]
    assert table[3]["reason"] == failed
    assert set(SETUP) <= set(table[0])
    assert float(table[1]["step_ms"]) == 56
    assert float(table[2]["efficiency"]) == pytest.approx(84 / (36 * 4))
    assert "exposed_ms: one rank does not communicate" in table[0]["reasons"]
    assert f"step_ms: failed: {failed}" in table[3]["reasons"] and table[3]["step_ms"] == ""
    text, latex = written.markdown.read_text(), (tmp_path / "out" / "scaling.tex").read_text()
    for said in (
        "Efficiency = T(N0) · N0 ÷ (T(N) · N)",
        "MFU: the peak of NVIDIA X1 is unknown.",
    ):
        assert said in text, said
    assert failed in text and "58.3 \\%" in latex
    html = written.page.read_text()
    assert html.count('<section id="scaling">') == 1
    assert 'data-chart="scaling-throughput"' in html and "84.0" in html
    assert "no best" not in html and "swept settings" not in html


def test_charts_have_the_ideal_line(strong):
    throughput, efficiency = scaling_charts(strong.scaling, read_setups(strong))
    measured, ideal = throughput.series
    assert list(ideal.y) == pytest.approx([64 / 0.084 * n for n in (1, 2, 4)])
    assert throughput.x.names == ["1", "2", "4"]
    assert measured.y[1] == pytest.approx(64 / 0.056)
    assert efficiency.series[0].y[0] == 100
    # a proportional line is straight, without a kink, if both scales are logarithmic
    assert throughput.x.log and throughput.y.log and draw(throughput).axes[0].get_yscale() == "log"
    assert draw(throughput).axes[0].get_legend_handles_labels()[1] == ["measured", "ideal"]


def test_the_recommended_strategy_has_the_command_that_trains_it(strategies, tmp_path):
    written = report(strategies.path, tmp_path, plots=False)
    html, table = written.page.read_text(), read_setups(strategies)
    [best] = recommended(strategies, table)
    assert best.text.startswith("shard_grad_op: 79.2 samples/s, 500 MB")
    assert "44 % less memory" in best.text
    assert "parallel.strategy=shard_grad_op" in best.command and best.command.endswith("--world 4")
    assert "Recommended" in html and best.command.split()[-4] in html
    assert best.command in written.markdown.read_text()
    assert scaling_charts(strategies.scaling, table) == [], "at one number of ranks"


def test_other_studies_name_the_layout_of_their_setups(tmp_path):
    def names(scaling, cells):
        path = tmp_path / scaling.mode
        settings = ["parallel.tensor=2"]
        study = build_scaling(path, scaling, cells, lambda a: phases(50.0), settings=settings)
        return [row.name for row in read_setups(study)]

    assert names(Scaling("strong"), worlds(2, 4)) == [
        "1 host, 2 ranks, tp 2",
        "1 host, 4 ranks, tp 2",
    ]
    cells = [{WORLD: 4, "parallel.strategy": kind} for kind in ("ddp", "full_shard")]
    assert names(Scaling("strategies"), cells) == ["ddp, tp 2", "full_shard, tp 2"]


def test_strategies_have_utilisation_steps_and_the_scores_of_the_suite(strategies, tmp_path):
    def shown(study):
        return rows_of(setup_table(study, read_setups(study)), shown=True)

    first, *_ = shown(strategies)
    assert (first["Steps/s"], first["Utilisation (%)"]) == ("10.000", "87.5") and "F1" not in first
    cells = [{WORLD: 2, "parallel.strategy": kind} for kind in ("ddp", "full_shard")]
    scored = build_scaling(
        tmp_path / "scored",
        Scaling("strategies"),
        cells,
        lambda a: phases(100.0),
        settings=["eval.suites=['loss', 'squad']", "data.format=squad", "data.source=squad"],
    )
    assert [(row["Exact match"], row["F1"]) for row in shown(scored)] == [("12.5", "25.0")] * 2
