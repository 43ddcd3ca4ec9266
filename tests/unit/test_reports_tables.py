"""The numbers, tables and texts of a report, and the curve in the terminal."""

import csv
import io
import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_fixtures import add_lines, build_run, changed, loss_at

from windlass.reports.tables import (
    Column,
    Table,
    all_settings,
    comparison,
    evaluations,
    markdown_cell,
    results,
    times,
)
from windlass.reports.view import RunView, Track, curve, views
from windlass.telemetry.terminal import printable


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    folder, options = tmp_path_factory.mktemp("runs"), {"steps": 100, "ranks": 1}
    runs = [
        build_run(folder / "a", lr=1e-2, **options),
        build_run(folder / "b", lr=1e-3, seed=2, **options),
        build_run(folder / "c", lr=1e-4, seed=3, finished=False, device="cpu", **options),
    ]
    return views(runs)


def read(table):
    return list(csv.DictReader(io.StringIO(table.csv())))


def shown(view):
    return dict(results(view).texts())


def test_the_results_of_a_run_by_hand(one):
    values = one.values
    best = min(range(0, 401, 50), key=lambda s: loss_at(s, 1))
    expected = {
        "train_loss": loss_at(400, 1),
        "eval_loss": loss_at(400, 1) + 0.06,
        "best_eval_step": best,
        "best_eval_loss": loss_at(best, 1) + 0.06,
        "steps": 400,
        "tokens": 819_200,
        "samples": 6400,
        "starts": 2,
        "steps_per_epoch": 250,
        "eval_samples_per_s": 256,
        "world": 2,
        "parameters": 813_568,
        "util_pct": 91.7,
        "goodput": 200 / one.numbers.wall["total"],
        "runtime_s": one.numbers.wall["total"],
        "hellaswag_acc": 0.25 + 400 / 9000,
    }
    assert {name: values[name] for name in expected} == pytest.approx(expected)
    assert values["device_hours"] == pytest.approx(2 * one.numbers.wall["total"] / 3600)
    assert one.numbers.wall["lost"] > 15
    [row] = read(times([one]))
    parts = [float(seconds) for name, seconds in row.items() if name != "run"]
    assert sum(parts) == pytest.approx(one.numbers.wall["total"])
    assert "best_measure" not in values, "the loss has its own lines"


def test_a_page_has_each_number_of_a_run_once_and_csv_has_full_precision(one):
    rows, brief = shown(one), dict(results(one, brief=True).texts())
    assert brief.items() < rows.items() and "Final training loss" in brief
    loss, hellaswag = evaluations(one)
    names = {column.heading for table in (loss, hellaswag) for column in table.columns}
    assert not {"Final validation loss", "Best validation loss", "Runtime"} & {*brief}
    assert {"Loss", "Perplexity", "Acc norm"} <= names
    assert [float(row["loss"]) for row in read(loss)] == list(one.evals["loss"]["loss"])
    assert [int(row["step"]) for row in read(loss)] == list(range(0, 401, 50))
    columns = [column.name for column in hellaswag.columns]
    assert columns[2:] == ["acc", "acc_norm", "items"]
    exact = {row["name"]: row for row in read(results(one))}
    assert float(exact["train_loss"]["one"]) == loss_at(400, 1)


def test_a_loss_that_is_not_a_number_is_shown_and_a_run_without_a_step_has_results(tmp_path):
    bad = build_run(tmp_path / "bad", steps=50, finished=False)
    add_lines(bad, {"kind": "train", "step": 60, "loss": "NaN"})
    assert shown(RunView(bad))["Final training loss"] == "NaN"
    bad.metrics_path.unlink()
    assert shown(RunView(bad))["Steps"] == "0"


def test_settings_that_differ_come_first_then_those_changed(three):
    settings = all_settings(three)
    changed = [row for row in settings if row.changed and not row.differs]
    assert [row.key for row in settings[:2]] == ["run.seed", "optim.lr"]
    assert settings[2 : 2 + len(changed)] == changed
    assert [row.key for row in changed] == ["train.steps"], "the rest is as in the preset"
    assert settings[1].meaning.startswith("Peak learning rate")
    rows = read(comparison(three, all_settings(three)))
    assert list(rows[0])[:4] == ["run", "run.seed", "optim.lr", "state"]
    rates = {row["run"]: float(row["optim.lr"]) for row in rows}
    assert list(rates.items()) == [("a", 1e-2), ("b", 1e-3), ("c", 1e-4)]
    cpu = three[2].values  # no summary: the samples in training steps count
    assert cpu["util_pct"] == pytest.approx(93, abs=0.6)
    assert cpu["state"] == "failed" and "mem_alloc_mb" not in cpu
    losses = [loss_at(100, i + 1, lr) for i, lr in enumerate((1e-2, 1e-3, 1e-4))]
    assert [float(row["train_loss"]) for row in rows] == losses and rows[2]["mem_alloc_mb"] == ""


def test_control_characters_pipes_and_tags_are_made_safe():
    assert printable("a\x1b[31m\x00\n\tb\x85") == "a\\x1b[31m\\x00\n\tb\\x85"
    assert markdown_cell("a|b\n<script> `x` *y*") == "a\\|b &lt;script&gt; \\`x\\` \\*y\\*"


TEXTS = st.text(st.characters(exclude_characters="\r\x00"))


@given(st.lists(st.tuples(st.floats(allow_nan=False), TEXTS), min_size=1))
def test_csv_reads_back_exactly(rows):
    written = Table("t", [Column("x"), Column("y")], rows).csv()
    lines = list(csv.reader(io.StringIO(written, newline="")))
    assert lines[0] == ["x", "y"] and [(float(x), y) for x, y in lines[1:]] == rows


@given(st.lists(st.text("ab&%$#_{}~^\\", min_size=1), min_size=2, max_size=2))
def test_latex_is_escaped_as_by_pandas(cells):
    pandas = pytest.importorskip("pandas")
    expected = pandas.DataFrame([cells], columns=["x_1", "50%"]).to_latex(index=False, escape=True)
    table = Table("t", [Column("x_1"), Column("50%")], [cells])
    assert table.latex() == re.sub(r"(\\text[a-z]+) ", r"\1{}", expected)


def test_the_curve_of_a_run(one):
    lines = curve(one, width=72).splitlines()
    assert "training" in lines[0] and "o validation" in lines[0] and lines[-1].endswith("400 steps")
    assert max(map(len, lines)) <= 72 and "o" in "".join(lines[1:])
    for x, y in (([1.0], [2.0]), ([1.0, 2.0], [3.0, 3.0]), ([1.0, 2.0], [math.nan, math.inf])):
        seen = changed(one, train=Track({"step": np.array(x), "loss": np.array(y)}), evals={})
        assert (curve(seen, width=40) == "") == (not np.isfinite(y).any())
        if len(x) == 1:
            assert curve(seen, width=40).split("\n")[-1].strip() == "1 step"
