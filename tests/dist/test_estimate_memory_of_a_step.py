"""What the plan says of memory, against what real steps of real modules on real ranks take."""

from dataclasses import replace

import pytest
import torch
from harness import recipe, run_ranks
from meters import measured

import hf_fixtures
from windlass.estimate.activations import measure_peaks
from windlass.estimate.memory import memory
from windlass.estimate.rank import layout_of
from windlass.model.build import build_model, read_sizes

WIDE = {"heads": 4, "width": 128, "context": 64}
MODERN = {"layers": 6, "kv_heads": 2, "activation": "swiglu", "norm": "rmsnorm"}
MODERN |= {"position": "rope", "qk_norm": True, "attn_bias": False, "ff_bias": False}
SHAPES = {  # what takes most of the memory: settings, vocabulary, micro-batch
    "logits": ({"layers": 4, "heads": 4, "width": 64, "context": 128}, 1000, 2),
    "weights": ({"layers": 4, "heads": 4, "width": 256, "context": 32}, 100, 1),
    "activations": (WIDE | {"layers": 10, "tie_head": False, "activation": "relu2"}, 50, 4),
    "modern": (WIDE | MODERN, 300, 2),
}
# a large embedding and head
TABLES = {"tables": (WIDE | {"layers": 3, "context": 32, "tie_head": False}, 3000, 1)}


def compare(shape, world=1, accumulation=1, **overrides):
    settings, vocab, micro = (SHAPES | TABLES)[shape]
    changes = {f"model__{key}": value for key, value in settings.items()}
    changes |= {"train__micro_batch": micro, "train__global_batch": micro * world * accumulation}
    r = recipe(**changes | overrides)
    ranks = run_ranks(measured, world, r, vocab, micro, accumulation)
    rest, peak = max(ranks, key=lambda rank: rank[1])
    return memory(r.model, vocab, layout_of(r, world), r.optim.kind), rest, peak


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.full)


def slow_but(name):
    return [name, *(slow(other) for other in SHAPES if other != name)]


TWICE, REDUCE_EACH = {"accumulation": 2}, "parallel__reduce_each_micro_batch"
BF16 = {"train__precision": "bf16", "train__master": "bf16"}
ONE_RANK = [
    {},
    TWICE,
    slow({"train__precision": "bf16"}),
    {"optim__kind": "muon"},
    {"optim__kind": "adamw8bit"},
    BF16,
    slow(BF16 | TWICE),
    slow({"parallel__activation_checkpointing": "full"}),
    {"parallel__activation_checkpointing": "selective", "train__precision": "bf16"},
]


@pytest.mark.parametrize("shape", slow_but("modern"))
@pytest.mark.parametrize("settings", ONE_RANK, ids=repr)
def test_one_rank(shape, settings):
    predicted, rest, peak = compare(shape, **settings)
    assert predicted.parameters + predicted.optimizer == pytest.approx(rest, rel=0.002)
    assert predicted.total == pytest.approx(peak, rel=0.02), predicted


STRATEGIES = ("ddp", "shard_optim", "full_shard", "shard_grad_op")
SEVERAL_RANKS = [
    *((name, {}) for name in STRATEGIES),
    *(slow(name, TWICE) for name in STRATEGIES),
    slow("shard_optim", {"optim__kind": "muon"}),
    *(slow(name, BF16) for name in ("ddp", "shard_optim", "full_shard")),
    slow("full_shard", {"optim__kind": "adamw8bit"}),
    slow("full_shard", TWICE | {REDUCE_EACH: False}),
    slow("shard_grad_op", TWICE | {REDUCE_EACH: True}),
    slow("full_shard", {"parallel__activation_checkpointing": "full"}),
]


@pytest.mark.dist
@pytest.mark.parametrize("shape", slow_but("weights"))
@pytest.mark.parametrize(("strategy", "settings"), SEVERAL_RANKS)
def test_two_ranks(shape, strategy, settings):
    predicted, _, peak = compare(shape, world=2, parallel__strategy=strategy, **settings)
    assert predicted.total == pytest.approx(peak, rel=0.04), predicted


@pytest.mark.dist
@pytest.mark.parametrize("settings", [{}, slow({"train__precision": "bf16"}), slow(TWICE)])
def test_embedding_and_head_are_gathered_one_after_the_other(settings):
    predicted, _, peak = compare("tables", world=2, parallel__strategy="full_shard", **settings)
    assert predicted.total == pytest.approx(peak, rel=0.04), predicted


@pytest.mark.dist
@pytest.mark.parametrize("accumulation", [2, slow(4)])
def test_a_pipeline(accumulation):
    changes = {"model__layers": 8, "parallel__pipeline": 2, "train__global_batch": 2 * accumulation}
    predicted, _, peak = compare("modern", 2, accumulation, **changes)
    assert predicted.total == pytest.approx(peak, rel=0.05), predicted


@pytest.mark.parametrize(
    ("lora", "files", "settings"),
    [
        slow(0, "float32", {}),
        slow(8, "float32", {}),
        (8, "bfloat16", {}),
        (8, "bfloat16", {"train__precision": "bf16"}),
    ],
)
def test_the_states_of_a_model_of_transformers(lora, files, settings, tmp_path):
    """Weights and optimizer state at rest; frozen weights have none, and bf16 files stay bf16."""
    sizes = {"vocab": 2000, "n_embd": 128, "n_layer": 6, "n_head": 4, "n_positions": 128}
    hf_fixtures.save("gpt2", tmp_path, getattr(torch, files), **sizes)
    batch = {"train__micro_batch": 2, "train__global_batch": 2, "model__lora__rank": lora}
    r = recipe(model__kind="hf", model__name=str(tmp_path), model__context=128, **batch, **settings)
    (rest, peak), *_ = run_ranks(measured, 1, r, 2000, 2, 1)
    sizes, layout = read_sizes(r), layout_of(r, 1)
    predicted = memory(sizes, sizes.vocab, layout, r.optim.kind)
    assert predicted.parameters + predicted.optimizer == pytest.approx(rest, rel=0.01)
    assert predicted.total < peak
    sizes = replace(sizes, peaks=measure_peaks(build_model(r, 2000), r, layout.precision, 2))
    whole = memory(sizes, sizes.vocab, layout, r.optim.kind)
    assert whole.total == pytest.approx(peak, rel=0.04), whole
