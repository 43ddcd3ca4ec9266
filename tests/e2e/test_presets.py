"""Presets of published models: their parameters by transformers, three steps of each with fewer
layers on tiny data, and what two presets reach on the real tiny Shakespeare.
"""

import json
from pathlib import Path
from typing import Any

import pytest

import hf_fixtures
from helpers import overrides, write_corpus
from windlass import train
from windlass.estimate.calendar import optimal_steps
from windlass.estimate.plan import plan
from windlass.model.build import read_sizes
from windlass.model.size import count
from windlass.recipe import Recipe

# The published config.json of each model, without what changes no parameter.
SMOLLM2 = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
SMOLLM2 |= {"num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152}
SMOLLM2_LARGE = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24}
SMOLLM2_LARGE |= {"num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 49152}
SMOLLM2_LARGE["dtype"] = "bfloat16"
QWEN3 = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "head_dim": 128}
QWEN3 |= {"num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 151_936}
PUBLISHED = {
    "smollm2-135m": ("llama", {**SMOLLM2, "rope_theta": 100_000.0}, 8192),
    "qwen3-0.6b": ("qwen3", QWEN3, 40960),
    "chat-lora": ("llama", SMOLLM2, 8192),  # any model
    "continue-pretraining": ("llama", {**SMOLLM2, "rope_theta": 100_000.0}, 8192),
}


def publish(preset: str, folder: Path, **changes: object) -> Path:
    """A directory with the configuration of a preset's model."""
    from transformers import AutoConfig

    kind, fields, longest = PUBLISHED[preset]
    fields = {"max_position_embeddings": longest, "tie_word_embeddings": True, **fields, **changes}
    AutoConfig.for_model(kind, **fields).save_pretrained(folder)
    return folder


def network(folder: Path, device: str) -> Any:
    """The network of a directory's configuration, by transformers."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device(device):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))


def test_shapes_of_published_models(tmp_path):
    for preset in ("smollm2-135m", "qwen3-0.6b"):
        model = network(publish(preset, tmp_path / preset), "meta")
        parameters = sum(p.numel() for p in model.parameters())
        recipe = Recipe.load(preset)
        if preset == "smollm2-135m":
            assert count(recipe.model, recipe.model.vocab).total == parameters == 134_515_008
            assert recipe.model.rope_theta == model.config.rope_parameters["rope_theta"]
            assert recipe.model.context <= model.config.max_position_embeddings
        else:
            sizes = read_sizes(recipe.replace(f"model.name={tmp_path / preset}"))
            assert sizes.total == parameters == 596_049_920
            assert optimal_steps(recipe, parameters) == 11_368
    d12, vocab, width = Recipe.load("nanochat-d12").model, 65_536, 768
    nanochat = 2 * vocab * width + 12 * 12 * width**2  # its norms have no weights
    assert count(d12, vocab).total == nanochat + (2 * 12 + 1) * width == 185_617_152


@pytest.mark.full  # a pass of 24 layers with fake tensors
def test_chat_lora_fits_a_gpu_of_16_gb(tmp_path):
    name = publish("chat-lora", tmp_path / "model", **SMOLLM2_LARGE)
    changes = [f"model.name={name}", "data.tokenizer=byte", "train.steps=100"]
    found = plan("chat-lora", changes, device="T4")
    assert found.size.parameters == 1_711_376_384 + found.size.trained
    (row,) = [row for row in found.memory if row.chosen]
    assert row.fits and row.memory.total < 14e9


@pytest.mark.parametrize("preset", ["smollm2-135m", "nanochat-d12", *list(PUBLISHED)[1:]])
def test_three_steps_of_each(preset, tmp_path):
    corpus = write_corpus(tmp_path / "corpus" / "text.txt", words=1200)
    lines = corpus.read_text().splitlines()
    changes = {
        "run.dir": tmp_path / "run",
        "data.source": tmp_path / "corpus" / "items.jsonl",
        "data.dir": tmp_path / "data",
        "data.eval_split": "",
        "data.max_tokens": 0,
        "data.val_fraction": 0.2,
        "data.streaming": False,
        "model.context": 64,
        "train.global_batch": 2,
        "train.micro_batch": 1,
        "train.steps": 3,
        "eval.suites": ["loss"],
        "parallel.device": "cpu",
    }
    recipe, items = Recipe.load(preset), [{"text": line} for line in lines]
    if recipe.data.format == "chat":
        items = [
            {"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b}]}
            for a, b in zip(lines[::2], lines[1::2], strict=False)
        ]
    (tmp_path / "corpus" / "items.jsonl").write_text("".join(json.dumps(i) + "\n" for i in items))
    if recipe.model.kind == "hf":
        small = {"num_hidden_layers": 1, "vocab_size": 512, "bos_token_id": 0, "eos_token_id": 0}
        folder = publish(preset, tmp_path / "model", **small)
        if not recipe.model.from_scratch:
            network(folder, "cpu").save_pretrained(folder)
        hf_fixtures.save_tokenizer(lines, folder)
        changes |= {"model.name": folder, "data.tokenizer": f"hf:{folder}"}
    else:
        changes |= {"model.layers": 1, "model.vocab": 0, "data.tokenizer": "byte"}
        changes |= {"model.width": 96} if recipe.optim.kind == "muon" else {}  # slow on a CPU
    values = {key: str(v) if isinstance(v, Path) else v for key, v in changes.items()}
    run = train(recipe.replace(*overrides(values)))
    losses = [line["loss"] for line in run.lines("train")]
    assert run.state == "finished" and 0 < losses[-1] < 12
    assert run.lines("eval")


@pytest.mark.full
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("preset", "reaches"), [("shakespeare-char-cpu", 1.93), ("shakespeare-char-fast", 1.72)]
)
def test_the_validation_loss_of_2000_steps(data_files, tmp_path, preset, reaches):
    """Over the whole validation split. nanoGPT's own train.py at these settings, over 400 random
    batches: 1.912.
    """
    source = data_files / "tinyshakespeare" / "input.txt"
    places = {"data.source": source, "data.dir": tmp_path / "data", "run.dir": tmp_path / "run"}
    recipe = Recipe.load(preset, places | {"data.sha256": ""})
    assert (recipe.train.steps, recipe.train.global_batch) == (2000, 12)
    assert (recipe.model.context, recipe.eval.batches) == (64, 0)
    last = train(recipe).lines("eval")[-1]
    assert last["tokens"] == 111_539, "every token of the split that has one before it"
    assert last["loss"] <= reaches
