"""Speeds of past runs: on the right device, of the right model, the median of several."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from test_estimate_plan import write_run

from windlass.cli import main
from windlass.errors import UserError
from windlass.estimate.devices import Device
from windlass.estimate.plan import Facts, Setting
from windlass.estimate.speeds import assumed, device_of, on_device, own_speed, past_speeds, same_device, scaled
from windlass.estimate.time import Speed, assumed_speed, measured_speed, of_world, project
from windlass.model.size import flops_per_token
from windlass.recipe import Recipe
from windlass.run import Run

A100 = Device("NVIDIA A100-SXM4-80GB", "cuda", 80 * 2**30)
CPU = Device("CPU", "cpu", 16 * 10**9)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def made_on(path, device, step_ms=100.0):
    run = write_run(path)
    text = run.metrics_path.read_text(encoding="utf-8").replace('"CPU"', f'"{device}"')
    text = text.replace('"step_ms": 100.0', f'"step_ms": {step_ms}').replace("20480.0", str(2048 / step_ms * 1000))
    run.metrics_path.write_text(text, encoding="utf-8")
    return Run(path)


def refused(capsys, *arguments):
    with pytest.raises(SystemExit) as end:
        main(["plan", *arguments])
    error = capsys.readouterr().err
    assert end.value.code == 2 and "Traceback" not in error
    return " ".join(error.split())


def plan_of(capsys, *arguments):
    with pytest.raises(SystemExit) as end:
        main(["plan", *arguments, "--json"])
    said = capsys.readouterr()
    assert end.value.code == 0, said.err
    return json.loads(said.out)


def test_names_of_one_device():
    assert same_device("A100-80GB", "NVIDIA A100-SXM4-80GB") and same_device("cpu", "CPU")
    assert not same_device("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB")
    assert same_device("", "CPU")  # nobody wrote it down


def test_a_speed_of_another_device_is_refused(tmp_path, capsys):
    write_run(tmp_path / "runs" / "one")
    assert "was measured on CPU, and the plan is for NVIDIA A100" in refused(
        capsys, "quickstart", "--from", "runs/one", "--device", "A100-80GB"
    )
    past = past_speeds([Run(tmp_path / "runs" / "one"), made_on(tmp_path / "runs" / "two", A100.name)])
    kept = on_device(past, A100, "x")
    assert [s.device for _, s in kept] == [A100.name] and "1 run on other devices left out" in kept[0][1].detail
    with pytest.raises(UserError, match="CPU and on NVIDIA A100"):
        device_of([speed for _, speed in past], "x")


def test_without_a_name_the_plan_is_for_the_device_of_the_past_run(tmp_path, capsys):
    made_on(tmp_path / "runs" / "gpu", A100.name)
    made = plan_of(capsys, "quickstart", "--from", "runs/gpu")
    assert made["device"]["name"] == A100.name and made["time"]["basis"] == "measured"


def test_measuring_is_of_this_machine_alone(capsys):
    assert "and the plan is for NVIDIA GB300-made-up" in refused(
        capsys, "quickstart", "--measure", "--device", "NVIDIA GB300-made-up"
    )


def test_measuring_on_remote_data_asks_for_them_first(capsys):
    said = refused(capsys, "c4-30m", "parallel.device=cpu", "--measure", "--device", "cpu")
    assert "windlass prepare c4-30m parallel.device=cpu" in said
    said = refused(capsys, "gpt-squad", "train.steps=10", "--measure", "--device", "cpu")
    assert "windlass prepare gpt-squad train.steps=10" in said


def test_a_run_of_the_recipe_on_another_device_is_no_measurement(tmp_path):
    setting = Setting(Recipe.load("quickstart"), 1, A100, "bf16", Facts())
    made_on(tmp_path / "here", "CPU")
    assert own_speed(setting, tmp_path / "here") == [] and own_speed(setting, tmp_path / "nowhere") == []
    assert own_speed(replace(setting, device=CPU), tmp_path / "here")[0].basis == "measured"


def test_another_model_is_scaled_and_said_so(tmp_path):
    run = write_run(tmp_path / "run")
    speed = measured_speed(run)
    same = Setting(Recipe.load("quickstart"), 1, CPU, "fp32", Facts(257, 100, 128.0))
    assert scaled(same, run, speed) is speed
    deep = Recipe.load("quickstart", ["model.layers=8"])
    got = scaled(replace(same, recipe=deep), run, speed)
    ratio = flops_per_token(run.recipe.model, 257) / flops_per_token(deep.model, 257)
    assert got.basis == "scaled" and got.tokens_per_s == pytest.approx(speed.tokens_per_s * ratio)
    assert project([got], 1).basis == "scaled" and project([got], 4).basis == "at best"


def test_samples_filled_by_half_are_half_as_many_real_tokens(tmp_path):
    run = write_run(tmp_path / "run")  # all of its places are tokens
    half = Setting(Recipe.load("quickstart"), 1, CPU, "fp32", Facts(257, 100, 64.0))
    got = scaled(half, run, measured_speed(run))
    assert got.tokens_per_s == pytest.approx(measured_speed(run).tokens_per_s / 2) and got.basis == "scaled"


def test_an_assumed_speed_computes_padding_too():
    full = Setting(Recipe.load("gpt2-124m"), 8, A100, "bf16", Facts(50257, 1000, 1024.0))
    padded = replace(full, facts=Facts(50257, 1000, 256.0))
    (one,), (other,) = assumed(full, 0.4), assumed(padded, 0.4)
    assert other.tokens_per_s == pytest.approx(one.tokens_per_s / 4)  # so a step takes as long as a full one
    assert "25 % of the places are tokens" in other.detail and "padding" not in one.detail
    assert one == assumed_speed(flops_per_token(full.recipe.model, 50304), 312e12, 8, A100.name, 0.4)


def test_of_several_runs_at_one_world_the_median_counts():
    speeds = [Speed(v, 2, "measured", f"run {v}", {"evaluation": e}) for v, e in ((90.0, 1), (300.0, 2), (100.0, 9))]
    got = project(speeds, 2)
    assert got.tokens_per_s == 100 and got.costs == {"evaluation": 2} and "median of 3 runs (90 to 300" in got.detail
    foreign = Speed(1000.0, 2, "scaled", "another model")
    assert of_world([*speeds, foreign]).tokens_per_s == 100
    assert project([Speed(60.0, 1, "scaled", "s"), foreign], 4).detail.startswith("scaled from another model at 1, 2")
