"""Float8 on two ranks: every strategy multiplies the same rounded numbers."""

from typing import Any

import pytest
import torch
from harness import Join, recipe, run_ranks
from torch.distributed.tensor import DTensor

from windlass.model.build import build_model
from windlass.model.frozen import Float8Linear
from windlass.model.gpt import initialise
from windlass.parallel import collectives
from windlass.parallel.parallelize import autocast, parallelize, sync_gradients, unwrap

SMALL = {"model__layers": 2, "model__heads": 4, "model__width": 128, "model__context": 16}
FLOAT8: dict[str, Any] = {**SMALL, "train__precision": "float8"}


def gradients(join: Join, strategy: str, rounded: bool) -> tuple[float, list[torch.Tensor]]:
    """Loss and gradients of four micro-batches of one row, which the ranks divide.

    `rounded`: weights start as numbers that bf16 has, as FSDP2 gathers them.
    """
    chosen = recipe(**FLOAT8, parallel__strategy=strategy)
    with join(chosen) as ranks:
        model = parallelize(build_model(chosen, 64), ranks, chosen)
        initialise(unwrap(model), 1)
        assert sum(isinstance(module, Float8Linear) for module in model.modules()) == 8
        if rounded:
            for p in unwrap(model).parameters():
                p.data.copy_(p.data.bfloat16())
        rows = torch.randint(64, (4, 17), generator=torch.Generator().manual_seed(0))
        total, own = torch.zeros(()), range(join.rank, 4, join.world)
        for k in own:
            with sync_gradients(model, ranks.strategy, k == own[-1]):
                with autocast(chosen, ranks.device):
                    loss = model(rows[k : k + 1, :-1], rows[k : k + 1, 1:]) / 64
                loss.backward()
            total += loss.detach()
        grads = [p.grad for p in unwrap(model).parameters() if p.grad is not None]
        assert {grad.dtype for grad in grads} == {torch.float32}
        grads = [g.full_tensor() if isinstance(g, DTensor) else g for g in grads]
        return float(collectives.sum_over_ranks(total, ranks)), [g.clone() for g in grads]


@pytest.mark.dist
@pytest.mark.parametrize("strategy", ["ddp", "full_shard"])
def test_strategies_agree(strategy):
    [(loss, grads)] = run_ranks(gradients, 1, "single", strategy != "ddp")
    # FSDP2 rounds the gradients of a micro-batch to bf16 once.
    tolerance = 1e-6 if strategy == "ddp" else 2**-8
    for found, own in run_ranks(gradients, 2, strategy, False):
        assert found == pytest.approx(loss, rel=1e-6)
        for grad, wanted in zip(own, grads, strict=True):
            assert (grad - wanted).norm() <= tolerance * wanted.norm()
