"""One save of all ranks, committed whole or not at all; removal, and recovery after a kill.

Each rank writes its file and then a part, which describes the file. Rank 0 waits for the parts,
writes the manifest and gives the directory its name. The ranks agree through the file system,
because collectives would cross the training's, and could not end if a rank is dead.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from windlass.checkpoint.format import (
    DIGEST,
    MANIFEST,
    STATE,
    STEP_DIR,
    Manifest,
    digest_line,
    is_whole,
    names_in,
    read_checkpoint,
    step_dir,
)
from windlass.errors import first_line
from windlass.fileio import PIECE_BYTES, Files, to_json

PART, FILE = "part-{:05d}.json", "rank-{:05d}.safetensors"
FAILED = ".failed-"  # begins the name of the directory of a save that rank 0 gave up
SLOWEST_POLL_SECONDS = 0.25
RESERVE_BYTES = 16 * 2**20  # left free after a checkpoint, for the ledger, logs and the manifest


@dataclass(kw_only=True)
class Save:
    """One save, on one rank: first what to write, and after `run` the outcome. Without an `error`
    the checkpoint at `path` is then durable and visible."""

    directory: Path  # the run's `checkpoints`
    rank: int
    world: int
    files: Files
    deadline: float  # seconds; how long rank 0 waits for the other ranks after its own part

    step: int
    save_id: str  # the same on all ranks, and never used twice in a run
    manifest_fields: Mapping[str, Any]  # meta, aliases and base
    counters: bytes = b"{}"
    file_bytes: Any = b""  # this rank's file in host memory: header length, header, numbers
    tensors: dict[str, Any] = field(default_factory=dict)
    """By name `dtype`, `shape` of the whole tensor, `chunks`: file, place in it, offsets, sizes."""

    error: str = ""  # why it failed; set before `run`, it makes all ranks give up
    warning: str = ""  # a problem that did not fail the save
    ended: bool = False
    waited_s: float = 0.0  # the step waited for the save before this one
    staged_s: float = 0.0  # the step waited for the copy
    write_s: float = 0.0  # from the copy to the end: hashing, writing, syncing and agreement
    total_bytes: int = 0  # of a committed checkpoint, on rank 0

    def __post_init__(self) -> None:
        self.path = step_dir(self.directory, self.step)
        self.temporary = self.directory / f".saving-{self.save_id}"
        self.tombstone = self.directory / f"{FAILED}{self.save_id}"

    def run(self, serial: int) -> Manifest | None:
        """Write, agree, and commit as number `serial` of the run; rank 0 returns the manifest of
        the durable checkpoint. After an error nothing of the save remains."""
        try:
            self._write_part()
            if self.rank == 0:
                return self._commit(self._collect_parts(), serial)
            # Wait, longer than rank 0 does, until it has committed or given up.
            for _ in _polls(2 * self.deadline + 60.0):
                names = names_in(self.directory)
                if self.tombstone.name in names:
                    raise OSError("rank 0 gave the save up")
                if self.temporary.name not in names and self.path.name in names:
                    content = read_checkpoint(self.path).content
                    if content is not None and content.save_id == self.save_id:
                        return None
            raise OSError("rank 0 neither committed the save nor gave it up")
        except Exception as error:
            self._give_up(error)
            if self.rank != 0 and self.tombstone.name in names_in(self.directory):
                raise OSError("rank 0 gave the save up") from error  # the error follows from that
            raise

    def _write_part(self) -> None:
        """Write this rank's file, durably, and then the part that describes it."""
        files = self.files
        for folder in (self.directory.parent, self.directory, self.temporary):
            files.make_dir(folder)
        if self.rank == 0:
            size = len(self.file_bytes) * self.world  # the ranks write about as much as each other
            if (free := shutil.disk_usage(self.directory).free) < size + RESERVE_BYTES:
                needs = f"{decimal(size)} and a reserve of {decimal(RESERVE_BYTES)}"
                raise OSError(f"{self.path.name} needs {needs}; the disk has {decimal(free)} free")
        if self.error:
            raise OSError(self.error)
        part = {"host": socket.gethostname(), "files": {}, "tensors": self.tensors}
        if self.tensors:
            name, digest = FILE.format(self.rank), hashlib.sha256()
            data = self.file_bytes
            with files.create(self.temporary / name) as output:
                for at in range(0, len(data), PIECE_BYTES):
                    digest.update(data[at : at + PIECE_BYTES])
                    output.write(data[at : at + PIECE_BYTES])
                output.sync()
            part["files"] = {name: {"size": len(data), "sha256": digest.hexdigest()}}
        files.replace(self.temporary / PART.format(self.rank), to_json(part), durable=False)

    def _collect_parts(self) -> list[dict[str, Any]]:
        """Rank 0: every rank's part. OSError if one reports an error, or at the deadline."""
        parts: dict[int, dict[str, Any]] = {}
        for _ in _polls(self.deadline):
            names = set(names_in(self.temporary))
            for rank in set(range(self.world)) - parts.keys():
                if PART.format(rank) in names:
                    part = json.loads((self.temporary / PART.format(rank)).read_bytes())
                    if error := part.get("error"):
                        raise OSError(f"rank {rank} on {part['host']} failed to write: {error}")
                    parts[rank] = part
            if len(parts) == self.world:
                return [parts[rank] for rank in range(self.world)]
        late = ", ".join(str(r) for r in range(self.world) if r not in parts)
        problem = f"no part came from rank {late} within {self.deadline:g} s"
        raise OSError(f"{problem}; is {self.directory} on a file system that all ranks share?")

    def _commit(self, parts: list[dict[str, Any]], serial: int) -> Manifest:
        """Rank 0: counters, manifest and digest, then the name."""
        files = self.files
        manifest = self._manifest(parts, serial)
        data = to_json(manifest.model_dump())
        files.write_bytes(self.temporary / STATE, self.counters)
        files.write_bytes(self.temporary / MANIFEST, data)
        for rank in range(self.world):
            files.unlink(self.temporary / PART.format(rank))
        files.write_bytes(self.temporary / DIGEST, digest_line(data))
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
        return manifest

    def _manifest(self, parts: list[dict[str, Any]], serial: int) -> Manifest:
        """The manifest of the parts of all ranks, which it validates."""
        counters = {"size": len(self.counters), "sha256": hashlib.sha256(self.counters).hexdigest()}
        files = {STATE: counters}
        tensors: dict[str, dict[str, Any]] = {}
        for part in parts:
            files.update(part["files"])  # one, or none
            for name, tensor in part["tensors"].items():
                tensors.setdefault(name, {**tensor, "chunks": []})["chunks"] += tensor["chunks"]
        for tensor in tensors.values():
            tensor["chunks"].sort(key=lambda chunk: chunk[2])  # by their offsets
        return Manifest(
            step=self.step,
            serial=serial,
            save_id=self.save_id,
            time=datetime.now(UTC).isoformat(timespec="milliseconds"),
            world=self.world,
            tensors=dict(sorted(tensors.items())),
            files=files,
            **self.manifest_fields,
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


def explain(error: BaseException) -> str:
    """An error in one line, without a traceback."""
    if not isinstance(error, OSError):
        return f"{type(error).__name__}: {first_line(error)}"
    if not error.strerror:  # our own
        return str(error)
    return f"{error.strerror} ({os.fspath(error.filename)})" if error.filename else error.strerror


def recover(directory: Path, files: Files | None = None) -> list[str]:
    """Remove temporary directories from a run's `checkpoints`, and give a checkpoint its name back
    if the save in its place was interrupted; returns a note on each such checkpoint."""
    files, notes = files or Files(), list[str]()
    for name in names_in(directory):
        path = directory / name
        is_step = STEP_DIR.match(name) and path.is_dir()
        if name.startswith(".") or (is_step and not is_whole(path)):
            files.remove_tree(path)
    for name in names_in(directory):
        if name.endswith(".replaced") and STEP_DIR.match(name):
            successor = directory / name.removesuffix(".replaced")
            if is_whole(successor) and not read_checkpoint(successor).problem:
                discard(directory / name, files)
            else:
                discard(successor, files)
                files.rename(directory / name, successor)
                files.sync_dir(directory)
                notes.append(f"restored {successor.name}: a save in its place was interrupted")
    return notes


def discard(path: Path, files: Files) -> None:
    """Remove a checkpoint: first its digest, durably, so that a kill leaves it temporary."""
    if is_whole(path):
        files.unlink(path / DIGEST)
        files.sync_dir(path)
    files.remove_tree(path)
