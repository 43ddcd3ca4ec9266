"""How the ranks of one save come to one checkpoint, or to none, through the file system alone. Needs no torch.

Every rank writes its file and then a part, a small JSON file, into a temporary directory. Rank 0 waits for all parts,
writes counters, manifest and digest, makes every byte durable, and renames the directory: that one rename is the
commit. The other ranks watch for it. Rank 0 alone decides: it gives up when a part reports an error or is not there in
time, and renames the directory to `.failed-...`, where the others find the reason.

What is durable when `Commit.run` returns on rank 0: everything. Before the rename no reader sees anything of the save.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from windlass.checkpoint import format as format_
from windlass.checkpoint.load import discard
from windlass.errors import first_line
from windlass.fileio import PAGE, Files, to_json

REASON = "reason"
SLOWEST_POLL_SECONDS = 0.25
DIRECT_BYTES = 2**20
"""Files from this size on are written past the page cache."""
RESERVE_BYTES = 16 * 2**20
"""Left free beside a checkpoint, for the ledger, logs and the manifest."""


class GivenUp(OSError):
    """A save that cannot be completed: no room, another rank failed, or one did not deliver in time."""


@dataclass(frozen=True)
class Request:
    """What one rank brings to a save."""

    step: int
    save_id: str
    """The same on all ranks, and never used twice in a run."""
    image: memoryview
    """The whole file of this rank: 8 bytes of header length, the header, the data."""
    tensors: Mapping[str, Mapping[str, Any]]
    """By name: `dtype`, `shape` of the whole tensor, `chunk` (offset in the file, first row, rows)."""
    aliases: Mapping[str, str]
    counters: bytes
    meta: Mapping[str, Any]
    total_bytes: int
    """Of all ranks together."""
    failed: str
    """Why this rank has nothing to bring, and all ranks give the save up; empty: it has."""


@dataclass
class Commit:
    """One save, on one rank."""

    request: Request
    directory: Path
    """The run's `checkpoints`."""
    rank: int
    world: int
    serial: int
    """The number of this commit in the run; rank 0's counts."""
    files: Files
    deadline: float
    """Seconds that rank 0 waits for the others' parts."""
    piece_bytes: int
    """Bytes in one write."""
    warning: str = ""
    """What went wrong after the rename (rank 0)."""

    def __post_init__(self) -> None:
        self.target = format_.step_dir(self.directory, self.request.step)
        self.temporary = self.directory / f".saving-{self.request.save_id}"
        self.tombstone = self.directory / f".failed-{self.request.save_id}"

    def run(self) -> None:
        """Write, agree, commit. Raises OSError, and then nothing of the save counts or stays."""
        try:
            self._deliver()
            if self.rank == 0:
                self._commit(self._collect_parts())
            else:
                self._await_commit()
        except Exception as error:
            self._give_up(error)
            if self.rank != 0 and self.tombstone.name in format_.names_in(self.directory):
                raise GivenUp(self._reason()) from error  # rank 0 gave up first; the error here is a consequence
            raise

    def _deliver(self) -> None:
        """Write this rank's file, durably, and then the part that describes it."""
        request, files = self.request, self.files
        if self.rank == 0:
            short = shortage(self.directory, request.total_bytes, f"the checkpoint of step {request.step}")
            if short:
                raise GivenUp(f"no room on the disk: {short}")
        for folder in (self.directory.parent, self.directory, self.temporary):
            files.make_dir(folder)
        if request.failed:
            raise GivenUp(request.failed)
        part: dict[str, Any] = {"rank": self.rank, "host": socket.gethostname(), "files": {}, "tensors": {}}
        if request.tensors:
            name, digest, image = self._file(self.rank), hashlib.sha256(), request.image
            direct = len(image) >= DIRECT_BYTES and self.piece_bytes % PAGE == 0
            with files.create(self.temporary / name, direct) as output:
                for at in range(0, len(image), self.piece_bytes):
                    piece = image[at : at + self.piece_bytes]
                    digest.update(piece)
                    output.write(piece)
                output.sync()
            part["files"] = {name: {"size": len(image), "sha256": digest.hexdigest()}}
            part["tensors"] = request.tensors
        files.replace(self.temporary / self._part(self.rank), to_json(part), durable=False)

    def _collect_parts(self) -> list[dict[str, Any]]:
        """Rank 0: every rank's part, once all are there; GivenUp where one reports an error or the time is over."""
        parts: dict[int, dict[str, Any]] = {}
        end, pause = time.monotonic() + self.deadline, 0.005
        while True:
            names = set(format_.names_in(self.temporary))
            for rank in range(self.world):
                if rank not in parts and self._part(rank) in names:
                    part = json.loads((self.temporary / self._part(rank)).read_bytes())
                    if "error" in part:
                        raise GivenUp(f"rank {rank} on {part['host']} could not write its part: {part['error']}")
                    parts[rank] = part
            if len(parts) == self.world:
                return [parts[rank] for rank in range(self.world)]
            if time.monotonic() > end:
                late = ", ".join(str(r) for r in range(self.world) if r not in parts)
                raise GivenUp(
                    f"no part came from rank {late} within {self.deadline:g} s; is {self.directory} on a file system "
                    "that all ranks share?"
                )
            time.sleep(pause)
            pause = min(2 * pause, SLOWEST_POLL_SECONDS)

    def _commit(self, parts: list[dict[str, Any]]) -> None:
        """Rank 0: counters, manifest and digest, then the name."""
        files = self.files
        manifest = self._manifest(parts)
        format_.parse(manifest)  # what was put together from other ranks' parts is checked like a stranger's
        files.write_bytes(self.temporary / format_.STATE, self.request.counters)
        files.write_bytes(self.temporary / format_.MANIFEST, manifest)
        for rank in range(self.world):
            files.unlink(self.temporary / self._part(rank))
        files.write_bytes(self.temporary / format_.DIGEST, format_.digest_line(manifest))
        files.sync_dir(self.temporary)
        replaced = self.target.with_name(f"{self.target.name}.replaced")
        if format_.is_whole(self.target):  # a directory cannot be replaced in one step: for a moment there are two
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
            self.warning = f"the checkpoint is committed, but the disk did not confirm it: {explain(error)}"

    def _manifest(self, parts: list[dict[str, Any]]) -> bytes:
        """What all ranks wrote, as the bytes of one manifest."""
        request = self.request
        tensors: dict[str, dict[str, Any]] = {}
        written: dict[str, dict[str, Any]] = {}
        for part in parts:
            for file, info in part["files"].items():
                written[file] = info
                for name, entry in part["tensors"].items():
                    tensor = tensors.setdefault(name, {"dtype": entry["dtype"], "shape": entry["shape"], "chunks": []})
                    tensor["chunks"].append([file, *entry["chunk"]])
        for tensor in tensors.values():
            tensor["chunks"].sort(key=lambda chunk: chunk[2])  # by their first row
        digest = hashlib.sha256(request.counters).hexdigest()
        written[format_.STATE] = {"size": len(request.counters), "sha256": digest}
        return to_json(
            {
                "format": "windlass-checkpoint", "version": 2, "step": request.step, "serial": self.serial,
                "save_id": request.save_id, "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
                "world": self.world, "meta": request.meta, "aliases": request.aliases,
                "tensors": {name: tensors[name] for name in sorted(tensors)}, "files": written,
            }
        )  # fmt: skip

    def _await_commit(self) -> None:
        """Other ranks: until rank 0 has committed or given up. They wait longer than rank 0, so that it decides."""
        end, pause = time.monotonic() + 2 * self.deadline + 60.0, 0.005
        while time.monotonic() < end:
            names = format_.names_in(self.directory)
            if self.tombstone.name in names:
                raise GivenUp(self._reason())
            if self.temporary.name not in names and self.target.name in names:
                with contextlib.suppress(format_.Damaged):
                    if format_.read_manifest(self.target).save_id == self.request.save_id:
                        return
            time.sleep(pause)
            pause = min(2 * pause, SLOWEST_POLL_SECONDS)
        raise GivenUp("rank 0 neither committed the save nor gave it up")

    def _reason(self) -> str:
        """Why rank 0 gave the save up, as far as it could write that."""
        try:
            return (self.tombstone / REASON).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return "rank 0 gave the save up"

    def _give_up(self, error: Exception) -> None:
        """Leave nothing of a save that failed, and tell the other ranks; on a broken disk, as far as that goes."""
        files = self.files
        with contextlib.suppress(OSError):  # first: on a full disk this makes room for the message
            files.unlink(self.temporary / self._file(self.rank))
        if self.rank != 0:
            note = {"rank": self.rank, "host": socket.gethostname(), "error": explain(error)}
            with contextlib.suppress(OSError):
                if self.tombstone.name not in format_.names_in(self.directory):
                    files.make_dir(self.temporary)
                    files.replace(self.temporary / self._part(self.rank), to_json(note), durable=False)
                else:  # rank 0 has left: the last rank removes the directory
                    files.unlink(self.temporary / self._part(self.rank))
                    files.remove_dir(self.temporary)
        elif self.world == 1:
            with contextlib.suppress(OSError):
                files.remove_tree(self.temporary)
        else:
            with contextlib.suppress(OSError):
                files.make_dir(self.temporary)  # there must be something to rename, also where this failed before
            with contextlib.suppress(OSError):
                files.write_bytes(self.temporary / REASON, explain(error).encode())
            with contextlib.suppress(OSError):
                files.rename(self.temporary, self.tombstone)
            for name in set(format_.names_in(self.tombstone)) - {REASON}:
                with contextlib.suppress(OSError):
                    files.unlink(self.tombstone / name)

    @staticmethod
    def _part(rank: int) -> str:
        return f"part-{rank:05d}.json"

    @staticmethod
    def _file(rank: int) -> str:
        return f"rank-{rank:05d}.safetensors"


def shortage(path: Path, needed: int, what: str) -> str:
    """Empty where `needed` bytes and a reserve are free under `path`, else the message that says what is missing."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    free = shutil.disk_usage(path).free
    if free >= needed + RESERVE_BYTES:
        return ""
    return f"{what} needs {format_bytes(needed + RESERVE_BYTES)} under {path}, and {format_bytes(free)} are free"


def format_bytes(count: int) -> str:
    """Bytes for people (1 GB = 10^9 bytes)."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}" if count < 1000 * size else f"{count / size:,.0f} {unit}"
    return f"{count} bytes"


def explain(error: BaseException) -> str:
    """What went wrong in one line, without a traceback."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}{f' ({os.fspath(error.filename)})' if error.filename else ''}"
    return str(error) if isinstance(error, GivenUp) else f"{type(error).__name__}: {first_line(error)}"
