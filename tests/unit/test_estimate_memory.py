"""Memory: what a forward pass keeps against what autograd saves, sums by hand, and which layout is recommended."""

from __future__ import annotations

import contextlib
import gc
from dataclasses import replace

import pytest
import torch

from windlass.estimate.activations import (
    CHUNK_BYTES,
    Pass,
    block_bytes,
    logits_bytes,
    recomputed,
    root_bytes,
    saved_by_block,
    weight_copies,
)
from windlass.estimate.layouts import Task, largest_micro_batch, micro_batches, options, recommend, sized
from windlass.estimate.memory import Layout, layout_of, memory
from windlass.model import loss
from windlass.model.gpt import GPT, initialise
from windlass.model.size import HfSizes, count
from windlass.parallel.parallelize import checkpoint_activations
from windlass.recipe import ModelSettings, Recipe

BASE = {"layers": 2, "heads": 4, "width": 64, "context": 128}
MODERN = {"norm": "rmsnorm", "position": "rope", "qk_norm": True, "activation": "relu2", "attn_bias": False}
VOCAB, BATCH = 1000, 2


def saved_bytes(settings: ModelSettings, low_precision: bool, dtype=torch.float32) -> int:
    """Bytes of the storages that autograd keeps after a forward pass; parameters, tokens and labels not among them."""
    model = GPT(settings, VOCAB).to(dtype)
    initialise(model, 0)
    tokens = torch.zeros(BATCH, settings.context, dtype=torch.int64)
    outside = {t.untyped_storage().data_ptr() for t in (*model.parameters(), tokens)}
    found, alive = {}, []

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in outside:
            found[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    context = torch.autocast("cpu", torch.bfloat16) if low_precision else contextlib.nullcontext()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t), context:
        model(tokens, tokens)
    return sum(found.values())


def predicted_bytes(settings: ModelSettings, compute: int, master: int = 4) -> int:
    p = Pass(settings, VOCAB, BATCH, compute, master)
    blocks = settings.layers * (block_bytes(p) + weight_copies(p))
    return blocks + root_bytes(p) - 16 * p.tokens + logits_bytes(p).saved


@pytest.mark.parametrize("low_precision", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "over",
    [
        {},
        MODERN,
        {**MODERN, "kv_heads": 2},
        {"activation": "swiglu", "final_norm": False, "tie_head": False},
        {"activation": "relu", "kv_heads": 1, "position": "none"},
        {"position": "rope", "norm": "rmsnorm", "ff_width": 100, "activation": "gelu_tanh"},
        {"dropout": 0.1},
        {**MODERN, "dropout": 0.1, "kv_heads": 2},
        {"qk_norm": True},
        {"logit_cap": 15.0},
    ],
    ids=lambda over: "-".join(f"{k}" for k in over) or "gpt2",
)
def test_what_autograd_saves(over, low_precision):
    settings = ModelSettings(**{**BASE, **over})
    got = saved_bytes(settings, low_precision)
    assert predicted_bytes(settings, 2 if low_precision else 4) == pytest.approx(got, rel=1e-4)


def test_float64():
    settings = ModelSettings(**BASE)
    assert predicted_bytes(settings, 8, 8) == pytest.approx(saved_bytes(settings, False, torch.float64), rel=1e-4)


@pytest.mark.parametrize("how", ["full", "selective"])
@pytest.mark.parametrize("over", [{}, {"activation": "swiglu", **{k: MODERN[k] for k in ("norm", "position")}}])
def test_checkpointed_blocks_keep_less(how, over):
    """The memory that a checkpointed block lets go of comes back at the latest with its graph: count what stays."""
    settings = ModelSettings(**{**BASE, **over})
    p = Pass(settings, VOCAB, BATCH, 4)
    model = GPT(settings, VOCAB)
    initialise(model, 0)
    checkpoint_activations(model.blocks(), how)
    tokens = torch.zeros(BATCH, settings.context, dtype=torch.int64)
    gc.collect()  # or what earlier tests left is freed, and counted, in the middle of it
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = model(tokens, tokens)
    left = sum(e.nbytes() for e in profile.profiler.kineto_results.events() if e.name() == "[memory]")
    want = settings.layers * saved_by_block(p, how) + root_bytes(p) - 16 * p.tokens + logits_bytes(p).saved
    assert result.requires_grad
    assert want == pytest.approx(left, rel=0.01)
    assert saved_by_block(p, how) + recomputed(p, how) == block_bytes(p)


def test_the_chunk_is_that_of_the_loss():
    assert CHUNK_BYTES == loss.CHUNK_BYTES
    p = Pass(ModelSettings(**BASE), 200_000, 8, 4)
    chunk = loss._chunk(p.tokens, p.vocab, "cpu")
    assert logits_bytes(p).forward > 2 * chunk * p.vocab * 4 > 0


@pytest.mark.parametrize("over", [{}, {"logit_cap": 15.0}])
def test_the_peak_of_a_chunked_loss(over):
    """All that the allocator gave out while the loss was made in chunks, on top of weights and hidden states."""
    settings, vocab = ModelSettings(**{**BASE, "layers": 1, **over}), 120_000
    p = Pass(settings, vocab, 4, 4)
    weight = torch.zeros(vocab, settings.width, requires_grad=True)
    hidden = torch.zeros(4, settings.context, settings.width, requires_grad=True)
    labels = torch.zeros(4, settings.context, dtype=torch.int64)
    gc.collect()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        loss.cross_entropy_sum(hidden, weight, labels, cap=settings.logit_cap)
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    total = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        total += event.nbytes()
        peak = max(peak, total)
    assert logits_bytes(p).forward == pytest.approx(peak, rel=0.01)


# ---------------------------------------------------------------- layouts

GPT2 = Recipe.load("gpt2-124m")
ROWS = 50304
BASE_LAYOUT = Layout("ddp", 8, precision="bf16", device="cuda", micro_batch=0)


def gpt2_memory(**layout):
    return memory(GPT2.model, ROWS, replace(Layout("single", micro_batch=1), **layout))


def test_static_memory_by_hand():
    """12 bytes a parameter at rest for AdamW in fp32 master weights, divided by the ranks that shard them."""
    n = count(GPT2.model, ROWS).total
    whole, sharded = gpt2_memory(), gpt2_memory(strategy="full_shard", world=8, shard=8)
    assert (whole.parameters, whole.optimizer) == (4 * n, 8 * n)
    assert (sharded.parameters, sharded.optimizer) == (-(-4 * n // 8), n)
    assert gpt2_memory(strategy="hybrid_shard", world=8, shard=4).parameters == n
    offloaded = gpt2_memory(strategy="full_shard", world=8, shard=8, offload=True, device="cuda")
    assert offloaded.parameters == offloaded.optimizer == 0 and offloaded.host == pytest.approx(2 * n, rel=1e-6)


def test_memory_falls_in_the_order_one_expects():
    def total(**changes):
        return gpt2_memory(
            **{"strategy": "ddp", "world": 8, "precision": "bf16", "micro_batch": 8, "device": "cuda", **changes}
        ).total

    assert total() > total(checkpointing="selective") > total(checkpointing="full")
    assert total() > total(strategy="shard_grad_op", shard=8) > total(strategy="full_shard", shard=8)
    assert total(precision="fp32") > total() and total(micro_batch=16) > total() > total(micro_batch=4)


def test_layout_of_a_recipe():
    got = layout_of(GPT2, 8, "cuda")
    assert (got.strategy, got.precision, got.micro_batch, got.accumulation) == ("ddp", "bf16", 16, 4)
    assert layout_of(GPT2, 1, "cpu").precision == "fp32"


def task(gigabytes, model=GPT2.model):
    return Task(model, ROWS, "adamw", 64, int(gigabytes * 1e9))


@pytest.mark.parametrize("gigabytes", [1, 3, 6, 12, 80])
def test_the_largest_micro_batch_is_the_largest(gigabytes):
    layout = replace(BASE_LAYOUT, checkpointing="selective")
    needed = {size: memory(GPT2.model, ROWS, sized(layout, size, 64)).total for size in micro_batches(64)}
    fits = [size for size, total in needed.items() if total <= gigabytes * 1e9]
    assert largest_micro_batch(task(gigabytes), layout) == max(fits, default=0)


def test_what_is_recommended_fits_and_nothing_cheaper_does():
    assert recommend(task(70), BASE_LAYOUT).settings == {
        "parallel.strategy": "ddp", "parallel.activation_checkpointing": "none", "train.micro_batch": 16,
    }  # fmt: skip
    model = GPT2.model.model_copy(update={"layers": 36, "width": 1280, "heads": 20})
    for gigabytes in (6, 10, 16, 30):
        found = recommend(task(gigabytes, model), BASE_LAYOUT)
        assert found.fits and found.memory.total <= gigabytes * 1e9
        chosen = replace(found.layout, micro_batch=0, accumulation=1)
        for option in options(BASE_LAYOUT):
            if option == chosen:
                break
            assert memory(model, ROWS, sized(option, 2, 64)).total > gigabytes * 1e9, option
    fixed = recommend(task(20), replace(BASE_LAYOUT, micro_batch=64))
    assert fixed.layout.micro_batch == 64 and fixed.layout.checkpointing != "none"


def test_when_nothing_fits_it_says_what_to_change():
    model = GPT2.model.model_copy(update={"layers": 48, "width": 8192, "heads": 64})
    found = recommend(task(20, model), BASE_LAYOUT)
    assert found.fits is False and found.settings == {}
    assert all(word in found.why for word in ("GB", "--world", "train.micro_batch", "model.context"))


def test_of_a_hugging_face_model_the_states_are_known(hf_sizes):
    """Weights, and gradients and two moments of what is trained, in fp32; activations are not known."""
    whole = memory(hf_sizes, 1000, Layout("ddp", 4))
    assert (whole.parameters, whole.gradients, whole.optimizer, whole.activations) == (4e6, 4e5, 8e5, 0)
    sharded = memory(hf_sizes, 1000, Layout("full_shard", 4, 4))
    assert sharded.total == whole.total / 4
    assert memory(hf_sizes, 1000, Layout("full_shard", 4, 4, offload=True)).total == 0


@pytest.fixture
def hf_sizes():
    return HfSizes(total=10**6, trained=10**5, vocab=1000)
