"""How the ranks of one save come to one checkpoint, or to none, through the file system alone. No torch.

Every rank writes its file and then a part, a small JSON file, into a temporary directory. Rank 0 waits for all parts,
writes counters, manifest and digest, makes every byte durable, and renames the directory: that one rename is the
commit. The other ranks watch for it. Rank 0 alone decides: it gives up when a part reports an error or is not there in
time, and renames the directory to `.failed-...`, where the others find the reason.
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
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from windlass.checkpoint import format as format_
from windlass.checkpoint.load import discard
from windlass.errors import first_line
from windlass.fileio import PAGE, Files, to_json

PART, FILE, REASON = "part-{:05d}.json", "rank-{:05d}.safetensors", "reason"
SLOWEST_POLL_SECONDS = 0.25
DIRECT_BYTES = 2**20  # files from this size on are written past the page cache
RESERVE_BYTES = 16 * 2**20  # left free beside a checkpoint, for the ledger, logs and the manifest


class GivenUp(OSError):
    """A save that cannot be completed: no room, another rank failed, or one did not deliver in time."""


@dataclass
class Commit:
    """One save, on one rank."""

    directory: Path  # the run's `checkpoints`
    rank: int
    world: int
    files: Files
    deadline: float  # seconds that rank 0 waits for the others' parts
    piece_bytes: int  # in one write
    step: int
    save_id: str  # the same on all ranks, and never used twice in a run
    image: memoryview  # this rank's whole file: 8 bytes of header length, the header, the data
    tensors: Mapping[
        str, Mapping[str, Any]
    ]  # `dtype`, `shape` of the whole, `chunk` (offset in the file, row, rows)
    aliases: Mapping[str, str]
    counters: bytes
    meta: Mapping[str, Any]
    total_bytes: int  # of all ranks together
    failed: str  # why this rank has nothing to write, and all ranks give the save up; empty: it has
    warning: str = ""  # what went wrong after the rename (rank 0)

    def __post_init__(self) -> None:
        self.target = format_.step_dir(self.directory, self.step)
        self.temporary = self.directory / f".saving-{self.save_id}"
        self.tombstone = self.directory / f".failed-{self.save_id}"

    def run(self, serial: int) -> None:
        """Write, agree, commit as the run's commit number `serial` (rank 0's counts); durable when rank 0 returns.

        Raises OSError, and then nothing of the save counts or stays.
        """
        try:
            self._write_part()
            if self.rank == 0:
                self._commit(self._collect_parts(), serial)
            else:
                self._await_commit()
        except Exception as error:
            self._give_up(error)
            if self.rank != 0 and self.tombstone.name in format_.names_in(self.directory):
                reason = "rank 0 gave the save up"
                with contextlib.suppress(OSError):  # a full disk may have no reason on it
                    reason = (self.tombstone / REASON).read_text(encoding="utf-8", errors="replace")
                raise GivenUp(
                    reason
                ) from error  # rank 0 gave up first; the error here is a consequence
            raise

    def _write_part(self) -> None:
        """Write this rank's file, durably, and then the part that describes it."""
        files = self.files
        for folder in (self.directory.parent, self.directory, self.temporary):
            files.make_dir(folder)
        if self.rank == 0 and (
            short := shortage(self.directory, self.total_bytes, f"checkpoint {self.target.name}")
        ):
            raise GivenUp(f"no room on the disk: {short}")
        if self.failed:
            raise GivenUp(self.failed)
        part: dict[str, Any] = {
            "rank": self.rank,
            "host": socket.gethostname(),
            "files": {},
            "tensors": self.tensors,
        }
        if self.tensors:
            name, digest = FILE.format(self.rank), hashlib.sha256()
            direct = len(self.image) >= DIRECT_BYTES and self.piece_bytes % PAGE == 0
            with files.create(self.temporary / name, direct) as output:
                for at in range(0, len(self.image), self.piece_bytes):
                    piece = self.image[at : at + self.piece_bytes]
                    digest.update(piece)
                    output.write(piece)
                output.sync()
            part["files"] = {name: {"size": len(self.image), "sha256": digest.hexdigest()}}
        files.replace(self.temporary / PART.format(self.rank), to_json(part), durable=False)

    def _collect_parts(self) -> list[dict[str, Any]]:
        """Rank 0: every rank's part, once all are there; GivenUp where one reports an error or the time is over."""
        parts: dict[int, dict[str, Any]] = {}
        for _ in _polls(self.deadline):
            names = set(format_.names_in(self.temporary))
            for rank in range(self.world):
                if rank not in parts and PART.format(rank) in names:
                    part = json.loads((self.temporary / PART.format(rank)).read_bytes())
                    if "error" in part:
                        raise GivenUp(
                            f"rank {rank} on {part['host']} could not write its part: {part['error']}"
                        )
                    parts[rank] = part
            if len(parts) == self.world:
                return [parts[rank] for rank in range(self.world)]
        late = ", ".join(str(r) for r in range(self.world) if r not in parts)
        shared = f"is {self.directory} on a file system that all ranks share?"
        raise GivenUp(f"no part came from rank {late} within {self.deadline:g} s; {shared}")

    def _commit(self, parts: list[dict[str, Any]], serial: int) -> None:
        """Rank 0: counters, manifest and digest, then the name."""
        files = self.files
        manifest = self._manifest(parts, serial)
        format_.parse(
            manifest
        )  # what was put together from other ranks' parts is checked like a stranger's
        files.write_bytes(self.temporary / format_.STATE, self.counters)
        files.write_bytes(self.temporary / format_.MANIFEST, manifest)
        for rank in range(self.world):
            files.unlink(self.temporary / PART.format(rank))
        files.write_bytes(self.temporary / format_.DIGEST, format_.digest_line(manifest))
        files.sync_dir(self.temporary)
        replaced = self.target.with_name(f"{self.target.name}.replaced")
        if format_.is_whole(
            self.target
        ):  # a directory cannot be replaced in one step: for a moment there are two
            if replaced.exists():
                files.remove_tree(replaced)
            files.rename(self.target, replaced)
        elif self.target.exists():
            files.remove_tree(self.target)
        try:
            files.rename(self.temporary, self.target)
        except OSError:
            with contextlib.suppress(OSError):
                if replaced.exists():
                    files.rename(replaced, self.target)
            raise
        # From here on other ranks and readers may have seen it: no error takes it back.
        try:
            files.sync_dir(self.directory)
            files.sync_dir(self.directory.parent)  # `checkpoints` itself may be new
            if replaced.exists():
                discard(replaced, files)
        except OSError as error:  # what stays of the replaced one goes at the next start
            self.warning = (
                f"the checkpoint is committed, but the disk did not confirm it: {explain(error)}"
            )

    def _manifest(self, parts: list[dict[str, Any]], serial: int) -> bytes:
        """What all ranks wrote, as the bytes of one manifest."""
        counters = {"size": len(self.counters), "sha256": hashlib.sha256(self.counters).hexdigest()}
        written, tensors = {format_.STATE: counters}, dict[str, dict[str, Any]]()
        for part in parts:
            written |= part["files"]  # one, or none
            for file in part["files"]:
                for name, entry in part["tensors"].items():
                    tensor = tensors.setdefault(
                        name, {"dtype": entry["dtype"], "shape": entry["shape"], "chunks": []}
                    )
                    tensor["chunks"].append([file, *entry["chunk"]])
        for tensor in tensors.values():
            tensor["chunks"].sort(key=lambda chunk: chunk[2])  # by their first row
        return to_json(
            {
                "format": "windlass-checkpoint",
                "version": 2,
                "step": self.step,
                "serial": serial,
                "save_id": self.save_id,
                "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
                "world": self.world,
                "meta": self.meta,
                "aliases": self.aliases,
                "tensors": dict(sorted(tensors.items())),
                "files": written,
            }
        )

    def _await_commit(self) -> None:
        """Other ranks: until rank 0 has committed or given up. They wait longer than rank 0, so that it decides."""
        for _ in _polls(2 * self.deadline + 60.0):
            names = format_.names_in(self.directory)
            if self.tombstone.name in names:
                raise GivenUp("rank 0 gave the save up")
            if self.temporary.name not in names and self.target.name in names:
                with contextlib.suppress(format_.Damaged):
                    if format_.read_manifest(self.target).save_id == self.save_id:
                        return
        raise GivenUp("rank 0 neither committed the save nor gave it up")

    def _give_up(self, error: Exception) -> None:
        """Leave nothing of a save that failed, and tell the other ranks; on a broken disk, as far as that goes."""
        files = self.files
        with contextlib.suppress(OSError):  # first: on a full disk this makes room for the message
            files.unlink(self.temporary / FILE.format(self.rank))
        if self.rank != 0:
            note = {"rank": self.rank, "host": socket.gethostname(), "error": explain(error)}
            with contextlib.suppress(OSError):
                if self.tombstone.name not in format_.names_in(self.directory):
                    files.make_dir(self.temporary)
                    files.replace(
                        self.temporary / PART.format(self.rank), to_json(note), durable=False
                    )
                else:  # rank 0 has left: the last rank removes the directory
                    files.unlink(self.temporary / PART.format(self.rank))
                    files.remove_dir(self.temporary)
        elif self.world == 1:
            with contextlib.suppress(OSError):
                files.remove_tree(self.temporary)
        else:
            with contextlib.suppress(OSError):
                files.make_dir(
                    self.temporary
                )  # there must be something to rename, also where this failed before
            with contextlib.suppress(OSError):
                files.write_bytes(self.temporary / REASON, explain(error).encode())
            with contextlib.suppress(OSError):
                files.rename(self.temporary, self.tombstone)
            for name in set(format_.names_in(self.tombstone)) - {REASON}:
                with contextlib.suppress(OSError):
                    files.unlink(self.tombstone / name)


def _polls(seconds: float) -> Iterator[None]:
    """One turn at once, and more at growing intervals until the time is over."""
    end, pause = time.monotonic() + seconds, 0.005
    yield
    while time.monotonic() <= end:
        time.sleep(pause)
        pause = min(2 * pause, SLOWEST_POLL_SECONDS)
        yield


def shortage(path: Path, needed: int, what: str) -> str:
    """Empty if `needed` bytes and a reserve are free under `path`, else the message that says what is missing."""
    free = shutil.disk_usage(path).free
    if free >= needed + RESERVE_BYTES:
        return ""
    need = f"{format_bytes(needed)} and a reserve of {format_bytes(RESERVE_BYTES)}"
    return f"{what} needs {need} under {path}, and {format_bytes(free)} are free"


def format_bytes(count: int) -> str:
    """Bytes for people (1 GB = 10^9 bytes)."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return (
                f"{count / size:.3g} {unit}"
                if count < 1000 * size
                else f"{count / size:,.0f} {unit}"
            )
    return f"{count} bytes"


def explain(error: BaseException) -> str:
    """What went wrong in one line, without a traceback."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}{f' ({os.fspath(error.filename)})' if error.filename else ''}"
    return (
        str(error) if isinstance(error, GivenUp) else f"{type(error).__name__}: {first_line(error)}"
    )
