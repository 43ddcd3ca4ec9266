"""The ranks of one save agree on a checkpoint, or on none, through the file system: each writes its
file and a part that describes it; rank 0 waits for the parts and renames the directory, which is the
commit. If a part reports an error or comes too late, the name becomes `.failed-...`."""

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

from windlass.checkpoint.choose import discard
from windlass.checkpoint.format import (
    DIGEST,
    MANIFEST,
    STATE,
    Base,
    Damaged,
    Manifest,
    digest_line,
    is_whole,
    names_in,
    parse,
    read_manifest,
    step_dir,
)
from windlass.errors import first_line
from windlass.fileio import Files, to_json

PART, FILE, REASON = "part-{:05d}.json", "rank-{:05d}.safetensors", "reason"
SLOWEST_POLL_SECONDS = 0.25
RESERVE_BYTES = 16 * 2**20  # left free beside a checkpoint, for the ledger, logs and the manifest


class GivenUp(OSError):
    """A save that cannot be completed: a full disk, a failed rank, or a part that came too late."""


@dataclass
class Save:
    """One save, on one rank: first what to write, and after `run` the outcome. Without an `error` the
    checkpoint at `path` is then durable and visible."""

    directory: Path  # the run's `checkpoints`
    step: int
    save_id: str  # the same on all ranks, and never used twice in a run
    rank: int
    world: int
    files: Files
    piece_bytes: int  # per write
    deadline: float  # seconds; how long rank 0 waits for the other ranks after its part
    nbytes: int  # of this rank's tensors
    aliases: Mapping[str, str]  # of tied weights: a name, and the name under which it is saved
    base: Base | None
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
        self.path = step_dir(self.directory, self.step)
        self.temporary = self.directory / f".saving-{self.save_id}"
        self.tombstone = self.directory / f".failed-{self.save_id}"

    def run(self, serial: int) -> Manifest | None:
        """Write, agree, and commit as number `serial` of the run; rank 0 returns the manifest of the
        durable checkpoint. After an error nothing of the save remains."""
        try:
            self._write_part()
            if self.rank == 0:
                return self._commit(self._collect_parts(), serial)
            # Wait, longer than rank 0 does, until it has committed or given up.
            for _ in _polls(2 * self.deadline + 60.0):
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
                reason = "rank 0 gave the save up"  # the error here follows from that
                with contextlib.suppress(OSError):  # on a full disk the reason may be missing
                    reason = (self.tombstone / REASON).read_text(encoding="utf-8", errors="replace")
                raise GivenUp(reason) from error
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
            data, piece_bytes = self.image, self.piece_bytes
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
        for _ in _polls(self.deadline):
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
        problem = f"no part came from rank {late} within {self.deadline:g} s"
        raise GivenUp(f"{problem}; is {self.directory} on a file system that all ranks share?")

    def _commit(self, parts: list[dict[str, Any]], serial: int) -> Manifest:
        """Rank 0: counters, manifest and digest, then the name."""
        files = self.files
        manifest = self._manifest(parts, serial)
        content = parse(manifest)  # the parts of other ranks are checked like any manifest
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

    def _manifest(self, parts: list[dict[str, Any]], serial: int) -> bytes:
        """The manifest of the parts of all ranks."""
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
        manifest = {"format": "windlass-checkpoint", "version": 3, "step": self.step}
        manifest |= {"serial": serial, "save_id": self.save_id, "world": self.world}
        manifest |= {"time": datetime.now(UTC).isoformat(timespec="milliseconds")}
        manifest |= {"meta": self.meta, "aliases": dict(self.aliases)}
        manifest |= {"tensors": dict(sorted(tensors.items())), "files": written}
        return to_json(manifest | {"base": self.base and self.base.model_dump()})

    def _give_up(self, error: Exception) -> None:
        """Remove a failed save and tell the other ranks, if the disk allows it."""
        files = self.files
        with contextlib.suppress(OSError):  # first, to make room for the message on a full disk
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
                files.write_bytes(self.temporary / REASON, explain(error).encode())
            with contextlib.suppress(OSError):
                files.rename(self.temporary, self.tombstone)
            for name in set(names_in(self.tombstone)) - {REASON}:
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
