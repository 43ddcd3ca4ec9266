"""`train.stream = "bf16"`: the blocks get and give a stream in bf16, in every strategy and layout, and
the losses are those of one process within its rounding."""

import pytest
import torch
from equivalence import built, settings, train
from harness import Join, recipe, run_ranks

from windlass.errors import UserError
from windlass.model.build import build_model
from windlass.parallel.dist import init_ranks
from windlass.parallel.env import DistEnv
from windlass.parallel.parallelize import parallelize, unwrap
from windlass.recipe import Recipe

NEW = {"model__position": "rope", "model__norm": "rmsnorm", "model__activation": "swiglu"}
CELLS = [
    ("ddp", {}),
    ("shard_optim", {}),
    ("full_shard", {"activation_checkpointing": "selective"}),
    ("full_shard", {"tensor": 2}),
    ("ddp", {"tensor": 2, "sequence": False}),
    ("ddp", {"context": 2}),
    ("ddp", {"pipeline": 2}),
]


def outcomes(join: Join, recipes: list[Recipe]) -> list[tuple[list[float], list[float], set]]:
    """Losses and gradient norms of some steps, and the types of what the blocks get and give."""
    results = []
    for one in recipes:
        with join(one) as ranks:
            model, trainer = built(ranks, one)
            types: set[torch.dtype] = set()
            for block in unwrap(model).blocks():
                block.register_forward_hook(
                    lambda _, args, out, types=types: types.update([args[0].dtype, out.dtype])
                )
            results.append((*train(ranks, one, trainer, range(3)), types))
    return results


@pytest.mark.dist
@pytest.mark.parametrize("parts", [{}, NEW])
def test_the_stream_is_low_in_every_strategy(parts):
    low = {"train__stream": "bf16", **parts}
    one = [settings("fp32", "single", **parts), settings("bf16", "single", **low)]
    [[(exact, *_), (losses, norms, types)]] = run_ranks(outcomes, 1, one)
    assert types == {torch.bfloat16} and losses != exact
    assert losses == pytest.approx(exact, rel=2e-3)
    recipes = []
    for strategy, layout in CELLS:
        keys = {f"parallel__{key}": value for key, value in layout.items()}
        divides = {"tensor", "context", "pipeline"} & set(layout)
        recipes.append(settings("bf16", strategy, 1 if divides else 2, 2, **keys, **low))
    for per_rank in run_ranks(outcomes, 2, recipes, timeout=120):
        for cell, (mine, sizes, kinds) in zip(CELLS, per_rank, strict=True):
            assert kinds == {torch.bfloat16}, cell
            assert mine == pytest.approx(losses, rel=2e-3), cell
            assert sizes == pytest.approx(norms, rel=3e-2), cell


def test_the_stream_has_the_precision_of_the_arithmetic_and_other_models_are_refused():
    with init_ranks(DistEnv(), low := recipe(train__stream="bf16")) as ranks:
        assert not parallelize(build_model(low, 64), ranks, low).low_stream  # fp32 on a CPU
        low = low.replace("train.precision=bf16")
        assert parallelize(build_model(low, 64), ranks, low).low_stream
        with pytest.raises(UserError, match=r"train\.stream.*Linear has its own"):
            parallelize(torch.nn.Linear(2, 2), ranks, low)
    with pytest.raises(UserError, match=r'train\.stream: .*"bf16", not "fp16": write "fp32"'):
        recipe(train__stream="bf16", train__precision="fp16")
    with pytest.raises(UserError, match=r"train\.stream: a model of transformers"):
        recipe(train__stream="bf16", model__kind="hf", model__name="gpt2")
