"""Saving: the step waits while the state is copied to the host; a thread writes the copy while training continues.

`Saver.save` copies this rank's rows into a buffer that holds the file as it will be written, header first
(`HostBuffer`), and returns. A thread writes the buffer, hashing on the way, and agrees with the other ranks through the
file system (commit.py). Rank 0 then deletes what retention does not keep. The thread never touches a process group:
its calls would cross the training's own collectives, and could not be given up when a rank is dead.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import re
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from windlass.checkpoint import format as format_
from windlass.checkpoint.commit import Commit, explain
from windlass.checkpoint.load import discard
from windlass.checkpoint.retention import (
    PERIODIC,
    Committed,
    Policy,
    committed,
    read_lineage,
    retain,
)
from windlass.checkpoint.state_dict import Slice, State
from windlass.errors import UserError
from windlass.fileio import PAGE, PIECE_BYTES, Files, to_json

POLL_SECONDS = 0.1
TEMPORARY = re.compile(r"^\.(?:saving|failed)-\d+-(\w+)-(\d+)$")
TYPE_NAMES = {getattr(torch, name): key for key, (name, _) in format_.DTYPES.items()}


@dataclass(frozen=True)
class SaveOutcome:
    """How a save ended. Where `error` is empty the checkpoint at `path` is committed: durable, and seen by readers."""

    step: int
    path: Path
    error: str
    bytes: int  # of the state, over all ranks
    staged_s: float  # how long the step waited for the copy
    waited_s: float  # how long the step waited for the save before this one
    write_s: float  # from the copy to the end, hashing, syncing and agreement included
    warning: str = ""  # what went wrong without failing the save: after the commit, or in getting page-locked memory


class HostBuffer:
    """The host's copy of a rank's share, reused by every save: its pages are touched once, and its size is constant.

    For a state on CUDA it is page-locked, and the copies are put on the current stream, so that they see the weights of
    this step and none of the next; an event says when they are done, and only the writer waits for it.

    The memory is mapped here and registered with CUDA: `pin_memory=True` rounds a size up to a power of two.
    """

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._can_pin = True
        self._unpin: Callable[[], object] = lambda: None  # unregisters the present memory
        self.warning = ""  # why the memory is not page-locked though the state lies on CUDA; until it was reported

    def reserve(self, size: int, pinned_for: torch.device | None) -> None:
        """Have `size` bytes, page-locked for the copies from a CUDA device; does nothing if there are as many."""
        if self._bytes.numel() >= size:
            return
        self._unpin()
        self._bytes = torch.empty(0, dtype=torch.uint8)  # the smaller one is freed first
        memory = mmap.mmap(-1, -(-size // PAGE) * PAGE)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(
                mmap.MADV_HUGEPAGE
            )  # 2 MiB pages are many times faster to touch than 4 KiB ones
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        if pinned_for is None or not self._can_pin:
            return
        # In a thread, which has the failure to itself: CUDA reports it to the next kernel of the thread that saw it.
        address, errors = self._bytes.data_ptr(), list[str]()
        thread = threading.Thread(
            target=register, args=[address, len(memory), pinned_for, errors.append], daemon=True
        )
        thread.start()
        thread.join()
        if errors:  # such memory is scarce (`ulimit -l`); without it the save still works
            self._can_pin = False
            self.warning = (
                f"no page-locked memory for saves, which block the step for longer: {errors[0]}"
            )
            return
        self._unpin = weakref.finalize(
            self, lambda: torch.cuda.cudart().cudaHostUnregister(address)
        )
        self._unpin.atexit = False  # type: ignore[attr-defined] # the end of the process frees it

    def fill(
        self, slices: Mapping[str, Slice], rank: int
    ) -> tuple[memoryview, dict[str, dict[str, Any]], Any]:
        """Copy the slices into the buffer, after the header that describes them.

        Returns `image` and `tensors` as `Commit` has them, and an event that is done when the copies from the device
        are; None where they are already.
        """
        header, offsets, size = layout(slices, rank)
        device = cuda_device(slices)
        self.reserve(size, device)
        image = memoryview(self._bytes.numpy())[:size]
        image[: len(header)] = header
        tensors = {}
        for name, start in offsets.items():
            s = slices[name]
            target = (
                self._bytes[start : start + s.tensor.nbytes]
                .view(s.tensor.dtype)
                .view(s.tensor.shape)
            )
            target.copy_(s.tensor, non_blocking=True)
            chunk = [
                start,
                s.start,
                s.tensor.shape[0] if s.global_shape else 1,
            ]  # a scalar is one row
            tensors[name] = {
                "dtype": TYPE_NAMES[s.tensor.dtype],
                "shape": list(s.global_shape),
                "chunk": chunk,
            }
        return (
            image,
            tensors,
            torch.cuda.current_stream().record_event() if device is not None else None,
        )


def layout(slices: Mapping[str, Slice], rank: int) -> tuple[bytes, dict[str, int], int]:
    """The header of the file that has these slices, the place of each slice in the file, and the file's size."""
    order = sorted(
        slices, key=lambda name: -slices[name].tensor.element_size()
    )  # keeps every tensor aligned
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "windlass": f"rows of rank {rank}"}}
    ends = [0]
    for name in order:
        tensor = slices[name].tensor
        ends.append(ends[-1] + tensor.nbytes)
        dtype, shape = TYPE_NAMES[tensor.dtype], list(tensor.shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": ends[-2:]}
    text = json.dumps(header, separators=(",", ":")).encode()
    data_at = -(-(8 + len(text)) // PAGE) * PAGE
    text = text.ljust(data_at - 8)  # the format allows spaces after the header's JSON
    offsets = {name: data_at + start for name, start in zip(order, ends, strict=False)}
    return len(text).to_bytes(8, "little") + text, offsets, data_at + ends[-1]


def cuda_device(slices: Mapping[str, Slice]) -> torch.device | None:
    """The CUDA device of a state; None if no tensor of it is on one."""
    return next((s.tensor.device for s in slices.values() if s.tensor.is_cuda), None)


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
class Saver:
    """Saves the state of one rank. Every rank has one, with the same `attempt`, and makes the same saves in order."""

    directory: Path  # the run's `checkpoints`, on a file system that all ranks share
    rank: int = 0
    world: int = 1
    attempt: str = (
        "0"  # the same letters and digits on all ranks, and others at every start of the run
    )
    policy: Policy = field(default_factory=Policy)
    device: torch.device | None = None  # where the state is
    files: Files = field(default_factory=Files)
    deadline: float = (
        600.0  # seconds that rank 0 waits for the parts of the others once its own is written
    )
    background: bool = True  # False: `save` returns when all is written
    piece_bytes: int = PIECE_BYTES  # in one write

    def __post_init__(self) -> None:
        self.newest = -1  # the step of the newest save, also in progress; -1: none, or it failed
        self.committed = 0  # the step that a restart would resume from
        self.failures = 0  # saves that failed since the last one that was committed
        self.last_seconds: float | None = None  # of the last committed save, with the copy
        self._began = 0.0
        self._started = self._reported = 0  # saves
        self._buffer = HostBuffer()
        self._known: dict[Path, Committed] = {}  # rank 0's writer reads each manifest once
        self._outcomes: deque[SaveOutcome] = deque()
        self._reserving = threading.Thread()  # makes room for the first save
        # A thread for each save, a daemon: a process whose disk hangs can end. At most one at a time.
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """Whether a save is being written."""
        return self._started > self._reported + len(self._outcomes)

    def expected_seconds(self, step: int) -> float:
        """How long a save of `step` will take after any save in progress; 0 if this step is saved.

        Every save is expected to take as long as the last committed one.
        """
        if self.newest == step:
            return 0.0
        last, elapsed = self.last_seconds or 0.0, time.monotonic() - self._began
        return last + (max(0.0, last - elapsed) if self.busy else 0.0)

    def resume_from(self, step: int) -> None:
        """Training starts from, or has returned to, the committed checkpoint of `step`."""
        self.newest = self.committed = step

    def reserve(self, state: State) -> None:
        """Make room for saves of this state, in the background: the first one waits for no memory."""

        def make_room() -> None:
            with contextlib.suppress(Exception):  # a save tries again, and says why it failed
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
        scores: Mapping[int, float] | None = None,
        while_waiting: Callable[[], None] | None = None,
    ) -> None:
        """Copy the state, which may change as soon as this returns; nothing is durable before `poll` or `wait` says so.

        Waits for the save before this one, and calls `while_waiting` ten times a second. `counters` (JSON) is what a resume
        needs besides tensors; rank 0's are written. `meta` (JSON) is `reason` (see retention) and anything else to list; a float
        that is not finite becomes null. `scores` are values of `policy.measure` by step, from the run's ledger.
        """
        called = time.perf_counter()
        self._until_idle(None, while_waiting)
        if self._reserving.ident is not None:
            self._reserving.join()
        begin = time.perf_counter()
        image, tensors, copied, counters_json, failed = (
            memoryview(b""),
            dict[str, Any](),
            None,
            b"{}",
            "",
        )
        try:
            counters_json = to_json(dict(counters))
            image, tensors, copied = self._buffer.fill(state.slices, self.rank)
        except (
            MemoryError,
            OSError,
            RuntimeError,
            ValueError,
        ) as error:  # fails the save on all ranks, not the run
            failed = f"the state could not be copied to the host: {explain(error)}"
        finite = {
            k: None if isinstance(v, float) and not abs(v) < float("inf") else v
            for k, v in (meta or {}).items()
        }
        commit = Commit(
            self.directory,
            self.rank,
            self.world,
            self.files,
            self.deadline,
            self.piece_bytes,
            step,
            f"{step:08d}-{self.attempt}-{self._started + 1}",
            image,
            tensors,
            state.aliases,
            counters_json,
            {"reason": PERIODIC, **finite},
            state.total_bytes,
            failed,
        )
        job = (commit, copied, time.perf_counter() - begin, begin - called, dict(scores or {}))
        self._started, self._began = self._started + 1, time.monotonic()
        self.newest = step
        if not self.background:
            self._write(*job)
            return
        self._thread = threading.Thread(
            target=self._write, args=job, name="checkpoint-writer", daemon=True
        )
        self._thread.start()

    def poll(self) -> list[SaveOutcome]:
        """The outcomes since the last call; never waits."""
        outcomes = [self._outcomes.popleft() for _ in range(len(self._outcomes))]
        self._reported += len(outcomes)
        for outcome in outcomes:
            if not outcome.error:
                self.committed, self.failures = outcome.step, 0
                continue
            self.failures += 1
            if outcome.step == self.newest:
                self.newest = -1
        return outcomes

    def wait(
        self, timeout: float | None = None, while_waiting: Callable[[], None] | None = None
    ) -> list[SaveOutcome]:
        """Wait until nothing is being written, or `timeout` seconds; the outcomes since the last `poll` or `wait`."""
        self._until_idle(timeout, while_waiting)
        return self.poll()

    def _until_idle(self, timeout: float | None, while_waiting: Callable[[], None] | None) -> None:
        end = float("inf") if timeout is None else time.monotonic() + timeout
        while self.busy and (left := end - time.monotonic()) > 0:
            assert self._thread is not None
            self._thread.join(min(POLL_SECONDS, left))
            assert self._thread.is_alive() or not self.busy, "the checkpoint's writer is gone"
            if while_waiting is not None:
                while_waiting()

    def _write(
        self,
        commit: Commit,
        copied: Any,
        staged_s: float,
        waited_s: float,
        scores: Mapping[int, float],
    ) -> None:
        """Write and commit; any error becomes the outcome, and training continues. `copied` is the event of `fill`."""
        began, error = time.perf_counter(), ""
        warning, self._buffer.warning = self._buffer.warning, ""
        try:
            if self.device is not None and self.device.type == "cuda":
                torch.cuda.set_device(
                    self.device
                )  # a thread starts on device 0, and would make a context there
            if copied is not None:
                copied.synchronize()
            if self.rank == 0:
                names, before = (
                    format_.names_in(self.directory),
                    self._known or committed(self.directory),
                )
                self._known = {path: saved for path, saved in before.items() if path.name in names}
            serials = [saved.serial for saved in self._known.values()]
            with contextlib.suppress(
                UserError
            ):  # commits whose checkpoints were deleted count by the lineage
                if lineage := read_lineage(self.directory.parent):
                    serials.append(lineage.serial)
            commit.run(serial := 1 + max(serials, default=0))
        except Exception as problem:
            error = explain(problem)
        else:
            warning = commit.warning or warning
            if self.rank == 0:
                self._known[commit.target] = Committed(
                    serial, commit.step, str(commit.meta["reason"])
                )
                try:
                    self._clean_up(scores)
                except Exception as problem:  # the checkpoint is committed all the same
                    warning = f"the checkpoint is committed, but old ones could not be removed: {explain(problem)}"
            self.last_seconds = time.perf_counter() - began + staged_s
        seconds = time.perf_counter() - began
        result = (
            commit.step,
            commit.target,
            error,
            commit.total_bytes,
            staged_s,
            waited_s,
            seconds,
            warning,
        )
        self._outcomes.append(SaveOutcome(*result))

    def _clean_up(self, scores: Mapping[int, float]) -> None:
        """After a commit: remove leftovers of earlier saves, and what retention does not keep."""
        for name in format_.names_in(self.directory):
            # Not those of a later save of this attempt: another rank may have begun it.
            if (match := TEMPORARY.match(name)) and (
                match[1] != self.attempt or int(match[2]) <= self._started
            ):
                self.files.remove_tree(self.directory / name)
        why = retain(self._known.values(), self.policy, scores)
        for path in [path for path, saved in self._known.items() if not why[saved.serial]]:
            discard(path, self.files)
            del self._known[path]
