"""What `windlass plan` says of memory beside what real steps take, on CPU ranks: a table in
Markdown.

    python benchmarks/plan_memory.py

Measured is the most that tensors took in the third step, on the fullest rank, seen by watching
every operation (what a kernel takes and gives back within one operation is not in it). Resident
memory would also hold Python, PyTorch and what the allocator keeps.
"""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).parent.parent / "tests"
sys.path[:0] = [str(TESTS / "dist"), str(TESTS)]

from harness import run_ranks  # noqa: E402 - the tests come first in the path
from memory_meter import measured  # noqa: E402 - the tests come first in the path

from windlass.estimate.memory import memory  # noqa: E402 - the tests come first in the path
from windlass.estimate.rank import layout_of  # noqa: E402 - the tests come first in the path
from windlass.recipe import Recipe  # noqa: E402 - the tests come first in the path

CASES = [
    ("quickstart", 257, 2, {"parallel.strategy": "full_shard"}),
    ("shakespeare-char", 65, 1, {"train.micro_batch": 4}),
    ("shakespeare-char", 65, 2, {"train.micro_batch": 4}),
    ("c4-30m", 50257, 1, {}),
    ("c4-30m", 50257, 1, {"optim.kind": "muon"}),
    ("c4-30m", 50257, 1, {"parallel.activation_checkpointing": "full"}),
    ("c4-30m", 50257, 2, {}),
    ("c4-30m", 50257, 2, {"parallel.strategy": "shard_optim"}),
    ("c4-30m", 50257, 2, {"parallel.strategy": "shard_grad_op"}),
    ("c4-30m", 50257, 2, {"parallel.strategy": "full_shard"}),
]


def main() -> None:
    """Print a row a case; c4-30m with micro-batches of 4 sequences, 2 of them a step."""
    print("| recipe | ranks | settings | predicted MB | measured MB | off by |")
    print("|---|---:|---|---:|---:|---:|")
    for name, vocab, world, changes in CASES:
        quick = {
            "train.precision": "fp32",
            "parallel.device": "cpu",
            "parallel.startup_timeout_seconds": 120,
        }
        small = (
            {"train.micro_batch": 4, "train.global_batch": 8 * world} if name == "c4-30m" else {}
        )
        r = Recipe.load(name).replace(**(quick | small | changes))
        batch = r.batch(world)
        _, peak = max(
            run_ranks(
                measured,
                world,
                r,
                vocab,
                batch.micro_batch,
                min(batch.accumulation, 2),
                timeout=600,
            )
        )
        guess = memory(r.model, r.model.vocab or vocab, layout_of(r, world), r.optim.kind).total
        shown = " ".join(f"{k}={v}" for k, v in changes.items()) or "as it is"
        print(
            f"| {name} | {world} | {shown} | {guess / 1e6:,.0f} | {peak / 1e6:,.0f} | {100 * (guess / peak - 1):+.1f} % |"
        )


if __name__ == "__main__":
    main()
