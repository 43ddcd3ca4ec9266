"""Pipelines against one process, in float64, to 1e-9; micro-batches have different lengths."""

import itertools
import math
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from equivalence import (
    BATCH,
    CONTEXT,
    VOCAB,
    built,
    distance,
    reference,
    rows,
    settings,
    train,
    trained,
)
from harness import run_ranks
from torch import nn

from windlass.checkpoint.choose import choose_checkpoint
from windlass.checkpoint.load import open_checkpoint
from windlass.checkpoint.save import Writer
from windlass.checkpoint.state_dict import gather_shard, restore
from windlass.data.loader import Loader
from windlass.errors import UserError
from windlass.evaluation.generate import Sampling, generate
from windlass.evaluation.likelihood import Continuation, evaluate_loss, log_likelihoods
from windlass.model.build import build_model
from windlass.parallel.parallelize import counted, parallelize, unwrap
from windlass.parallel.pipeline import needs, order, split_blocks, timetable
from windlass.recipe.network import ModelSettings

LAYERS = 5
TIED = {"model__layers": LAYERS, "model__head_bias": True}
UNTIED = {
    "model__layers": LAYERS,
    "model__tie_head": False,
    "model__position": "rope",
    "model__norm": "rmsnorm",
    "model__activation": "swiglu",
    "model__ff_width": 24,
}
MODELS = {"tied": TIED, "untied": UNTIED}
TWO, FOUR = {"pipeline": 2}, {"pipeline": 4}
INTERLEAVED = {"pipeline": 2, "pipeline_chunks": 2}
CELLS = {  # world: strategy, layout
    2: [
        *(("ddp", layout) for layout in (TWO, INTERLEAVED)),
        *(("full_shard", layout) for layout in (TWO, INTERLEAVED)),
    ],
    4: [
        *((s, TWO) for s in ("ddp", "shard_optim", "full_shard", "shard_grad_op", "hybrid_shard")),
        *((s, INTERLEAVED) for s in ("ddp", "full_shard", "shard_grad_op", "hybrid_shard")),
        ("ddp", FOUR),
        *((s, TWO | {"tensor": 2}) for s in ("shard_optim", "full_shard")),
        *((s, TWO | {"context": 2}) for s in ("ddp", "full_shard")),
    ],
}


def pipelined(strategy: str, layout, world: int, accumulation: int = 4, **more):
    keys = {f"parallel__{key}": value for key, value in layout.items()}
    ranks = math.prod(size for key, size in layout.items() if key != "pipeline_chunks")
    return settings("fp64", strategy, world // ranks, accumulation, **keys, **more)


def every(join, recipes):
    return [trained(join, recipe) for recipe in recipes]


def ends_of(join, recipe):
    """Whether this rank holds a tied table, and whether the mesh knows the group that shares it."""
    with join(recipe) as ranks:
        ends = unwrap(built(ranks, recipe)[0]).pipeline.ends
        return ends is not None, any(group is ends for group in ranks.mesh.groups())


@pytest.mark.dist
def test_the_mesh_sets_the_time_limit_of_the_group_of_a_tied_table_too():
    found = run_ranks(ends_of, 4, pipelined("ddp", FOUR, 4, **TIED))
    assert found == [(True, True), (False, False), (False, False), (True, True)]


def assert_equal(per_rank, wanted, cells) -> None:
    """All ranks log what one process logs, and together they hold its parameters."""
    for number, cell in enumerate(cells):
        names = set[str]()
        for outcomes in per_rank:
            losses, norms, own = outcomes[number]
            names |= own.keys()
            assert own.keys() < wanted[2].keys(), cell
            held = {name: wanted[2][name] for name in own}
            assert max(distance((losses, norms, own), (*wanted[:2], held))) < 1e-9, cell
        assert names == wanted[2].keys(), cell


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    """A model's settings, and its losses, norms and parameters in one process."""
    outcome = reference(**MODELS[request.param])
    assert min(outcome[1]) > 0.5  # every step clips, by the norm over all stages
    return MODELS[request.param], outcome


@pytest.mark.dist
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    "model", ["tied", pytest.param("untied", marks=pytest.mark.full)], indirect=True
)
def test_every_strategy_and_schedule_in_float64(model, world):
    more, wanted = model
    recipes = [pipelined(strategy, layout, world, **more) for strategy, layout in CELLS[world]]
    assert_equal(run_ranks(every, world, recipes, timeout=240), wanted, CELLS[world])


@pytest.mark.dist
def test_dropout_draws_the_masks_of_one_process():
    more = {**TIED, "model__dropout": 0.1, "train__micro_batch": 2}
    [wanted] = run_ranks(trained, 1, settings("fp64", "single", **more))
    assert distance(wanted, reference(**TIED))[0] > 1e-3
    cells = [("ddp", TWO), ("full_shard", INTERLEAVED)]
    checkpointed = {"parallel__activation_checkpointing": "full"}
    recipes = [pipelined(*cell, 2, **more, **checkpointed) for cell in cells]
    assert_equal(run_ranks(every, 2, recipes, timeout=120), wanted, cells)


def compiled(join, recipes):
    warnings.simplefilter("ignore")  # Dynamo's own
    torch.compile = partial(torch.compile, backend="eager")
    return every(join, recipes)


@pytest.mark.dist
@pytest.mark.full
def test_compiled_and_selectively_checkpointed_blocks(model):
    more, wanted = model
    more = more | {"train__compile": True, "parallel__activation_checkpointing": "selective"}
    recipes = [pipelined("full_shard", INTERLEAVED, 2, **more)]
    assert_equal(run_ranks(compiled, 2, recipes, timeout=280), wanted, [INTERLEAVED])


SAVED = {  # world: strategy, layout
    1: [("single", {})],
    2: [("ddp", TWO), ("full_shard", INTERLEAVED)],
    4: [("hybrid_shard", TWO | {"tensor": 2}), ("shard_optim", TWO)],
}


def write(join, folder):
    """Two steps and a checkpoint in each layout; returns the size that the manifest will have."""
    totals = []
    for number, cell in enumerate(SAVED[join.world]):
        recipe = pipelined(*cell, join.world, **TIED)
        with join(recipe) as ranks:
            model, trainer = built(ranks, recipe)
            train(ranks, recipe, trainer, range(2))
            writer = Writer(
                Path(folder, f"{join.world}-{number}", "checkpoints"), ranks.rank, ranks.world
            )
            stages = ranks.mesh.sizes.pp
            state = gather_shard(model, trainer.optimizer, ranks.rank, ranks.world, stages)
            writer.write(2, state, {"step": 2})
            [outcome] = writer.wait()
            assert not outcome.error, outcome
            totals.append(sum(ranks.all_gather_object("n", state.nbytes)))
    return totals


def read(join, folder):
    """Three more steps from each checkpoint in each layout."""
    outcomes = []
    for cell in SAVED[join.world]:
        recipe = pipelined(*cell, join.world, **TIED)
        for path in sorted(Path(folder).iterdir()):
            with join(recipe) as ranks:
                model, trainer = built(ranks, recipe)
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.fill_(float("nan"))
                restore(open_checkpoint(choose_checkpoint(path).path), model, trainer.optimizer)
                outcomes.append((cell, path.name, train(ranks, recipe, trainer, range(2, 5))))
    return outcomes


@pytest.mark.dist
def test_a_checkpoint_of_any_layout_continues_in_any_other(tmp_path):
    wanted = reference(**TIED)
    totals = {n for world in SAVED for t in run_ranks(write, world, str(tmp_path)) for n in t}
    assert len(totals) == 1
    for world in SAVED:
        for outcomes in run_ranks(read, world, str(tmp_path), timeout=120):
            for *cell, pair in outcomes:
                for found, expected in zip(pair, wanted, strict=False):
                    assert found == pytest.approx(expected[2:], rel=1e-9), cell


def other_model(join, folder):
    """A checkpoint of a smaller model is rejected, although every stage finds all its names."""
    recipe = pipelined("ddp", TWO, 2, **TIED | {"model__layers": 4})
    with join(recipe) as ranks:
        model, _ = built(ranks, recipe)
        with pytest.raises(UserError, match=r"blocks\.4.*not in this model"):
            restore(open_checkpoint(choose_checkpoint(Path(folder, "1-0")).path), model)
        ranks.all_gather_object("both", 1)


@pytest.mark.dist
def test_a_checkpoint_of_another_model_is_rejected(tmp_path):
    run_ranks(write, 1, str(tmp_path))
    run_ranks(other_model, 2, str(tmp_path))


def measured(join, recipe):
    """Validation loss, likelihoods and texts of the first weights."""
    with join(recipe) as ranks:
        model, trainer = built(ranks, recipe)
        loss = evaluate_loss(model, rows(), ranks, 3, 20)
        endings = [([1, 2, 3], [4, 5]), ([6] * 9, [7, 8, 9]), ([1, 2, 3], [6, 7, 8]), ([3], [2])]
        scores = log_likelihoods(model, [Continuation(*pair) for pair in endings], ranks)
        sampling = Sampling(max_tokens=15, seed=3)
        texts = generate(model, [[1, 2, 3], [5]], sampling, ranks)
        train(ranks, recipe, trainer, range(1))  # an evaluation leaves nothing behind
        return loss, [score.sum for score in scores], texts


@pytest.mark.dist
def test_evaluation_and_texts_on_every_rank_as_in_one_process(model):
    more, _ = model
    [wanted] = run_ranks(measured, 1, settings("fp64", "single", **more))
    cells = [(2, "ddp", TWO), (2, "full_shard", INTERLEAVED), (4, "full_shard", TWO)]
    cells += [(4, "ddp", TWO | {"tensor": 2}), (4, "ddp", TWO | {"context": 2})]
    for world, strategy, layout in cells:
        recipe = pipelined(strategy, layout, world, **more)
        for loss, scores, texts in run_ranks(measured, world, recipe):
            assert loss == pytest.approx(wanted[0], rel=1e-12)
            assert scores == pytest.approx(wanted[1], rel=1e-12)
            assert texts == wanted[2]


def poisoned(join, recipe, stage: int):
    """A step after a weight of one stage became infinite: whether this rank made its update."""
    with join(recipe) as ranks:
        model, trainer = built(ranks, recipe)
        if ranks.mesh.at["pp"] == stage:
            with torch.no_grad():
                next(unwrap(model).parameters()).fill_(float("nan"))
        before = [p.detach().clone() for p in model.parameters()]
        losses, norms = train(ranks, recipe, trainer, range(1))
        after = [p.detach() for p in model.parameters()]
        same = all(
            torch.equal(a.nan_to_num(7), b.nan_to_num(7))
            for a, b in zip(before, after, strict=True)
        )
        return losses, norms, same


@pytest.mark.dist
@pytest.mark.parametrize("stage", [0, 1])
def test_all_stages_skip_a_step_that_is_not_finite(stage):
    recipe = pipelined("ddp", TWO, 2, **UNTIED, train__on_nonfinite="skip")
    for losses, norms, same in run_ranks(poisoned, 2, recipe, stage):
        assert np.isnan(losses).all()
        assert np.isnan(norms).all()
        assert same


def norm_of_one_stage(join, recipe):
    """The gradient of a tied table counts once, and every rank has the norm of all stages."""
    with join(recipe) as ranks:
        model, trainer = built(ranks, recipe)
        names = dict(unwrap(model).named_parameters())
        own = len(counted(model)), len(names)
        batch = next(Loader(rows(), recipe.batch(2), 0, seed=1, kind="sequential", prefetch=0))
        grads = {}
        trainer.optimizer.step = lambda: grads.update(
            {name: p.grad.clone() for name, p in names.items()}
        )
        norm = float(trainer.step(batch, 0.0).grad_norm)
        return own, norm, grads


@pytest.mark.dist
def test_a_tied_table_has_one_gradient_and_counts_once():
    (first, norm, grads), (last, other_norm, others) = run_ranks(
        norm_of_one_stage, 2, pipelined("ddp", TWO, 2, **TIED)
    )
    assert norm == other_norm
    assert first[0] == first[1]
    assert last[0] == last[1] - 1
    torch.testing.assert_close(
        grads["embedding.weight"], others["embedding.weight"], rtol=0, atol=0
    )
    every_grad = (others | grads).values()
    clipped = torch.stack([g.square().sum() for g in every_grad]).sum().sqrt()
    assert float(clipped) == pytest.approx(0.5, rel=1e-5)  # after clipping to grad_clip


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 4)


def rejected(join):
    recipe = pipelined("ddp", TWO, 2, **TIED)
    with join(recipe) as ranks:
        with pytest.raises(UserError, match=r"parallel\.pipeline = 2.*not Own"):
            parallelize(Own(), ranks, recipe)
        frozen = ["blocks.[0-2].*", "embedding.*", "positions.*"]
        recipe = recipe.replace({"model.freeze": frozen, "model.tie_head": False})
        assert split_blocks(recipe.model, VOCAB, 2)[0] == range(3)
        with pytest.raises(UserError, match=r"model\.freeze.*stage 0 of 2"):
            parallelize(build_model(recipe, VOCAB), ranks, recipe)


@pytest.mark.dist
def test_models_without_stages_are_rejected():
    run_ranks(rejected, 2)


def test_recipes_that_cannot_be_a_pipeline_are_rejected_before_the_start():
    with pytest.raises(UserError, match=r"needs 4 or more micro-batches.*micro_batch"):
        settings(parallel__pipeline=4, model__layers=4, train__micro_batch=BATCH // 2)
    with pytest.raises(UserError, match=r"parallel\.pipeline: 6 stages.*5: write at most 2"):
        settings(**TIED, parallel__pipeline=3, parallel__pipeline_chunks=2)
    hf = {"model__kind": "hf", "model__name": "gpt2", "model__context": CONTEXT}
    with pytest.raises(UserError, match=r"parallel\.pipeline: a model of transformers has only"):
        settings(parallel__pipeline=2, train__micro_batch=4).replace(
            {key.replace("__", "."): value for key, value in hf.items()}
            | {"model.layers": 12, "model.vocab": 0}
        )


def test_timetables_have_each_task_once_after_what_it_needs():
    for ranks, chunks, count in itertools.product((2, 3, 4, 8), (1, 2, 3), range(1, 18)):
        ticks, done = timetable(ranks, chunks, count), set()
        for tick in ticks:
            tasks = {task for task in tick if task is not None}
            for task in tasks:
                assert needs(task, ranks * chunks) <= done
                assert tick[task.stage % ranks] == task
            assert not tasks & done
            done |= tasks
        assert len(done) == 2 * ranks * chunks * count
        if chunks == 1 or count % ranks == 0:
            assert len(ticks) == 2 * (count * chunks + ranks - 1)  # no waiting but the bubble
        held, most = 0, 0
        for task in order(0, ranks, chunks, count):
            held += -1 if task.backward else 1
            most = max(most, held)
        if chunks == 1:
            assert most == min(ranks, count)


def test_blocks_are_divided_by_their_cost():
    even = ModelSettings(layers=8, width=64, heads=4, context=64, vocab=100)
    assert split_blocks(even, 100, 2) == [range(4), range(4, 8)]
    assert split_blocks(even, 100, 3) == [range(3), range(3, 6), range(6, 8)]
    assert split_blocks(even.model_copy(update={"layers": 7}), 100, 3)[0] == range(2)
    # The head costs as much as 2.4 blocks.
    assert split_blocks(even, 2000, 2) == [range(5), range(5, 8)]
    assert split_blocks(even, 2000, 4) == [range(2), range(2, 4), range(4, 7), range(7, 8)]
    assert split_blocks(even, 100, 8) == [range(i, i + 1) for i in range(8)]
    for stages in range(1, 9):
        parts = split_blocks(even, 500, stages)
        assert [i for part in parts for i in part] == list(range(8))
