"""The number of CPU threads of a run: the fastest in a measurement at its start.

More threads do not always help. A small model gains nothing from a second thread, and beside a busy
process threads mostly wait for each other. The number changes the rounding of sums, so every
checkpoint records it, and a resume on as many cores uses it again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from windlass.data.loader import MicroBatch
from windlass.data.samples import Batch
from windlass.parallel.dist import Ranks
from windlass.parallel.parallelize import autocast
from windlass.processes import usable_cores
from windlass.recipe import Recipe
from windlass.training.halves import Halves

PROBE_TOKENS = 1024  # in a timed forward and backward pass
PROBE_PASSES = 2  # for each number of threads; the faster one counts
LONG_SECONDS = 0.3  # CPU time per thread: a longer pass has work for all threads
ENOUGH_SECONDS = 0.5  # for the passes with one number of threads
WATCH_SECONDS = 5.0  # between two looks at other processes, at least
EQUAL = 1.03  # times within this factor count as equal, and fewer threads win


def set_threads(
    recipe: Recipe,
    model: nn.Module,
    batch: int,
    vocab: int,
    ranks: Ranks,
    halves: Halves | None,
    recorded: Mapping[str, Any],
    custom: bool,
) -> str:
    """Set the number of threads of a run on a CPU; returns it with the reason, or "" on CUDA.

    `train.threads`, OMP_NUM_THREADS and the number in the checkpoint (`recorded`) come before a
    measurement. A `custom` model is not measured, because a pass may change it.
    """
    threads, cores = torch.get_num_threads(), usable_cores()
    if ranks.device.type != "cpu":
        return ""
    if recipe.train.threads:
        return f"{threads}, by train.threads"
    if ranks.world > 1:  # an equal share, or what the launcher set
        return f"{threads} for each rank, of {cores} cores"
    if "OMP_NUM_THREADS" in os.environ:
        return f"{threads}, by OMP_NUM_THREADS"
    if recorded.get("threads") and recorded.get("cores") == cores:
        torch.set_num_threads(recorded["threads"])
        return f"{recorded['threads']} of {cores} cores, as in the run so far"
    compiled = recipe.train.compile is True  # for a number of threads
    if threads == 1 or custom or compiled:
        return f"{threads} of {cores} cores"
    seconds = probe(training_pass(recipe, model, batch, vocab, ranks, halves), threads)
    threads = fewest(seconds)
    torch.set_num_threads(threads)
    times = ", ".join(f"{n}: {1e3 * s:.0f} ms" for n, s in sorted(seconds.items()))
    return f"{threads} of {cores} cores, the fastest in a pass with each number ({times})"


def training_pass(
    recipe: Recipe, model: nn.Module, batch: int, vocab: int, ranks: Ranks, halves: Halves | None
) -> Callable[[], None]:
    """A forward and backward pass of at most PROBE_TOKENS tokens that leaves no gradient."""
    context = min(recipe.model.context, PROBE_TOKENS)
    rows = max(1, min(batch, PROBE_TOKENS // context))
    tokens = (torch.arange(rows * context).reshape(rows, context) * 31) % vocab

    def compute_loss(micro: MicroBatch) -> Tensor:
        with autocast(recipe, ranks.device):
            loss: Tensor = model(micro.batch.tokens, micro.batch.labels)
        return loss

    def run() -> None:
        micro = MicroBatch(0, Batch(tokens, tokens))
        if halves is None:
            compute_loss(micro).backward()
        else:
            halves.train([micro], compute_loss, Tensor.backward, compute_loss, torch.zeros(()))
        model.zero_grad(set_to_none=True)

    return run


def probe(run: Callable[[], None], most: int) -> dict[int, float]:
    """The seconds of a pass with `most` threads, then with half while that is not clearly slower.

    A start waits for it: if half the threads are slower than the first pass, which has cold caches,
    no further pass is made.
    """
    first = timed(run, most)
    if first < LONG_SECONDS and (half := timed(run, most // 2)) > EQUAL * first:
        return {most: first, most // 2: half}
    seconds, threads = dict[int, float](), most
    while threads:
        times, cpu_seconds = list[float](), time.process_time()
        while len(times) < PROBE_PASSES and sum(times) < ENOUGH_SECONDS:
            times.append(timed(run, threads))
        seconds[threads] = min(times)
        long = time.process_time() - cpu_seconds > LONG_SECONDS * threads * len(times)
        if long or min(times) > 1.5 * min(seconds.values()):
            break
        threads //= 2
    return seconds


def timed(run: Callable[[], None], threads: int) -> float:
    """The seconds of a pass with a number of threads."""
    torch.set_num_threads(threads)
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def fewest(seconds: Mapping[int, float]) -> int:
    """The smallest number of threads that is as fast as the fastest."""
    return min(threads for threads, s in seconds.items() if s <= EQUAL * min(seconds.values()))


class Contention:
    """Warns once if other processes use cores that the threads of this process wait for."""

    def __init__(self) -> None:
        self.cores, self.warned = usable_cores(), False
        self._last = self._times()

    def _times(self) -> tuple[float, float, float]:
        """The time now, idle seconds of the usable cores, and CPU seconds of this process."""
        usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
        cores = [
            times
            for i, times in enumerate(psutil.cpu_times(percpu=True))
            if usable is None or i in usable
        ]
        idle = sum(times.idle + getattr(times, "iowait", 0.0) for times in cores)
        return time.monotonic(), idle, time.process_time()

    def poll(self) -> str:
        """The warning, or "" if there is none or the last look was less than WATCH_SECONDS ago."""
        if self.warned or time.monotonic() - self._last[0] < WATCH_SECONDS:
            return ""
        before, self._last = self._last, self._times()
        elapsed, idle, own = (b - a for a, b in zip(before, self._last, strict=True))
        others = self.cores - (idle + own) / elapsed  # cores that other processes use
        threads, free = torch.get_num_threads(), max(1, round(self.cores - others))
        if others < 0.5 or threads + others < self.cores + 0.5:
            return ""
        self.warned = True
        restart = f", or start this run again with train.threads={free}" if threads > free else ""
        return (
            f"other processes use {others:.1f} of {self.cores} cores and slow this training "
            f"(train.threads={threads}): stop them{restart}"
        )
