"""Wrapped models: how often they exchange gradients, in which precision, and their first weights.

`test_parallel_equivalence.py` compares their trainings with one process.
"""

import collections
import json
import os
from typing import Any

import pytest
import torch
from equivalence import gathered
from harness import Join, recipe, run_ranks
from toy import micro_batch, toy

from windlass.parallel import collectives
from windlass.parallel.connect import init_ranks
from windlass.parallel.env import DistEnv
from windlass.parallel.parallelize import parallelize, sync_gradients, unwrap
from windlass.parallel.precision import LOW, autocast

pytestmark = pytest.mark.dist

STRATEGIES = ("ddp", "full_shard", "shard_grad_op", "hybrid_shard")
ONCE = "full_shard, reduced once"


def exchanges(join: Join) -> dict[str, list[collections.Counter[str]]]:
    """How many collectives one step makes, with 1 micro-batch and with 4, from the flight recorder."""
    from torch._C._distributed_c10d import _dump_fr_trace_json

    def recorded() -> collections.Counter[str]:
        entries = json.loads(_dump_fr_trace_json(True, False))["entries"]
        assert len(entries) < 8192, "the recorder is a ring: it would forget"
        return collections.Counter(entry["profiling_name"].split(":")[1] for entry in entries)

    os.environ["TORCH_FR_BUFFER_SIZE"] = "8192"
    results = {}
    for case in (*STRATEGIES, ONCE):
        more = {"parallel__reduce_each_micro_batch": False} if case == ONCE else {}
        settings, counts = recipe(parallel__strategy=case.partition(",")[0], **more), []
        with join(settings) as ranks:
            model = parallelize(toy(dtype=torch.float32), ranks, settings)
            for accumulation in (1, 1, 4):
                before = recorded()
                for k in range(accumulation):
                    with sync_gradients(model, ranks.strategy, k == accumulation - 1):
                        model(*micro_batch(k)).backward()
                counts.append(recorded() - before)
        results[case] = counts[1:]
    return results


def test_gradients_are_exchanged_once_a_step_or_after_each_micro_batch():
    for case, counts in run_ranks(exchanges, 2)[0].items():
        reduced = [sum(n for name, n in c.items() if "reduce" in name) for c in counts]
        gathered = [sum(n for name, n in c.items() if "gather" in name) for c in counts]
        assert reduced[0] > 0, case
        # `hybrid_shard` of 2 ranks has shards of one rank each: what is left is the reduction
        # between the shards' replicas.
        assert reduced[1] == (4 if case == "full_shard" else 1) * reduced[0], case
        # ZeRO-2 gathers once for the whole step.
        if case.startswith(("full_shard", "shard_grad_op")):
            assert gathered[1] == (1 if case == "shard_grad_op" else 4) * gathered[0] > 0, case


def same_pass_twice(join: Join) -> list[torch.Tensor]:
    """The gradients of the first two passes of DDP over the same samples, in float32."""
    settings = recipe(parallel__strategy="ddp")
    with join(settings) as ranks:
        model = parallelize(toy(dtype=torch.float32), ranks, settings)
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
    same, wanted = {}, toy(seed=0, dtype=torch.float32)
    for strategy in ("ddp", "full_shard", "hybrid_shard"):
        settings = recipe(parallel__strategy=strategy)
        with join(settings) as ranks:
            mine = toy(seed=join.rank, dtype=torch.float32)
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
                bare = toy(dtype=torch.float32)
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
                    float(collectives.sum_over_ranks(loss, ranks)),
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
        model = parallelize(toy(dtype=torch.float32, tied=False), ranks, settings)
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


@pytest.mark.parametrize("how", ["full", "selective"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_recomputing_changes_no_bit_also_with_dropout(how: str, dropout: float):
    grads = {}
    for way in ("none", how):
        settings = recipe(parallel__strategy="single", parallel__activation_checkpointing=way)
        with init_ranks(DistEnv(), settings) as ranks:
            model = parallelize(toy(dtype=torch.float32, dropout=dropout), ranks, settings)
            torch.manual_seed(7)
            model(*micro_batch(2)).backward()
            model(*micro_batch(3)).backward()
            grads[way] = [p.grad for p in model.parameters() if p.grad is not None]
            grads[way].append(torch.rand(1))  # the generator's state is equal, too
    assert all(torch.equal(a, b) for a, b in zip(grads["none"], grads[how], strict=True))
