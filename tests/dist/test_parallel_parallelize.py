"""Wrapped models: the order in which they add gradients, their precision, and their first weights.

`test_parallel_equivalence.py` compares their trainings with one process, and
`test_estimate_bytes.py` how often they exchange gradients with the plan.
"""

from typing import Any

import pytest
import torch
from equivalence import gathered
from harness import Join, recipe, run_ranks
from toy import micro_batch, toy

from windlass.model.sharding import unwrap
from windlass.parallel import collectives
from windlass.parallel.parallelize import LOW, autocast, parallelize, sync_gradients

pytestmark = pytest.mark.dist

STRATEGIES = ("ddp", "full_shard", "shard_grad_op", "hybrid_shard")


def same_pass_twice(join: Join) -> list[torch.Tensor]:
    """The gradients of the first two passes of DDP over the same samples, in float32."""
    settings = recipe(parallel__strategy="ddp")
    with join(settings) as ranks:
        model = parallelize(toy(), ranks, settings)
        assert all(p.grad is None for p in model.parameters())
        grads = []
        for _ in range(2):
            model(*micro_batch(join.rank)).backward()
            grads.append(
                torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])
            )
            model.zero_grad()
    return grads


def test_the_first_step_after_a_start_adds_gradients_as_later_ones_do():
    """DDP by itself has other buckets in its first pass, and three ranks round by the place."""
    for first, second in run_ranks(same_pass_twice, 3):
        assert torch.equal(first, second) and first.any()


def differing(join: Join) -> dict[str, bool]:
    """Whether a user's model, made differently on each rank, comes out as rank 0's."""
    same, wanted = {}, toy()
    for strategy in ("ddp", "full_shard", "hybrid_shard"):
        settings = recipe(parallel__strategy=strategy)
        with join(settings) as ranks:
            mine = toy(join.rank)
            mine.shift += join.rank
            model = unwrap(parallelize(mine, ranks, settings))
            values = {name: gathered(p) for name, p in model.named_parameters()}
            equal = [torch.equal(values.pop(name), p) for name, p in wanted.named_parameters()]
            equal += [torch.equal(mine.shift, wanted.shift), not values]
            same[strategy] = all(equal) and mine.head.weight is mine.embedding.weight
    return same


def test_a_model_made_differently_on_each_rank_becomes_rank_0s():
    assert run_ranks(differing, 2) == [{"ddp": True, "full_shard": True, "hybrid_shard": True}] * 2


def low_precision(join: Join) -> dict[tuple[str, str], Any]:
    results = {}
    for precision in ("fp32", "bf16", "fp16"):
        for strategy in STRATEGIES if join.world > 1 else ("single", "rounded"):
            used = "single" if strategy == "rounded" else strategy
            settings = recipe(train__precision=precision, parallel__strategy=used)
            with join(settings) as ranks:
                bare = toy()
                for p in bare.parameters() if strategy == "rounded" and precision != "fp32" else ():
                    p.data = p.data.to(LOW[precision]).float()
                model = parallelize(bare, ranks, settings)
                loss = torch.zeros(())
                numbers = range(join.rank, 4, join.world)
                for k in numbers:
                    with sync_gradients(model, ranks.strategy, k == numbers[-1]):
                        with autocast(settings, ranks.device):
                            part = model(*micro_batch(k)) / 20
                        part.backward()
                    loss += part.detach()
                gradients = [p.grad for p in model.parameters() if p.grad is not None]
                kinds = {tensor.dtype for tensor in [*model.parameters(), *gradients]}
                grads = torch.cat([gathered(grad).flatten() for grad in gradients])
                results[precision, strategy] = (
                    float(collectives.norm_and_loss([], loss, ranks.mesh)[1]),
                    grads,
                    kinds,
                )
    return results


def test_strategies_agree_in_low_precision_and_keep_master_weights():
    one, two = run_ranks(low_precision, 1)[0], run_ranks(low_precision, 2)[0]
    exact_loss, exact_grads, _ = one["fp32", "single"]
    for (precision, strategy), (loss, grads, kinds) in two.items():
        # FSDP2 gathers in low precision what autocast does not round: embeddings, gains and biases
        # of norms.
        wanted_loss, wanted_grads, _ = one[precision, "single" if strategy == "ddp" else "rounded"]
        assert kinds == {torch.float32}
        assert loss == pytest.approx(wanted_loss, rel=1e-6), (precision, strategy)
        # and it rounds their gradients once
        rounded = {"fp32": 1e-6, "bf16": 2**-9, "fp16": 2**-11}[precision]
        tolerance = 1e-6 if strategy == "ddp" else rounded
        distance = (grads - wanted_grads).norm()
        assert distance <= tolerance * wanted_grads.norm(), (precision, strategy)
        if precision != "fp32":
            assert not torch.equal(grads, exact_grads)  # it does compute in low precision
            assert loss == pytest.approx(exact_loss, rel=2e-2)


def embeddings_gradient(join: Join, world_strategy: str) -> torch.Tensor:
    """The gradient of the embedding of a token that occurs 2,000 times, untied from the head."""
    settings = recipe(train__precision="bf16", parallel__strategy=world_strategy)
    with join(settings) as ranks:
        model = parallelize(toy(tied=False), ranks, settings)
        tokens = torch.ones(2, 1000 // join.world, dtype=torch.int64)
        with sync_gradients(model, ranks.strategy, True), autocast(settings, ranks.device):
            loss = model(tokens, tokens + 1)
        loss.backward()
        return gathered(unwrap(model).embedding.weight.grad)[1].clone()


def test_gradients_of_a_frequent_token_are_added_in_float32():
    (wanted,) = run_ranks(embeddings_gradient, 1, "single")
    for grad in run_ranks(embeddings_gradient, 2, "full_shard"):
        # Sums in bf16 would lose almost all of it.
        assert (grad - wanted).norm() <= 2**-6 * wanted.norm()
