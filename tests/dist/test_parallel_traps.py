"""Silent errors that other trainers have had in layouts, each as a test of ours, in float64.

The numbers are of issues: pytorch/pytorch (p), pytorch/torchtitan (t), NVIDIA/Megatron-LM (m).
`test_parallel_equivalence.py` excludes wrong gradients.
"""

import itertools

import pytest
import torch
from equivalence import CONTEXT, VOCAB, built, settings
from harness import run_ranks
from test_parallel_equivalence import NEW

from windlass.model.gpt import GPT
from windlass.model.share import Peers
from windlass.parallel.parallelize import unwrap
from windlass.parallel.tensor import divide_gpt
from windlass.recipe.network import ModelSettings


def tokens() -> torch.Tensor:
    return torch.randint(VOCAB, (4, CONTEXT), generator=torch.Generator().manual_seed(5))


def gathered_logits(join, recipe):
    """Logits in training mode, also of rows that the ranks of a stream cannot divide evenly."""
    with join(recipe) as ranks:
        model = unwrap(built(ranks, recipe)[0])
        logits = [model(tokens()[:, :length]) for length in (CONTEXT, CONTEXT - 1, 1)]
        return logits[0].requires_grad, [one.detach() for one in logits]


@pytest.mark.dist
def test_logits_of_a_divided_head_are_whole_and_have_no_gradient():
    """A loss of their own on them would have wrong gradients (p190746, m7452, finding 2)."""
    [(_, wanted)] = run_ranks(gathered_logits, 1, settings("fp64", "single", **NEW))
    recipe = settings("fp64", "ddp", **NEW, tensor=2)
    for needs_gradient, logits in run_ranks(gathered_logits, 2, recipe):
        assert not needs_gradient
        torch.testing.assert_close(logits, wanted, rtol=1e-9, atol=1e-12)


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


def test_gathered_keys_give_every_rank_equal_work():
    work = []
    for _, here in parts(64, 1, 4, 1):
        work.append(sum(place + 1 for place in here.places.tolist()))
    assert len(set(work)) == 1
