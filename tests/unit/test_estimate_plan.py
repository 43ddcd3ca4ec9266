"""The plan: optimal tokens and steps, devices, every preset, data that is not prepared, and a run that is under way."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from estimate_fixtures import write_run

import hf_fixtures
from helpers import write_corpus
from windlass.data.prepare import prepare
from windlass.errors import UserError
from windlass.estimate.devices import GIB, device_names, find_device, low_precision, same_device
from windlass.estimate.optimum import known_vocab, optimal_tokens, resolve_steps
from windlass.estimate.plan import assemble, plan
from windlass.estimate.subject import Facts, Subject
from windlass.estimate.time import Speed
from windlass.model.size import count
from windlass.recipe import Recipe, presets
from windlass.telemetry.timing import peak_flops

C4 = Recipe.load("c4-30m")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


# ---------------------------------------------------------------- compute-optimal


def test_c4_30m_exactly():
    assert count(C4.model, 50257).total == 29_995_520
    assert optimal_tokens(29_995_520) == 599_910_400
    assert resolve_steps(C4) == 4576


def test_tokens_are_whole_and_exact_for_any_ratio():
    assert optimal_tokens(10**15 + 1, 20.0) == 20 * 10**15 + 20
    assert (optimal_tokens(10, 0.1), optimal_tokens(29_995_520, 1.5)) == (1, 44_993_280)


def test_steps_for_every_way_they_are_written():
    assert resolve_steps(C4, tokens_per_sample=128) == 9153  # 599,910,400 / (512 x 128) = 9,153.9
    assert resolve_steps(C4, tokens_per_sample=255.5) == 4585
    assert (resolve_steps(C4, parameters=1_000_000), resolve_steps(C4, parameters=1)) == (152, 1)
    assert resolve_steps(C4.with_overrides("train.steps=77")) == 77
    epochs = C4.with_overrides("train.steps=2.5 epochs")
    assert resolve_steps(epochs, samples_per_epoch=1000) == 5  # 2,500 samples at 512 a step
    assert resolve_steps(epochs, samples_per_epoch=1) == 1


@pytest.mark.parametrize(
    ("overrides", "remedy"),
    [
        (["train.steps=1 epoch"], "windlass prepare"),
        (["model.vocab=0", "data.tokenizer=char"], "model.vocab"),
        (["model.kind=hf", "model.name=x", "data.tokenizer=hf:x"], "train.steps"),
    ],
)
def test_steps_that_are_not_known_yet(overrides, remedy):
    with pytest.raises(UserError) as error:
        resolve_steps(C4.with_overrides(*overrides))
    assert remedy in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "vocab"),
    [
        (["data.tokenizer=byte"], 257),
        (["data.tokenizer=gpt2"], 50257),
        (["data.tokenizer=bpe", "data.tokenizer_vocab=999"], 999),
        (["data.tokenizer=char"], None),
        (["data.tokenizer=gpt2", "model.vocab=50304"], 50304),
    ],
)
def test_vocabularies_known_from_the_recipe(overrides, vocab):
    assert known_vocab(C4.with_overrides("model.vocab=0", *overrides)) == vocab


# ---------------------------------------------------------------- devices


@pytest.mark.parametrize(
    ("name", "gib", "tflops"),
    [
        ("NVIDIA A100 80GB PCIe", 80, 312), ("NVIDIA A100-PCIE-40GB", 40, 312), ("NVIDIA A100-SXM4-80GB", 80, 312),
        ("NVIDIA H200", 141, 989), ("NVIDIA H100 80GB HBM3", 80, 989), ("NVIDIA H100 NVL", 94, 835), ("NVIDIA L4", 24, 121),
        ("NVIDIA L40S", 48, 362), ("Tesla T4", 16, 65), ("Tesla V100-PCIE-16GB", 16, 112), ("NVIDIA B200", 180, 2250),
        ("NVIDIA GeForce RTX 3090", 24, 71), ("AMD Instinct MI300X", 192, 1307.4),
    ],
)  # fmt: skip
def test_a_driver_s_name_is_in_the_table(name, gib, tflops):
    device = find_device(name)
    assert device.name == name and device.memory_bytes == gib * GIB
    assert peak_flops(device.name, "fp16") == pytest.approx(tflops * 1e12)


@pytest.mark.parametrize(("name", "variant"), [("A100", "A100-40GB"), ("v100", "V100-32GB"), ("RTX", "RTX-4090")])
def test_a_name_that_several_have_is_not_guessed(name, variant):
    with pytest.raises(UserError) as error:
        find_device(name)
    assert variant in str(error.value)


def test_names_of_devices():
    assert len({find_device(name).name for name in device_names()}) == len(device_names())
    assert all(find_device(name).memory_bytes and peak_flops(find_device(name).name, "fp16") for name in device_names())
    assert find_device("H200", 10).memory_bytes == 10 and find_device("Cerebras").usable_bytes is None
    assert (low_precision(find_device("V100-32GB")), low_precision(find_device("cpu"))) == ("fp16", "")
    assert same_device("A100-80GB", "NVIDIA A100-SXM4-80GB") and same_device("cpu", "CPU") and same_device("", "CPU")
    assert not same_device("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB")


# ---------------------------------------------------------------- plans


@pytest.mark.parametrize("name", sorted(presets()))
@pytest.mark.parametrize("world", [1, 4])
def test_a_plan_of_every_preset(name, world):
    recipe = Recipe.load(name)
    facts = Facts(vocab=65, samples_per_epoch=10_000, tokens_per_sample=recipe.model.context)
    subject = Subject(recipe, world, find_device("A100-80GB"), "bf16", facts)
    made = assemble(subject, Speed(1e5, world, "measured", "", {"evaluation": 3.0}))
    assert json.loads(json.dumps(made.as_dict()))["time"]["speed"]["basis"] == "measured"
    assert made.milestones[-1].what == "end"
    assert made.milestones[-1].first_seconds == pytest.approx(made.time.left.seconds)
    if recipe.model.kind == "gpt":
        assert made.model.parameters == sum(made.model.parts.values()) and made.unknown == {}
        assert made.recommendation.fits and sum(row.chosen for row in made.memory) == 1
    else:
        assert made.memory is made.disk is made.flops is None and "size" in made.unknown


@pytest.mark.parametrize("name", sorted(presets()))
def test_a_plan_of_every_preset_from_the_recipe_alone(name, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    made = plan(name, device="A100-80GB")
    assert made.length.tokens_per_step > 0 and made.as_dict()
    missing = [
        field for field in ("model", "flops", "memory", "disk", "time", "milestones") if getattr(made, field) is None
    ]
    assert bool(missing) <= bool(made.unknown)


def test_what_is_not_known_is_none_and_has_a_reason():
    text = write_corpus(Path("mine.txt"), 200)
    own = ["data.source=mine.txt", "data.sha256=''", "train.steps=100"]
    made = plan("shakespeare-char-cpu", own, device="A100-80GB")  # a tokenizer of characters
    assert (made.model.parameters, made.model.vocab, made.model.non_embedding) == (None, None, 787_584)
    assert made.flops is made.memory is made.recommendation is made.disk is made.time is None
    assert made.length.steps == 100 and made.milestones[-1].first == 100
    assert {"size", "time", "epochs"} <= set(made.unknown) and "steps" not in made.unknown
    epochs = plan("quickstart", [f"data.source={text}", "train.steps=3 epochs"], device="A100-80GB")
    assert epochs.model.parameters == 820_480 and epochs.memory and epochs.disk.checkpoints is None
    assert epochs.length.steps is epochs.milestones is epochs.time.left is None and epochs.time.seconds_per_step > 0
    assert "steps" in epochs.unknown


def test_a_plan_of_a_hugging_face_model(tmp_path):
    """Parameters, steps, FLOPs and the states' memory; not its activations, and so no recommendation."""
    hf_fixtures.config("llama").save_pretrained(tmp_path / "model")
    own = [f"model.name={tmp_path / 'model'}", "model.context=64", "train.steps=compute-optimal"]
    made = plan("bloom-560m-squad", own, world=2, device="A100-40GB")
    n = made.model.parameters
    assert n == made.model.trained and made.model.parts == {}
    assert made.length.optimal_tokens == 20 * n and made.length.steps == made.length.optimal_steps == 20 * n // (4 * 64)
    assert (made.flops.per_token_6n, made.disk.checkpoint_bytes, made.recommendation) == (6 * n, 12 * n, None)
    assert [row.memory.total for row in made.memory] == [16 * n, 8 * n, 8 * n]
    assert made.time.speed.basis == "assumed"


def test_a_model_out_of_reach_leaves_the_rest_of_the_plan(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    made = plan("bloom-560m-squad", ["model.name=nobody/nothing", "train.steps=10"], device="A100-40GB")
    assert made.milestones and made.model is None and "nobody/nothing" in made.unknown["size"]
    optimal = plan("bloom-560m-squad", ["model.name=nobody/nothing", "train.steps=compute-optimal"], device="A100-40GB")
    assert optimal.milestones is None and "steps" in optimal.unknown


CHAT = {"messages": [{"role": "user", "content": "what is it?"}, {"role": "assistant", "content": "it is so, always"}]}
SQUAD = {"data": [{"title": "t", "paragraphs": [{"context": "Ada wrote it in 1843.", "qas": [
    {"id": str(i), "question": "Who wrote it?", "answers": [{"text": "Ada", "answer_start": 0}]} for i in range(12)
]}]}]}  # fmt: skip


@pytest.mark.parametrize("kind", ["text", "chat", "squad"])
def test_after_preparing_everything_is_known(tmp_path, kind):
    """A plan of chat and SQuAD data used to ask for `windlass prepare` for ever."""
    if kind == "text":
        path = write_corpus(tmp_path / "text.txt", 4000)
        own = [f"data.source={path}", "train.steps=2 epochs"]
    elif kind == "chat":
        path = tmp_path / "chat.jsonl"
        path.write_text("".join(json.dumps(CHAT) + "\n" for _ in range(12)), encoding="utf-8")
        own = [f"data.source={path}", "data.format=chat", "train.steps=2 epochs", "data.tokenizer=char"]
    else:
        path = tmp_path / "squad.json"
        path.write_text(json.dumps(SQUAD), encoding="utf-8")
        own = [f"data.source=squad:{path}", "data.format=squad", "train.steps=2 epochs", "data.tokenizer=char"]
        own += [f"data.eval_source=squad:{path}"]
    own += ["model.context=64", "train.global_batch=4", "train.micro_batch=4"]
    assert plan("quickstart", own, device="A100-80GB").length.steps is None
    prepare(Recipe.load("quickstart", own))
    made = plan("quickstart", own, device="A100-80GB")
    assert made.unknown == {} and made.length.steps > 0 and made.time.left.seconds > 0 and made.memory
    assert made.length.epochs == pytest.approx(2, abs=0.5) and not made.length.taken_as_full


def test_a_live_run_says_what_is_left(tmp_path):
    run = write_run(tmp_path / "runs" / "live", until=40)
    for source in (run, run.path):
        made = plan(source)
        assert (made.length.done, made.length.steps, made.device.kind) == (40, 100, "cpu")
        assert made.time.left.train_seconds == pytest.approx(6.0) and made.time.speed.basis == "measured"
        assert made.time.left.seconds == pytest.approx(6.0 + 3 * 2.0)  # evaluations at 50, 75 and 100
        first = {m.what: m for m in made.milestones}["evaluation"]
        assert first.first == 50 and first.first_seconds == pytest.approx(1.0 + 2.0)
    assert plan(write_run(tmp_path / "gpu", device="NVIDIA A100-SXM4-80GB")).device.memory_bytes == 80 * GIB


def test_the_device_of_past_runs(tmp_path):
    gpu = write_run(tmp_path / "gpu", device="NVIDIA A100-SXM4-80GB")
    made = plan("quickstart", past=[[gpu]])
    assert made.device.name == "NVIDIA A100-SXM4-80GB" and made.time.speed.basis == "measured"
    with pytest.raises(UserError) as error:
        plan("quickstart", past=[[gpu, write_run(tmp_path / "cpu")]])
    assert "--device" in str(error.value)


def test_no_torch_is_imported():
    code = (
        "import sys; from windlass.estimate.plan import plan; from windlass.estimate import text\n"
        "plan('gpt2-124m', world=8, device='A100-40GB')\n"
        "sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
