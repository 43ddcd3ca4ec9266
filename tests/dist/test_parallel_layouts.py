"""Layouts with tensor and context parallelism against one process, in float64, to 1e-9."""

import pytest
from equivalence import BATCH, distance, reference, settings, trained
from harness import run_ranks

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
            assert max(distance(outcome, wanted[heads])) < 1e-9, (cell, distance(outcome, wanted[heads]))
