"""The plan: optimal tokens and steps, devices, every preset, data that is not prepared, and a run
that is under way.
"""

import json
from pathlib import Path

import pytest
from estimate_fixtures import write_run

import hf_fixtures
from helpers import refused, write_corpus, write_ledger
from windlass.data.loader import Loader
from windlass.data.open import open_samples
from windlass.data.prepare import prepare
from windlass.estimate import activations
from windlass.estimate.calendar import (
    measures_all,
    milestones,
    optimal_tokens,
    resolve_steps,
)
from windlass.estimate.devices import GIB, find_device, peak_flops
from windlass.estimate.inputs import PlanInputs
from windlass.estimate.plan import Speed, assemble, plan
from windlass.model.size import count, flops_per_token
from windlass.recipe import Horizon, Recipe, presets

C4 = Recipe.load("c4-30m")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_compute_optimal_tokens_exactly():
    assert count(C4.model, 50257).total == 29_995_520
    assert (optimal_tokens(29_995_520), resolve_steps(C4)) == (599_910_400, 4576)
    assert optimal_tokens(10**15 + 1, 20.0) == 20 * 10**15 + 20
    assert (optimal_tokens(10, 0.1), optimal_tokens(29_995_520, 1.5)) == (1, 44_993_280)


def test_steps_for_every_way_they_are_written():
    assert resolve_steps(C4, tokens_per_sample=128) == 9153  # 599,910,400 / (512 x 128) = 9,153.9
    assert resolve_steps(C4, tokens_per_sample=255.5) == 4585
    assert (resolve_steps(C4, parameters=1_000_000), resolve_steps(C4, parameters=1)) == (152, 1)
    assert resolve_steps(C4.replace("train.steps=77")) == 77
    epochs = C4.replace("train.steps=2.5 epochs")
    assert resolve_steps(epochs, samples_per_epoch=1000) == 5  # 2,500 samples at 512 a step
    assert resolve_steps(epochs, samples_per_epoch=1) == 1
    for overrides, remedy in [
        (["train.steps=1 epoch"], "prepare"),
        (["model.vocab=0", "data.tokenizer=char"], "model.vocab"),
        (["model.kind=hf", "model.name=x", "data.tokenizer=hf:x"], "train.steps"),
    ]:
        with refused(remedy):
            resolve_steps(C4.replace(*overrides))


PEAKS = {
    ("NVIDIA A100-SXM4-80GB", "bf16"): 312,
    ("NVIDIA H100 80GB HBM3", "bf16"): 989,
    ("Tesla V100-PCIE-16GB", "fp16"): 112,
    ("NVIDIA H800 SXM", "tf32"): 494,
    ("NVIDIA H100 NVL", "fp32"): 60,
    ("NVIDIA H800 PCIe", "bf16"): 756,
    ("NVIDIA GB200", "float8"): 5000,
    # what is not known is not guessed
    ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16"): None,
    ("Tesla V100-SXM2-32GB", "bf16"): None,
    ("NVIDIA A1000", "bf16"): None,
    ("NVIDIA H200", "fp64"): None,
}


def test_peaks_of_real_names():
    assert {key: (peak_flops(*key) or 0) / 1e12 or None for key in PEAKS} == PEAKS
    assert peak_flops("NVIDIA A100-SXM4-80GB", "fp32", tf32=True) == 156e12
    assert find_device("NVIDIA A100 80GB PCIe").memory_bytes == 80 * GIB
    assert find_device("T4").memory_bytes == 15 * GIB, "as nvidia-smi shows: ECC takes a sixteenth"


@pytest.mark.parametrize("name", sorted(presets()))
def test_a_plan_of_every_preset(name):
    recipe, world = Recipe.load(name), 4
    if recipe.train.steps == "compute-optimal" and recipe.model.kind == "hf":
        recipe = recipe.replace({"train.steps": 100})  # the Hub's model, whose size is not known
    device = find_device("A100-80GB")
    inputs = PlanInputs(recipe, world, device, "bf16", 65, 10_000, recipe.model.context)
    result = assemble(inputs, Speed(1e5, world, "measured", "", {"evaluation": 3.0}))
    assert json.loads(json.dumps(result.as_dict()))["speed"]["basis"] == "measured"
    assert result.device_hours == pytest.approx(result.seconds * world / 3600)
    assert "checkpoint" in result.not_counted
    if recipe.model.kind == "gpt":
        assert result.size.parameters and result.unknown == {}
        assert result.advice and sum(row.chosen for row in result.memory) == 1
    else:
        assert result.size.checkpoint_bytes is result.flops is None
        assert not result.memory and "size" in result.unknown


def test_large_and_small_numbers_of_a_plan_have_no_exponents():
    own = ["model.layers=80", "model.width=8192", "model.heads=64", "train.precision=fp32"]
    text = repr(plan("gpt2-124m", own, device="A100-80GB"))
    assert "GB of the host's memory" in text and "e+0" not in text
    text = repr(plan("quickstart", ["model.layers=1"], device="A100-80GB"))
    assert " MB, of which a save" in text


def test_what_is_not_known_is_none_and_has_a_reason():
    text = write_corpus(Path("mine.txt"), 200)
    own = ["data.source=mine.txt", "data.sha256=''", "train.steps=100"]
    chars = plan("shakespeare-char-cpu", own, device="A100-80GB")  # a tokenizer of characters
    assert chars.size.parameters is chars.size.vocab is None
    assert chars.size.non_embedding == 787_584
    assert chars.flops is chars.size.checkpoint_bytes is chars.speed is None and not chars.memory
    assert chars.steps == 100 and chars.milestones["checkpoint"]
    assert {"size", "time", "epochs"} <= set(chars.unknown) and "steps" not in chars.unknown
    assert "windlass prepare" in chars.unknown["size"] and "char" in chars.unknown["size"]
    time = plan(C4, device="cpu").unknown["time"]
    assert "--from" in time and "--device" in time
    epochs = plan("quickstart", [f"data.source={text}", "train.steps=3 epochs"], device="A100-80GB")
    assert epochs.size.parameters == 820_480 and epochs.memory and epochs.checkpoints is None
    assert epochs.steps is epochs.seconds is None
    assert epochs.milestones == {} and epochs.seconds_per_step > 0
    assert "prepare them first" in epochs.unknown["steps"]
    result = plan("gpt2-124m", device="A100-80GB", world=8)
    assert result.checkpoints is None and "epochs" in result.unknown["checkpoints"]
    assert "unknown, because some are written at epochs" in repr(result)


def test_a_plan_of_a_hugging_face_model(tmp_path, monkeypatch):
    hf_fixtures.config("llama").save_pretrained(tmp_path / "model")
    own = [f"model.name={tmp_path / 'model'}", "model.context=64", "train.steps=compute-optimal"]
    result = plan("bloom-560m-squad", own, world=2, device="A100-40GB")
    n = result.size.parameters
    assert n == result.size.trained and result.speed.basis == "predicted"
    assert result.optimal_tokens == 20 * n
    assert result.steps == result.optimal_steps == 20 * n // (4 * 64)
    assert (result.size.flops_per_token, result.size.checkpoint_bytes) == (6 * n, 12 * n)
    memory = [row.memory for row in result.memory]
    states = [m.parameters + m.gradients + m.optimizer for m in memory]
    assert states == [20 * n, 12 * n, 16 * n, 8 * n]
    assert all(row.memory.activations > 0 and row.fits for row in result.memory)
    assert result.recommended == {}, "the recipe's own layout"
    assert 0 < result.speed.tokens_per_s < 2 * 312e12 / (6 * n)
    assert "?" not in repr(result)
    # an operation that has no fake kernel
    monkeypatch.setattr(activations, "measure_peaks", lambda *_: 1 / 0)
    unknown = plan("bloom-560m-squad", own, world=2, device="A100-40GB")
    assert unknown.advice == "" and "ZeroDivisionError" in unknown.unknown["activations"]
    assert "activations of this model are unknown" in repr(unknown)
    assert all(row.memory.activations == 0 for row in unknown.memory)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))  # and out of reach, the rest of the plan
    own = ["model.name=nobody/nothing", "train.steps=10"]
    result = plan("bloom-560m-squad", own, device="A100-40GB")
    assert result.milestones and "nobody/nothing" in result.unknown["size"]


def test_a_plan_of_weights_in_4_bits_needs_no_package(tmp_path, monkeypatch):
    monkeypatch.setattr("windlass.errors.find_spec", lambda name: name != "bitsandbytes" or None)
    hf_fixtures.config("llama").save_pretrained(tmp_path / "model")
    own = [f"model.name={tmp_path / 'model'}", "model.context=64", "model.lora.rank=4"]
    own += ["train.steps=10"]
    whole = plan("bloom-560m-squad", own, device="A100-40GB")
    small = plan("bloom-560m-squad", [*own, "model.lora.base=4bit"], device="A100-40GB")
    assert small.size.parameters == whole.size.parameters and not small.unknown.get("activations")
    weights, less = (result.memory[0].memory for result in (whole, small))
    assert less.parameters < weights.parameters and less.activations > 0
    recipe = Recipe.load("bloom-560m-squad", [*own, "model.lora.base=4bit"])
    with refused("pip install bitsandbytes"):
        recipe.check_packages()


def test_after_preparing_everything_is_known(tmp_path):
    write_corpus(tmp_path / "text", 4000)
    own = ["train.steps=2 epochs", "data.source=text", "data.tokenizer=char"]
    own += ["model.context=64", "train.global_batch=4", "train.micro_batch=4"]
    assert plan("quickstart", own, device="A100-80GB").steps is None
    prepare(Recipe.load("quickstart", own))
    result = plan("quickstart", own, device="A100-80GB")
    assert result.unknown == {} and result.steps > 0 and result.seconds > 0 and result.memory
    assert result.epochs == pytest.approx(2, abs=0.5)


@pytest.mark.parametrize("buckets", [True, False])
def test_ragged_rows_cost_what_training_computes(tmp_path, buckets):
    """A micro-batch is as wide as its longest conversation, not as the context."""
    asked, lines = {"role": "user", "content": "x"}, list[str]()
    for number in range(64):
        answer = {"role": "assistant", "content": "yes " * (1 + number * 7 % 20)}
        lines.append(json.dumps({"messages": [asked, answer]}))
    (tmp_path / "chat.jsonl").write_text("\n".join(lines))
    own = ["data.format=chat", "data.source=chat.jsonl", "data.tokenizer=char", "model.context=256"]
    own += ["train.global_batch=8", "train.micro_batch=2", "train.steps=1 epoch"]
    recipe = Recipe.load("quickstart", [*own, f"data.length_buckets={buckets}".lower()])
    rows = open_samples(recipe, prepare(recipe)).train
    result = plan(recipe, device="A100-80GB")
    steps, computed, flops = len(rows) // 8, 0, 0
    batch = recipe.batch(1)
    with Loader(rows, batch, 0, recipe.run.seed, length_buckets=buckets) as loader:
        for _ in range(steps):
            for micro in next(loader).micro:
                size, width = micro.batch.tokens.shape
                computed += size * width
                flops += size * width * flops_per_token(recipe.model, result.size.vocab, width)
    assert result.padded_tokens_per_step == pytest.approx(computed / steps)
    assert result.flops / result.steps == pytest.approx(flops / steps, rel=0.02)


@pytest.mark.parametrize(
    ("at_end", "steps", "last"),
    [("auto", 300, 16), ("auto", 400, 125), ("all", 300, 125), ("batches", 400, 16)],
)
def test_all_validation_data_is_measured_at_end_if_that_is_tenth_of_work(at_end, steps, last):
    """125 batches are 42 training steps."""
    settings = ["train.global_batch=8", "eval.batches=16", f"eval.at_end={at_end}"]
    recipe, horizon = Recipe.load("quickstart", settings), Horizon(steps, 4000, 8)
    assert measures_all(recipe, horizon, 1000) == (last == 125)
    assert max(m.size for m in milestones(recipe, horizon, 1000)) == last / 16


def test_a_live_run_says_what_is_left(tmp_path):
    run = write_run(tmp_path / "runs" / "live", until=40)
    result = plan(run)
    assert (result.done, result.steps, result.size.vocab) == (40, 100, 257)
    assert result.seconds == pytest.approx(6.0 + 3 * 2.0), "evaluations at 50, 75, 100"
    assert (result.speed.basis, result.milestones["evaluation"]) == ("measured", 3)
    write_ledger(run, {"kind": "event", "event": "preempted", "step": 43})
    assert (plan(run).done, plan(run).seconds) == (43, pytest.approx(5.7 + 3 * 2.0))


def test_an_unknown_device_and_runs_by_their_paths(call, tmp_path):
    unknown = ["plan", "c4-30m", "--device", "Cerebras"]
    _, error = call(*unknown, code=2)
    assert all(word in error for word in ("Cerebras", "--memory GB", "A100-80GB"))
    result = json.loads(call(*unknown, "--memory", "40", "--json")[0])
    assert result["speed"] is None and result["advice"] and result["steps"] == 4576
    write_run(tmp_path / "done")
    write_run(tmp_path / "live", world=2, step_s=0.0625, until=40)
    past = "plan quickstart --from done --from live --world 4 --json".split()
    speed = json.loads(call(*past)[0])["speed"]
    assert speed["basis"] == "at best" and speed["tokens_per_s"] == pytest.approx(20_480 * 1.6 * 2)
    assert "step 40 of 100" in call("plan", "live")[0]
    assert "to the end" not in call("plan", "done")[0]


def test_bad_input_is_one_message(call):
    for arguments, word in (
        ("c4-30m --device A100", "A100-80GB"),
        ("c4-30m --world 3", "train.global_batch"),
        ("quickstart optim.schedule.warmup=9000", "schedule.warmup"),
        ("quickstart optim.schedule.steps=50 optim.schedule.warmup=60", "50 steps"),
        ("quickstart --from nowhere", "nowhere"),
        ("--device cpu", "RECIPE"),
    ):
        _, error = call("plan", *arguments.split(), code=2)
        assert word in error and "Traceback" not in error
