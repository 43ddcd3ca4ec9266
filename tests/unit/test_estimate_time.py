"""How long a run takes: milestones, and measured and predicted speeds."""

from dataclasses import replace

import pytest
from estimate_fixtures import write_run

from helpers import refused
from windlass.estimate.calendar import milestones, most_checkpoints, occurrences
from windlass.estimate.devices import find_device
from windlass.estimate.inputs import PlanInputs
from windlass.estimate.plan import measured_speed, past_speed, plan, predicted_speed
from windlass.estimate.rank import compiles, layout_of
from windlass.recipe import Horizon, Recipe
from windlass.run import Run


@pytest.mark.parametrize("every", [0, 7, 250, 0.34, 1.0, "1 epoch", "2.5 epochs", "0.01 epochs"])
@pytest.mark.parametrize("sizes", [(100, 333, 10), (97, 12, 5), (50, 3, 16), (1, 1, 1)])
def test_occurrences_are_where_they_are_due(every, sizes):
    horizon = Horizon(*sizes)
    assert occurrences(horizon, every) == [s for s in range(sizes[0] + 1) if horizon.due(every, s)]


def test_milestones_by_hand():
    r = Recipe().replace({"train.global_batch": 4, "eval.every": 0.4, "checkpoint.every": 60})
    saves, rest = [], []
    for one in milestones(r, Horizon(100, 130, 4)):
        (saves if one.what == "checkpoint" else rest).append(one.step)
    assert (saves, rest) == ([60, 100], [0, 40, 80, 100])
    # the best may be of step 80, between the saves
    assert most_checkpoints(r, Horizon(100, 130, 4)) == 3
    assert most_checkpoints(r.replace({"checkpoint.keep_best": False}), Horizon(100, 130, 4)) == 2
    r = r.replace({"checkpoint.every": 10, "checkpoint.keep_last": 3})
    # three, the best, and one while it is written
    assert most_checkpoints(r, Horizon(100, 0, 4)) == 5


START = {"kind": "event", "event": "started", "step": 0, "world": 2, "device": "some GPU"}


def train(step, step_ms, attempt=0, **more):
    speed = {"step_ms": step_ms, "tokens_per_s": 1e6 / step_ms}
    return {"kind": "train", "step": step, "attempt": attempt, **speed, **more}


def test_a_measured_speed_leaves_out_the_start_outliers_and_earlier_starts():
    steady = [train(30 + 10 * i, 100) for i in range(18)]
    outliers = train(210, 800), train(220, 20)
    speed = measured_speed([START, train(10, 9000), train(20, 500), *steady, *outliers], "x")
    assert speed.tokens_per_s == pytest.approx(10_000)
    assert (speed.world, speed.basis) == (2, "measured")
    assert "2 x some GPU, steps 30 to 220" in speed.detail
    assert measured_speed([START], "x") is None
    resumed = START | {"event": "resumed", "step": 20, "attempt": 1, "world": 4}
    later = (train(s, 50, 1) for s in (30, 40, 50, 60, 70))
    speed = measured_speed([START, train(10, 100), train(20, 100), resumed, *later], "x")
    assert speed.world == 4 and speed.tokens_per_s == pytest.approx(20_000)


def test_costs_of_evaluations_and_saves():
    evals = ((0, "loss", 40.0), (10, "loss", 6.0), (10, "hellaswag", 10.0))
    lines = [{"kind": "eval", "step": n, "suite": s, "runtime_s": t} for n, s, t in evals]
    lines += [train(10, 100), *({"kind": "event", "event": "checkpoint", "step": 10},) * 2]
    lines.append(train(20, 100, seconds={"train": 2.0, "save": 0.5}))
    assert measured_speed([START, *lines], "x").costs == {"evaluation": 16.0, "checkpoint": 0.25}
    again = START | {"event": "resumed", "step": 20, "attempt": 1}
    saved = {"kind": "event", "event": "checkpoint", "step": 30, "attempt": 1}
    lines += [again, train(30, 100, 1, seconds={"train": 1.0, "save": 0.4}), saved]
    assert measured_speed([START, *lines], "x").costs["checkpoint"] == pytest.approx(0.3)


def test_a_speed_is_of_its_own_device_and_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cpu = write_run(tmp_path / "one")
    gpu = write_run(tmp_path / "two", device="NVIDIA A100-SXM4-80GB", step_s=0.01)
    r = Recipe.load("quickstart")
    inputs = PlanInputs(r, 1, find_device("A100-80GB"), "fp32")
    assert past_speed(inputs, [cpu, gpu]).tokens_per_s == pytest.approx(204_800)
    assert past_speed(inputs, [cpu]) is past_speed(inputs, [Run(tmp_path / "none")]) is None
    assert past_speed(replace(inputs, recipe=r.replace("model.layers=8")), [gpu]) is None
    assert plan(cpu).speed.basis == "measured"
    assert plan(cpu, device="A100-80GB").speed.basis == "predicted"
    # the first run's
    assert plan("quickstart", past=[gpu, cpu]).device.name == "NVIDIA A100-SXM4-80GB"
    with refused("past=RUN", "device=NAME"):
        plan("quickstart", ["model.layers=8"], past=[gpu])


def test_predicted_speed():
    r, device = Recipe.load("gpt2-124m", ["train.micro_batch=16"]), find_device("A100-80GB")
    full = PlanInputs(r, 8, device, "bf16", 50257, 1000, 1024.0)

    def speed(**changes):
        return predicted_speed(replace(full, **changes))

    one, _ = speed()
    assert one.basis == "predicted" and "149 published runs on A100" in one.detail
    assert one.range[0] < 0.65 and one.range[1] > 1.2
    # padding is computed, too
    assert speed(tokens_per_sample=256.0)[0].tokens_per_s == pytest.approx(one.tokens_per_s / 4)
    assert "A100-SXM4-80GB, compiled" in one.detail  # `train.compile = "auto"`
    eager, _ = speed(recipe=r.replace("train.compile=false"))
    assert one.tokens_per_s > 1.1 * eager.tokens_per_s
    full_shard, _ = speed(recipe=r.replace("parallel.strategy=full_shard"))
    assert full_shard.tokens_per_s < one.tokens_per_s
    cpu, why = speed(device=find_device("cpu"))
    assert cpu is None and "CPU" in why and "--from" in why
    recipes = (r.replace({"train.tf32": tf32}) for tf32 in (True, False))
    on, off = (speed(recipe=recipe, precision="fp32")[0] for recipe in recipes)
    assert 3 < on.tokens_per_s / off.tokens_per_s < 8  # peaks of 156 and 19.5 TFLOP/s
    l4, _ = speed(device=find_device("L4"))
    assert l4.range is None and "error is unknown" in l4.detail


def test_auto_compiles_a_run_of_a_thousand_steps_on_a_gpu():
    r = Recipe.load("gpt2-124m", ["train.steps=1000"])
    assert compiles(r, "cuda") and layout_of(r, 8, "cuda").compile
    assert compiles(r.replace("train.compile=true", "train.steps=1"), "cpu")
    for never in ("train.compile=false", "train.deterministic=true", "train.steps=999"):
        assert not compiles(r.replace(never), "cuda"), never
    assert not compiles(r, "cpu")
    assert not compiles(r.replace({"model.kind": "hf", "model.name": "gpt2"}), "cuda")
    epochs = r.replace('train.steps="1 epoch"')
    assert [compiles(epochs, "cuda", steps) for steps in (999, 1000)] == [False, True]
