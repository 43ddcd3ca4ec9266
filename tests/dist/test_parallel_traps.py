"""Silent errors that other trainers have had in layouts, each as a test of ours, in float64.

The numbers are of issues: pytorch/pytorch (p), pytorch/torchtitan (t), NVIDIA/Megatron-LM (m).
`test_parallel_equivalence.py` excludes wrong gradients.
"""

import itertools

import pytest
import torch

from windlass.model.gpt import GPT
from windlass.model.share import Peers
from windlass.parallel.tensor import divide_gpt
from windlass.recipe.network import ModelSettings


def parts(length: int, tp: int, cp: int, kv_heads: int):
    """The tokens of every rank of a model that `tp` x `cp` ranks divide."""
    settings = ModelSettings(layers=1, heads=4, kv_heads=kv_heads, width=16, context=64)
    for c in range(cp):
        for t in range(tp):
            tensor = Peers("t", t, tp) if tp > 1 else None
            context = Peers("c", c, cp) if cp > 1 else None
            model = GPT(settings, 8)
            divide_gpt(model, tensor, context, sequence=tp > 1)
            yield c, model.part(length, True, torch.device("cpu"))


@pytest.mark.parametrize("length", [1, 5, 16, 23])
@pytest.mark.parametrize(("tp", "cp", "kv_heads"), [(1, 4, 1), (1, 4, 4), (2, 3, 1), (4, 1, 2)])
def test_every_token_is_on_one_rank_with_its_own_label(length, tp, cp, kv_heads):
    """Load balance must not reorder tokens or labels (t1882)."""
    tokens = torch.arange(length).unsqueeze(0)
    inner, stream, sizes = dict[int, list[int]](), list[int](), set[tuple[int, int]]()
    for c, here in parts(length, tp, cp, kv_heads):
        sizes.add((len(here.places), len(here.stream)))
        real = here.places < length
        assert here.tokens(tokens)[0, real].tolist() == here.places[real].tolist()
        assert here.labels(tokens + 1)[0, real].tolist() == (here.places[real] + 1).tolist()
        assert (here.labels(tokens)[0, ~real] == -100).all()
        assert len(here.places) == tp * len(here.stream)
        inner[c] = here.places[real].tolist()
        stream += here.stream[here.stream < length].tolist()
    assert sorted(itertools.chain(*inner.values())) == list(range(length)) == sorted(stream)
    assert len(sizes) == 1, "a rank has more work"
