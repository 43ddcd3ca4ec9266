"""The end foreseen after 5 % of the steps, also of a run that was interrupted."""

from __future__ import annotations

import json

import pytest
from test_estimate_plan import write_run

from windlass.estimate.foreseen import foreseen_time, without_pauses
from windlass.estimate.predict import predicted_beside_measured
from windlass.reports.plan import predicted_section
from windlass.run import Run, read_lines


def rewritten(run, lines):
    run.metrics_path.write_text("".join(json.dumps(x) + "\n" for x in lines), encoding="utf-8")
    return Run(run.path)


def interrupted(run, killed_at=61, resumed_at=50, world=1):
    """Killed after step `killed_at`, gone on from `resumed_at` with 3 s of starting; steps take 100 ms throughout."""
    lines = list(read_lines(run.metrics_path))
    first = [x for x in lines if x["step"] <= killed_at]
    seam = {
        "kind": "event",
        "event": "resumed",
        "step": resumed_at,
        "attempt": 1,
        "world": world,
        "seconds": {"startup": 3.0},
    }
    second = []
    for x in lines:
        if x["step"] > resumed_at:
            evals = 2.0 * (x["step"] // 25 - resumed_at // 25)
            seconds = {"startup": 3.0, "eval": evals, "train": 0.1 * (x["step"] - resumed_at)}
            second.append(x | {"attempt": 1, "seconds": seconds})
    return rewritten(run, [*first, seam, *second])


def test_of_an_interrupted_run_the_pauses_are_left_out(tmp_path):
    whole = foreseen_time(write_run(tmp_path / "whole"))
    run = interrupted(write_run(tmp_path / "cut"))
    again = foreseen_time(run)
    assert again["starts"] == 2 and "starts" not in whole
    assert again["measured"] == pytest.approx(whole["measured"]) == pytest.approx(1 + 10 + 5 * 2.0)
    assert again["predicted"] == pytest.approx(whole["predicted"]) and again["after_step"] == whole["after_step"] == 6
    said = predicted_section(predicted_beside_measured(run))
    assert any("2 starts, the pauses" in note for note in said.notes)


def test_a_kill_before_the_first_5_percent_takes_the_next_start(tmp_path):
    found = foreseen_time(interrupted(write_run(tmp_path / "run"), killed_at=4, resumed_at=2))
    assert found["after_step"] == 6 and found["predicted"] == pytest.approx(found["measured"], rel=0.02)


def test_without_pauses_by_hand(tmp_path):
    lines = list(read_lines(interrupted(write_run(tmp_path / "run")).metrics_path))
    assert without_pauses(lines[:3]) == pytest.approx(1 + 2 + 0.2)  # start, first evaluation, two steps
    assert without_pauses(lines) == pytest.approx(21.0)


def test_other_ranks_on_the_way_are_a_reason(tmp_path):
    run = interrupted(write_run(tmp_path / "run"), world=4)
    assert foreseen_time(run) == {"why": "its ranks changed on the way: 1, then 4"}
    section = predicted_section(predicted_beside_measured(run))
    assert any("not predicted, its ranks changed" in note for note in section.notes)


def test_nothing_logged_in_between_is_a_reason(tmp_path):
    run = write_run(tmp_path / "run")
    lines = [x for x in read_lines(run.metrics_path) if x["kind"] != "train" or x["step"] in (2, 100)]
    assert "nothing was logged between 5 %" in foreseen_time(rewritten(run, lines))["why"]


def test_a_run_that_did_not_come_to_its_end_has_none(tmp_path):
    run = write_run(tmp_path / "run")
    assert foreseen_time(rewritten(run, list(read_lines(run.metrics_path))[:20])) is None
