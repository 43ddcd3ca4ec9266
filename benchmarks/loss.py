"""The loss over a large vocabulary in three ways, and what other objectives add to it.

    python benchmarks/loss.py ways [full|chunked|library] [WIDTH]
    python benchmarks/loss.py objective [WIDTH]

`ways` measures one way in a process, because its peak of memory is the process's. `objective`
compares the loss with and without z-loss and label smoothing: in turns and by CPU time of one
thread, so that a busy machine does not decide; the last column is the median of the ratios to the
first row.
"""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from windlass.model.loss import PLAIN, Objective, cross_entropy_sum
from windlass.processes import keep_freed_memory

Step = Callable[[], float]


def in_turns(rows: dict[str, Step], rounds: int) -> None:
    """Print the time of each row, and its ratio to the first."""
    taken: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(rounds + 2):
        for name, step in rows.items():
            taken[name].append(step())
    first = next(iter(taken.values()))[2:]
    for name, times in taken.items():
        ratio = statistics.median(a / b for a, b in zip(times[2:], first, strict=True))
        print(f"{name:24s} {1e3 * statistics.median(times[2:]):9.1f} ms {ratio:7.3f}")


def objectives(width: int) -> None:
    rows, vocab = 2048, 50257
    x = torch.randn(rows, width, requires_grad=True)
    weight = (0.02 * torch.randn(vocab, width)).requires_grad_()
    labels = torch.randint(vocab, (rows,))

    def timed(objective: Objective) -> Step:
        def step() -> float:
            start = time.process_time()
            cross_entropy_sum(x, weight, labels, objective=objective).backward()
            x.grad = weight.grad = None
            return time.process_time() - start

        return step

    more = {"z-loss": (1e-4, 0.0), "label smoothing": (0.0, 0.1), "both": (1e-4, 0.1)}
    in_turns({"plain": timed(PLAIN)} | {k: timed(Objective(*v)) for k, v in more.items()}, 8)


def losses(how: str, width: int) -> None:
    rows, vocab = 2048, 50257
    x = torch.randn(rows, width, requires_grad=True)
    weight = (0.02 * torch.randn(vocab, width)).requires_grad_()
    labels = torch.randint(vocab, (rows,))
    ways: dict[str, Callable[[], Tensor]] = {
        "full": lambda: cross_entropy_sum(x, weight, labels, chunk=0),
        "chunked": lambda: cross_entropy_sum(x, weight, labels),
        "library": lambda: F.linear_cross_entropy(
            x,
            weight,
            labels,
            reduction="sum",
            options=torch.nn.LinearCrossEntropyOptions(batch_chunk_size=256),
        ),
    }
    before, times = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, []
    for _ in range(4):
        start = time.process_time()
        ways[how]().backward()
        times.append(time.process_time() - start)
        x.grad = weight.grad = None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(
        f"{how:10s} {min(times):.2f} s, +{peak / 1e6:.2f} GB for {rows:,} tokens x {vocab:,} at width {width}"
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    keep_freed_memory()
    what, *rest = sys.argv[1:] or ["ways"]
    if what == "objective":
        objectives(int(rest[0]) if rest else 256)
    else:
        losses(rest[0] if rest else "chunked", int(rest[1]) if len(rest) > 1 else 256)
