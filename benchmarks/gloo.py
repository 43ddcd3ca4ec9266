"""Collectives over gloo, and a step of each strategy with torch's own and with ours: `python benchmarks/gloo.py [WORLD]`.

Everything is measured in turns, and the best of several rounds is given: on a shared machine only ratios are to be trusted.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "dist"))

import torch
import torch.distributed as dist
from harness import Join, recipe, run_ranks

from windlass.model.build import build_model
from windlass.model.gpt import initialise
from windlass.parallel import gloo
from windlass.parallel.parallelize import parallelize

ELEMENTS, ROUNDS = 16 * 2**20, 5


def timed(work: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The best time of each in milliseconds, taken in turns."""
    best: dict[str, float] = {}
    for _ in range(rounds):
        for name, run in work.items():
            dist.barrier()
            start = time.perf_counter()
            run()
            best[name] = min(best.get(name, float("inf")), 1e3 * (time.perf_counter() - start))
    return best


def collectives(join: Join) -> dict[str, float]:
    with join(recipe(parallel__strategy="full_shard")) as ranks:
        group, world = dist.distributed_c10d._get_default_group(), ranks.world
        gather, reduce = gloo.AllGather(), gloo.ReduceScatter()
        whole, part = torch.randn(ELEMENTS), torch.empty(ELEMENTS // world)
        return timed(
            {
                "all-reduce": lambda: dist.all_reduce(whole),
                "reduce-scatter, torch": lambda: dist.reduce_scatter_single(part, whole),
                "reduce-scatter, ours": lambda: reduce(part, whole, group, dist.ReduceOp.SUM),
                "all-gather, torch": lambda: dist.all_gather_single(whole, part),
                "all-gather, ours": lambda: gather(whole, part, group),
            },
            ROUNDS,
        )


def steps(join: Join) -> dict[str, float]:
    """Forward and backward of the 10.7M character model on 2 x 256 tokens a rank."""
    work: dict[str, Callable[[], object]] = {}
    settings = recipe(parallel__strategy="full_shard", model__layers=6, model__heads=6, model__width=384)
    with join(settings) as ranks:
        tokens = torch.randint(0, 65, (2, 256))
        for name, strategy, own in (
            ("ddp", "ddp", True),
            ("full_shard, torch", "full_shard", False),
            ("full_shard, ours", "full_shard", True),
        ):
            ranks.strategy = strategy
            model = build_model(settings, 65, device="cpu")
            initialise(model, 0)
            wrapped = parallelize(model, ranks, settings)
            if not own:
                from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

                for module in wrapped.modules():
                    if hasattr(module, "set_custom_all_gather"):
                        module.set_custom_all_gather(DefaultAllGather())
                        module.set_custom_reduce_scatter(DefaultReduceScatter())
            work[name] = lambda wrapped=wrapped: wrapped(tokens, tokens).backward()
        return timed(work, ROUNDS)


def main() -> None:
    world = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for title, measure in (("64 MB of float32", collectives), ("10.7M parameters, one step", steps)):
        print(f"{title}, {world} ranks, ms:")
        for name, ms in run_ranks(measure, world, timeout=300)[0].items():
            print(f"  {name:24} {ms:8.1f}")


if __name__ == "__main__":
    main()
