"""Saving: the state is copied to the host while the next step computes; a thread writes the copy.

`Saver.save` begins to copy this rank's boxes into a buffer with the layout of the file
(`HostBuffer`) and returns; before the state changes, `Saver.settle` is called. A thread hashes and
writes the buffer, and agrees with the other ranks through the file system (`Save.run`). Rank 0 then
deletes the checkpoints that retention does not keep. `poll` and `wait` return the saves that have
ended, and `Saver` knows the step from which a restart resumes.

The thread uses no process group: its calls would cross the training's collectives, and it could not
give them up if a rank is dead.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from windlass.checkpoint.commit import Save, SavingRank, explain
from windlass.checkpoint.format import names_in
from windlass.checkpoint.image import HostBuffer, StateFile, cuda_device, describe, layout
from windlass.checkpoint.load import discard
from windlass.checkpoint.retention import (
    PERIODIC,
    Committed,
    Policy,
    Scores,
    committed,
    read_lineage,
    retain,
)
from windlass.checkpoint.state_dict import State
from windlass.errors import UserError
from windlass.fileio import to_json

POLL_SECONDS = 0.1
# Of the writer, so that it takes the time that computing threads leave. More would let a program
# that uses every core hold it up for a second while it holds Python's lock.
NICENESS = 10
TEMPORARY = re.compile(r"^\.(?:saving|failed)-\d+-(\w+)-(\d+)$")


@dataclass
class Saver(SavingRank):
    """Saves the state of one rank. Every rank makes the same saves in the same order."""

    attempt: str = "0"  # letters and digits: the same on all ranks, different at every start
    policy: Policy = field(default_factory=Policy)
    device: torch.device | None = None  # of the state
    background: bool = True  # False: `save` returns after the commit
    deferred: bool = False  # the state changes only after a call of `settle`

    def __post_init__(self) -> None:
        self.newest = -1  # the step of the newest save, also in progress; -1: none, or it failed
        self.committed = 0  # the step that a restart would resume from
        self.failures = 0  # saves that failed since the last commit
        self.last_seconds: float | None = None  # of the last committed save, with the copy
        self._began = 0.0
        self._started = self._reported = 0  # saves
        self._buffer = HostBuffer()
        self._unsettled: Save | None = None
        self._known: dict[Path, Committed] = {}  # rank 0's writer reads each manifest once
        self._ended: deque[Save] = deque()
        self._reserving = threading.Thread()  # makes room for the first save
        # One thread per save, one at a time. A daemon, so that a process with a stuck disk can end.
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """Whether a save is being written."""
        return self._started > self._reported + len(self._ended)

    def expected_seconds(self, step: int) -> float:
        """Seconds until a save of `step` would end if it took as long as the last; 0 if saved."""
        if self.newest == step:
            return 0.0
        last, elapsed = self.last_seconds or 0.0, time.monotonic() - self._began
        return last + (max(0.0, last - elapsed) if self.busy else 0.0)

    def resume_from(self, step: int) -> None:
        """Training starts from, or has returned to, the committed checkpoint of `step`."""
        self.newest = self.committed = step

    def reserve(self, state: State) -> None:
        """Make room for saves of this state in the background, so that the first one need not."""

        def make_room() -> None:
            # A save tries again and reports the failure.
            with contextlib.suppress(MemoryError, OSError, RuntimeError):
                _, _, size = layout(state.slices, self.rank)
                self._buffer.reserve(size, cuda_device(state.slices))

        self._reserving = threading.Thread(target=make_room, name="checkpoint-memory", daemon=True)
        self._reserving.start()

    def save(
        self,
        step: int,
        state: State,
        counters: Mapping[str, Any],
        meta: Mapping[str, Any] | None = None,
        scores: Scores | None = None,
        while_waiting: Callable[[], None] | None = None,
        still: bool = False,
    ) -> None:
        """Begin to save the state; `poll` returns the save when it has ended.

        The state may then change, if the saver is `deferred` only after `settle`.

        Args:
            step: Names the checkpoint; replaces a committed one of the same step.
            state: This rank's boxes.
            counters: Other numbers that a resume needs (JSON), from rank 0.
            meta: `reason` (see retention) and other facts (JSON); a non-finite float becomes null.
            scores: Values of `policy.measure` by step, from the run's ledger.
            while_waiting: Called every POLL_SECONDS until the save before this one has ended.
            still: The state does not change before this save has ended. Then the writer reads it,
                and a state on the host needs no second one in memory.
        """
        called = time.perf_counter()
        self._until_idle(None, while_waiting)
        if self._reserving.ident is not None:
            self._reserving.join()
        begin = time.perf_counter()
        name = f"{step:08d}-{self.attempt}-{self._started + 1}"
        facts = {"reason": PERIODIC} | {k: _finite(v) for k, v in (meta or {}).items()}
        save = Save(self, step, name, state.aliases, state.total_bytes, facts)
        try:
            save.counters = to_json(dict(counters))
            if still and cuda_device(state.slices) is None:
                header, places, size = layout(state.slices, self.rank)
                save.image, save.tensors = StateFile(header, places, size), describe(places)
            else:
                self._buffer.fill(save, state.slices, state.passing)
        except (MemoryError, OSError, RuntimeError, ValueError) as error:
            # The save fails on all ranks, but not the run.
            save.error = f"the state could not be copied to the host: {explain(error)}"
        save.warning, self._buffer.warning = self._buffer.warning, ""
        save.waited_s, save.staged_s = begin - called, time.perf_counter() - begin
        job = save, scores or Scores()
        self._started, self._began, self.newest = self._started + 1, time.monotonic(), step
        self._unsettled = save
        if not self.deferred:
            self.settle()
        if not self.background:
            self._write(*job)
            return
        self._thread = threading.Thread(
            target=self._write_behind, args=job, name="checkpoint-writer", daemon=True
        )
        self._thread.start()

    def settle(self) -> None:
        """Called before the state changes: see `Copy.settle`."""
        save, self._unsettled = self._unsettled, None
        if save is not None and (copy := save.copy) is not None:
            begin = time.perf_counter()
            copy.settle()
            save.staged_s += time.perf_counter() - begin

    def poll(self) -> list[Save]:
        """The saves that have ended since the last call, without waiting."""
        ended = [self._ended.popleft() for _ in range(len(self._ended))]
        self._reported += len(ended)
        for save in ended:
            if not save.error:
                self.committed, self.failures = save.step, 0
                continue
            self.failures += 1
            if save.step == self.newest:
                self.newest = -1
        return ended

    def wait(
        self, timeout: float | None = None, while_waiting: Callable[[], None] | None = None
    ) -> list[Save]:
        """`poll` once nothing is being written, or after `timeout` seconds."""
        self._until_idle(timeout, while_waiting)
        return self.poll()

    def _until_idle(self, timeout: float | None, while_waiting: Callable[[], None] | None) -> None:
        end = math.inf if timeout is None else time.monotonic() + timeout
        while self.busy and (left := end - time.monotonic()) > 0:
            assert self._thread is not None
            self._thread.join(min(POLL_SECONDS, left))
            assert self._thread.is_alive() or not self.busy, "the checkpoint writer has died"
            if while_waiting is not None:
                while_waiting()

    def _write_behind(self, *job: Any) -> None:
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            if sys.platform == "linux":  # elsewhere it is the priority of the whole process
                os.nice(NICENESS)
        self._write(*job)

    def _write(self, save: Save, scores: Scores) -> None:
        """Write, commit and clean up; any error becomes the save's."""
        began = time.perf_counter()
        try:
            if self.device is not None and self.device.type == "cuda":
                torch.cuda.set_device(self.device)  # a new thread would make a context on device 0
            if save.copy is not None:
                save.copy.finish()
            save.run(serial := self._next_serial())
            if self.rank == 0:
                self._known[save.path] = Committed(serial, save.step, str(save.meta["reason"]))
                try:
                    self._clean_up(scores)
                except Exception as problem:
                    save.warning = f"old checkpoints could not be removed: {explain(problem)}"
        except Exception as problem:
            save.error = explain(problem)
        save.image, save.copy = b"", None  # the next save reuses the memory
        save.write_s = time.perf_counter() - began
        if not save.error:
            self.last_seconds = save.write_s + save.staged_s
        self._ended.append(save)

    def _next_serial(self) -> int:
        """The number of the next commit; only rank 0's counts."""
        if self.rank == 0:
            names = names_in(self.directory)
            known = self._known or committed(self.directory)
            self._known = {path: entry for path, entry in known.items() if path.name in names}
        serials = [entry.serial for entry in self._known.values()]
        with contextlib.suppress(UserError):  # the lineage counts deleted checkpoints, too
            if lineage := read_lineage(self.directory.parent):
                serials.append(lineage.serial)
        return 1 + max(serials, default=0)

    def _clean_up(self, scores: Scores) -> None:
        """Remove leftovers of earlier saves, and the checkpoints that retention does not keep."""
        for name in names_in(self.directory):
            # Another rank may have begun a later save of this attempt: its directory stays.
            if (match := TEMPORARY.match(name)) and (
                match[1] != self.attempt or int(match[2]) <= self._started
            ):
                self.files.remove_tree(self.directory / name)
        why = retain(self._known.values(), self.policy, scores)
        for path in [path for path, entry in self._known.items() if not why[entry.serial]]:
            discard(path, self.files)
            del self._known[path]


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
