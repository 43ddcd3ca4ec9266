"""The five answers at the top of a report, with runs that were killed, failed, diverged, skipped."""

import pytest
from report_fixtures import add_lines, build_run, edit, stamp
from scaling_fixtures import build_scaling, phases, worlds

from windlass.reports.page import Contents
from windlass.reports.study import StudyView
from windlass.reports.tables import markdown_cell
from windlass.reports.view import RunView
from windlass.reports.write import markdown
from windlass.study.grid import WORLD
from windlass.study.study import Scaling


def answers(views, study=None):
    found = Contents(views, study).head.answers
    assert len(found) == 5 and all(one.text and len(one.text) < 90 for one in found)
    return found


def test_a_run_that_was_killed_and_resumed(one):
    worked, good, fast, cost, wrong = answers([one])
    assert worked.text == "Yes: finished 400 of 400 steps" and worked.mark == "good"
    assert worked.remark == "2 starts, 1 kill"
    assert good.text.startswith("Validation loss 2.05") and good.text.endswith("nats per token")
    assert fast.text == f"{one.numbers.speed.tokens_per_s:,.0f} tokens/s"
    assert "2 ranks" in fast.remark and "MFU" in fast.remark
    # 240 W of two devices, in the time that counts
    assert cost.text.endswith("of wall time") and "device-hours" in cost.remark
    assert one.values["energy_kwh"] == pytest.approx(0.24 * one.numbers.device_hours, rel=0.01)
    assert "kWh" in cost.remark and "goodput" in cost.remark
    assert wrong.text == "1 kill" and wrong.mark == "warn"
    assert wrong.remark.endswith("after step 260")


def event(name, step, seconds, **fields):
    return {"kind": "event", "event": name, "step": step, "time": stamp(seconds), **fields}


def test_runs_that_did_not_end_well(tmp_path):
    failed = build_run(tmp_path / "failed", steps=100, finished=False, device="cpu")
    add_lines(failed, event("failed", 100, 500, reason="step 100: out of memory"))
    worked, _, fast, cost, wrong = answers([RunView(failed)])
    assert worked.text == "No: failed after 100 of 100 steps" and worked.mark == "bad"
    assert (wrong.text, wrong.remark) == ("1 failure", "step 100: out of memory")
    assert "kWh" not in cost.remark, "nothing measured the power of a CPU"
    killed = build_run(tmp_path / "killed", steps=100, finished=False)
    worked, *_, wrong = answers([RunView(killed)])
    assert worked.text == "No: failed after 100 of 100 steps" and wrong.text == "1 kill"
    stopped = build_run(tmp_path / "stopped", steps=100, finished=False)
    add_lines(stopped, event("preempted", 100, 500, reason="SIGTERM", saved=True))
    worked, *_, wrong = answers([RunView(stopped)])
    assert worked.text == "Not yet: preempted after 100 of 100 steps" and worked.mark == "open"
    assert (wrong.text, wrong.remark) == ("Nothing", ""), "everything is saved"
    for kind in ("preempted", "stopped"):  # by SIGTERM, by Ctrl-C
        add_lines(stopped, event(kind, 100, 501, reason="SIGTERM", saved=False))
        wrong = answers([RunView(stopped)])[-1]
    assert wrong.text == "2 unsaved stops" and wrong.remark == "step 100: SIGTERM"
    diverged = build_run(tmp_path / "diverged", steps=100)
    edit(diverged, lambda x: x | {"loss": 99.0} if x["kind"] == "train" and x["step"] > 50 else x)
    worked, *_, wrong = answers([RunView(diverged)])
    assert worked.text.startswith("No: the loss diverged") and "to 99.0000" in wrong.remark
    empty = build_run(tmp_path / "empty", steps=20)
    empty.metrics_path.unlink()
    assert [one.text.split(":")[0] for one in answers([RunView(empty)])[:4]] == [
        "Not yet",
        *["Unknown"] * 3,
    ]
    assert "MFU" in fast.remark


def test_skipped_steps_and_failed_saves_are_counted_and_listed(tmp_path):
    run = build_run(tmp_path / "run", steps=100)
    add_lines(
        run,
        event("skipped", 30, 10, reason="step 30: gradient not finite", count=3),
        event("save_failed", 50, 12, reason="No space left on device"),
        event("finished", 100, 20),
    )
    worked, *_, wrong = answers([RunView(run)])
    assert wrong.text == "3 skipped steps, 1 failed save"
    assert wrong.more[0] == "step 30: gradient not finite" and len(wrong.more) == 2
    assert "0 kills" in worked.remark
    text = markdown(Contents([RunView(run)]), {})
    assert all(markdown_cell(problem) in text for problem in wrong.more)


def test_a_comparison_names_the_best_run(one, tmp_path):
    other = RunView(build_run(tmp_path / "other", lr=1e-2, steps=300, ranks=1))
    worked, good, fast, cost, wrong = answers([one, other])
    assert worked.text == "2 of 2 runs finished"
    best = one.values["best_eval_loss"]
    assert good.text == f"Best validation loss {best:.4f} nats per token: one"
    assert "(other)" in fast.remark
    assert cost.text == f"{one.numbers.device_hours + other.numbers.device_hours:.3f} device-hours"
    assert wrong.text == "1 kill" and wrong.remark.startswith("one: start 1")


def test_a_study_counts_its_cells_and_says_what_failed(study):
    worked, good, fast, _, wrong = answers(study.views, study)
    assert worked.text == "10 of 12 cells finished" and worked.remark == "1 failed, 1 waiting"
    assert good.text == f"Best validation loss {study.winners.groups[0].median:.4f} nats per token"
    assert good.remark == "lr=0.001 kind=cosine, median of 2 seeds"
    assert fast.text.endswith("tokens/s, median of the runs")
    assert wrong.text == "1 failed cell"
    assert "loss not finite on rank 0" in wrong.remark


def test_a_scaling_study_says_how_well_it_scales(tmp_path):
    path = tmp_path / "strong"
    step = lambda a: phases(100.0 if a[WORLD] == 1 else 62.5)  # noqa: E731
    study = build_scaling(path, Scaling("strong"), worlds(1, 2), step)
    seen = StudyView(study.path)
    worked, scales, fast, *_ = answers(seen.views, seen)
    assert worked.text == "2 of 2 cells finished"
    assert (scales.text, scales.remark) == ("Efficiency 80.0 % on 2 ranks", "Speed-up 1.600")
    assert "2 ranks, the fastest setup: 62.5 ms a step" in fast.remark


@pytest.mark.parametrize(
    ("numbers", "why"), [([0], "the baseline, 1 host, 1 rank, lacks"), ([1, 2], "only 1 rank")]
)
def test_a_scaling_study_says_why_it_does_not_know_how_well_it_scales(tmp_path, numbers, why):
    listed = worlds(1, 2, 4)
    options = {"step": lambda _: phases(50.0), "failed": numbers}
    seen = StudyView(build_scaling(tmp_path / "s", Scaling("strong"), listed, **options).path)
    scales = answers(seen.views, seen)[1]
    assert scales.text.startswith(f"Unknown: {why}") and not scales.remark
