import json

import pytest

from windlass.estimate.milestones import milestones
from windlass.estimate.time import Speed, assumed_speed, measured_speed, project, time_left
from windlass.recipe import Horizon, Recipe
from windlass.run import Run


def ledger(tmp_path, lines, world=2):
    recipe = Recipe()
    (tmp_path / "recipe.toml").write_text(recipe.toml(), encoding="utf-8")
    start = {"kind": "event", "event": "started", "step": 0, "attempt": 0, "world": world, "device": "some GPU"}
    text = "".join(json.dumps(x) + "\n" for x in [start, *lines])
    (tmp_path / "metrics.jsonl").write_text(text, encoding="utf-8")
    return Run.open(tmp_path)


def train(step, step_ms, attempt=0, **more):
    line = {
        "kind": "train",
        "step": step,
        "attempt": attempt,
        "step_ms": step_ms,
        "tokens_per_s": 1000 / step_ms * 1000,
    }
    return {**line, **more}


def test_measured_speed_leaves_out_the_start_and_outliers(tmp_path):
    steps = [
        train(10, 9000),
        train(20, 500),
        *(train(30 + 10 * i, 100) for i in range(18)),
        train(210, 800),
        train(220, 20),
    ]
    speed = measured_speed(ledger(tmp_path, steps))
    assert speed.tokens_per_s == pytest.approx(10_000) and speed.world == 2 and speed.basis == "measured"
    assert "2 x some GPU, steps 30 to 220" in speed.detail


def test_only_the_last_start_counts(tmp_path):
    resumed = {"kind": "event", "event": "resumed", "step": 20, "attempt": 1, "world": 4}
    run = ledger(tmp_path, [train(10, 100), train(20, 100), resumed, *(train(s, 50, 1) for s in (30, 40, 50, 60, 70))])
    speed = measured_speed(run)
    assert speed.world == 4 and speed.tokens_per_s == pytest.approx(20_000)


def test_costs_of_evaluations_and_saves(tmp_path):
    lines = [
        {"kind": "eval", "step": 0, "suite": "loss", "runtime_s": 4.0, "attempt": 0},
        train(10, 100),
        {"kind": "eval", "step": 10, "suite": "loss", "runtime_s": 6.0, "attempt": 0},
        {"kind": "eval", "step": 10, "suite": "hellaswag", "runtime_s": 10.0, "attempt": 0},
        {"kind": "event", "event": "checkpoint", "step": 10, "attempt": 0},
        {"kind": "event", "event": "checkpoint", "step": 20, "attempt": 0},
        train(20, 100, seconds={"train": 2.0, "save": 0.5}),
    ]
    assert measured_speed(ledger(tmp_path, lines)).costs == {"evaluation": 10.0, "checkpoint": 0.25}


def test_nothing_logged_is_nothing_measured(tmp_path):
    assert measured_speed(ledger(tmp_path, [])) is None


def test_assumed_speed_says_so():
    """GPT-2 124M: 855 MFLOP a token, 8 A100 at half of 312 TFLOP/s."""
    speed = assumed_speed(855e6, 312e12, 8, "A100", mfu=0.5)
    assert speed.tokens_per_s == pytest.approx(8 * 156e12 / 855e6) and speed.basis == "assumed"
    assert "assumed MFU of 50 %" in speed.detail and "312 TFLOP/s" in speed.detail


def measured(world, tokens_per_s):
    return Speed(tokens_per_s, world, "measured", f"at {world}")


def test_projection_uses_the_measured_efficiency():
    known = [measured(1, 100.0), measured(2, 180.0), measured(4, 324.0)]
    assert project(known, 2) is known[1]
    beyond = project(known, 8)
    assert beyond.tokens_per_s == pytest.approx(324 * 1.8) and beyond.basis == "projected"
    assert "efficiency 73 % of 1 rank" in beyond.detail
    between = project([known[0], known[2]], 2)
    assert between.tokens_per_s == pytest.approx(180.0)


def test_one_measurement_has_no_efficiency():
    speed = project([measured(2, 180.0)], 8)
    assert speed.tokens_per_s == 720 and speed.basis == "at best" and "as if nothing were lost" in speed.detail


def test_time_left():
    recipe = Recipe().with_overrides(**{"train.steps": 100, "eval.every": 50, "checkpoint.every": 25})
    found = milestones(recipe, Horizon(100, 0, 64))
    speed = Speed(500.0, 4, "measured", "", {"evaluation": 7.0})
    whole = time_left(found, 0, 100, 1000, speed)
    assert whole.seconds == 200 + 3 * 7 and whole.train_seconds == 200
    assert whole.device_hours == pytest.approx(221 * 4 / 3600) and whole.not_counted == ("checkpoint",)
    left = time_left(found, 60, 100, 1000, speed)
    assert left.seconds == 80 + 7 and left.train_seconds == 80
    assert time_left(found, 100, 100, 1000, speed).seconds == 0
