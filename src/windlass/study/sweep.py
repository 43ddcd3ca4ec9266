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
from windlass.run import OCCUPIED
from windlass.study.cells import CellProcess
from windlass.study.grid import Cell
from windlass.study.halving import Halving
from windlass.study.progress import evaluations, progress
from windlass.study.study import Study

OPEN = ("waiting", "interrupted", "running")
"""States of cells that a sweep works on; a `running` one that is not ours is left to whoever runs it, and looked at again:
if it is killed there, it is taken up here."""
RETRIES = 2
"""How often a sweep takes up again a cell that a signal ended (a full memory, a kill) or that another process had taken."""
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
    say: Callable[[str], None] = lambda text: None
    """Called with what the user should know and no table has."""
    running: list[CellProcess] = field(default_factory=list)
    queue: list[Cell] = field(default_factory=list)
    interruptions: dict[str, int] = field(default_factory=dict)
    stopping: bool = False

    def __post_init__(self) -> None:
        self.cells = self.study.cells if self.only is None else self.only
        self.world = max((cell.world or self.options.world for cell in self.cells), default=1)
        """Ranks of the largest cell."""
        needs = any(cell.recipe.parallel.device != "cpu" for cell in self.cells)
        self.devices = visible_devices() if needs else []
        self.workers = self._workers()
        self.halving: Halving | None = None

    def run(self) -> int:
        """Work until no cell is open."""
        before = {s: signal.signal(s, self._stop) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            self._work()
        finally:
            for process in self.running:
                process.kill()
                process.close()
            for number, handler in before.items():
                signal.signal(number, handler)
        self.show(self.study)
        if self.stopping:
            return STOPPED
        states = [self.study.state_of(cell)[0] for cell in self.cells]
        return DONE if all(s in ("finished", "pruned", "diverged") for s in states) else 1

    def _workers(self) -> int:
        """How many cells run side by side: no more than there are, and each with devices of its own."""
        asked, have = min(self.options.workers, max(1, len(self.cells))), len(self.devices)
        workers = asked if not have else max(1, min(asked, have // self.world))
        if workers < asked:
            each = "a device" if self.world == 1 else f"{self.world} devices"
            self.say(f"{have} devices: {workers} cells side by side, not {asked} (each needs {each} of its own)")
        return workers

    @property
    def _open(self) -> tuple[str, ...]:
        return (*OPEN, "failed") if self.options.retry_failed else OPEN

    def _stop(self, number: int, _frame: FrameType | None) -> None:
        if self.stopping and number == signal.SIGINT:
            for process in self.running:
                process.kill()
        self.stopping = True

    def _work(self) -> None:
        if self.options.retry_failed:
            for cell in self.cells:
                if self.study.state_of(cell)[0] in ("failed", "diverged"):
                    self.study.judge(cell, "", "")
        self.queue = [c for c in self.cells if self.study.state_of(c)[0] in self._open]
        self.halving = Halving(self.study) if self.options.halving else None
        while self.queue or self.running:
            self._fill()
            if self.stopping:
                self._wait_for_saves()
                return
            for process in list(self.running):
                code = process.poll()
                if code is not None:
                    self.running.remove(process)
                    self._ended(process, code)
                else:
                    self._watch(process)
            self.show(self.study)
            time.sleep(self.options.poll_seconds)

    def _fill(self) -> None:
        """Start the next cells while there is room; those that another process trains stay in the queue."""
        for cell in list(self.queue):
            if self.stopping or len(self.running) >= self.workers:
                return
            state = self.study.state_of(cell)[0]
            if state == "running":
                continue
            self.queue.remove(cell)
            if state not in self._open:
                continue
            if self.halving and (reason := self.halving.prunes(cell, evaluations(self.study.run_of(cell)))):
                self.study.judge(cell, "pruned", reason)  # a sweep that was killed had not come to write it down
            else:
                self.running.append(self._start(cell))

    def _start(self, cell: Cell) -> CellProcess:
        world = cell.world or self.options.world
        used = [name for process in self.running for name in (process.devices or "").split(",")]
        free = [name for name in self.devices if name not in used][:world]
        devices = ",".join(free) if len(free) == world else None
        return CellProcess(self.study, cell, world, thread_share(self.workers * self.world), devices)

    def _decided(self, cell: Cell) -> bool:
        return self.study.verdicts().get(cell.key, {}).get("state", "interrupted") != "interrupted"

    def _watch(self, process: CellProcess) -> None:
        """Stop a running cell that diverged or that halving leaves behind; the verdict says why.

        Not one that is through all its steps and only saves.
        """
        cell, now = process.cell, progress(process.run)
        if now.at_end or self._decided(cell):
            return
        if self.options.stop_diverged and (reason := now.diverged):
            self.study.judge(cell, "diverged", reason)
            process.stop()
        elif self.halving and (reason := self.halving.prunes(cell, evaluations(process.run))):
            self.study.judge(cell, "pruned", reason)
            process.stop()

    def _ended(self, process: CellProcess, code: int) -> None:
        process.close()
        cell, diverged = process.cell, progress(process.run).diverged
        if self.halving:  # it may have ended between two looks, and later cells are measured against it
            self.halving.prunes(cell, evaluations(process.run))
        if self._decided(cell):
            return
        reason = process.reason(code)
        if code == STOPPED or code < 0 or OCCUPIED in reason:
            self._interrupted(cell, reason or "stopped by a signal")
        elif code != DONE:
            self.study.judge(cell, "diverged" if diverged and code != BAD_INPUT else "failed", reason)
        elif diverged and self.study.state_of(cell)[0] != "finished":
            self.study.judge(cell, "diverged", diverged)

    def _interrupted(self, cell: Cell, reason: str) -> None:
        """Take a cell up again that ended by no fault of its own; after some times leave it to the next sweep."""
        times = self.interruptions[cell.key] = self.interruptions.get(cell.key, 0) + 1
        said = f"{reason} ({times} times)" if times > 1 else reason
        self.study.judge(cell, "interrupted", said)
        if times <= RETRIES:
            self.queue.append(cell)

    def _wait_for_saves(self) -> None:
        for process in self.running:
            process.stop()
        deadline = time.monotonic() + STOP_SECONDS
        while time.monotonic() < deadline and any(p.poll() is None for p in self.running):
            time.sleep(0.1)


def thread_share(ranks: int) -> int:
    """The threads of each of so many ranks side by side on this machine: an equal share of its cores, at least one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // ranks)


def visible_devices() -> list[str]:
    """The CUDA devices that cells may use, as CUDA_VISIBLE_DEVICES names them; empty where there is none."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [n.strip() for n in visible.split(",") if n.strip()] if visible is not None else _devices()


def _devices() -> list[str]:
    try:
        import pynvml

        pynvml.nvmlInit()
        return [str(i) for i in range(pynvml.nvmlDeviceGetCount())]
    except Exception:  # no driver, no library: a machine without NVIDIA devices
        return []
