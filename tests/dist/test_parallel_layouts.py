"""Layouts with tensor and context parallelism against one process, in float64, to 1e-9."""

import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from equivalence import VOCAB, built, distance, each, logits_of, reference, settings, train, trained
from harness import run_ranks
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

import hf_fixtures
from windlass.checkpoint.choose import choose_checkpoint
from windlass.checkpoint.load import open_checkpoint
from windlass.checkpoint.save import Writer
from windlass.checkpoint.state_dict import gather_shard, named_state, restore
from windlass.errors import UserError
from windlass.model.build import build_model
from windlass.model.gpt import initialise
from windlass.model.share import cut_of, local_part, whole_shape
from windlass.parallel.parallelize import parallelize, unwrap

OLD = {"model__head_bias": True, "model__context": 12}
NEW = {
    "model__position": "rope",
    "model__norm": "rmsnorm",
    "model__activation": "swiglu",
    "model__ff_width": 24,
    "model__heads": 4,
    "model__kv_heads": 2,
    "model__qk_norm": True,
    "model__tie_head": False,
    "model__logit_cap": 5.0,
    "model__attn_bias": False,
}
PARTS = {"old": OLD, "new": NEW}
LAYOUTS = {
    2: [{"tensor": 2}, {"tensor": 2, "sequence": False}, {"context": 2}],
    4: [
        {"tensor": 4},
        {"context": 4},
        {"tensor": 2, "context": 2},
        {"tensor": 2},
        {"context": 2},
    ],
}
STRATEGIES = ("ddp", "shard_optim", "full_shard")


def initial_values(join, layouts):
    """For each layout: whether weights are those of a rank alone, and the numbers drawn for them."""
    outcomes, normal = [], torch.Tensor.normal_
    for strategy, layout in layouts:
        more = {f"{'' if '__' in key else 'parallel__'}{key}": x for key, x in layout.items()}
        recipe = settings("fp32", strategy, 1, **{"train__micro_batch": 2, **more})
        with join(recipe) as ranks:
            model = unwrap(parallelize(build_model(recipe, VOCAB), ranks, recipe))
            initialise(model, 3)
            alone, drawn = [local_part(p).clone() for p in model.parameters()], []
            torch.Tensor.normal_ = lambda x, *how, drawn=drawn, **kwargs: normal(
                drawn.append(x.numel()) or x, *how, **kwargs
            )
            try:
                initialise(model, 3, ranks.mesh.loss_group)
            finally:
                torch.Tensor.normal_ = normal
            pairs = zip(alone, map(local_part, model.parameters()), strict=True)
            held = sum(whole_shape(p).numel() for p in model.parameters() if p.dim() > 1)
            outcomes.append((all(torch.equal(*pair) for pair in pairs), sum(drawn), held))
    return outcomes


@pytest.mark.dist
def test_ranks_share_the_work_of_drawing_initial_values(tmp_path):
    """Each number once in all; ranks of `tensor` draw the same numbers, stages draw their own."""
    directory = hf_fixtures.save("llama", tmp_path)
    hf = {"model__kind": "hf", "model__name": str(directory), "model__from_scratch": True}
    layouts = [("ddp", {}), ("full_shard", {}), ("full_shard", hf)]
    for strategy in ("ddp", "full_shard"):
        layouts += [(strategy, {"tensor": 2}), (strategy, {"context": 2})]
    layouts += [("ddp", {"pipeline": 2}), ("hybrid_shard", {"shard_size": 2})]
    for i, outcomes in enumerate(zip(*run_ranks(initial_values, 4, layouts), strict=True)):
        assert all(equal for equal, _, _ in outcomes), layouts[i]
        parts = 2 if {"tensor", "pipeline"} & set(layouts[i][1]) else 1
        drawn, held = (sum(one[n] for one in outcomes) for n in (1, 2))
        assert 0.9 * held <= drawn * 4 / parts <= 1.1 * held, (layouts[i], outcomes)


def cells(join, world: int, parts: str, **more):
    """The outcome of each layout and strategy."""
    outcomes = {}
    for layout in LAYOUTS[world]:
        model = PARTS[parts] | {f"parallel__{key}": value for key, value in layout.items()}
        if parts == "old" and layout.get("tensor", 1) == 4:
            model = model | {"model__heads": 4}
        ranks = layout.get("tensor", 1) * layout.get("context", 1)
        for strategy in STRATEGIES:
            recipe = settings("fp64", strategy, world // ranks, 2, **model, **more)
            outcomes[(*layout.items(), strategy)] = trained(join, recipe)
    return outcomes


@pytest.mark.dist
@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("world", [2, 4])
def test_layouts_in_float64(world, parts):
    wanted = {h: reference(**PARTS[parts] | {"model__heads": h}) for h in (2, 4)}
    for per_rank in run_ranks(cells, world, world, parts, timeout=240):
        for cell, outcome in per_rank.items():
            heads = 4 if parts == "new" or ("tensor", 4) in cell else 2
            assert max(distance(outcome, wanted[heads])) < 1e-9, cell


DROPOUT = {"model__dropout": 0.2, "train__micro_batch": 4}


@pytest.mark.dist
@pytest.mark.parametrize(
    ("parts", "recomputed"),
    [("old", "full"), pytest.param("new", "selective", marks=pytest.mark.full)],
)
def test_dropout_draws_the_masks_of_one_process(parts, recomputed):
    """Attention by heads (`old`) and by gathered keys too, with padding at the end of the parts,
    and with recomputed activations.
    """
    model = PARTS[parts] | {"model__heads": 4} | DROPOUT
    [wanted] = run_ranks(trained, 1, settings("fp64", "single", **model))
    layouts = [{"tensor": 4}, {"context": 4}, {"tensor": 2, "context": 2}, {"tensor": 2}]
    recipes = []
    for layout in layouts:
        keys = {f"parallel__{key}": value for key, value in layout.items()}
        keys["parallel__activation_checkpointing"] = recomputed
        recipes.append(settings("fp64", "ddp", **model, **keys))
    for per_rank in run_ranks(each, 4, recipes, timeout=120):
        for layout, outcome in zip(layouts, per_rank, strict=True):
            assert max(distance(outcome, wanted)) < 1e-9, layout


MUON = {"optim__kind": "muon"}


@pytest.mark.dist
def test_muon_orthogonalises_whole_matrices():
    model = PARTS["new"] | MUON
    [wanted] = run_ranks(trained, 1, settings("fp64", "single", **model))
    kinds = ("ddp", "shard_optim", "full_shard")
    recipes = [settings("fp64", kind, 2, **model, parallel__tensor=2) for kind in kinds]
    for per_rank in run_ranks(each, 4, recipes, timeout=120):
        for kind, outcome in zip(kinds, per_rank, strict=True):
            assert max(distance(outcome, wanted)) < 1e-9, kind


def refused(join):
    for kind in ("Adafactor", "Muon"):
        recipe = settings("fp64", "ddp", parallel__tensor=2, optim__kind=f"torch.optim.{kind}")
        with join(recipe) as ranks, pytest.raises(UserError, match=r"optim\.kind.*parallel"):
            built(ranks, recipe)
    kept = settings("fp64", "ddp", parallel__tensor=2, optim__kind="torch.optim.SGD")
    return trained(join, kept)


@pytest.mark.dist
def test_an_optimizer_that_needs_whole_matrices_is_refused():
    [wanted] = run_ranks(trained, 1, settings("fp64", "single", optim__kind="torch.optim.SGD"))
    for outcome in run_ranks(refused, 2):
        assert max(distance(outcome, wanted)) < 1e-9


@pytest.mark.dist
@pytest.mark.parametrize("parts", PARTS)
def test_logits_and_a_cache_are_those_of_one_process(parts):
    """The tokens do not divide by the ranks, and the vocabulary of 37 does not either."""
    model = PARTS[parts] | {"model__heads": 4}
    [[(wanted, cached)]] = run_ranks(logits_of, 1, [settings("fp64", "single", **model)])
    layouts = [{"tensor": 4}, {"context": 4}, {"tensor": 2}, {"tensor": 2, "context": 2}]
    keys = [{f"parallel__{key}": n for key, n in layout.items()} for layout in layouts]
    recipes = [settings("fp64", "full_shard", **model, **more) for more in keys]
    for per_rank in run_ranks(logits_of, 4, recipes):
        for whole, parts_of_it in per_rank:
            torch.testing.assert_close(whole, wanted, rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(parts_of_it, cached, rtol=1e-9, atol=1e-12)


SAVED = {
    1: [("single", {})],
    2: [
        ("ddp", {"tensor": 2}),
        ("full_shard", {"tensor": 2, "sequence": False}),
        ("shard_optim", {"context": 2}),
    ],
    4: [
        ("full_shard", {"tensor": 2}),
        ("shard_optim", {"tensor": 2}),
        ("ddp", {"tensor": 4}),
        ("hybrid_shard", {"context": 2}),
        ("full_shard", {"tensor": 2, "context": 2}),
    ],
}


def saved_recipes(world: int, kind: str):
    for strategy, layout in SAVED[world]:
        keys = {f"parallel__{key}": value for key, value in layout.items()}
        ranks = layout.get("tensor", 1) * layout.get("context", 1)
        more = {**NEW, **keys, "optim__kind": kind, "train__micro_batch": 2}
        name = "-".join([strategy, *(f"{k}{v}" for k, v in layout.items()), str(world), kind])
        yield name, settings("fp64", strategy, max(1, world // ranks), **more)


def whole_state(model, optimizer):
    """Every tensor of the state, from the pieces of all ranks."""
    tensors = {}
    for name, tensor in named_state(model, optimizer)[0].items():
        cut = cut_of(tensor)
        full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        tensors[name] = (cut.gather(full) if cut else full).clone()
    return tensors


def write(join, folder, kind):
    for name, recipe in saved_recipes(join.world, kind):
        with join(recipe) as ranks:
            model, trainer = built(ranks, recipe)
            train(ranks, recipe, trainer, range(2))
            path = Path(folder, name)
            writer = Writer(path / "checkpoints", ranks.rank, ranks.world, piece_bytes=512)
            state = gather_shard(model, trainer.optimizer, ranks.rank, ranks.world)
            writer.write(2, state, {"step": 2})
            [outcome] = writer.wait()
            assert not outcome.error, outcome
            held = whole_state(model, trainer.optimizer)
            sizes = sum(box.tensor.nbytes for box in state.boxes)
            ranks.all_gather_object("saved", 1)
            if ranks.main:
                torch.save(held, path / "whole.pt")
            total = sum(ranks.all_gather_object("sizes", sizes))
            assert total == sum(t.nbytes for t in held.values())


def read(join, folder, kind):
    """Read every checkpoint in every layout of this world, and make three steps from the last."""
    outcomes = {}
    for name, recipe in saved_recipes(join.world, kind):
        with join(recipe) as ranks:
            model, trainer = built(ranks, recipe)
            for path in sorted(Path(folder).iterdir()):
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.fill_(float("nan"))
                restore(open_checkpoint(choose_checkpoint(path).path), model, trainer.optimizer)
                held, expected = (
                    whole_state(model, trainer.optimizer),
                    torch.load(path / "whole.pt"),
                )
                assert held.keys() == expected.keys()
                for key, tensor in expected.items():
                    assert torch.equal(held[key], tensor), (path.name, name, key)
            outcomes[name] = train(ranks, recipe, trainer, range(2, 5))
    return outcomes


@pytest.mark.dist
@pytest.mark.full
@pytest.mark.timeout(600)  # 72 checkpoints are read
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_every_layout_reads_the_checkpoint_of_every_other(tmp_path, kind):
    more = {"optim__kind": kind, "train__micro_batch": 2}
    [wanted] = run_ranks(trained, 1, settings("fp64", "single", **NEW, **more))
    for world in SAVED:
        run_ranks(write, world, str(tmp_path), kind, timeout=240)
    assert len(list(tmp_path.iterdir())) == sum(map(len, SAVED.values()))
    for world in SAVED:
        for outcomes in run_ranks(read, world, str(tmp_path), kind, timeout=240):
            for cell, pair in outcomes.items():
                for found, expected in zip(pair, wanted, strict=False):
                    assert found == pytest.approx(expected[2:], rel=1e-9), cell


def compiled(join, recipe):
    """Losses of a compiled model; its graphs and their breaks."""
    warnings.simplefilter("ignore")
    torch._dynamo.reset()
    counters.clear()
    graphs, real = CompileCounterWithBackend("eager"), torch.compile
    torch.compile = partial(real, backend=graphs)
    try:
        losses = trained(join, recipe)[0]
    finally:
        torch.compile = real
    return losses, graphs.frame_count, dict(counters["graph_break"])


@pytest.mark.dist
@pytest.mark.parametrize(("layout", "ragged"), [({"tensor": 2}, 2), ({"context": 4}, 0)])
def test_a_compiled_block_is_one_graph_with_its_collectives(layout, ragged):
    """Rows of another length take two more: FSDP2 gives the first block of a unit a view, whose base
    has a varying size. With `context` they take none, because all parts here have one size.
    """
    keys = NEW | {f"parallel__{key}": value for key, value in layout.items()}
    recipe = settings("fp64", "full_shard", 1, 2, **keys, model__layers=4)
    [world] = layout.values()
    plain = run_ranks(trained, world, recipe)
    recipe = recipe.replace({"train.compile": True})
    for losses, graphs, breaks in run_ranks(compiled, world, recipe, timeout=120):
        assert losses == plain[0][0]
        assert (graphs, breaks) == (1 + ragged, {})
