"""Documents of a row on CUDA, by flash attention and by a mask, as on the CPU."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.gpu

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
