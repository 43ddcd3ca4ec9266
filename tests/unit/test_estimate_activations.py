"""What the plan says a forward pass keeps, against what autograd really saves."""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch

from windlass.estimate.activations import (
    CHUNK_BYTES,
    Pass,
    block_bytes,
    kept_by_block,
    logits_bytes,
    recomputed,
    root_bytes,
    weight_copies,
)
from windlass.model import loss
from windlass.model.gpt import GPT, initialise
from windlass.parallel.parallelize import checkpoint_activations
from windlass.recipe import ModelSettings

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
    return blocks + root_bytes(p) - 16 * p.tokens + logits_bytes(p).kept


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
    want = settings.layers * kept_by_block(p, how) + root_bytes(p) - 16 * p.tokens + logits_bytes(p).kept
    assert result.requires_grad
    assert want == pytest.approx(left, rel=0.01)
    assert kept_by_block(p, how) + recomputed(p, how) == block_bytes(p)


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
