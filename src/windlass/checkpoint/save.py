"""Writing: the state is copied to the host while the next step computes; a thread writes the copy. It
agrees with the other ranks through the file system (`Save.run`), because its collectives would
cross the training's, and could not be given up if a rank is dead."""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from windlass.checkpoint.choose import PERIODIC, Policy, discard, read_lineage, retain
from windlass.checkpoint.commit import Save, explain
from windlass.checkpoint.format import Base, Manifest, checkpoints_in, names_in
from windlass.checkpoint.state_dict import TYPE_NAMES, Shard
from windlass.errors import UserError
from windlass.fileio import PIECE_BYTES, Files, to_json
from windlass.telemetry.ledger import Scores

POLL_SECONDS = 0.1
# Of the writer, so that it takes the time that computing threads leave. More would let a program
# that uses every core hold it up for a second while it holds Python's lock.
NICENESS = 10
TEMPORARY = re.compile(r"^\.(?:saving|failed)-\d+-(\w+)-(\d+)$")


@dataclass
class Writer:
    """Writes the checkpoints of one rank. Every rank makes the same saves in the same order."""

    directory: Path  # the run's `checkpoints`, on a file system that all ranks share
    rank: int = 0
    world: int = 1
    files: Files = field(default_factory=Files)
    deadline: float = 600.0  # seconds; how long rank 0 waits for the other ranks after its own part
    piece_bytes: int = PIECE_BYTES  # per write
    attempt: str = "0"  # letters and digits: the same on all ranks, different at every start
    policy: Policy = field(default_factory=Policy)
    background: bool = True  # False: `write` returns after the commit
    base: Base | None = None  # of the weights that no shard has

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
        self._warning = ""  # why memory for CUDA is not page-locked
        self._known: dict[Path, Manifest] = {}  # rank 0's writer reads each manifest once
        self._thread = threading.Thread()  # of the last save

    @property
    def busy(self) -> bool:
        return any(not save.ended for save in self._saves)

    def resume_from(self, step: int) -> None:
        """Training starts from, or has returned to, the committed checkpoint of `step`."""
        self.newest = self.committed = step

    def write(
        self,
        step: int,
        shard: Shard,
        counters: Mapping[str, Any],
        meta: Mapping[str, Any] | None = None,
        scores: Scores | None = None,
        while_waiting: Callable[[], None] | None = None,
    ) -> None:
        """Begin to write this rank's shard; `poll` returns the save when it has ended.

        After `settle` the state may change; a forward pass may come before. `counters` and `meta`
        are JSON, from rank 0; `scores`: values of `policy.measure` by step. `while_waiting` is called
        every POLL_SECONDS until the save before this one has ended.
        """
        called = time.perf_counter()
        self._until_idle(None, while_waiting)
        begin = time.perf_counter()
        save = Save(
            directory=self.directory,
            step=step,
            save_id=f"{step:08d}-{self.attempt}-{self._started + 1}",
            rank=self.rank,
            world=self.world,
            files=self.files,
            piece_bytes=self.piece_bytes,
            deadline=self.deadline,
            nbytes=shard.nbytes,
            aliases=shard.aliases,
            base=self.base,
            meta={"reason": PERIODIC} | dict(meta or {}),
        )
        try:
            save.counters = to_json(dict(counters))
            warned = self._warning
            self._copy(save, shard)
            save.warning = "" if warned else self._warning
        except (MemoryError, OSError, RuntimeError, ValueError) as error:
            # The save fails on all ranks, but not the run.
            save.error = f"the state could not be copied to the host: {explain(error)}"
        save.waited_s, save.staged_s = begin - called, time.perf_counter() - begin
        self._started, self.began, self.newest = self._started + 1, time.monotonic(), step
        self._saves.append(save)
        job, name = (save, scores or Scores(), self._copied, shard.device), "checkpoint-writer"
        # A daemon, so that a process with a stuck disk can end.
        self._thread = threading.Thread(target=self._write, args=job, name=name, daemon=True)
        self._thread.start()
        if not self.background:
            staged = time.perf_counter()
            self._until_idle(None, while_waiting)
            save.waited_s += time.perf_counter() - staged

    def _copy(self, save: Save, shard: Shard) -> None:
        """Begin to copy the boxes of a shard into host memory, as the file of a save."""
        header, places, size = shard.layout(self.rank)
        device, copying = shard.device, contextlib.ExitStack()
        self._allocate(size, device)
        image, tensors = memoryview(self._host.numpy())[:size], dict[str, dict[str, Any]]()
        image[: len(header)] = header
        if device is not None:  # CUDA: another stream copies, after all that was launched so far
            self._stream = self._stream or torch.cuda.Stream(device)
            self._stream.wait_stream(torch.cuda.current_stream(device))
            copying.enter_context(torch.cuda.stream(self._stream))
        with copying:
            for box, at in places:
                source = box.tensor.detach()
                target = self._host[at : at + source.nbytes].view(source.dtype).view(source.shape)
                target.copy_(source, non_blocking=True)
                about = {"dtype": TYPE_NAMES[source.dtype], "shape": list(box.shape), "chunks": []}
                chunks = tensors.setdefault(box.name, about)["chunks"]
                chunks.append([at, list(box.offsets), list(source.shape)])
        save.image, save.tensors, self._copied = image, tensors, None
        if device is not None and self._stream:
            self._copied = self._stream.record_event()

    def settle(self) -> None:
        """Called before the state changes: the stream of this thread waits for the copy."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def _allocate(self, size: int, device: torch.device | None) -> None:
        """Make room for `size` bytes, page-locked for copies from a CUDA device."""
        if self._host.numel() >= size:
            return
        self._host = torch.empty(0, dtype=torch.uint8)  # frees the smaller memory first
        if device is not None and not self._warning:
            try:
                with torch.cuda.device(device):
                    self._host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
                return
            except RuntimeError as error:  # such memory is scarce; without it the save still works
                why = explain(error)
                self._warning = f"saves block the step longer: no page-locked memory: {why}"
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

    def wait(
        self, timeout: float | None = None, while_waiting: Callable[[], None] | None = None
    ) -> list[Save]:
        """`poll` once nothing is being written, or after `timeout` seconds."""
        self._until_idle(timeout, while_waiting)
        return self.poll()

    def _until_idle(self, timeout: float | None, while_waiting: Callable[[], None] | None) -> None:
        end = math.inf if timeout is None else time.monotonic() + timeout
        while self.busy and (left := end - time.monotonic()) > 0:
            self._thread.join(min(POLL_SECONDS, left))
            assert self._thread.is_alive() or not self.busy, "the checkpoint writer has died"
            if while_waiting is not None:
                while_waiting()

    def _write(
        self,
        save: Save,
        scores: Scores,
        copied: torch.cuda.Event | None,
        device: torch.device | None,
    ) -> None:
        """Write, commit and clean up; any error becomes the save's."""
        began = time.perf_counter()
        if self.background and sys.platform == "linux":  # elsewhere it is the whole process's
            with contextlib.suppress(OSError):  # a sandbox may forbid it
                os.nice(NICENESS)
        try:
            if copied is not None:
                torch.cuda.set_device(device)  # a new thread would make a context on device 0
                copied.synchronize()
            if self.rank == 0:
                names, present = names_in(self.directory), self._known
                if not present:
                    saved = checkpoints_in(self.directory)
                    present = {c.path: c.content for c in saved if c.content is not None}
                self._known = {path: known for path, known in present.items() if path.name in names}
            serials = [known.serial for known in self._known.values()]
            with contextlib.suppress(UserError):  # the lineage counts deleted checkpoints, too
                serials += (
                    [lineage.serial] if (lineage := read_lineage(self.directory.parent)) else []
                )
            content = save.run(1 + max(serials, default=0))  # rank 0's number counts
            if content is not None:
                save.total_bytes = content.bytes
                # Retention does not need the tensors, of which a large world has many.
                self._known[save.path] = content.model_copy(update={"tensors": {}})
                try:
                    self._clean_up(scores)
                except Exception as problem:
                    save.warning = f"old checkpoints could not be removed: {explain(problem)}"
        except Exception as problem:
            save.error = explain(problem)
        save.image = b""  # the next save reuses its memory
        save.write_s = time.perf_counter() - began
        if not save.error:
            self.last_seconds = save.write_s + save.staged_s
        save.ended = True

    def _clean_up(self, scores: Scores) -> None:
        """Remove leftovers of earlier saves, and the checkpoints that retention does not keep."""
        for name in names_in(self.directory):
            # Another rank may have begun a later save of this attempt: its directory stays.
            if (match := TEMPORARY.match(name)) and (
                match[1] != self.attempt or int(match[2]) <= self._started
            ):
                self.files.remove_tree(self.directory / name)
        why = retain(self._known.values(), self.policy, scores)
        for path in [path for path, saved in self._known.items() if not why[saved.serial]]:
            discard(path, self.files)
            del self._known[path]
