"""Saving: staged while the step waits, written while it does not.

`Saver.save` copies this rank's rows into a buffer on the host and returns; a thread then writes them, hashing on the way,
and meets the other ranks in the file system (see commit.py). It never touches a process group: its calls would cross the
training's own collectives, and an agreement that needs all ranks alive could not be given up when one is not.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from windlass.checkpoint import catalog
from windlass.checkpoint.commit import Commit, Request, explain
from windlass.checkpoint.lineage import Lineage
from windlass.checkpoint.priority import NICE, lower_this_thread, set_nice
from windlass.checkpoint.reshard import Slice, State
from windlass.checkpoint.retention import LOSS, PERIODIC, Policy
from windlass.checkpoint.stage import Stage, Staged
from windlass.fileio import PIECE_BYTES, Files, to_json

POLL_SECONDS = 0.1
HEADER_BYTES = 2**20
"""Room for the header of a rank's file, when the buffer is reserved before the names are known."""


@dataclass(frozen=True)
class Outcome:
    """How a save ended. Where `error` is empty the checkpoint at `path` is committed."""

    step: int
    path: Path
    error: str
    bytes: int
    """This rank's bytes."""
    staged_s: float
    """How long the step waited for the copy."""
    waited_s: float
    """How long the step waited for the save before this one."""
    write_s: float
    """From the copy to the end, hashing, syncing and agreement included."""
    removed: tuple[str, ...] = ()
    """Checkpoints that were deleted as the rules of retention say (rank 0)."""
    warning: str = ""
    """What went wrong after the commit, in the index or in deleting old checkpoints (rank 0)."""


@dataclass(frozen=True)
class _Job:
    number: int
    request: Request
    staged: Staged
    staged_s: float
    waited_s: float


class Saver:
    """Saves the state of one rank. Every rank has one, with the same `attempt`, and makes the same saves in the same order.

    Args:
        directory: the run's `checkpoints`, on a file system that all ranks share.
        rank: this rank, of
        world: so many.
        attempt: the same text on all ranks, and another one at every start of the run.
        policy: what is kept.
        files: the layer through which the disk is changed.
        deadline: seconds that rank 0 waits for the parts of the others once its own is written.
        background: False to write before `save` returns.
        piece_bytes: bytes in one write.
    """

    def __init__(
        self,
        directory: Path,
        rank: int = 0,
        world: int = 1,
        attempt: str = "0",
        policy: Policy | None = None,
        *,
        files: Files | None = None,
        deadline: float = 600.0,
        background: bool = True,
        piece_bytes: int = PIECE_BYTES,
    ):
        if not re.fullmatch(r"[A-Za-z0-9_]+", attempt):
            raise ValueError(f"an attempt is named by letters, digits and underscores, not {attempt!r}")
        self.directory, self.rank, self.world, self.attempt = Path(directory), rank, world, attempt
        self.policy, self.files = policy or Policy(), files or Files()
        self.deadline, self.background, self.piece_bytes = deadline, background, piece_bytes
        self.last_seconds: float | None = None
        """How long the last committed save took, copy included: what a grace budget is held against."""
        self._saves, self._begun = 0, 0.0
        self._stage = Stage()
        self._changed = threading.Condition()
        self._job: _Job | None = None
        self._scores: dict[int, dict[str, float]] = {}
        self._noting = False
        self._reserve: tuple[int, bool] | None = None
        self._trouble = ""
        self._outcomes: list[Outcome] = []
        self._thread: threading.Thread | None = None
        self._closed = False

    def keep_start(self, fork: Lineage | None) -> None:
        """Keep the checkpoint that the run's present line goes on from, where it is one of the run's own."""
        self.policy = replace(self.policy, start=fork.own_step() if fork is not None else None)

    def recover(self) -> list[str]:
        """Tidy up after a kill, on rank 0 at the start, before any rank saves or loads; says what was done."""
        return catalog.recover(self.directory, self.policy, self.files) if self.rank == 0 else []

    @property
    def busy(self) -> bool:
        """Whether a save, or the loss of one, is being written."""
        with self._changed:
            return self._occupied()

    def rest_seconds(self) -> float:
        """How long what is being written still takes, going by the last committed save; 0 where nothing is."""
        with self._changed:
            gone = time.monotonic() - self._begun
            return max(0.0, (self.last_seconds or 0.0) - gone) if self._job is not None else 0.0

    def _occupied(self) -> bool:
        return self._job is not None or self._noting or self._reserve is not None

    def reserve(self, size: int, pinned: bool = False) -> None:
        """Make the host's buffer in the background, so that the first save need not wait for its memory.

        Args:
            size: bytes of this rank's share, see `reshard.expected_bytes`; a save that needs more gets more.
            pinned: the state lies on a CUDA device.
        """
        if self.background:
            with self._changed:
                self._reserve = (size + HEADER_BYTES, pinned)
            self._wake()

    def save(
        self,
        step: int,
        state: State | Mapping[str, Slice],
        counters: Mapping[str, Any],
        meta: Mapping[str, Any] | None = None,
        while_waiting: Callable[[], None] | None = None,
    ) -> None:
        """Take the state of a step; it may change as soon as this returns. The outcome comes by `poll` or `wait`.

        Waits for the save before this one, where that is still being written.

        Args:
            step: optimizer steps done.
            state: this rank's share (see `reshard.gather_state`).
            counters: JSON; what a resume needs beside tensors. Rank 0's are written.
            meta: JSON; `loss` (validation loss at this step), `reason` (see retention), digests, anything else to list.
            while_waiting: called ten times a second while an earlier save is still being written.
        """
        if not isinstance(state, State):
            state = State(dict(state), {}, sum(s.tensor.numel() * s.tensor.element_size() for s in state.values()))
        self._saves += 1
        began = time.perf_counter()
        self._until_idle(None, while_waiting)
        waited = time.perf_counter()
        failed, rest = "", b"{}"
        try:
            rest = to_json(dict(counters))
            staged = self._stage.fill(state.slices, self.rank)
        except (
            MemoryError,
            OSError,
            RuntimeError,
            ValueError,
        ) as problem:  # no memory, say: the save fails, not the run
            failed = f"the state could not be copied to the host: {explain(problem)}"
            staged = Staged(memoryview(b""), {}, None)
        request = Request(
            step=step,
            save_id=f"{step:08d}-{self.attempt}-{self._saves}",
            image=staged.image,
            tensors=staged.tensors,
            aliases=state.aliases,
            counters=rest,
            meta={"reason": PERIODIC, **_finite(meta or {})},
            total_bytes=state.total_bytes,
            failed=failed,
        )
        self._start(_Job(self._saves, request, staged, staged_s=time.perf_counter() - waited, waited_s=waited - began))

    def note(self, step: int, scores: Mapping[str, float]) -> None:
        """What was measured at a step whose save was begun before: `loss`, and others by names as `squad.f1`.

        Rank 0 writes it, in the background; what is not finite is left out. Saving first means that an evaluation that
        fails costs nothing.
        """
        finite = {name: value for name, value in scores.items() if math.isfinite(value)}
        if self.rank != 0 or not finite:
            return
        with self._changed:
            self._scores[step] = finite
            self._noting = self.background
        if self.background:
            self._wake()
        else:
            self._write_notes()

    def note_missing(self, step: int, scores: Mapping[str, float]) -> None:
        """The same, where the checkpoint of the step does not say so already: a kill came before it was written."""
        one = catalog.entry(catalog.step_dir(self.directory, step))
        known = one.scores if one.loss is None else {LOSS: one.loss, **one.scores}
        if one.manifest is not None and not scores.items() <= known.items():
            self.note(step, scores)

    def poll(self) -> list[Outcome]:
        """The outcomes since the last call; never waits."""
        with self._changed:
            found, self._outcomes = self._outcomes, []
        return found

    def wait(self, timeout: float | None = None, while_waiting: Callable[[], None] | None = None) -> list[Outcome]:
        """Wait until nothing is being written, or `timeout` seconds; the outcomes since the last `poll` or `wait`."""
        self._until_idle(timeout, while_waiting)
        return self.poll()

    @contextlib.contextmanager
    def _hurried(self) -> Iterator[None]:
        """While somebody waits for the writer, it gives way to nobody (where the system lets us say so)."""
        writer = self._thread.native_id if self._thread is not None else None
        if writer is not None and self.busy:
            set_nice(writer, os.getpriority(os.PRIO_PROCESS, 0))
        try:
            yield
        finally:
            if writer is not None:
                set_nice(writer, NICE)

    def close(self) -> None:
        """End the thread, at once where it is idle, else when it has done its work. Does not wait for that: `wait` first."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            idle, thread = not self._occupied(), self._thread
        if thread is not None and idle:
            thread.join()

    def _until_idle(self, timeout: float | None, while_waiting: Callable[[], None] | None) -> None:
        end = float("inf") if timeout is None else time.monotonic() + timeout
        with self._hurried():
            while True:
                with self._changed:
                    if not self._occupied() or time.monotonic() >= end:
                        return
                    assert self._thread is not None and self._thread.is_alive(), "the checkpoint's writer is gone"
                    self._changed.wait(max(0.0, min(POLL_SECONDS, end - time.monotonic())))
                if while_waiting is not None:
                    while_waiting()

    def _start(self, job: _Job) -> None:
        if not self.background:
            self._outcomes.append(self._run(job))
            return
        with self._changed:
            self._job, self._begun = job, time.monotonic()
        self._wake()

    def _wake(self) -> None:
        with self._changed:
            assert not self._closed, "a save after close()"
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="checkpoint-writer", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _work(self) -> None:
        lower_this_thread()
        while True:
            with self._changed:
                while not self._occupied():
                    if self._closed:
                        return
                    self._changed.wait()
                job, reserve = self._job, self._reserve
            if reserve is not None:
                with contextlib.suppress(MemoryError, OSError, RuntimeError):  # the first save will say so
                    self._stage.reserve(*reserve)
            outcome = self._run(job) if job is not None else None
            self._write_notes()
            with self._changed:
                if outcome is not None:
                    self._outcomes.append(outcome)
                    self._job = None
                self._noting = bool(self._scores)
                if self._reserve is reserve:
                    self._reserve = None
                self._changed.notify_all()

    def _write_notes(self) -> None:
        """Write down what was measured of checkpoints that are there now; it may change which one is the best."""
        with self._changed:
            notes, self._scores = self._scores, {}
        try:
            for step, scores in notes.items():
                catalog.note(self.directory, step, scores, self.files)
            if notes:
                catalog.publish(self.directory, self.policy, self.files)
        except Exception as problem:
            self._trouble = f"what was measured at step {', '.join(map(str, notes))} was not noted: {explain(problem)}"

    def _run(self, job: _Job) -> Outcome:
        """Write and commit; whatever goes wrong is an outcome, and the training goes on."""
        began = time.perf_counter()
        request, error, warning = job.request, "", ""
        removed: tuple[str, ...] = ()
        try:
            job.staged.ready()
            commit = Commit(
                request, self.directory, self.rank, self.world,
                files=self.files, deadline=self.deadline, piece_bytes=self.piece_bytes,
            )  # fmt: skip
            commit.run()
        except Exception as problem:
            error = explain(problem)
        else:
            removed, warning = self._tidy(job.number) if self.rank == 0 else ((), "")
            warning, self._trouble = commit.warning or warning or self._trouble, ""
            self.last_seconds = time.perf_counter() - began + job.staged_s
        return Outcome(
            step=request.step, path=catalog.step_dir(self.directory, request.step), error=error, bytes=len(request.image),
            staged_s=job.staged_s, waited_s=job.waited_s, write_s=time.perf_counter() - began, removed=removed,
            warning=warning,
        )  # fmt: skip

    def _tidy(self, number: int) -> tuple[tuple[str, ...], str]:
        """After a commit: the index, retention, and what earlier saves that failed have left."""
        try:
            catalog.sweep(self.directory, self.attempt, number, self.files)
            return tuple(p.name for p in catalog.publish(self.directory, self.policy, self.files)), ""
        except Exception as problem:  # whatever it is, the checkpoint is there
            return (
                (),
                f"the checkpoint is committed, but the index or old checkpoints could not be changed: {explain(problem)}",
            )


def _finite(meta: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no NaN and no infinity: a loss that is one is no loss."""
    return {k: None if isinstance(v, float) and not abs(v) < float("inf") else v for k, v in meta.items()}
