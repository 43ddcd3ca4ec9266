"""Memory: what a forward pass saves against what autograd saves, sums by hand, and which layout is
recommended.
"""

import gc
from dataclasses import replace
from itertools import accumulate

import pytest
import torch

from windlass.errors import installed
from windlass.estimate.advice import recommend
from windlass.estimate.devices import USABLE, Device, find_device
from windlass.estimate.inputs import PlanInputs
from windlass.estimate.layouts import memory_rows
from windlass.estimate.memory import GATHER_BYTES, STACK_NUMBERS, Tensors, memory
from windlass.estimate.plan import plan
from windlass.estimate.rank import Layout, Program, ranks_of
from windlass.model import loss
from windlass.model.gpt import GPT, initialise
from windlass.model.quantised import use_float8
from windlass.model.size import CountedSizes, count
from windlass.optim import muon, shard
from windlass.recipe import ModelSettings, Recipe

BASE = {"layers": 2, "heads": 4, "width": 64, "context": 128}
MODERN = {"norm": "rmsnorm", "position": "rope", "qk_norm": True, "activation": "relu2"}
MODERN |= {"attn_bias": False}
VOCAB, BATCH = 1000, 2


def saved_bytes(settings: ModelSettings, precision: str) -> int:
    """Bytes of the storages that autograd saves in a forward pass, without parameters and tokens."""
    model = GPT(settings, VOCAB).to(torch.float64 if precision == "fp64" else torch.float32)
    initialise(model, 0)
    tokens = torch.zeros(BATCH, settings.context, dtype=torch.int64)
    outside = {t.untyped_storage().data_ptr() for t in (*model.parameters(), tokens)}
    sizes, alive = {}, []

    def save(tensor):
        storage = getattr(tensor, "_data", tensor).untyped_storage()  # of torchao's float8
        if storage.data_ptr() not in outside:
            sizes[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    if precision == "float8":
        use_float8(model.blocks, torch.device("cpu"))
    context = torch.autocast("cpu", torch.bfloat16, enabled=precision in ("bf16", "float8"))
    with torch.autograd.graph.saved_tensors_hooks(save, lambda t: t), context:
        model(tokens, tokens)
    return sum(sizes.values())


def predicted_bytes(settings: ModelSettings, precision: str, **how) -> int:
    layout = Layout("single", precision=precision, micro_batch=BATCH, **how)
    step, layers = Tensors(*ranks_of(settings, VOCAB, layout)), settings.layers
    return step.saved(layers) + layers * step.copies + step.root_saved() + step.logits()[1]


def allocations(call) -> list[int]:
    """The allocator's bytes in use after each allocation and release of a call."""
    gc.collect()  # or what earlier tests left is freed, and counted, in the middle of it
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True) as profile:
        result = call()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    del result
    return list(accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64"])
@pytest.mark.parametrize(
    "over",
    [
        {},
        {**MODERN, "kv_heads": 2},
        {"activation": "swiglu", "final_norm": False, "tie_head": False},
        {"activation": "relu", "kv_heads": 1, "position": "none"},
        {"dropout": 0.1, "qk_norm": True},
        {"logit_cap": 15.0},
        {"position": "rope", "norm": "rmsnorm", "ff_width": 100, "activation": "gelu_tanh"},
        {**MODERN, "dropout": 0.1, "kv_heads": 2},
    ],
)
def test_what_autograd_saves(over, precision):
    settings = ModelSettings(**{**BASE, **over})
    saved = saved_bytes(settings, precision)
    assert predicted_bytes(settings, precision) == pytest.approx(saved, rel=1e-4)


@pytest.mark.skipif(not installed("torchao"), reason="torchao is not installed")
@pytest.mark.parametrize("activation", ["gelu", "relu", "relu2", "swiglu"])
@pytest.mark.parametrize("over", [{}, {"norm": "rmsnorm", "position": "rope", "kv_heads": 2}])
def test_what_autograd_saves_with_float8(over, activation):
    """Products save one byte for each number of their input, and no copy of a matrix."""
    settings = ModelSettings(**{**BASE, "width": 512, "activation": activation, **over})
    saved = saved_bytes(settings, "float8")
    assert predicted_bytes(settings, "float8") == pytest.approx(saved, rel=1e-4)


@pytest.mark.parametrize("over", [{}, MODERN, {"activation": "swiglu", "final_norm": False}])
def test_what_autograd_saves_with_a_stream_in_bf16(monkeypatch, over):
    """As programs of others; but for the means and gains of norms, a few thousand bytes."""
    embed = GPT.embed
    monkeypatch.setattr(GPT, "embed", lambda *how: (embed(*how)[0].bfloat16(), embed(*how)[1]))
    settings = ModelSettings(**{**BASE, **over})
    predicted = predicted_bytes(settings, "bf16", program=Program(stream=2))
    assert predicted == pytest.approx(saved_bytes(settings, "bf16"), rel=2e-3)


@pytest.mark.parametrize("over", [{}, {"logit_cap": 15.0}])
def test_the_peak_of_a_chunked_loss(over):
    """All that the allocator gave out, on top of weights and hidden states."""
    assert GATHER_BYTES == shard.GATHER_BYTES
    assert muon.AT_ONCE == STACK_NUMBERS
    settings, vocab = ModelSettings(**{**BASE, "layers": 1, **over}), 120_000
    step = Tensors(*ranks_of(settings, vocab, Layout("single", micro_batch=4)))
    weight = torch.zeros(vocab, settings.width, requires_grad=True)
    hidden = torch.zeros(4, settings.context, settings.width, requires_grad=True)
    labels = torch.zeros(4, settings.context, dtype=torch.int64)
    in_use = allocations(
        lambda: loss.cross_entropy_sum(hidden, weight, labels, cap=settings.logit_cap)
    )
    assert step.logits()[0] == pytest.approx(max(in_use), rel=0.01)


GPT2 = Recipe.load("gpt2-124m")
ROWS, SIZES = 50304, (1, 2, 4, 8, 16, 32, 64)
BASE_LAYOUT = Layout("ddp", 8, precision="bf16", device="cuda", micro_batch=16, accumulation=4)
LARGE = GPT2.model.model_copy(update={"layers": 36, "width": 1280, "heads": 20})


def test_static_memory_by_hand():
    """12 bytes a parameter for AdamW, divided by the ranks that shard them."""

    def gpt2_memory(**layout):
        return memory(GPT2.model, ROWS, replace(Layout("single"), **layout))

    n = count(GPT2.model, ROWS).total
    whole, sharded = gpt2_memory(), gpt2_memory(strategy="full_shard", world=8, shard=8)
    assert (whole.parameters, whole.optimizer) == (4 * n, 8 * n)
    assert (sharded.parameters, sharded.optimizer) == (-(-4 * n // 8), n)
    zero1 = gpt2_memory(strategy="shard_optim", world=8, shard=8)
    assert (zero1.parameters, zero1.optimizer) == (4 * n, n)
    assert gpt2_memory(strategy="hybrid_shard", world=8, shard=4).parameters == n
    offloaded = gpt2_memory(strategy="full_shard", world=8, shard=8, offload=True, device="cuda")
    assert offloaded.parameters == offloaded.optimizer == 0
    assert offloaded.host == pytest.approx(2 * n, rel=1e-6)
    # gradients and moments of what is trained
    sizes = CountedSizes(total=10**6, trained=10**5, vocab=1000)
    whole = memory(sizes, 1000, Layout("ddp", 4))
    assert (whole.parameters, whole.gradients, whole.optimizer) == (4e6, 4e5, 8e5)
    assert whole.activations == 0
    assert memory(sizes, 1000, Layout("shard_optim", 4, 4)).optimizer == 2e5
    assert memory(sizes, 1000, Layout("full_shard", 4, 4)).total == whole.total / 4


@pytest.mark.parametrize("gigabytes", [1, 6, 80])
def test_the_largest_micro_batch_is_the_largest(gigabytes):
    for row in memory_rows(GPT2.model, ROWS, "adamw", BASE_LAYOUT, int(gigabytes * 1e9)):
        tried = [replace(row.layout, micro_batch=n, accumulation=64 // n) for n in SIZES]
        fit = [x for x in tried if memory(GPT2.model, ROWS, x).total <= gigabytes * 1e9]
        assert row.largest_micro_batch == max((x.micro_batch for x in fit), default=0)


def inputs(micro_batch=0):
    recipe = GPT2.replace({"train.micro_batch": micro_batch, "train.steps": 10})
    return PlanInputs(recipe, 8, Device("", "cuda", int(70e9 / USABLE) + 1), "bf16")


def test_what_is_recommended_fits_and_nothing_cheaper_does():
    rows = memory_rows(GPT2.model, ROWS, "adamw", BASE_LAYOUT, int(70e9))
    assert [row.layout for row in rows if row.chosen] == [BASE_LAYOUT]
    assert recommend(rows, inputs())[0] == {"train.micro_batch": 64}
    strategies = set()
    for gigabytes in (6, 10, 16, 30):
        rows = memory_rows(LARGE, ROWS, "adamw", BASE_LAYOUT, int(gigabytes * 1e9))
        settings, _ = recommend(rows, inputs())
        first = next(row for row in rows if row.largest_micro_batch).layout
        assert settings.get("parallel.strategy", "ddp") == first.strategy
        assert settings.get("parallel.offload", False) == first.offload
        strategies.add((first.strategy, first.checkpointing))
    assert len(strategies) > 2
    whole = replace(BASE_LAYOUT, micro_batch=64, accumulation=1)
    rows = memory_rows(GPT2.model, ROWS, "adamw", whole, int(20e9))
    settings, _ = recommend(rows, inputs(64))  # the recipe's own micro-batch stays
    assert "train.micro_batch" not in settings
    assert settings["parallel.activation_checkpointing"] != "none"


def test_tensor_ranks_divide_a_model_of_transformers():
    network = {"layers": 4, "width": 100, "vocab": 1000}
    sizes = CountedSizes(10**6, 10**6, 1000, network)
    for strategy, parts in (("ddp", 1), ("full_shard", 2)):
        layouts = (Layout(strategy, 2 * t, parts, tensor=t, device="cuda") for t in (1, 2))
        one, two = (memory(sizes, 1000, layout) for layout in layouts)
        assert two.parameters == one.parameters / 2 and two.optimizer == one.optimizer / 2


def test_the_workspaces_of_cublas_are_counted():
    """Two threads of every GPU have 32 MiB each, which `import windlass` asks for; a CPU has none."""
    names = ("H100", "A100-80GB", "RTX-4090", "cpu")
    assert [find_device(name).workspace_bytes for name in names] == [2 * 2**25] * 3 + [0]
    row = next(row for row in plan("gpt2-124m", device="H100").memory if row.chosen)
    alone = memory(Recipe.load("gpt2-124m").model, 50304, replace(row.layout, workspace=0))
    assert row.memory.total - alone.total == 2 * 2**25
