"""How many CPU threads compute: chosen by measurement at the start of a run, recorded, and watched
against other processes.

More threads do not always help. A small model gains nothing from a second one, and beside another
process that keeps a core busy, threads that wait for each other lose most of the time. Sums over
other numbers of threads differ by rounding, so the choice is in every checkpoint, and a resume on
as many cores uses it again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import psutil
import torch
from torch import nn

from windlass.parallel.dist import Ranks
from windlass.parallel.parallelize import autocast
from windlass.processes import usable_cores
from windlass.recipe import Recipe

PROBE_TOKENS = 1024  # of a forward and backward pass that is timed
PROBE_PASSES = 2  # for each number of threads, the faster one counts
# of CPU a thread: a pass of so many has work for all; timing it with fewer would delay the start
LONG_SECONDS = 0.3
ENOUGH_SECONDS = 0.5  # for the passes with one number of threads
EQUAL = 1.03  # fewer threads are taken where they are as fast within this factor
WATCH_SECONDS = 5.0  # between two looks at other processes, at least


def set_threads(
    recipe: Recipe,
    model: nn.Module,
    batch: int,
    vocab: int,
    ranks: Ranks,
    recorded: Mapping[str, Any],
    custom: bool,
) -> str:
    """Set the number of threads of a run on a CPU, and say why so many; empty elsewhere.

    `train.threads`, OMP_NUM_THREADS and the `recorded` choice of a run on as many cores count
    before a measurement.
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
    # A pass may change a user's own model, and code is compiled for a number of threads.
    if threads == 1 or custom or recipe.train.compile:
        return f"{threads} of {cores} cores"
    seconds = probe(training_pass(recipe, model, batch, vocab, ranks), threads)
    threads = fewest(seconds)
    torch.set_num_threads(threads)
    times = ", ".join(f"{n}: {1e3 * s:.0f} ms" for n, s in sorted(seconds.items()))
    return f"{threads} of {cores} cores, as the time of a pass with each number says ({times})"


def training_pass(
    recipe: Recipe, model: nn.Module, batch: int, vocab: int, ranks: Ranks
) -> Callable[[], None]:
    """A forward and backward pass of at most PROBE_TOKENS tokens that leaves no gradient; a long
    context is cut."""
    context = min(recipe.model.context, PROBE_TOKENS)
    rows = max(1, min(batch, PROBE_TOKENS // context))
    tokens = (torch.arange(rows * context).reshape(rows, context) * 31) % vocab

    def run() -> None:
        with autocast(recipe, ranks.device):
            loss = model(tokens, tokens)
        loss.backward()
        model.zero_grad(set_to_none=True)

    return run


def probe(run: Callable[[], None], most: int) -> dict[int, float]:
    """The seconds of a pass by number of threads: of `most`, then of half as many while that is not
    clearly slower."""
    seconds, threads = dict[int, float](), most
    torch.set_num_threads(most)
    run()  # the first one fills caches
    while threads:
        torch.set_num_threads(threads)
        times, cpu_seconds = list[float](), time.process_time()
        while len(times) < PROBE_PASSES and sum(times) < ENOUGH_SECONDS:
            started = time.perf_counter()
            run()
            times.append(time.perf_counter() - started)
        seconds[threads] = min(times)
        long = time.process_time() - cpu_seconds > LONG_SECONDS * threads * len(times)
        if long or min(times) > 1.5 * min(seconds.values()):
            break
        threads //= 2
    return seconds


def fewest(seconds: Mapping[int, float]) -> int:
    """The smallest number of threads that is as fast as the fastest."""
    return min(threads for threads, s in seconds.items() if s <= EQUAL * min(seconds.values()))


class Contention:
    """Watches, from a log line to the next, how much of the cores other processes use; warns
    once."""

    def __init__(self) -> None:
        self.cores, self.warned = usable_cores(), False
        self._last = self._times()

    def _times(self) -> tuple[float, float, float]:
        """The time, and the CPU seconds of all processes on the cores that this one may use, and
        its own."""
        allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
        times = [
            t
            for i, t in enumerate(psutil.cpu_times(percpu=True))
            if allowed is None or i in allowed
        ]
        idle = sum(t.idle + getattr(t, "iowait", 0.0) for t in times)
        return time.monotonic(), -idle, time.process_time()

    def poll(self) -> str:
        """The warning, where other processes have used cores since the last look that the threads
        of this one wait for."""
        if self.warned or time.monotonic() - self._last[0] < WATCH_SECONDS:
            return ""
        before, self._last = self._last, self._times()
        elapsed, less_idle, own = (b - a for a, b in zip(before, self._last, strict=True))
        others = (self.cores * elapsed + less_idle - own) / elapsed
        threads, free = torch.get_num_threads(), max(1, round(self.cores - others))
        if others < 0.5 or threads + others < self.cores + 0.5:
            return ""
        self.warned = True
        fewer = (
            f", or stop this run and start it again with train.threads={free}"
            if threads > free
            else ""
        )
        slowed = f"they slow this training with its {threads} thread{'s' * (threads > 1)}: stop them{fewer}"
        return f"other processes use {others:.1f} of {self.cores} cores; {slowed}"
