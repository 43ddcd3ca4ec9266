import csv
import io
import json
import math

import numpy as np
import pytest
from report_fixtures import build_run, loss_at, stamp

from windlass.reports.measures import harmonic_mean, measures, tail_mean
from windlass.reports.page import _one_headline
from windlass.reports.tables import (
    all_settings,
    comparison,
    curves,
    differing,
    evaluation_names,
    evaluations,
    results,
    results_shown,
    settings_table,
)
from windlass.reports.view import Track, view, views


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def one(folder):
    return view(build_run(folder / "one", killed_at=263))


@pytest.fixture(scope="module")
def three(folder):
    runs = [
        build_run(folder / "a", lr=1e-2, steps=100, ranks=1),
        build_run(folder / "b", lr=1e-3, steps=100, ranks=1, seed=2),
        build_run(folder / "c", lr=1e-4, steps=100, ranks=1, seed=3, finished=False, device="cpu"),
    ]
    return views(runs)


def read(text):
    return list(csv.DictReader(io.StringIO(text)))


def test_the_results_of_a_run_by_hand(one):
    found = measures(one)
    assert found["train_loss"] == loss_at(400, 1)
    assert found["eval_loss"] == pytest.approx(loss_at(400, 1) + 0.06)
    assert found["train_loss_tail"] == pytest.approx(np.mean([loss_at(s, 1) for s in (370, 380, 390, 400)]))
    best = min(range(0, 401, 50), key=lambda s: loss_at(s, 1))
    assert (found["best_eval_step"], found["best_eval_loss"]) == (best, pytest.approx(loss_at(best, 1) + 0.06))
    assert (found["steps"], found["tokens"], found["samples"]) == (400, 819_200, 6400)
    assert found["steps_per_epoch"] == 250
    assert found["eval_samples_per_s"] == pytest.approx(256)
    assert (found["starts"], found["world"], found["parameters"]) == (2, 2, 813_568)
    assert found["goodput"] == pytest.approx(200 / one.wall["total"])
    assert found["runtime_s"] == one.wall["total"]
    assert found["hellaswag_accuracy"] == pytest.approx(0.25 + 400 / 9000)


def test_the_summary_speaks_first_and_the_samples_where_it_is_missing(one, three):
    assert measures(one)["util_pct"] == 91.7
    unfinished = measures(three[2])
    assert unfinished["util_pct"] == pytest.approx(93, abs=0.6)
    assert unfinished["rss_mb"] == pytest.approx(2100)
    assert "mem_alloc_mb" not in unfinished
    assert unfinished["state"] == "failed"
    assert unfinished["train_tokens_per_s"] == pytest.approx(harmonic_mean(three[2].train, "tokens_per_s"))


def test_the_table_has_the_evaluation_loss_of_each_evaluation(one):
    rows = dict(results_shown([one]).rows)
    assert rows["Evaluation loss, before training"] == "5.5100"
    assert rows["Evaluation loss, step 250"] == f"{loss_at(250, 1) + 0.06:.4f}"
    assert rows["Runtime"] == "4 min 20 s"
    labels = [row[0] for row in results_shown([one], each_evaluation=False).rows]
    assert not [x for x in labels if x.startswith("Evaluation loss, ")]


def test_results_csv_is_in_full_precision(one):
    rows = {row["name"]: row for row in read(results([one]).csv())}
    assert float(rows["train_loss"]["one"]) == loss_at(400, 1)
    assert rows["eval_loss"]["measure"] == "Final evaluation loss"


def test_a_bad_end_is_shown_and_not_replaced_by_an_earlier_value(folder):
    run = build_run(folder / "bad", steps=50, finished=False)
    with run.metrics_path.open("a") as file:
        file.write(json.dumps({"kind": "train", "step": 60, "time": stamp(99), "attempt": 0, "loss": "NaN"}) + "\n")
    assert dict(results_shown([view(run)]).rows)["Final training loss"] == "NaN"


def test_a_run_without_lines_has_a_table(folder):
    run = build_run(folder / "empty", steps=50)
    run.metrics_path.unlink()
    assert dict(results_shown([view(run)]).rows)["Steps"] == "0"


def test_speeds_of_equal_work_average_harmonically():
    track = Track({"step": np.array([1.0, 2.0, 3.0]), "tokens_per_s": np.array([100.0, 300.0, math.nan])})
    assert harmonic_mean(track, "tokens_per_s") == pytest.approx(150)
    assert harmonic_mean(track, "mfu") is None


def test_the_tail_is_the_last_tenth_of_the_steps():
    track = Track({"step": np.arange(1.0, 101.0), "loss": np.arange(100.0)})
    assert tail_mean(track, "loss") == pytest.approx(np.mean(np.arange(90.0, 100.0)))


def test_evaluations_are_named_by_epoch_where_they_follow_the_epochs():
    steps = np.array([0.0, 251.0, 501.0, 620.0])
    track = Track({"step": steps, "epoch": steps / 250.4, "loss": steps})
    assert evaluation_names(track, "1 epoch") == ["before training", "epoch 1", "epoch 2", "step 620"]
    assert evaluation_names(track, 0.25) == ["before training", "step 251", "step 501", "step 620"]
    half = Track({"step": np.array([126.0]), "epoch": np.array([126 / 250.4]), "loss": np.array([1.0])})
    assert evaluation_names(half, "0.5 epochs") == ["epoch 0.5"]


def test_the_evaluations_of_each_suite(one):
    found = {suite: table for table, suite in evaluations(one)}
    assert list(found) == ["loss", "hellaswag"]
    rows = read(found["loss"].csv())
    assert [int(row["step"]) for row in rows] == list(range(0, 401, 50))
    assert float(rows[3]["loss"]) == one.evals["loss"]["loss"][3]
    assert found["hellaswag"].columns[4:] == ("accuracy", "accuracy_norm", "items")


def test_settings_that_differ_come_first_then_those_changed(three):
    found = all_settings(three)
    assert [s.key for s in found[:2]] == ["run.seed", "optim.lr"]
    assert [s.key for s in differing(three)] == ["run.seed", "optim.lr"]
    changed = [s for s in found if s.changed and not s.differs]
    assert found[2 : 2 + len(changed)] == changed
    assert found[1].values == (1e-2, 1e-3, 1e-4)
    assert found[1].meaning == "Peak learning rate."
    assert settings_table(three).rows[1] == ("optim.lr", 1e-2, 1e-3, 1e-4)


def test_the_comparison_has_a_row_a_run_and_what_differs_first(three):
    table = comparison(three)
    assert table.columns[:4] == ("run", "run.seed", "optim.lr", "state")
    rows = read(table.csv())
    assert [row["run"] for row in rows] == ["a", "b", "c"]
    assert [float(row["optim.lr"]) for row in rows] == [1e-2, 1e-3, 1e-4]
    assert [float(row["train_loss"]) for row in rows] == [
        loss_at(100, i + 1, lr) for i, lr in enumerate((1e-2, 1e-3, 1e-4))
    ]
    assert rows[2]["mem_alloc_mb"] == ""


def test_curves_are_the_ledger_to_the_last_digit(one):
    rows = read(curves(one).csv())
    assert [float(row["loss"]) for row in rows] == list(one.train["loss"])
    assert [int(row["step"]) for row in rows] == list(range(10, 401, 10))


def test_the_best_score_of_another_measure_is_told_with_its_name(folder):
    settings = ["eval.suites=['loss', 'hellaswag']", "checkpoint.best=hellaswag.acc_norm"]
    run = build_run(folder / "scored", *settings, steps=100, ranks=1, finished=False)
    text = run.metrics_path.read_text().replace('"accuracy_norm"', '"acc_norm"')
    run.metrics_path.write_text(text)
    found = measures(view(run))  # no summary yet: of the evaluations so far
    assert (found["best_measure"], found["best_score_step"]) == ("hellaswag.acc_norm", 100)
    assert found["best_score"] == pytest.approx(0.26 + 100 / 8000)
    summary = {
        "kind": "summary",
        "step": 100,
        "time": stamp(900),
        "best_measure": "squad.f1",
        "best_score": 61.5,
        "best_step": 50,
    }
    with run.metrics_path.open("a") as file:
        file.write(json.dumps(summary) + "\n")
    shown = dict(results_shown([view(run)]).rows)
    assert (shown["Best checkpoint by"], shown["Best score of that measure"]) == ("squad.f1", "61.5000")
    assert shown["Step of that score"] == "50"
    row = next(r for r in csv.DictReader(io.StringIO(results([view(run)]).csv())) if r["name"] == "best_score")
    assert float(row["scored"]) == 61.5
    assert ("Best squad.f1", "61.5000", "at step 50") in _one_headline(view(run))


def test_the_loss_is_no_measure_of_its_own(one):
    assert "best_measure" not in measures(one)
