"""Collectives over gloo, and whole steps of `full_shard`, with torch's own and with ours: `python benchmarks/gloo.py [WORLD]`.

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
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from windlass.model.build import build_model
from windlass.model.gpt import initialise
from windlass.parallel.collectives import AllGather, ReduceScatter, global_grad_norm
from windlass.parallel.parallelize import parallelize, sync_gradients

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
        gather, reduce = AllGather(), ReduceScatter()
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


def steps(join: Join, accumulation: int, rows: int) -> dict[str, float]:
    """Whole steps of the 10.7M character model on ROWS x 256 tokens a rank and micro-batch: the best and the median of 8."""
    settings = recipe(
        parallel__strategy="full_shard",
        parallel__timeout_seconds=600,
        model__layers=6,
        model__heads=6,
        model__width=384,
    )
    seconds: dict[str, list[float]] = {"torch": [], "ours": []}
    with join(settings) as ranks:
        tokens = torch.randint(0, 65, (rows, 256))

        def make(own: bool) -> Callable[[], object]:
            model = build_model(settings, 65, device="cpu")
            initialise(model, 0)
            wrapped = parallelize(model, ranks, settings)
            for module in () if own else wrapped.modules():
                if isinstance(module, FSDPModule):
                    module.set_custom_all_gather(DefaultAllGather())
                    module.set_custom_reduce_scatter(DefaultReduceScatter())
            optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-4, fused=True)

            def step() -> None:
                for i in range(accumulation):
                    with sync_gradients(wrapped, i == accumulation - 1):
                        wrapped(tokens, tokens).backward()
                global_grad_norm(wrapped.parameters(), ranks)
                optimizer.step()
                optimizer.zero_grad()

            return step

        work = {"torch": make(False), "ours": make(True)}
        for turn in range(9):
            for name in sorted(work, reverse=bool(turn % 2)):
                dist.barrier()
                start = time.perf_counter()
                work[name]()
                dist.barrier()
                seconds[name].append(1e3 * (time.perf_counter() - start))
    shown = {name: sorted(times[1:]) for name, times in seconds.items()}  # the first turn warms up
    return {f"{name}, {what}": x[i] for name, x in shown.items() for what, i in (("best", 0), ("median", len(x) // 2))}


def main() -> None:
    world = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    cases = [("64 MB of float32", collectives, ())]
    for accumulation, rows in ((1, 16), (2, 16), (1, 4)):
        cases.append(
            (f"10.7M parameters, a step of {accumulation} x {rows} x 256 tokens a rank", steps, (accumulation, rows))
        )
    for title, measure, arguments in cases:
        print(f"{title}, {world} ranks, ms:")
        for name, ms in run_ranks(measure, world, *arguments, timeout=600)[0].items():
            print(f"  {name:24} {ms:8.1f}")


if __name__ == "__main__":
    main()
