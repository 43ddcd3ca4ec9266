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
import json
import math
import mmap
import os
import re
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from windlass.checkpoint.commit import Save, SavingRank, explain
from windlass.checkpoint.format import DTYPES, names_in
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
from windlass.checkpoint.state_dict import Slice, State
from windlass.errors import UserError
from windlass.fileio import PAGE, PIECE_BYTES, to_json

POLL_SECONDS = 0.1
# Of the writer, so that it takes the time that computing threads leave. More would let a program
# that uses every core hold it up for a second while it holds Python's lock.
NICENESS = 10
TEMPORARY = re.compile(r"^\.(?:saving|failed)-\d+-(\w+)-(\d+)$")
TYPE_NAMES = {getattr(torch, name): key for key, (name, _) in DTYPES.items()}


class Copy:
    """A copy of a state to the host, which may not change before `settle` has returned.

    On CUDA it runs on a stream of its own, beside the next forward and backward pass. On the host
    the writer copies, and `settle` copies what is left.
    """

    def __init__(self) -> None:
        self._left = deque[tuple[np.ndarray, np.ndarray]]()  # pieces: where to, where from
        self._lock = threading.Lock()  # held while a piece is copied
        self._end: Any = None  # on CUDA an event
        self._boxes: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()

    def add(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy a contiguous tensor on the host, in `finish`; NumPy frees Python's lock meanwhile."""
        to, origin = (t.detach().view(-1).view(torch.uint8).numpy() for t in (target, source))
        for start in range(0, len(to), PIECE_BYTES):
            piece = slice(start, start + PIECE_BYTES)
            self._left.append((to[piece], origin[piece]))

    def begin(
        self, stream: torch.cuda.Stream, boxes: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        """Begin to copy tensors from CUDA, as they are after all that was launched so far."""
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for target, source in boxes:
                target.copy_(source, non_blocking=True)
            self._end = stream.record_event()
        self._boxes = boxes  # else torch may reuse the memory of a temporary tensor

    def settle(self) -> None:
        """From the return on the state may change: by this thread, or by its CUDA stream."""
        if self._end is not None:
            torch.cuda.current_stream().wait_event(self._end)
        self._copy_left()

    def finish(self) -> None:
        """Return when the host has every byte."""
        self._copy_left()
        if self._end is not None:
            self._end.synchronize()

    def _copy_left(self) -> None:
        while True:
            with self._lock:
                if not self._left:
                    return
                to, origin = self._left.popleft()
                to[:] = origin


class HostBuffer:
    """Host memory for a copy of a rank's boxes, which every save reuses.

    For a state on CUDA it is page-locked: mapped here and registered, because `pin_memory=True`
    rounds a size up to a power of two.
    """

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._stream: torch.cuda.Stream | None = None
        self._can_pin = True
        self._unpin: Callable[[], object] = lambda: None  # unregisters the present memory
        self.warning = ""  # why memory for CUDA is not page-locked, until it was reported

    def reserve(self, size: int, pinned_for: torch.device | None) -> None:
        """Make room for `size` bytes, page-locked for copies from a CUDA device."""
        if self._bytes.numel() >= size:
            return
        self._unpin()
        self._bytes = torch.empty(0, dtype=torch.uint8)  # frees the smaller memory first
        memory = mmap.mmap(-1, -(-size // PAGE) * PAGE)
        if hasattr(mmap, "MADV_HUGEPAGE"):  # touching 2 MiB pages is many times faster
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        if pinned_for is None or not self._can_pin:
            return
        # In a thread: CUDA reports a failure to the next kernel of the thread that saw it.
        address, errors = self._bytes.data_ptr(), list[str]()
        arguments = [address, len(memory), pinned_for, errors.append]
        thread = threading.Thread(target=register, args=arguments, daemon=True)
        thread.start()
        thread.join()
        if errors:  # such memory is scarce (`ulimit -l`); without it the save still works
            self._can_pin = False
            self.warning = f"saves block the step longer: no page-locked memory: {errors[0]}"
            return
        unregister = weakref.finalize(self, lambda: torch.cuda.cudart().cudaHostUnregister(address))
        unregister.atexit = False  # the end of the process frees it
        self._unpin = unregister

    def fill(self, save: Save, slices: Sequence[Slice], passing: Set[str] = frozenset()) -> None:
        """Begin to copy the boxes into the buffer, as the file of a save.

        The tensors named in `passing`, which a forward pass may change, are copied first.
        """
        header, places, size = layout(slices, save.rank)
        device = cuda_device(slices)
        self.reserve(size, device)
        image = memoryview(self._bytes.numpy())[:size]
        image[: len(header)] = header
        copy, on_device = Copy(), list[tuple[torch.Tensor, torch.Tensor]]()
        for box, at in places:
            source = box.tensor
            target = self._bytes[at : at + source.nbytes].view(source.dtype).view(source.shape)
            if box.name in passing or not (source.is_cuda or source.is_contiguous()):
                target.copy_(source, non_blocking=True)
            elif source.is_cuda:
                on_device.append((target, source))
            else:
                copy.add(target, source)
        if device is not None:
            self._stream = self._stream or torch.cuda.Stream(device)
            copy.begin(self._stream, on_device)
        save.image, save.tensors, save.copy = image, describe(places), copy


class StateFile:
    """A rank's file, read from a state on the host that does not change meanwhile.

    A slice lies in memory that the next one overwrites.
    """

    def __init__(self, header: bytes, places: list[tuple[Slice, int]], size: int):
        self._parts = [(0, np.frombuffer(header, np.uint8))]
        for box, at in places:
            flat = box.tensor.detach().contiguous().view(-1).view(torch.uint8)
            self._parts.append((at, flat.numpy()))
        self._size, self._piece = size, np.empty(0, np.uint8)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, part: slice) -> memoryview:
        start, stop = part.start, min(part.stop, self._size)
        if len(self._piece) < stop - start:
            pages = mmap.mmap(-1, -(-(stop - start) // PAGE) * PAGE)  # as O_DIRECT needs them
            self._piece = np.frombuffer(pages, np.uint8)
        for at, data in self._parts:
            first, last = max(start, at), min(stop, at + len(data))
            if first < last:
                self._piece[first - start : last - start] = data[first - at : last - at]
        return self._piece[: stop - start].data


def describe(places: list[tuple[Slice, int]]) -> dict[str, dict[str, Any]]:
    """The boxes of a file, as in `Save.tensors`."""
    tensors: dict[str, dict[str, Any]] = {}
    for box, at in places:
        about = {"dtype": TYPE_NAMES[box.tensor.dtype], "shape": list(box.global_shape)}
        chunks = tensors.setdefault(box.name, about | {"chunks": []})["chunks"]
        chunks.append([at, list(box.offsets), list(box.tensor.shape)])
    return tensors


def layout(slices: Sequence[Slice], rank: int) -> tuple[bytes, list[tuple[Slice, int]], int]:
    """The header of the file that holds these boxes, the place of each box, the file's size."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "windlass": f"boxes of rank {rank}"}}
    places, end = list[tuple[Slice, int]](), 0
    for box in sorted(slices, key=lambda box: -box.tensor.element_size()):  # keeps all aligned
        begin, end = end, end + box.tensor.nbytes
        name = box.name  # further boxes of a tensor need names of their own
        while name in header:
            name = f"{box.name}@{','.join(map(str, box.offsets))}"
        about = {"dtype": TYPE_NAMES[box.tensor.dtype], "shape": list(box.tensor.shape)}
        header[name] = about | {"data_offsets": [begin, end]}
        places.append((box, begin))
    text = json.dumps(header, separators=(",", ":")).encode()
    data_at = -(-(8 + len(text)) // PAGE) * PAGE
    text = text.ljust(data_at - 8)  # the format allows spaces after the header's JSON
    places = [(box, data_at + begin) for box, begin in places]
    return len(text).to_bytes(8, "little") + text, places, data_at + end


def cuda_device(slices: Sequence[Slice]) -> torch.device | None:
    """The CUDA device of a state; None if no tensor is on one."""
    return next((box.tensor.device for box in slices if box.tensor.is_cuda), None)


def register(address: int, size: int, device: torch.device, fail: Callable[[str], None]) -> None:
    """Page-lock memory for copies from a CUDA device."""
    try:
        torch.cuda.set_device(device)
        portable = 1
        if code := int(torch.cuda.cudart().cudaHostRegister(address, size, portable)):
            fail(f"cudaHostRegister of {size / 2**20:.0f} MiB failed with error {code}")
    except (AssertionError, RuntimeError) as error:
        fail(explain(error))


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
            with contextlib.suppress(Exception):  # a save tries again and reports the failure
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
