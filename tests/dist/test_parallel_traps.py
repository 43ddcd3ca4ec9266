"""Silent errors that other trainers have had in layouts, each as a test of ours, in float64.

The numbers are of issues: pytorch/pytorch (p), pytorch/torchtitan (t), NVIDIA/Megatron-LM (m),
NVIDIA/TransformerEngine (e), NVIDIA-NeMo/RL (n), allenai/OLMo-core (o). Those of pipelines are in
test_parallel_pipeline.py.
"""

import itertools
import math

import pytest
import torch
from equivalence import CONTEXT, VOCAB, built, gathered, settings
from harness import grad_norm, run_ranks
from test_parallel_layouts import NEW, PARTS

from windlass.model.gpt import GPT
from windlass.model.share import Peers, cut_of
from windlass.parallel import collectives
from windlass.parallel.parallelize import unwrap
from windlass.parallel.tensor import divide_gpt
from windlass.recipe.network import ModelSettings

LAYOUTS = [
    {"tensor": 2, "context": 2},
    {"tensor": 2, "strategy": "full_shard"},
    {"context": 2, "strategy": "shard_optim"},
    {"tensor": 4},
    {"context": 4},
]


def recipes(**model):
    for layout in LAYOUTS:
        keys = {f"parallel__{key}": value for key, value in layout.items()}
        yield settings("fp64", layout.get("strategy", "ddp"), **model, **keys)


def rows(first_label: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Four rows of tokens; the labels before `first_label` are masked."""
    draw = torch.Generator().manual_seed(5)
    tokens, labels = torch.randint(VOCAB, (2, 4, CONTEXT), generator=draw)
    labels[:, :first_label] = -100
    return tokens, labels


def gradients(join, chosen, first_label: int):
    """The loss and every whole gradient of four rows, which data ranks divide."""
    outcomes = []
    tokens, labels = rows(first_label)
    for recipe in chosen:
        with join(recipe) as ranks:
            model, trainer = built(ranks, recipe)
            mesh = ranks.mesh
            mine = slice(mesh.data_rank, None, mesh.data_world)
            loss = model(tokens[mine], labels[mine])
            loss.backward()
            collectives.sum_over_tensor_ranks(trainer.parameters, ranks)
            grads = {}
            for name, parameter in unwrap(model).named_parameters():
                part = parameter.grad
                part.cut = cut_of(parameter)
                grads[name] = gathered(part)
            norm = grad_norm(trainer.parameters, ranks)
            total = collectives.sum_over_ranks(loss.detach(), ranks)
            outcomes.append((float(total), grads, float(norm)))
    return outcomes


@pytest.mark.dist
@pytest.mark.parametrize(("parts", "first_label"), [("old", 0), ("new", 0), ("new", 9)])
def test_every_gradient_is_that_of_one_process(parts, first_label):
    """Not: the loss halved by tp x cp (t3280, t3329) or changed by tp (t1750); a partial gradient
    taken for a whole one (t3412, p129355); a tie lost on the meta device (t2252); replicated norms
    counted tp times in the norm (e715, n3788, p159856); labels that fall to one rank of cp alone
    (m7452, finding 9).
    """
    model = PARTS[parts] | {"model__heads": 4}
    [[(loss, wanted, norm)]] = run_ranks(
        gradients, 1, [settings("fp64", "single", **model)], first_label
    )
    exact = math.sqrt(sum(float(grad.square().sum()) for grad in wanted.values()))
    assert norm == pytest.approx(exact, rel=1e-12)
    for per_rank in run_ranks(gradients, 4, list(recipes(**model)), first_label, timeout=120):
        for layout, (own_loss, grads, own_norm) in zip(LAYOUTS, per_rank, strict=True):
            assert own_loss == pytest.approx(loss, rel=1e-12), layout
            assert own_norm == pytest.approx(norm, rel=1e-12), layout
            assert grads.keys() == wanted.keys()
            for name, grad in wanted.items():
                torch.testing.assert_close(grads[name], grad, rtol=1e-9, atol=1e-12)


def gathered_logits(join, recipe):
    """Logits in training mode, also of rows that the ranks of a stream cannot divide evenly."""
    with join(recipe) as ranks:
        model = unwrap(built(ranks, recipe)[0])
        logits = [model(rows()[0][:, :length]) for length in (CONTEXT, CONTEXT - 1, 1)]
        return logits[0].requires_grad, [one.detach() for one in logits]


@pytest.mark.dist
def test_logits_of_a_divided_head_are_whole_and_have_no_gradient():
    """A loss of their own on them would have wrong gradients (p190746, m7452, finding 2)."""
    [(_, wanted)] = run_ranks(gathered_logits, 1, settings("fp64", "single", **NEW))
    recipe = settings("fp64", "ddp", **NEW, parallel__tensor=2)
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
