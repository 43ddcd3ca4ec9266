"""The plan's memory and bytes of a step in four layouts, beside real steps of CPU ranks: tables in
Markdown.

    python benchmarks/layout_cost.py --only memory
    python benchmarks/layout_cost.py --only bytes

A GPT of 12.3 million parameters (148 MB of weights and optimizer state), in fp32, with two
micro-batches of four sequences on each data rank. Memory is the peak of the tensors of the fullest
rank, as in benchmarks/plan_memory.py. Bytes are the buffers that the fullest rank gives to
collectives and messages in one step, by dimension; losses, norms and counts are left out.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent.parent / "tests"
sys.path[:0] = [str(TESTS / "dist"), str(TESTS)]

from byte_counter import sent_in_a_step  # noqa: E402 - the tests come first in the path
from harness import run_ranks  # noqa: E402
from memory_meter import measured  # noqa: E402

from windlass.estimate.memory import memory  # noqa: E402
from windlass.estimate.rank import layout_of  # noqa: E402
from windlass.estimate.work import LINKS, works  # noqa: E402
from windlass.recipe import Recipe  # noqa: E402

VOCAB, MICRO, ACCUMULATION = 4096, 4, 2
MODEL = {"layers": 6, "heads": 8, "width": 384, "context": 256}
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, {"tensor": 2}),
    (2, {"context": 2}),
    (2, {"pipeline": 2}),
    (4, {"tensor": 2, "strategy": "full_shard"}),
]


def recipe(settings: dict[str, Any], data_ranks: int) -> Recipe:
    """The recipe of a layout."""
    keys: dict[str, Any] = {f"model.{key}": value for key, value in MODEL.items()}
    keys |= {f"parallel.{key}": value for key, value in settings.items()}
    keys |= {"train.precision": "fp32", "train.micro_batch": MICRO, "parallel.device": "cpu"}
    keys |= {"train.global_batch": MICRO * ACCUMULATION * data_ranks}
    return Recipe().replace(keys | {"parallel.startup_timeout_seconds": 120})


def memory_row(r: Recipe, world: int) -> list[str]:
    """Predicted and measured megabytes of the fullest rank, and their difference."""
    ranks = run_ranks(measured, world, r, VOCAB, MICRO, ACCUMULATION, timeout=600)
    _, peak = max(ranks, key=lambda rank: rank[1])
    plan = memory(r.model, VOCAB, layout_of(r, world), r.optim.kind).total
    return [f"{plan / 1e6:,.1f}", f"{peak / 1e6:,.1f}", f"{100 * (plan / peak - 1):+.1f} %"]


def bytes_rows(r: Recipe, world: int) -> list[list[str]]:
    """For each dimension in use: its name, and predicted and counted bytes of the fullest rank."""
    ranks = [sent for _, sent in run_ranks(sent_in_a_step, world, r, VOCAB, timeout=600)]
    every = works(r.model, VOCAB, layout_of(r, world), r.parallel.bucket_mb)
    plans = [work.bytes_sent() for work in every]
    rows = []
    for link in LINKS:
        plan = max(one[link] for one in plans)
        counted = max(sent.get(link, 0) for sent in ranks)
        if plan or counted:
            rows.append([f"`{link}`", f"{plan:,}", f"{counted:,}"])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("memory", "bytes"), help="the table to print")
    given = parser.parse_args()
    heads = {
        "memory": ("layout", "ranks", "predicted MB", "measured MB", "off by"),
        "bytes": ("layout", "ranks", "dimension", "predicted bytes", "counted bytes"),
    }
    for table in [given.only] if given.only else heads:
        columns = heads[table]
        aligned = ["---:" if "by" in c or "MB" in c or c == "ranks" else "---" for c in columns]
        print(f"| {' | '.join(columns)} |\n|{'|'.join(aligned)}|", flush=True)
        for world, settings in LAYOUTS:
            shown = " ".join(f"parallel.{key}={value}" for key, value in settings.items())
            data_ranks = 2 if "strategy" in settings else 1
            r = recipe(settings, data_ranks)
            rows = [memory_row(r, world)] if table == "memory" else bytes_rows(r, world)
            for row in rows:
                print(f"| {' | '.join([f'`{shown}`', str(world), *row])} |", flush=True)
        print()


if __name__ == "__main__":
    main()
