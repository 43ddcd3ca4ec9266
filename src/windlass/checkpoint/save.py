"""The saves of one rank: it copies the state to the host while the next step computes, and a thread
writes the copy (see `commit.py`)."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from windlass.checkpoint.choose import PERIODIC, read_lineage, retain
from windlass.checkpoint.commit import FAILED, FILE, Save, discard, explain
from windlass.checkpoint.format import Base, Manifest, checkpoints_in, names_in
from windlass.checkpoint.state_dict import TYPE_NAMES, Shard
from windlass.errors import UserError
from windlass.fileio import Files, to_json
from windlass.recipe import Horizon
from windlass.recipe.settings import CheckpointSettings
from windlass.telemetry.summary import Scores

POLL_SECONDS = 0.1
# The writer takes the time that computing threads leave. With more niceness, a program that uses
# every core could hold it up for a second while it holds Python's lock.
NICENESS = 10


@dataclass
class Writer:
    """Writes the checkpoints of one rank. Every rank makes the same saves in the same order."""

    directory: Path  # the run's `checkpoints`, on a file system that all ranks share
    rank: int = 0
    world: int = 1
    files: Files = field(default_factory=Files)
    deadline: float = 600.0  # seconds; how long rank 0 waits for the other ranks after its own part
    attempt: str = "0"  # letters and digits: the same on all ranks, different at every start
    settings: CheckpointSettings = field(default_factory=CheckpointSettings)
    horizons: Sequence[Horizon] = ()  # see `retain`
    base: Base | None = None  # of the weights that no shard has
    damaged: Container[int] = ()  # checkpoints that retention does not count, by serial number
    while_waiting: Callable[[], None] | None = None  # called every POLL_SECONDS of a wait

    def __post_init__(self) -> None:
        self.newest = -1  # the step of the newest save, also in progress; -1: none, or it failed
        self.committed = 0  # the step that a restart would resume from
        self.failures = 0  # saves that failed since the last commit
        self.last_seconds: float | None = None  # of the last committed save, with the copy
        self.began = 0.0  # the last save, on the monotonic clock
        self._started = 0  # saves
        self._saves: list[Save] = []  # begun, and not yet returned by `poll`
        self._host = torch.empty(0, dtype=torch.uint8)  # every save reuses it
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None  # the end of the last copy from CUDA
        self._known: dict[Path, Manifest] = {}  # rank 0's writer reads each manifest once
        self._thread = threading.Thread()  # of the last save

    @property
    def busy(self) -> bool:
        return any(not save.ended for save in self._saves)

    def write(
        self,
        step: int,
        shard: Shard,
        counters: Mapping[str, Any],
        meta: Mapping[str, Any] | None = None,
        scores: Scores | None = None,
    ) -> None:
        """Begin to write this rank's shard; `poll` returns the save when it has ended.

        After `finish_staging` the state may change; a forward pass may come before. `counters` and
        `meta` are JSON, from rank 0; `scores`: values of `checkpoint.best` by step.
        """
        called = time.perf_counter()
        self._until_idle(None)
        begin = time.perf_counter()
        save = Save(
            directory=self.directory,
            rank=self.rank,
            world=self.world,
            files=self.files,
            deadline=self.deadline,
            step=step,
            save_id=f"{step:08d}-{self.attempt}-{self._started + 1}",
            manifest_fields={
                "meta": {"reason": PERIODIC, **(meta or {})},
                "aliases": shard.aliases,
                "base": self.base,
            },
        )
        try:
            save.counters = to_json(dict(counters))
            self._copy(save, shard)
        except (MemoryError, OSError, RuntimeError, ValueError) as error:
            # The save fails on all ranks, but not the run.
            save.error = f"the state could not be copied to the host: {explain(error)}"
        save.waited_s = begin - called
        save.staged_s = time.perf_counter() - begin
        self.began, self.newest = time.monotonic(), step
        self._started += 1
        self._saves.append(save)
        # A daemon, so that a process with a stuck disk can end.
        self._thread = threading.Thread(
            target=self._write,
            args=(save, scores or Scores(), self._copied, shard.device),
            name="checkpoint-writer",
            daemon=True,
        )
        self._thread.start()
        if not self.settings.background:
            staged = time.perf_counter()
            self._until_idle(None)
            save.waited_s += time.perf_counter() - staged

    def _copy(self, save: Save, shard: Shard) -> None:
        """Begin to copy the boxes of a shard into host memory, as the file of a save."""
        header, places, size = shard.layout(self.rank)
        file, device = FILE.format(self.rank), shard.device
        self._copied = None
        self._allocate(size, device)
        save.file_bytes = memoryview(self._host.numpy())[:size]
        save.file_bytes[: len(header)] = header
        with contextlib.ExitStack() as copying:
            if device is not None:  # another stream copies, after all that was launched so far
                self._stream = self._stream or torch.cuda.Stream(device)
                self._stream.wait_stream(torch.cuda.current_stream(device))
                copying.enter_context(torch.cuda.stream(self._stream))
            for box, at in places:
                source = box.tensor.detach()
                target = self._host[at : at + source.nbytes].view(source.dtype).view(source.shape)
                target.copy_(source, non_blocking=True)
                info = {"dtype": TYPE_NAMES[source.dtype], "shape": list(box.shape), "chunks": []}
                chunks = save.tensors.setdefault(box.name, info)["chunks"]
                chunks.append([file, at, list(box.offsets), list(source.shape)])
            if device is not None and self._stream:
                self._copied = self._stream.record_event()

    def finish_staging(self) -> None:
        """Have this thread's stream wait for the copy, before the state changes."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def _allocate(self, size: int, device: torch.device | None) -> None:
        """Make room for `size` bytes, page-locked for copies from a CUDA device."""
        if self._host.numel() >= size:
            return
        self._host = torch.empty(0, dtype=torch.uint8)  # frees the smaller memory first
        if device is not None:
            # Page-locked memory is scarce; without it the step waits longer for the copy.
            with contextlib.suppress(RuntimeError), torch.cuda.device(device):
                self._host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
                return
        self._host = torch.empty(size, dtype=torch.uint8)

    def poll(self) -> list[Save]:
        """The saves that have ended since the last call, without waiting."""
        ended = [save for save in self._saves if save.ended]
        self._saves = self._saves[len(ended) :]
        for save in ended:
            if not save.error:
                self.committed, self.failures = save.step, 0
            else:
                self.failures += 1
                self.newest = -1 if save.step == self.newest else self.newest
        return ended

    def wait(self, timeout: float | None = None) -> list[Save]:
        """`poll` once nothing is being written, or after `timeout` seconds."""
        self._until_idle(timeout)
        return self.poll()

    def _until_idle(self, timeout: float | None) -> None:
        end = math.inf if timeout is None else time.monotonic() + timeout
        while self.busy and (left := end - time.monotonic()) > 0:
            self._thread.join(min(POLL_SECONDS, left))
            assert self._thread.is_alive() or not self.busy, "the checkpoint writer has died"
            if self.while_waiting is not None:
                self.while_waiting()

    def _write(
        self,
        save: Save,
        scores: Scores,
        copied: torch.cuda.Event | None,
        device: torch.device | None,
    ) -> None:
        """Write, commit and clean up; any error becomes the save's."""
        began = time.perf_counter()
        # Elsewhere than on Linux the niceness is the whole process's.
        if self.settings.background and sys.platform == "linux":
            with contextlib.suppress(OSError):  # a sandbox may forbid it
                os.nice(NICENESS)
        try:
            if copied is not None:
                torch.cuda.set_device(device)  # a new thread would make a context on device 0
                copied.synchronize()
            manifest = save.run(self._next_serial())  # rank 0's number counts
            if manifest is not None:
                save.total_bytes = manifest.bytes
                # Retention does not need the tensors, of which a large world has many.
                self._known[save.path] = manifest.model_copy(update={"tensors": {}})
                try:
                    self._clean_up(scores)
                except Exception as problem:
                    save.warning = f"old checkpoints could not be removed: {explain(problem)}"
        except Exception as problem:
            save.error = explain(problem)
        save.file_bytes = b""  # the next save reuses its memory
        save.write_s = time.perf_counter() - began
        if not save.error:
            self.last_seconds = save.write_s + save.staged_s
        save.ended = True

    def _next_serial(self) -> int:
        """The number of the next commit in the run; rank 0 reads each manifest once."""
        if self.rank == 0:
            if not self._known:
                saved = checkpoints_in(self.directory)
                self._known = {c.path: c.content for c in saved if c.content is not None}
            names = names_in(self.directory)
            self._known = {path: known for path, known in self._known.items() if path.name in names}
        serials = [known.serial for known in self._known.values()]
        with contextlib.suppress(UserError):  # the lineage counts deleted checkpoints, too
            if lineage := read_lineage(self.directory.parent):
                serials.append(lineage.serial)
        return 1 + max(serials, default=0)

    def _clean_up(self, scores: Scores) -> None:
        """Remove the rest of failed saves, and the checkpoints that retention does not keep."""
        for name in names_in(self.directory):
            if name.startswith(FAILED):
                self.files.remove_tree(self.directory / name)
        good = [saved for saved in self._known.values() if saved.serial not in self.damaged]
        why = retain(good, self.settings, self.horizons, scores)
        for path in [path for path, saved in self._known.items() if why.get(saved.serial) == []]:
            discard(path, self.files)
            del self._known[path]
