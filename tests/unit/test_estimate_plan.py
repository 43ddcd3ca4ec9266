"""The plan as values: recommendation, disk, prediction, the whole of it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from windlass.estimate.devices import Device, device_names, find_device
from windlass.estimate.disk import disk, token_bytes
from windlass.estimate.memory import Layout, layout_of, memory
from windlass.estimate.milestones import milestones
from windlass.estimate.optimum import CHINCHILLA
from windlass.estimate.plan import Facts, Setting, plan
from windlass.estimate.predict import predict, predicted_beside_measured
from windlass.estimate.recommend import largest_micro_batch, micro_batches, options, recommend, sized
from windlass.estimate.time import Speed
from windlass.model.size import count
from windlass.recipe import Horizon, Recipe, presets
from windlass.run import Run

GPT2 = Recipe.load("gpt2-124m")
VOCAB = 50304
BASE = Layout("ddp", 8, precision="bf16", device="cuda", micro_batch=0)


def test_static_memory_by_hand():
    """12 bytes a parameter at rest for AdamW in fp32 master weights, divided by the ranks that shard them."""
    n = count(GPT2.model, VOCAB).total
    whole = memory(GPT2.model, VOCAB, Layout("single", micro_batch=1))
    assert (whole.parameters, whole.moments) == (4 * n, 8 * n)
    sharded = memory(GPT2.model, VOCAB, Layout("full_shard", 8, 8, micro_batch=1))
    assert (sharded.parameters, sharded.moments) == (-(-4 * n // 8), n)
    hybrid = memory(GPT2.model, VOCAB, Layout("hybrid_shard", 8, 4, micro_batch=1))
    assert hybrid.parameters == n
    offloaded = memory(GPT2.model, VOCAB, Layout("full_shard", 8, 8, offload=True, micro_batch=1, device="cuda"))
    assert offloaded.parameters == offloaded.moments == 0 and offloaded.host == pytest.approx(2 * n, rel=1e-6)


def test_memory_falls_in_the_order_one_expects():
    def total(**changes):
        return memory(
            GPT2.model, VOCAB, replace(Layout("ddp", 8, precision="bf16", micro_batch=8, device="cuda"), **changes)
        ).total

    assert total() > total(checkpointing="selective") > total(checkpointing="full")
    assert total() > total(strategy="shard_grad_op", shard=8) > total(strategy="full_shard", shard=8)
    assert total(precision="fp32") > total()
    assert total(micro_batch=16) > total() > total(micro_batch=4)


def test_layout_of_a_recipe():
    got = layout_of(GPT2, 8, "cuda")
    assert (got.strategy, got.precision, got.micro_batch, got.accumulation) == ("ddp", "bf16", 16, 4)
    assert layout_of(GPT2, 1, "cpu").precision == "fp32"


@pytest.mark.parametrize("room_gb", [1, 3, 6, 12, 80])
def test_the_largest_micro_batch_is_the_largest(room_gb):
    layout, room = replace(BASE, checkpointing="selective"), int(room_gb * 1e9)
    size = largest_micro_batch(GPT2.model, VOCAB, layout, 64, room)
    fits = [s for s in micro_batches(64) if memory(GPT2.model, VOCAB, sized(layout, s, 64)).total <= room]
    assert size == max(fits, default=0)


def test_a_roomy_device_needs_nothing():
    found = recommend(GPT2.model, VOCAB, BASE, 64, int(70e9))
    assert found.fit.settings() == {
        "parallel.strategy": "ddp", "parallel.activation_checkpointing": "none", "train.micro_batch": 16,
    }  # fmt: skip


def test_what_is_recommended_fits_and_nothing_cheaper_does():
    model = GPT2.model.model_copy(update={"layers": 36, "width": 1280, "heads": 20})
    for room in (int(6e9), int(10e9), int(16e9), int(30e9)):
        found = recommend(model, VOCAB, BASE, 64, room)
        assert found.fit is not None and found.fit.memory.total <= room
        chosen = replace(found.fit.layout, micro_batch=0, accumulation=1)
        for option in options(BASE):
            if option == chosen:
                break
            assert memory(model, VOCAB, sized(option, 2, 64)).total > room, option


def test_a_fixed_micro_batch_is_kept():
    found = recommend(GPT2.model, VOCAB, replace(BASE, micro_batch=64), 64, int(20e9))
    assert found.fit.layout.micro_batch == 64 and found.fit.layout.checkpointing != "none"


def test_when_nothing_fits_it_says_what_would():
    model = GPT2.model.model_copy(update={"layers": 48, "width": 8192, "heads": 64})
    found = recommend(model, VOCAB, BASE, 64, int(20e9))
    assert found.fit is None and "nothing fits" in found.why
    assert "ranks with parallel.strategy=" in found.why and "a device with more than" in found.why
    assert recommend(GPT2.model, VOCAB, BASE, 64, None).fit is None


def test_devices():
    assert find_device("a100-40gb").name == find_device("NVIDIA A100-SXM4-40GB").name == "NVIDIA A100-SXM4-40GB"
    assert find_device("H200").memory_bytes == 141 * 2**30
    assert find_device("H200", 10).memory_bytes == 10
    unknown = find_device("Cerebras")
    assert unknown.memory_bytes is None and unknown.usable_bytes is None
    assert find_device("CPU").kind == "cpu"
    assert all(find_device(name).memory_bytes for name in device_names())


def test_the_table_of_peaks_knows_the_devices():
    from windlass.telemetry.timing import peak_flops

    for name in device_names():
        assert peak_flops(find_device(name).name, "fp16"), name


def test_disk():
    recipe = Recipe.load("gpt2-124m", ["train.steps=1000", "checkpoint.every=100", "checkpoint.keep_last=3"])
    horizon = Horizon(1000, 0, 512)
    found = disk(recipe, VOCAB, 8, horizon, milestones(recipe, horizon))
    assert found["checkpoint_bytes"] == 12 * 124_475_904 and found["rank_bytes"] == 12 * 124_475_904 // 8
    assert found["kept"] == 4  # the last three and the best
    assert found["shard_bytes"] == 200_000_000
    kept = recipe.with_overrides(**{"checkpoint.keep_every": 200})
    assert disk(kept, VOCAB, 8, horizon, milestones(kept, horizon))["kept"] == 3 + 3 + 1  # 200, 400, 600 for good
    assert token_bytes(65_536) == 2 and token_bytes(65_537) == 4


@pytest.mark.parametrize("name", sorted(presets()))
@pytest.mark.parametrize("world", [1, 4])
def test_a_plan_of_every_preset(name, world):
    recipe = Recipe.load(name)
    facts = Facts(vocab=65, samples_per_epoch=10_000, tokens_per_sample=recipe.model.context)
    setting = Setting(recipe, world, find_device("A100-80GB"), "bf16", facts)
    made = plan(setting, [Speed(1e5, world, "measured", "", {"evaluation": 3.0})])
    assert json.loads(json.dumps(made))["time"]["basis"] == "measured"
    if recipe.model.kind == "gpt":
        assert made["model"]["parameters"] == sum(made["model"]["parts"].values())
        assert made["recommendation"]["fits"] and sum(row["chosen"] for row in made["memory"]) == 1
        for row in made["memory"]:
            parts = ("parameters", "gradients", "moments", "activations", "logits", "buffers")
            assert row["total_bytes"] == sum(row[f"{part}_bytes"] for part in parts)
    assert made["milestones"][-1]["what"] == "end"
    assert made["milestones"][-1]["first_seconds"] == pytest.approx(made["time"]["seconds"])


def test_nothing_measured_and_no_peak_is_unknown():
    setting = Setting(Recipe.load("quickstart"), 1, Device("CPU", "cpu", 2**30), "fp32", Facts())
    made = plan(setting, [])
    assert made["time"] is None and made["worlds"] == []
    assert all(m["first_seconds"] is None for m in made["milestones"])


def test_predict():
    got = predict(GPT2, 8, 50257, "cuda", "bf16")
    assert got["parameters"] == 124_475_904 and got["checkpoint_mb"] == pytest.approx(1493.7, abs=0.1)
    assert got["flops_per_token"] == pytest.approx(855e6, rel=1e-3)
    assert got["memory_mb"] == memory(GPT2.model, VOCAB, layout_of(GPT2, 8, "cuda", "bf16")).total / 1e6


def write_run(path):
    """A run of 100 steps at 100 ms with four evaluations of 2 s, logged every 2 steps; 1 s of start-up."""
    recipe = Recipe.load("quickstart", ["train.steps=100", "eval.every=25", "eval.sample_every=0"])
    (path / "devices").mkdir(parents=True)
    (path / "recipe.toml").write_text(recipe.toml(), encoding="utf-8")
    lines = [
        {"kind": "event", "event": "started", "step": 0, "world": 1, "steps": 100, "strategy": "single", "device": "CPU",
         "precision": "fp32", "parameters": 820_480, "samples_per_epoch": 0, "seconds": {"startup": 1.0}},
        {"kind": "eval", "step": 0, "suite": "loss", "runtime_s": 2.0, "seconds": {"startup": 1.0, "eval": 2.0}},
    ]  # fmt: skip
    for step in range(2, 101, 2):
        seconds = {"startup": 1.0, "eval": 2.0 * (1 + step // 25), "train": 0.1 * step}
        speed = {"step_ms": 100.0, "tokens_per_s": 20_480.0, "tokens": 2048 * step, "samples": 16 * step}
        lines.append({"kind": "train", "step": step, "seconds": seconds, **speed})
    (path / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines), encoding="utf-8")
    samples = [{"rss_mb": 300.0, "phase": "eval"}, {"rss_mb": 401.5, "phase": "train"}, {"rss_mb": 400.0}]
    (path / "devices" / "rank-00000.jsonl").write_text("".join(json.dumps(x) + "\n" for x in samples), encoding="utf-8")
    return Run(path)


def test_predicted_beside_measured(tmp_path):
    found = predicted_beside_measured(write_run(tmp_path / "run"))
    time = found["runtime_s"]
    assert time["after_step"] == 6
    assert time["measured"] == pytest.approx(1 + 10 + 5 * 2.0)
    assert time["predicted"] == pytest.approx(time["measured"], rel=0.01)
    assert found["memory_mb"]["measured"] == pytest.approx(101.5)
    assert found["memory_mb"]["predicted"] == pytest.approx(105.0, abs=0.5)


def test_what_the_same_flops_would_buy():
    """By the published law: its best N and D for 6 N D of the recipe, which no neighbour on the same budget beats."""
    setting = Setting(GPT2, 8, find_device("A100-80GB"), "bf16", Facts())
    length = plan(setting, [])["length"]
    found = length["same_compute"]
    assert found["flops"] == pytest.approx(6 * 124_475_904 * length["tokens"])
    best = found["optima"][0]
    assert 6 * best["parameters"] * best["tokens"] == pytest.approx(found["flops"])
    for factor in (0.9, 1.1):
        assert CHINCHILLA.loss(best["parameters"] * factor, best["tokens"] / factor) > best["loss"]
    assert found["within_the_fitted_sizes"]


def test_nothing_is_predicted_of_a_run_that_never_began(tmp_path):
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "recipe.toml").write_text(Recipe().toml(), encoding="utf-8")
    assert predicted_beside_measured(Run(tmp_path / "new")) == {}
