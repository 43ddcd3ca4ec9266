"""Our GPT in low precision under each strategy, with either normalisation: it runs, and agrees with one process."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from harness import recipe, run_ranks

from windlass.model.build import build_model
from windlass.model.init import initialise
from windlass.parallel import reduce
from windlass.parallel.wrap import autocast, sync_gradients, unwrap, wrap


def first_step(join, strategy: str, norm: str, precision: str):
    made = recipe(
        model__layers=2, model__heads=2, model__width=32, model__context=16, model__vocab=64, model__norm=norm,
        train__precision=precision, parallel__strategy=strategy,
    )  # fmt: skip
    with join(made) as ranks:
        model = wrap(build_model(made, 64), ranks, made)
        initialise(unwrap(model), 7)
        draw = torch.from_numpy(np.random.default_rng(0).integers(0, 64, (4, 17)))
        mine = draw.chunk(ranks.world)[ranks.rank]
        with sync_gradients(model, True):
            with autocast(made, ranks.device):
                loss = model(mine[:, :-1], mine[:, 1:]) / 64
            loss.backward()
        norm_ = float(reduce.global_grad_norm(model.parameters(), ranks))
        return float(reduce.sum_over_ranks(loss.detach().clone(), ranks)), norm_


@pytest.mark.dist
@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_agrees_with_float32_under_every_strategy(norm, precision):
    (plain,) = run_ranks(first_step, 1, "single", norm, "fp32")
    for strategy in ("ddp", "full_shard", "shard_grad_op"):
        for loss, size in run_ranks(first_step, 2, strategy, norm, precision):
            assert loss == pytest.approx(plain[0], rel=5e-3), strategy
            assert size == pytest.approx(plain[1], rel=3e-2), strategy
            assert loss != plain[0], "the arithmetic is not low at all"
