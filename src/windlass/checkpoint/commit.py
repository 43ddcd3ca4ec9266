"""How the ranks of one save come to one checkpoint, or to none, through the file system alone. Needs no torch.

Every rank writes its file and then a part, a small JSON file, into a directory that no reader looks at. Rank 0 waits for
all parts, writes counters and manifest, makes everything durable, gives the directory its name, and writes the commit
marker, last. The other ranks watch for that. Rank 0 alone decides: it gives up when a part reports an error or is not there
in time, leaves a tombstone for the others to see, and then nothing of the save counts or stays.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from windlass.checkpoint import catalog, space
from windlass.checkpoint import format as format_
from windlass.checkpoint.format import Chunk, FileInfo, Manifest, TensorInfo
from windlass.checkpoint.lineage import read_lineage
from windlass.errors import UserError
from windlass.fileio import PAGE, Files

REASON = "reason"
SLOWEST_POLL_SECONDS = 0.25
DIRECT_BYTES = 2**20
"""Files from this size on are written past the page cache."""


class GivenUp(OSError):
    """A save that cannot be completed: no room, another rank failed, or one did not deliver in time."""


@dataclass(frozen=True)
class Request:
    """What one rank brings to a save."""

    step: int
    save_id: str
    """The same on all ranks, and never used twice in a run."""
    image: memoryview
    """The bytes of this rank's file."""
    tensors: Mapping[str, Mapping[str, Any]]
    """What lies where in it; see `stage.Staged`."""
    aliases: Mapping[str, str]
    counters: bytes
    meta: Mapping[str, Any]
    total_bytes: int
    """Of all ranks together."""
    failed: str = ""
    """Why this rank has nothing to bring: the save is given up by all."""


class Commit:
    """One save, on one rank.

    Args:
        request: what this rank brings.
        directory: the run's `checkpoints`.
        rank: this rank, of
        world: so many.
        files: the layer through which the disk is changed.
        deadline: seconds that rank 0 waits for the others' parts.
        piece_bytes: bytes in one write.
    """

    def __init__(
        self,
        request: Request,
        directory: Path,
        rank: int,
        world: int,
        *,
        files: Files,
        deadline: float,
        piece_bytes: int,
    ):
        self.request, self.directory, self.rank, self.world = request, directory, rank, world
        self.files, self.deadline, self.piece_bytes = files, deadline, piece_bytes
        self.target = catalog.step_dir(directory, request.step)
        self.temporary = directory / f".saving-{request.save_id}"
        self.tombstone = directory / f".failed-{request.save_id}"
        self.warning = ""
        """What went wrong after the marker was written (rank 0)."""

    def run(self) -> Path:
        """Write, agree, commit; returns the committed directory. Raises OSError, and then nothing of the save is left."""
        try:
            self._deliver()
            if self.rank == 0:
                self._commit()
            else:
                self._await_commit()
        except Exception as problem:
            self._give_up(problem)
            if self.rank != 0 and self.tombstone.name in catalog.names(self.directory):
                raise GivenUp(self._reason()) from problem  # what happened here is only its echo
            raise
        return self.target

    def _deliver(self) -> None:
        """Write this rank's file and the part that tells of it."""
        request, files = self.request, self.files
        if self.rank == 0:
            what = f"the checkpoint of step {request.step}"
            missing = space.shortage(self.directory, request.total_bytes + space.RESERVE_BYTES, what)
            if missing:
                raise GivenUp(f"no room on the disk: {missing}")
        for folder in (self.directory.parent, self.directory, self.temporary):
            files.make_dir(folder)
        if request.failed:
            raise GivenUp(request.failed)
        name = f"rank-{self.rank:05d}.safetensors"
        part: dict[str, Any] = {"rank": self.rank, "host": socket.gethostname(), "files": {}, "tensors": {}}
        if request.tensors:
            digest = self._write(self.temporary / name)
            part["files"] = {name: {"size": len(request.image), "sha256": digest}}
            part["tensors"] = request.tensors
        files.replace_json(self.temporary / self._part(self.rank), part, durable=False)

    def _write(self, path: Path) -> str:
        """Write this rank's file durably, and return the SHA-256 of what was to be written."""
        digest, image = hashlib.sha256(), self.request.image
        with self.files.create(path, direct=len(image) >= DIRECT_BYTES and self.piece_bytes % PAGE == 0) as output:
            for at in range(0, len(image), self.piece_bytes):
                piece = image[at : at + self.piece_bytes]
                digest.update(piece)
                output.write(piece)
            output.sync()
        return digest.hexdigest()

    @staticmethod
    def _part(rank: int) -> str:
        return f"part-{rank:05d}.json"

    def _commit(self) -> None:
        """Rank 0: when all parts are there, counters and manifest, then the name, then the marker."""
        files, request = self.files, self.request
        parts = self._parts()
        files.write_bytes(self.temporary / format_.STATE, request.counters)
        manifest = self._manifest(parts)
        format_.parse(files.write_json(self.temporary / format_.MANIFEST, manifest.to_json()))
        for rank in range(self.world):
            files.unlink(self.temporary / self._part(rank))
        files.sync_dir(self.temporary)
        old = self.directory / f".old-{request.save_id}"
        try:
            if format_.committed(self.target):
                files.rename(self.target, old)
                files.sync_dir(self.directory)  # before its name is given away
            else:
                catalog.discard(self.target, files)
            files.rename(self.temporary, self.target)
            files.sync_dir(self.directory)
            files.sync_dir(self.directory.parent)  # this may be the first thing in it
            catalog.write_marker(self.target, files)
        except OSError as problem:
            if not self._marked():
                self._roll_back(old)
                raise
            self.warning = f"the checkpoint is committed, but the disk did not confirm it: {explain(problem)}"
        with contextlib.suppress(OSError):  # where this fails, the next start does it
            catalog.discard(old, files)

    def _line(self) -> int:
        """The number after which the run's present line begins: commits that were deleted by hand keep theirs."""
        with contextlib.suppress(UserError):
            fork = read_lineage(self.directory.parent)
            return fork.serial if fork is not None else 0
        return 0

    def _marked(self) -> bool:
        """Whether an error came so late that the marker is there: other ranks may count on it already."""
        return not self.temporary.exists() and self._is_committed()

    def _roll_back(self, old: Path) -> None:
        """After an error: the checkpoint that was to be replaced has its name again, and the new one is gone."""
        with contextlib.suppress(OSError):
            if not self.temporary.exists():  # it has the target's name already
                catalog.discard(self.target, self.files)
        with contextlib.suppress(OSError):
            if old.exists():
                self.files.rename(old, self.target)

    def _parts(self) -> list[dict[str, Any]]:
        """Every rank's part, once all are there; GivenUp where one reports an error or the time is over."""
        parts: dict[int, dict[str, Any]] = {}
        end, pause = time.monotonic() + self.deadline, 0.005
        while True:
            there = set(catalog.names(self.temporary))
            for rank in range(self.world):
                if rank not in parts and self._part(rank) in there:
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

    def _await_commit(self) -> None:
        """Other ranks: until rank 0 has committed or given up. They wait longer than rank 0, so that it decides."""
        end, pause = time.monotonic() + 2 * self.deadline + 60.0, 0.005
        while time.monotonic() < end:
            there = catalog.names(self.directory)
            if self.target.name in there and self._is_committed():
                return
            if self.tombstone.name in there:
                raise GivenUp(self._reason())
            time.sleep(pause)
            pause = min(2 * pause, SLOWEST_POLL_SECONDS)
        raise GivenUp("rank 0 neither committed the save nor gave it up")

    def _is_committed(self) -> bool:
        if not format_.committed(self.target):
            return False
        try:
            return format_.read(self.target).save_id == self.request.save_id
        except format_.Damaged:  # the marker is just being written
            return False

    def _reason(self) -> str:
        """Why rank 0 gave the save up, as far as it could say so."""
        try:
            return (self.tombstone / REASON).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return "rank 0 gave the save up"

    def _give_up(self, problem: Exception) -> None:
        """Leave nothing of a save that failed, and tell the other ranks. On a broken disk, as far as that goes."""
        files = self.files
        with contextlib.suppress(OSError):  # first: on a full disk this makes room for the message
            files.unlink(self.temporary / f"rank-{self.rank:05d}.safetensors")
        if self.rank != 0:
            note = {"rank": self.rank, "host": socket.gethostname(), "error": explain(problem)}
            with contextlib.suppress(OSError):
                if self.tombstone.name not in catalog.names(self.directory):
                    files.make_dir(self.temporary)
                    files.replace_json(self.temporary / self._part(self.rank), note, durable=False)
                else:  # rank 0 is gone from there: whoever leaves last takes the directory with him
                    files.unlink(self.temporary / self._part(self.rank))
                    files.remove_dir(self.temporary)
        elif self.world == 1:
            with contextlib.suppress(OSError):
                catalog.discard(self.temporary, files)
        else:
            with contextlib.suppress(OSError):
                files.make_dir(self.temporary)  # so that there is something to rename, whatever it was that failed
            with contextlib.suppress(OSError):
                files.write_bytes(self.temporary / REASON, explain(problem).encode())
            with contextlib.suppress(OSError):
                files.rename(self.temporary, self.tombstone)
            for name in set(catalog.names(self.tombstone)) - {REASON}:
                with contextlib.suppress(OSError):
                    files.unlink(self.tombstone / name)

    def _manifest(self, parts: list[dict[str, Any]]) -> Manifest:
        """What all ranks wrote, as one."""
        request = self.request
        chunks: dict[str, list[Chunk]] = {}
        kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
        written: dict[str, FileInfo] = {}
        for part in parts:
            for file, info in part["files"].items():
                written[file] = FileInfo(info["size"], info["sha256"])
                for name, entry in part["tensors"].items():
                    offset, start, rows = entry["chunk"]
                    chunks.setdefault(name, []).append(Chunk(file, offset, start, rows))
                    kinds[name] = (entry["dtype"], tuple(entry["shape"]))
        written[format_.STATE] = FileInfo(len(request.counters), hashlib.sha256(request.counters).hexdigest())
        return Manifest(
            step=request.step,
            serial=1 + max((*(e.serial for e in catalog.entries(self.directory)), self._line()), default=0),
            save_id=request.save_id,
            time=datetime.now(UTC).isoformat(timespec="milliseconds"),
            world=self.world,
            meta=dict(request.meta),
            tensors={n: TensorInfo(*kinds[n], tuple(sorted(chunks[n], key=lambda c: c.start))) for n in sorted(chunks)},
            aliases=dict(request.aliases),
            files=written,
        )


def explain(problem: BaseException) -> str:
    """What went wrong in one line, without a traceback."""
    if isinstance(problem, GivenUp):
        return str(problem)
    if isinstance(problem, OSError) and problem.strerror:
        where = f" ({os.fspath(problem.filename)})" if problem.filename else ""
        return f"{problem.strerror}{where}"
    return f"{type(problem).__name__}: {problem}"
