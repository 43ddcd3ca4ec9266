"""Writing: the state is copied to the host while the next step computes; a thread writes the copy.
It agrees with the other ranks through the file system (`Save.run`), because its collectives would
cross the training's, and could not end if a rank is dead."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.filesize import decimal

from windlass.checkpoint.choose import PERIODIC, Policy, discard, read_lineage, retain
from windlass.checkpoint.format import (
    DIGEST,
    MANIFEST,
    STATE,
    Base,
    Damaged,
    Manifest,
    checkpoints_in,
    digest_line,
    is_whole,
    names_in,
    read_manifest,
    step_dir,
)
from windlass.checkpoint.state_dict import TYPE_NAMES, Shard
from windlass.errors import UserError, first_line
from windlass.fileio import PIECE_BYTES, Files, to_json
from windlass.telemetry.summary import Scores

PART, FILE = "part-{:05d}.json", "rank-{:05d}.safetensors"
SLOWEST_POLL_SECONDS = 0.25
RESERVE_BYTES = 16 * 2**20  # left free beside a checkpoint, for the ledger, logs and the manifest
POLL_SECONDS = 0.1
# Of the writer, so that it takes the time that computing threads leave. More would let a program
# that uses every core hold it up for a second while it holds Python's lock.
NICENESS = 10
TEMPORARY = re.compile(r"^\.(?:saving|failed)-\d+-(\w+)-(\d+)$")


class GivenUp(OSError):
    """A save that cannot be completed: a full disk, a failed rank, or a part that came too late."""


@dataclass
class Save:
    """One save, on one rank: first what to write, and after `run` the outcome. Without an `error`
    the checkpoint at `path` is then durable and visible."""

    writer: Writer
    step: int
    save_id: str  # the same on all ranks, and never used twice in a run
    nbytes: int  # of this rank's tensors
    aliases: Mapping[str, str]  # of tied weights: a name, and the name under which it is saved
    meta: Mapping[str, Any]
    counters: bytes = b"{}"
    image: Any = b""  # this rank's file in host memory: header length, header, numbers
    tensors: Mapping[str, Any] = field(default_factory=dict)
    """By name `dtype`, `shape` of the whole tensor, `chunks`: place in the file, offsets, sizes."""
    error: str = ""  # why it failed; before `run` why `image` is missing, so that all ranks give up
    warning: str = ""  # a problem that did not fail the save
    ended: bool = False
    waited_s: float = 0.0  # the step waited for the save before this one
    staged_s: float = 0.0  # the step waited for the copy
    total_bytes: int = 0  # of a committed checkpoint, on rank 0
    write_s: float = 0.0  # from the copy to the end: hashing, writing, syncing and agreement

    def __post_init__(self) -> None:
        self.directory, self.files = self.writer.directory, self.writer.files
        self.rank, self.world = self.writer.rank, self.writer.world
        self.path = step_dir(self.directory, self.step)
        self.temporary = self.directory / f".saving-{self.save_id}"
        self.tombstone = self.directory / f".failed-{self.save_id}"

    def run(self, serial: int) -> Manifest | None:
        """Write, agree, and commit as number `serial` of the run; rank 0 returns the manifest of
        the durable checkpoint. After an error nothing of the save remains."""
        try:
            self._write_part()
            if self.rank == 0:
                return self._commit(self._collect_parts(), serial)
            # Wait, longer than rank 0 does, until it has committed or given up.
            for _ in _polls(2 * self.writer.deadline + 60.0):
                names = names_in(self.directory)
                if self.tombstone.name in names:
                    raise GivenUp("rank 0 gave the save up")
                if self.temporary.name not in names and self.path.name in names:
                    with contextlib.suppress(Damaged):
                        if read_manifest(self.path).save_id == self.save_id:
                            return None
            raise GivenUp("rank 0 neither committed the save nor gave it up")
        except Exception as error:
            self._give_up(error)
            if self.rank != 0 and self.tombstone.name in names_in(self.directory):
                raise GivenUp("rank 0 gave the save up") from error  # the error follows from that
            raise

    def _write_part(self) -> None:
        """Write this rank's file, durably, and then the part that describes it."""
        files = self.files
        for folder in (self.directory.parent, self.directory, self.temporary):
            files.make_dir(folder)
        if self.rank == 0:
            size = self.nbytes * self.world  # the ranks write about as much as each other
            if short := shortage(self.directory, size, f"checkpoint {self.path.name}"):
                raise GivenUp(f"no room on the disk: {short}")
        if self.error:
            raise GivenUp(self.error)
        part = {"host": socket.gethostname(), "files": {}, "tensors": self.tensors}
        if self.tensors:
            name, digest = FILE.format(self.rank), hashlib.sha256()
            data, piece_bytes = self.image, self.writer.piece_bytes
            with files.create(self.temporary / name) as output:
                for at in range(0, len(data), piece_bytes):
                    digest.update(data[at : at + piece_bytes])
                    output.write(data[at : at + piece_bytes])
                output.sync()
            part["files"] = {name: {"size": len(data), "sha256": digest.hexdigest()}}
        files.replace(self.temporary / PART.format(self.rank), to_json(part), durable=False)

    def _collect_parts(self) -> list[dict[str, Any]]:
        """Rank 0: every rank's part. GivenUp if one reports an error, or at the deadline."""
        parts: dict[int, dict[str, Any]] = {}
        for _ in _polls(self.writer.deadline):
            names = set(names_in(self.temporary))
            for rank in set(range(self.world)) - parts.keys():
                if PART.format(rank) in names:
                    part = json.loads((self.temporary / PART.format(rank)).read_bytes())
                    if error := part.get("error"):
                        raise GivenUp(f"rank {rank} on {part['host']} failed to write: {error}")
                    parts[rank] = part
            if len(parts) == self.world:
                return [parts[rank] for rank in range(self.world)]
        late = ", ".join(str(r) for r in range(self.world) if r not in parts)
        problem = f"no part came from rank {late} within {self.writer.deadline:g} s"
        raise GivenUp(f"{problem}; is {self.directory} on a file system that all ranks share?")

    def _commit(self, parts: list[dict[str, Any]], serial: int) -> Manifest:
        """Rank 0: counters, manifest and digest, then the name."""
        files = self.files
        content = self._manifest(parts, serial)
        manifest = to_json(content.model_dump())
        files.write_bytes(self.temporary / STATE, self.counters)
        files.write_bytes(self.temporary / MANIFEST, manifest)
        for rank in range(self.world):
            files.unlink(self.temporary / PART.format(rank))
        files.write_bytes(self.temporary / DIGEST, digest_line(manifest))
        files.sync_dir(self.temporary)
        replaced = self.path.with_name(f"{self.path.name}.replaced")
        if is_whole(self.path):  # a directory cannot be replaced in one step
            if replaced.exists():
                files.remove_tree(replaced)
            files.rename(self.path, replaced)
        elif self.path.exists():
            files.remove_tree(self.path)
        try:
            files.rename(self.temporary, self.path)
        except OSError:
            with contextlib.suppress(OSError):
                if replaced.exists():
                    files.rename(replaced, self.path)
            raise
        # From here an error cannot undo it, because others may have seen it.
        try:
            files.sync_dir(self.directory)
            files.sync_dir(self.directory.parent)  # `checkpoints` itself may be new
            if replaced.exists():
                discard(replaced, files)  # after an error the next start removes the rest
        except OSError as error:
            problem = "the checkpoint is committed, but the disk did not confirm it"
            self.warning = f"{problem}: {explain(error)}"
        return content

    def _manifest(self, parts: list[dict[str, Any]], serial: int) -> Manifest:
        """The manifest of the parts of all ranks, which it validates."""
        counters = {"size": len(self.counters), "sha256": hashlib.sha256(self.counters).hexdigest()}
        written, tensors = {STATE: counters}, dict[str, dict[str, Any]]()
        for part in parts:
            written |= part["files"]  # one, or none
            for file in part["files"]:
                for name, entry in part["tensors"].items():
                    about = {"dtype": entry["dtype"], "shape": entry["shape"], "chunks": []}
                    chunks = tensors.setdefault(name, about)["chunks"]
                    chunks += [[file, *chunk] for chunk in entry["chunks"]]
        for tensor in tensors.values():
            tensor["chunks"].sort(key=lambda chunk: chunk[2])  # by their offsets
        return Manifest(
            step=self.step,
            serial=serial,
            save_id=self.save_id,
            time=datetime.now(UTC).isoformat(timespec="milliseconds"),
            world=self.world,
            meta=dict(self.meta),
            tensors=dict(sorted(tensors.items())),
            aliases=dict(self.aliases),
            files=written,
            base=self.writer.base,
        )

    def _give_up(self, error: Exception) -> None:
        """Remove a failed save and tell the other ranks, if the disk allows it."""
        files = self.files
        with contextlib.suppress(OSError):  # first, to make room on a full disk
            files.unlink(self.temporary / FILE.format(self.rank))
        if self.rank != 0:
            note = {"host": socket.gethostname(), "error": explain(error)}
            with contextlib.suppress(OSError):
                if self.tombstone.name not in names_in(self.directory):
                    files.make_dir(self.temporary)
                    part = self.temporary / PART.format(self.rank)
                    files.replace(part, to_json(note), durable=False)
                else:  # rank 0 has left: the last rank removes the directory
                    files.unlink(self.temporary / PART.format(self.rank))
                    files.remove_dir(self.temporary)
        elif self.world == 1:
            with contextlib.suppress(OSError):
                files.remove_tree(self.temporary)
        else:
            with contextlib.suppress(OSError):
                files.make_dir(self.temporary)  # may be missing, and is renamed below
            with contextlib.suppress(OSError):
                files.rename(self.temporary, self.tombstone)
            for name in names_in(self.tombstone):
                with contextlib.suppress(OSError):
                    files.unlink(self.tombstone / name)


def _polls(seconds: float) -> Iterator[None]:
    """One turn at once, and more at growing intervals until `seconds` have passed."""
    end, pause = time.monotonic() + seconds, 0.005
    yield
    while time.monotonic() <= end:
        time.sleep(pause)
        pause = min(2 * pause, SLOWEST_POLL_SECONDS)
        yield


def shortage(path: Path, needed: int, what: str) -> str:
    """Empty if `needed` bytes and a reserve are free under `path`; otherwise a message."""
    free = shutil.disk_usage(path).free
    if free >= needed + RESERVE_BYTES:
        return ""
    need = f"{decimal(needed)} and a reserve of {decimal(RESERVE_BYTES)}"
    return f"{what} needs {need} under {path}, and {decimal(free)} are free"


def explain(error: BaseException) -> str:
    """An error in one line, without a traceback."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}{f' ({os.fspath(error.filename)})' if error.filename else ''}"
    if isinstance(error, GivenUp):
        return str(error)
    return f"{type(error).__name__}: {first_line(error)}"


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

        After `settle` the state may change; a forward pass may come before. `counters` and `meta`
        are JSON, from rank 0; `scores`: values of `policy.measure` by step.
        """
        called = time.perf_counter()
        self._until_idle(None)
        begin = time.perf_counter()
        save_id = f"{step:08d}-{self.attempt}-{self._started + 1}"
        meta = {"reason": PERIODIC} | dict(meta or {})
        save = Save(self, step, save_id, shard.nbytes, shard.aliases, meta)
        try:
            save.counters = to_json(dict(counters))
            self._copy(save, shard)
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
            self._until_idle(None)
            save.waited_s += time.perf_counter() - staged

    def _copy(self, save: Save, shard: Shard) -> None:
        """Begin to copy the boxes of a shard into host memory, as the file of a save."""
        header, places, size = shard.layout(self.rank)
        device, copying, self._copied = shard.device, contextlib.ExitStack(), None
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
        save.image, save.tensors = image, tensors
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
                if lineage := read_lineage(self.directory.parent):
                    serials.append(lineage.serial)
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
        good = [saved for saved in self._known.values() if saved.serial not in self.damaged]
        why = retain(good, self.policy, scores)
        for path in [path for path, saved in self._known.items() if why.get(saved.serial) == []]:
            discard(path, self.files)
            del self._known[path]
