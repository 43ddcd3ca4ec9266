"""The network on CUDA: the numbers of the CPU, a loss that is lean with a large vocabulary, and
documents of a row by flash attention and by a mask.
"""

from typing import Any

import pytest

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.gpu

NEW = {"position": "rope", "norm": "rmsnorm"}
SHAPES: list[dict[str, Any]] = [
    {"activation": "gelu_tanh"},
    NEW | {"activation": "swiglu", "kv_heads": 2, "qk_norm": True, "tie_head": False},
    NEW | {"activation": "relu2", "logit_cap": 5.0},
]


def both(settings: dict[str, Any], dtype: Any, device: str) -> list[Any]:
    from windlass.model.build import build_model
    from windlass.model.gpt import initialise
    from windlass.recipe import Recipe

    shape = {"layers": 2, "heads": 4, "width": 64, "context": 48, "vocab": 101, "init_std": 0.1}
    recipe = Recipe.model_validate({"model": {**shape, **settings}})
    models = [build_model(recipe, 101, where).to(dtype) for where in ("cpu", device)]
    for model in models:
        initialise(model, 3)
    return models


@pytest.mark.parametrize("settings", SHAPES)
def test_logits_loss_gradients_and_a_cache_are_those_of_the_cpu(settings, device):
    cpu, gpu = both(settings, torch.float64, device)
    assert all(
        torch.equal(a, b.cpu()) for a, b in zip(cpu.parameters(), gpu.parameters(), strict=True)
    )
    tokens = torch.randint(101, (3, 48), generator=torch.Generator().manual_seed(0))
    labels = tokens.roll(-1, 1)
    labels[0, 10:20] = -100
    torch.testing.assert_close(gpu(tokens.to(device)).cpu(), cpu(tokens), rtol=0, atol=1e-10)
    losses = [cpu(tokens, labels), gpu(tokens.to(device), labels.to(device))]
    torch.testing.assert_close(losses[1].cpu(), losses[0], rtol=1e-12, atol=0)
    for loss in losses:
        loss.backward()
    for a, b in zip(cpu.parameters(), gpu.parameters(), strict=True):
        torch.testing.assert_close(b.grad.cpu(), a.grad, rtol=1e-8, atol=1e-10)
    cache, whole = gpu.eval().new_cache(3, 48), gpu(tokens.to(device))
    for start, stop in [(0, 7), (7, 20), *((i, i + 1) for i in range(20, 48))]:
        logits = gpu(tokens[:, start:stop].to(device), cache=cache)
        torch.testing.assert_close(logits[:, 0], whole[:, stop - 1], rtol=0, atol=1e-10)


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("autocast", [False, True])
def test_the_loss_never_holds_all_logits(autocast: bool) -> None:
    from windlass.model.loss import cross_entropy_sum
    from windlass.model.size import CHUNK_BYTES

    tokens, width, vocab = 32_768, 64, 50_304
    x = torch.randn(tokens, width, device="cuda", requires_grad=True)
    weight = (0.1 * torch.randn(vocab, width, device="cuda")).requires_grad_()
    labels = torch.randint(vocab, (tokens,), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        loss = cross_entropy_sum(x, weight, labels)
    loss.backward()
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < 4 * CHUNK_BYTES["cuda"] < tokens * vocab * 4 / 3
    some = slice(0, 512)
    expected = torch.nn.functional.cross_entropy(x[some] @ weight.T, labels[some], reduction="sum")
    part = cross_entropy_sum(x[some], weight, labels[some], chunk=100)
    torch.testing.assert_close(part, expected, rtol=1e-3, atol=0)


@pytest.mark.usefixtures("cuda")
def test_float8_multiplies_as_the_emulation_of_the_cpu(device):
    pytest.importorskip("torchao")
    from windlass.model.quantised import use_float8

    if torch.cuda.get_device_capability(device) < (8, 9):
        pytest.skip("no float8")
    found: list[list[Any]] = []
    for where in ("cpu", device):
        torch.manual_seed(0)
        block = torch.nn.Sequential(torch.nn.Linear(256, 384)).to(where)
        use_float8([block], torch.device(where))
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(64, 256, generator=generator).to(where).requires_grad_()
        with torch.autocast(torch.device(where).type, torch.bfloat16):
            y = block(x)
        y.backward(torch.randn(64, 384, generator=generator).to(y))
        found.append([one.detach().cpu().float() for one in (y, x.grad, block[0].weight.grad)])
    for wanted, own in zip(*found, strict=True):
        assert (own - wanted).norm() < 2**-7 * wanted.norm()


LENGTHS = ([100, 1, 155], [256], [3] * 80 + [16])


def documents_on(device: Any) -> Any:
    from windlass.data.batch import positions_of
    from windlass.model.attention import Documents

    numbers = torch.stack(
        [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in LENGTHS]
    )
    return Documents(numbers, torch.from_numpy(positions_of(numbers.numpy())).to(device))


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 2e-2)])
@pytest.mark.parametrize("first", [0, 128])
def test_attention_within_documents_is_that_of_the_cpu(dtype, tolerance, first, device):
    """bf16 uses `varlen_attn`, float32 a mask; queries of a late part, too."""
    from windlass.model.attention import Spans

    draw = torch.Generator().manual_seed(0)
    q = torch.randn(3, 4, 256 - first, 64, generator=draw)
    k, v = torch.randn(2, 3, 2, 256, 64, generator=draw)
    results = []
    for where, kind in (("cpu", "float64"), (device, dtype)):
        mask = torch.float32 if kind == "float32" else None
        spans = Spans(documents_on(where), first, 256, mask)
        parts = [x.to(where, getattr(torch, kind)).requires_grad_() for x in (q, k, v)]
        assert (spans.edges is not None) == (kind == "bfloat16" and "cuda" in str(where))
        y = spans.attention(*parts)
        y.square().sum().backward()
        results.append([x.double().cpu() for x in (y, *(part.grad for part in parts))])
    for ours, wanted in zip(*results[::-1], strict=True):
        assert (ours - wanted).abs().max() <= tolerance * wanted.abs().max()


def test_documents_compile_once_on_a_gpu(device):
    """Losses of a compiled GPT in bf16 are those of the eager one, with one graph."""
    from torch._dynamo.utils import counters

    from windlass.model.build import build_model
    from windlass.model.gpt import initialise
    from windlass.recipe import Recipe

    shape = {"layers": 2, "heads": 4, "width": 256, "context": 256, "position": "rope"}
    recipe = Recipe.model_validate({"model": shape})
    model: Any = build_model(recipe, 101, device)
    initialise(model, 3)
    tokens = torch.randint(101, (3, 256), generator=torch.Generator().manual_seed(0)).to(device)
    packed = documents_on(device)
    parts = zip(packed.numbers.split([2, 1]), packed.positions.split([2, 1]), strict=True)
    inputs = [packed, *(type(packed)(*part) for part in parts)]
    rows = [tokens, *tokens.split([2, 1])]

    def losses() -> list[float]:
        with torch.autocast(torch.device(device).type, torch.bfloat16), torch.no_grad():
            return [float(model(x, x, documents=d)) for x, d in zip(rows, inputs, strict=True)]

    eager = losses()
    counters.clear()
    for block in model.blocks:
        block.forward = torch.compile(block.forward)
    assert losses() == pytest.approx(eager, rel=1e-3)
    assert not counters["graph_break"]
