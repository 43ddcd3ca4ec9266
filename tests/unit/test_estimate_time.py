"""How long a run takes: milestones, measured and assumed speeds, and the prediction after 5 % beside the real time."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from estimate_fixtures import rewrite, write_run

from windlass.errors import UserError
from windlass.estimate.devices import Device
from windlass.estimate.milestones import (
    Milestone,
    checkpoints_to_come,
    milestone_rows,
    milestones,
    occurrences,
    seconds_until,
)
from windlass.estimate.speeds import assumed, find_speed, measuring_recipe, speed_of_measurement, speeds_of
from windlass.estimate.subject import Facts, Subject
from windlass.estimate.time import Speed, measured_speed, predicted_and_actual, project, time_left
from windlass.recipe import Horizon, Recipe
from windlass.run import Run, read_lines

A100 = Device("NVIDIA A100-SXM4-80GB", "cuda", 80 * 2**30)
CPU = Device("CPU", "cpu", 16 * 10**9)


# ---------------------------------------------------------------- milestones


@pytest.mark.parametrize(
    "every", [0, 1, 7, 250, 0.1, 0.34, 1.0, "1 epoch", "0.5 epochs", "2.5 epochs", "0.001 epochs", "40 epochs"]
)
@pytest.mark.parametrize("sizes", [(100, 333, 10), (97, 12, 5), (50, 3, 16), (10, 160, 16), (1, 1, 1)])
def test_occurrences_are_where_they_are_due(every, sizes):
    horizon = Horizon(*sizes)
    assert occurrences(horizon, every) == [s for s in range(sizes[0] + 1) if horizon.due(every, s)]


def recipe(**overrides):
    return Recipe().with_overrides(**{"train.steps": 100, "train.global_batch": 4, **overrides})


def test_milestones_by_hand():
    r = recipe(**{
        "optim.schedule.kind": "wsd", "optim.schedule.warmup": 5, "optim.schedule.decay": 0.3, "eval.every": 0.4,
        "checkpoint.every": 60,
    })  # fmt: skip
    assert [(m.step, m.what) for m in milestones(r, Horizon(100, 130, 4))] == [
        (0, "evaluation"), (5, "warm-up ends"), (33, "epoch ends"), (40, "evaluation"), (60, "checkpoint"),
        (65, "epoch ends"), (70, "decay starts"), (80, "evaluation"), (98, "epoch ends"), (100, "evaluation"),
        (100, "checkpoint"), (100, "end"),
    ]  # fmt: skip


def test_what_is_left_and_when():
    events = milestones(recipe(**{"eval.every": 30, "checkpoint.every": 25}), Horizon(100, 0, 4))
    costs = {"evaluation": 10.0, "checkpoint": 1.0}
    whole = {row.what: row for row in milestone_rows(events, 0, 2.0, costs)}
    assert (whole["evaluation"].first, whole["evaluation"].last, whole["evaluation"].left) == (0, 100, 5)
    assert (whole["evaluation"].every, whole["checkpoint"].every) == (30, 25)
    assert whole["checkpoint"].first_seconds == 25 * 2 + 10 + 1
    left = milestone_rows(events, 60, None, {})
    assert {row.what: (row.first, row.left) for row in left}["evaluation"] == (90, 2)
    assert left[-1].what == "end" and left[-1].first_seconds is None and "warm-up ends" not in {r.what for r in left}
    assert milestone_rows(events, 100, 2.0, costs) == []
    assert [seconds_until(events, step, 0, 2.0, costs) for step in (0, 24, 25, 100)] == [10, 58, 61, 254]
    uneven = [Milestone("epoch ends", step) for step in (33, 65, 98, 130)]
    assert milestone_rows(uneven, 0, None, {})[0].every is None


def test_checkpoints_to_come():
    r = recipe(**{"checkpoint.every": 10, "checkpoint.keep_last": 3})
    assert checkpoints_to_come(r, Horizon(100, 0, 4), 0, 0) == 5  # three, the best, and one while it is written
    assert checkpoints_to_come(r, Horizon(100, 0, 4), 90, 4) == 1
    assert checkpoints_to_come(r, Horizon(100, 0, 4), 100, 4) == 0


# ---------------------------------------------------------------- speeds


def train(step, step_ms, attempt=0, **more):
    line = {"kind": "train", "step": step, "attempt": attempt, "step_ms": step_ms, "tokens_per_s": 1e6 / step_ms}
    return {**line, **more}


def with_ledger(tmp_path, lines, world=2):
    start = {"kind": "event", "event": "started", "step": 0, "attempt": 0, "world": world, "device": "some GPU"}
    return rewrite(write_run(tmp_path / "run"), [start, *lines])


def test_measured_speed_leaves_out_the_start_and_outliers(tmp_path):
    steps = [
        train(10, 9000),
        train(20, 500),
        *(train(30 + 10 * i, 100) for i in range(18)),
        train(210, 800),
        train(220, 20),
    ]
    speed = measured_speed(with_ledger(tmp_path, steps))
    assert speed.tokens_per_s == pytest.approx(10_000) and (speed.world, speed.basis) == (2, "measured")
    assert "2 x some GPU, steps 30 to 220" in speed.detail


def test_only_the_last_start_counts(tmp_path):
    resumed = {"kind": "event", "event": "resumed", "step": 20, "attempt": 1, "world": 4}
    steps = [train(10, 100), train(20, 100), resumed, *(train(s, 50, 1) for s in (30, 40, 50, 60, 70))]
    speed = measured_speed(with_ledger(tmp_path, steps))
    assert speed.world == 4 and speed.tokens_per_s == pytest.approx(20_000)
    assert measured_speed(with_ledger(tmp_path / "empty", [])) is None


def evaluation(step, seconds, **more):
    return {"kind": "eval", "step": step, "suite": "loss", "runtime_s": seconds, "attempt": 0, **more}


def test_costs_of_evaluations_and_saves(tmp_path):
    lines = [
        evaluation(0, 40.0), train(10, 100), evaluation(10, 6.0), evaluation(10, 10.0, suite="hellaswag"),
        {"kind": "event", "event": "checkpoint", "step": 10, "attempt": 0},
        {"kind": "event", "event": "checkpoint", "step": 20, "attempt": 0},
        train(20, 100, seconds={"train": 2.0, "save": 0.5}),
    ]  # fmt: skip
    assert measured_speed(with_ledger(tmp_path, lines)).costs == {"evaluation": 16.0, "checkpoint": 0.25}


@pytest.mark.parametrize(
    ("first", "cost"),
    [
        ({"tokens": 60_000}, 2.0),  # a third of the 6 s that training on them takes
        ({}, 40.0),  # nothing to tell the start-up from
    ],
)
def test_a_first_evaluation_alone_is_taken_without_its_start_up(tmp_path, first, cost):
    speed = measured_speed(with_ledger(tmp_path, [evaluation(0, 40.0, **first), *(train(s, 100) for s in (1, 2, 3))]))
    assert speed.costs["evaluation"] == pytest.approx(cost)


def measured(world, tokens_per_s):
    return Speed(tokens_per_s, world, "measured", f"at {world}")


def test_projection_uses_the_measured_efficiency():
    speeds = [measured(1, 100.0), measured(2, 180.0), measured(4, 324.0)]
    assert project(speeds, 2) is speeds[1]
    beyond = project(speeds, 8)
    assert beyond.tokens_per_s == pytest.approx(324 * 1.8) and beyond.basis == "projected" and "73 %" in beyond.detail
    assert project([speeds[0], speeds[2]], 2).tokens_per_s == pytest.approx(180.0)
    one = project([measured(2, 180.0)], 8)
    assert (one.tokens_per_s, one.basis) == (720, "at best")


def test_of_several_runs_at_one_world_the_median_counts():
    speeds = [Speed(v, 2, "measured", f"run {v}", {"evaluation": e}) for v, e in ((90.0, 1), (300.0, 2), (100.0, 9))]
    got = project(speeds, 2)
    assert got.tokens_per_s == 100 and got.costs == {"evaluation": 2}


def test_time_left():
    events = milestones(
        Recipe().with_overrides(**{"train.steps": 100, "eval.every": 50, "checkpoint.every": 25}), Horizon(100, 0, 64)
    )
    speed = Speed(500.0, 4, "measured", "", {"evaluation": 7.0})
    whole = time_left(events, 0, 1000, speed)
    assert (whole.seconds, whole.train_seconds, whole.not_counted) == (200 + 3 * 7, 200, ("checkpoint",))
    assert whole.device_hours == pytest.approx(221 * 4 / 3600)
    assert time_left(events, 60, 1000, speed).seconds == 80 + 7
    assert time_left(events, 100, 1000, speed).seconds == 0


def subject(device=CPU, facts=None, **overrides):
    return Subject(
        Recipe.load("quickstart").with_overrides(**overrides), 1, device, "fp32", facts or Facts(257, 100, 128.0)
    )


def test_a_speed_is_of_its_own_device(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run, other = write_run(tmp_path / "one"), write_run(tmp_path / "two", device="A100-80GB", step_s=0.01)
    with pytest.raises(UserError) as error:
        speeds_of(subject(A100), [run])
    assert "CPU" in str(error.value) and "--device" in str(error.value)
    assert [s.tokens_per_s for s in speeds_of(subject(A100), [run, other])] == [pytest.approx(204_800)]
    given = {"past": [], "measure": False, "mfu": 0.4, "own": True, "notify": print}
    assert find_speed(subject(), run, **given).basis == "measured"
    assert find_speed(subject(A100), run, **given).basis == "assumed"
    assert find_speed(subject(), other, **given) is None  # no peak of a CPU is known
    with pytest.raises(UserError) as error:
        find_speed(subject(A100), None, **{**given, "measure": True})
    assert "--measure" in str(error.value)


def test_the_speed_of_another_model_is_refused(tmp_path):
    run = write_run(tmp_path / "run")
    assert speeds_of(subject(), [run]) == [measured_speed(run)]
    with pytest.raises(UserError) as error:
        speeds_of(subject(**{"model.layers": 8}), [run])
    assert "--from" in str(error.value) and "--measure" in str(error.value)


def test_assumed_speed():
    """GPT-2 124M, 855 MFLOP a token, on 8 A100 at 40 % of 312 TFLOP/s; padding is computed too."""
    full = Subject(Recipe.load("gpt2-124m"), 8, A100, "bf16", Facts(50257, 1000, 1024.0))
    one = assumed(full, 0.4)
    assert one.tokens_per_s == pytest.approx(8 * 0.4 * 312e12 / 855.4e6, rel=1e-3) and one.basis == "assumed"
    other = assumed(replace(full, facts=Facts(50257, 1000, 256.0)), 0.4)
    assert other.tokens_per_s == pytest.approx(one.tokens_per_s / 4)
    assert assumed(replace(full, device=CPU), 0.4) is None


def test_measured_steps_are_multiplied_by_the_accumulation(tmp_path):
    r = Recipe.load("quickstart", ["train.global_batch=64", "train.micro_batch=4"])
    short = measuring_recipe(r, 1, "cpu", tmp_path)
    assert (short.batch(1).accumulation, short.batch(1).micro_batch, short.model) == (4, 4, r.model)
    assert short.checkpoint.every == short.eval.every == 0
    tokens = 4 * 4 * 128
    line = {"kind": "train", "step_ms": 50.0, "optimizer_ms": 8.0, "data_ms": 2.0, "tokens_per_s": tokens / 0.05}
    run = rewrite(write_run(tmp_path / "run"), [line | {"step": s} for s in range(1, 9)])
    speed = speed_of_measurement(run, r, short, 1, "cpu")
    assert speed.basis == "measured" and speed.tokens_per_s == pytest.approx(4 * tokens / (4 * 0.040 + 0.010))


# ---------------------------------------------------------------- predicted beside actual


@pytest.mark.parametrize("first_eval", [{}, {"tokens": 20_480 * 6}])
def test_a_slow_first_evaluation_does_not_count_for_the_later_ones(tmp_path, first_eval):
    """12 s at step 0 and 2 s from then on: after 5 % the time to finish is predicted within 10 %."""
    slow = 12.0 if first_eval else 2.0
    found = predicted_and_actual(write_run(tmp_path / "run", first_eval_s=slow, **first_eval))
    assert found.actual_seconds == pytest.approx(1 + slow + 10 + 4 * 2) and found.predicted_at_step == 6
    assert found.predicted_seconds == pytest.approx(found.actual_seconds, rel=0.1)


def interrupted(run, killed_at=61, resumed_at=50, world=1):
    """Killed after step `killed_at`, resumed from `resumed_at` with 3 s of start-up; steps take 100 ms throughout."""
    lines = list(read_lines(run.metrics_path))
    resumed = {"kind": "event", "event": "resumed", "step": resumed_at, "attempt": 1, "world": world}
    second = [resumed | {"seconds": {"startup": 3.0}}]
    for x in lines:
        if x["step"] > resumed_at:
            evals = 2.0 * (x["step"] // 25 - resumed_at // 25)
            seconds = {"startup": 3.0, "eval": evals, "train": 0.1 * (x["step"] - resumed_at)}
            second.append(x | {"attempt": 1, "seconds": seconds})
    return rewrite(run, [x for x in lines if x["step"] <= killed_at] + second)


def test_of_an_interrupted_run_pauses_and_repeated_steps_are_left_out(tmp_path):
    whole = predicted_and_actual(write_run(tmp_path / "whole"))
    again = predicted_and_actual(interrupted(write_run(tmp_path / "cut")))
    assert again.actual_seconds == pytest.approx(whole.actual_seconds) == pytest.approx(1 + 10 + 5 * 2)
    assert again.predicted_seconds == pytest.approx(whole.predicted_seconds)
    early = predicted_and_actual(interrupted(write_run(tmp_path / "early"), killed_at=4, resumed_at=2))
    assert early.predicted_at_step == 6 and early.predicted_seconds == pytest.approx(early.actual_seconds, rel=0.02)


def test_why_there_is_no_prediction(tmp_path):
    moved = predicted_and_actual(interrupted(write_run(tmp_path / "moved"), world=4))
    assert moved.predicted_seconds is None and "1, then 4" in moved.reason
    run = write_run(tmp_path / "sparse")
    sparse = rewrite(run, [x for x in read_lines(run.metrics_path) if x["kind"] != "train" or x["step"] in (2, 100)])
    assert "5 %" in predicted_and_actual(sparse).reason
    assert "not finished" in predicted_and_actual(write_run(tmp_path / "cut", until=40)).reason


def test_peak_memory_beside_the_devices(tmp_path):
    run = write_run(tmp_path / "run")
    assert predicted_and_actual(run).peak_bytes is None
    with run.metrics_path.open("a") as file:
        file.write(json.dumps({"kind": "summary", "step": 100, "peak_mem_mb": 401.5}) + "\n")
    ranks = [{"rank": 0, "memory_mb": 80_000}, {"rank": 1, "memory_mb": 40_000}]
    (run.path / "environment.json").write_text(json.dumps({"ranks": ranks}))
    found = predicted_and_actual(Run(run.path))
    assert (found.peak_bytes, found.device_bytes) == (pytest.approx(401.5e6), pytest.approx(40e9))
