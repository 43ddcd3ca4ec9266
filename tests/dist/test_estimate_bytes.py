"""The plan's bytes of a step in each dimension, against the calls of real steps on real ranks."""

from collections import Counter

import pytest
from harness import recipe as make_recipe
from harness import run_ranks
from meters import sent_in_a_step

from windlass.estimate.rank import layout_of, ranks_of
from windlass.estimate.step import work_of
from windlass.recipe import Recipe, dotted

VOCAB = 64
MODEL = {"layers": 4, "heads": 4, "width": 32, "context": 16}
UNITS = {"model__width": 256}  # FSDP2 has two units of two blocks
FEW_KEYS = {"model__kv_heads": 1, "model__position": "rope", "model__tie_head": False}
SELECTIVE = {"parallel__activation_checkpointing": "selective"}
FULL = {"parallel__activation_checkpointing": "full"}


def recipe(changes) -> Recipe:
    """A step of two micro-batches or more, with sizes that every layout divides."""
    train = {"global_batch": 8, "micro_batch": 2, "precision": "fp32", "steps": 2}
    sections = {"model": MODEL, "train": train, "data": {"source": "none", "tokenizer": "char"}}
    return make_recipe(**dotted(sections) | changes)


def counted(join, recipes):
    return [sent_in_a_step(join, recipe, VOCAB) for recipe in recipes]


def check(world, cells):
    """Every rank of each cell sends what the plan says of its stage."""
    recipes = [recipe(cell) for cell in cells]
    for per_rank in run_ranks(counted, world, recipes, timeout=120):
        for cell, r, (stage, sent) in zip(cells, recipes, per_rank, strict=True):
            rank, plan = ranks_of(r.model, VOCAB, layout_of(r, world))[stage], Counter[str]()
            for one in work_of(rank, r.parallel.bucket_mb).collectives:
                plan[one.link] += one.calls * one.size
            assert sent == {link: round(size) for link, size in plan.items()}, (cell, stage)


def on(**sizes):
    return {f"parallel__{key}": value for key, value in sizes.items()}


@pytest.mark.dist
def test_bytes_of_two_ranks():
    cells = [
        on(strategy="ddp"),
        on(strategy="full_shard"),
        on(strategy="full_shard") | UNITS,
        on(strategy="full_shard", reduce_each_micro_batch=False) | UNITS,
        on(strategy="full_shard") | UNITS | {"model__tie_head": False},
        on(strategy="shard_grad_op") | UNITS,
        on(tensor=2),
        on(context=2),  # exchanges heads
        on(context=2) | FEW_KEYS,  # gathers keys
        on(context=2, strategy="shard_optim"),
        on(pipeline=2),
    ]
    check(2, cells)


@pytest.mark.dist
def test_bytes_of_four_ranks():
    cells = [
        on(tensor=2, strategy="full_shard"),
        on(tensor=2, pipeline=2),
        on(tensor=2, context=2) | FEW_KEYS | {"model__kv_heads": 2},
    ]
    check(4, cells)


@pytest.mark.dist
@pytest.mark.full
@pytest.mark.parametrize("again", [{}, SELECTIVE, FULL], ids=["none", "selective", "full"])
def test_bytes_of_other_layouts(again):
    cells = [
        on(tensor=4),
        on(context=2, pipeline=2),
        on(context=2, strategy="full_shard"),
        on(pipeline=2, strategy="full_shard"),
        on(pipeline=2, strategy="shard_grad_op") | {"model__tie_head": False},
        on(strategy="hybrid_shard", shard_size=2),
        on(tensor=2) | {"model__dropout": 0.1},
    ]
    check(4, [cell | again for cell in cells])
