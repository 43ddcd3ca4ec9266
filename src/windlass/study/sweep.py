"""Working through a study's cells: side by side, kill-safe, with the table on screen. No torch.

The directory is the only state. Whatever ends the sweep, the same command goes on: finished cells are left alone,
interrupted ones resume from their last checkpoint, failed and diverged ones stay where they are with their reason.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType

from windlass.errors import BAD_INPUT, DONE, STOPPED
from windlass.study.cells import CellProcess, evaluations, progress
from windlass.study.grid import Cell
from windlass.study.halving import Halving
from windlass.study.study import Study

OPEN = ("waiting", "interrupted", "running")
"""States of cells that a sweep works on; a `running` one that is not ours is left to whoever runs it, and looked at again:
if it is killed there, it is taken up here."""
STOP_SECONDS = 90.0
"""How long cells may take to save and end when the sweep is stopped."""


@dataclass(frozen=True)
class Options:
    """How a sweep works through its cells."""

    world: int = 1
    workers: int = 1
    stop_diverged: bool = False
    halving: bool = False
    retry_failed: bool = False
    poll_seconds: float = 0.5


@dataclass
class Sweep:
    """A sweep at work. `run` returns the exit code: 0 all done, 1 some cells failed, 75 stopped with everything saved."""

    study: Study
    options: Options
    show: Callable[[Study], None] = lambda study: None
    only: list[Cell] | None = None
    running: list[CellProcess] = field(default_factory=list)
    stopping: bool = False

    def run(self) -> int:
        """Work until no cell is open."""
        before = {s: signal.signal(s, self._stop) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            self._work()
        finally:
            for process in self.running:
                process.kill()
            for number, handler in before.items():
                signal.signal(number, handler)
        self.show(self.study)
        if self.stopping:
            return STOPPED
        states = [self.study.state_of(cell)[0] for cell in self._cells()]
        return DONE if all(s in ("finished", "pruned", "diverged") for s in states) else 1

    @property
    def _open(self) -> tuple[str, ...]:
        return (*OPEN, "failed") if self.options.retry_failed else OPEN

    def _cells(self) -> list[Cell]:
        return self.study.cells if self.only is None else self.only

    def _stop(self, number: int, _frame: FrameType | None) -> None:
        if self.stopping and number == signal.SIGINT:
            for process in self.running:
                process.kill()
        self.stopping = True

    def _work(self) -> None:
        if self.options.retry_failed:
            for cell in self._cells():
                if self.study.state_of(cell)[0] in ("failed", "diverged"):
                    self.study.judge(cell, "", "")
        queue = [c for c in self._cells() if self.study.state_of(c)[0] in self._open]
        halving = Halving(self.study) if self.options.halving else None
        while queue or self.running:
            self._fill(queue)
            if self.stopping:
                self._wait_for_saves()
                return
            for process in list(self.running):
                code = process.poll()
                if code is not None:
                    self.running.remove(process)
                    self._ended(process, code)
                else:
                    self._watch(process, halving)
            self.show(self.study)
            time.sleep(self.options.poll_seconds)

    def _fill(self, queue: list[Cell]) -> None:
        """Start the next cells while there is room; those that another process trains stay in the queue."""
        for cell in list(queue):
            if self.stopping or len(self.running) >= self.options.workers:
                return
            state = self.study.state_of(cell)[0]
            if state != "running":
                queue.remove(cell)
                if state in self._open:
                    self.running.append(self._start(cell))

    def _start(self, cell: Cell) -> CellProcess:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        ranks = self.options.workers * self.options.world
        used = [p.devices for p in self.running]
        devices = next((d for d in device_shares(self.options.workers, self.options.world) if d not in used), None)
        return CellProcess(self.study, cell, self.options.world, max(1, cores // ranks), devices)

    def _watch(self, process: CellProcess, halving: Halving | None) -> None:
        """Stop a running cell that diverged or that halving leaves behind; the verdict says why."""
        if self.study.verdicts().get(process.cell.recipe.digest):
            return
        if self.options.stop_diverged and (reason := progress(process.run).diverged):
            self.study.judge(process.cell, "diverged", reason)
            process.stop()
        elif halving and (reason := halving.prunes(process.cell, evaluations(process.run))):
            self.study.judge(process.cell, "pruned", reason)
            process.stop()

    def _ended(self, process: CellProcess, code: int) -> None:
        if self.study.verdicts().get(process.cell.recipe.digest):
            return
        if code in (DONE, STOPPED):
            reason = progress(process.run).diverged
            if code == DONE and reason and self.study.state_of(process.cell)[0] != "finished":
                self.study.judge(process.cell, "diverged", reason)
            return
        state = "diverged" if code not in (DONE, BAD_INPUT) and progress(process.run).diverged else "failed"
        self.study.judge(process.cell, state, process.reason(code))

    def _wait_for_saves(self) -> None:
        for process in self.running:
            process.stop()
        deadline = time.monotonic() + STOP_SECONDS
        while time.monotonic() < deadline and any(p.poll() is None for p in self.running):
            time.sleep(0.1)


def device_shares(workers: int, world: int) -> list[str]:
    """The CUDA devices of each of `workers` cells of `world` ranks, as CUDA_VISIBLE_DEVICES wants them.

    Empty where there is no NVIDIA device, or where there are too few for each cell to have its own.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [n for n in visible.split(",") if n] if visible is not None else _devices()
    if len(names) < workers * world:
        return []
    return [",".join(names[i * world : (i + 1) * world]) for i in range(workers)]


def _devices() -> list[str]:
    try:
        import pynvml

        pynvml.nvmlInit()
        return [str(i) for i in range(pynvml.nvmlDeviceGetCount())]
    except Exception:  # no driver, no library: a machine without NVIDIA devices
        return []
