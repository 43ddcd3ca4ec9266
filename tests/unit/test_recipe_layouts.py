"""Layouts that a model, a batch or the ranks rule out: what Windlass says, and how it counts."""

import pytest

from helpers import refused
from windlass.recipe import Recipe, RecipeError
from windlass.recipe.strategies import Sizes
from windlass.training.api import check_start, train


def problems(*overrides: str) -> dict[str, str]:
    with pytest.raises(RecipeError) as caught:
        Recipe.load("quickstart", overrides)
    assert len(dict(caught.value.problems)) == len(caught.value.problems), caught.value
    return dict(caught.value.problems)


TENSOR = "parallel.tensor"


@pytest.mark.parametrize(
    ("overrides", "key", "says"),
    [
        ("tensor=2 heads=3 width=96", TENSOR, "write 1, or change model.heads"),
        ("tensor=4 heads=6 width=96", TENSOR, "write 3, or change model.heads"),
        ("tensor=2 ff_width=33", TENSOR, "write 1, or change model.ff_width"),
        ("tensor=8 heads=8 kv_heads=1 width=32", TENSOR, "write 1, or change model.kv_heads"),
        ("tensor=4 heads=12 kv_heads=3 width=96", TENSOR, "write 3, or change model.kv_heads"),
        ("pipeline=8 layers=2", "parallel.pipeline", "write at most 2"),
        ("tensor=2 strategy=single", "parallel.strategy", 'write "auto"'),
        ("pipeline=2 micro_batch=8", "train.micro_batch", "smaller train.micro_batch"),
        ("tensor=2 micro_batch=3", "train.micro_batch", "write 2 or 4"),
        ("context=2 kind=hf", "parallel.context", "write 1"),
    ],
)
def test_a_bad_layout_is_one_problem_with_a_size_that_works(overrides, key, says):
    model = ("heads", "kv_heads", "width", "ff_width", "layers", "kind")
    sections = {**dict.fromkeys(model, "model"), "micro_batch": "train"}
    words = [f"{sections.get(o.partition('=')[0], 'parallel')}.{o}" for o in overrides.split()]
    more = ["model.name=gpt2"] * ("kind=hf" in overrides)
    found = problems(*words, *more)
    assert list(found) == [key] and says in found[key], found


@pytest.mark.parametrize(
    ("world", "layout", "words"),
    [
        (1, {TENSOR: 2}, ["parallel.tensor = 2", "multiple of 2", "has 1", "start 2 ranks"]),
        (3, {TENSOR: 2}, ["multiple of 2", "has 3", "start 2 or 4 ranks", "world=2"]),
        (6, {TENSOR: 2, "parallel.context": 2}, ["multiple of 4", "start 4 or 8 ranks"]),
        (6, {TENSOR: 2}, ["train.global_batch = 8", "3 data ranks", "write 6 or 9"]),
    ],
)
def test_ranks_that_cannot_train_a_recipe_are_refused_before_they_start(world, layout, words):
    recipe = Recipe.load("quickstart", layout)
    with refused(*words):
        check_start(recipe, world)


def test_a_world_that_the_launcher_does_not_have_is_refused(monkeypatch):
    launched = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    for name, value in (launched | {"MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x"}).items():
        monkeypatch.setenv(name, value)
    with refused("world=4", "one of 2", "torchrun"):
        train("quickstart", world=4)


def test_a_users_own_module_is_refused_before_it_starts():
    recipe = Recipe.load("quickstart", {TENSOR: 2})
    with refused("parallel.tensor = 2", "your module", "data parallelism"):
        check_start(recipe, 2, own_model=True)
    check_start(recipe, 2)


def test_a_layout_and_the_place_of_rank_5_in_words():
    for sizes, layout, place in (
        (Sizes(dp_replicate=2, dp_shard=4), "", ""),
        (Sizes(tp=8), "tp 8", "tp 5"),
        (Sizes(2, 2, tp=2), "tp 2 · pp 2", "pp 1, dp 0, tp 1"),
        (Sizes(1, 1, 2, 2, 2), "tp 2 · cp 2", "dp 1, cp 0, tp 1"),
    ):
        assert (sizes.layout, sizes.place(5)) == (layout, place)
    recipe = Recipe.load("quickstart", ["parallel.pipeline=4", "train.global_batch=8"])
    batch = recipe.batch(8)  # a micro-batch for each stage
    assert (batch.data_world, batch.micro_batch, batch.accumulation) == (2, 1, 4)


@pytest.mark.parametrize(
    ("world", "layout", "strategy", "sizes"),
    [
        (2, {TENSOR: 2}, "auto", Sizes(tp=2)),
        (8, {TENSOR: 2, "parallel.context": 2}, "full_shard", Sizes(dp_shard=2, cp=2, tp=2)),
        (8, {TENSOR: 2}, "hybrid_shard", Sizes(dp_replicate=2, dp_shard=2, tp=2)),
        (8, {"parallel.pipeline": 2, TENSOR: 2}, "ddp", Sizes(pp=2, dp_replicate=2, tp=2)),
    ],
)
def test_the_sizes_and_the_batch_of_a_layout(world, layout, strategy, sizes):
    """The samples of a step are divided over the data ranks, not over all ranks."""
    recipe = Recipe.load("quickstart", {**layout, "parallel.strategy": strategy})
    assert recipe.sizes(world) == sizes
    batch = recipe.batch(world)
    assert batch.data_world == sizes.data_world
    assert batch.micro_batch * batch.accumulation * batch.data_world == batch.global_batch
