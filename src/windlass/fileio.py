"""File operations that decide what is durable when, and small readers and writers of JSON.

Everything a save changes on the disk goes through one `Files` object, one operation at a time, so that a test can stop,
fail or kill the process at each of them (docs/reliability.md). The rules of durability are those of POSIX: a file's
bytes are on the disk after its `fsync`, a name (a new file, a rename, a removal) after the `fsync` of its directory.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windlass.errors import UserError

O_DIRECT = getattr(os, "O_DIRECT", 0)
PAGE = 4096
PIECE_BYTES = (
    16 * 2**20
)  # in one write: large, so that a background writer rarely asks for the interpreter's lock


def make_dir(path: Path, instead: str) -> None:
    """Make a directory that the user named, where it is not there; UserError where nothing can be written to it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}); {instead}") from None


@dataclass
class Output:
    """A new file that is being written."""

    files: Files
    path: Path
    descriptor: int

    def write(self, data: memoryview | bytes) -> None:
        """Write all of `data`, also where the system takes it in parts."""
        view = memoryview(data)
        while view:
            self.files.about_to("write", self.path, self, view)
            count = 0
            flags = fcntl.fcntl(self.descriptor, fcntl.F_GETFL)
            if flags & O_DIRECT:
                # O_DIRECT takes whole pages only. Where the file system refuses it anyway (EINVAL, ENOTSUP, EIO, by
                # system), the page cache is used from here on; a disk that is full or broken fails again there.
                with contextlib.suppress(OSError):
                    count = os.write(self.descriptor, view[: len(view) // PAGE * PAGE])
                if not count:
                    fcntl.fcntl(self.descriptor, fcntl.F_SETFL, flags & ~O_DIRECT)
            view = view[count or os.write(self.descriptor, view) :]

    def sync(self) -> None:
        """Return when the file's bytes are on the disk."""
        self.files.about_to("fsync", self.path)
        os.fsync(self.descriptor)


class Files:
    """The file operations of a save. Each raises OSError as the system does."""

    def about_to(
        self,
        operation: str,
        path: Path,
        output: Output | None = None,
        data: memoryview | None = None,
    ) -> None:
        """Called before every operation; tests override it to record, fail or kill at any of them."""

    def make_dir(self, path: Path) -> None:
        """Make a directory, unless it exists."""
        self.about_to("mkdir", path)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path)

    def make_dirs(self, path: Path) -> None:
        """Make a directory and its parents; each new one is durable when this returns."""
        if not path.is_dir():
            self.make_dirs(path.parent)
            self.make_dir(path)
            self.sync_dir(path.parent)

    @contextlib.contextmanager
    def create(self, path: Path, direct: bool = False) -> Iterator[Output]:
        """A new, empty file for writing, in place of any file of that name.

        With `direct`, where the system offers it, the bytes (from the start of a page on) are not copied to the page
        cache, which saves about a third of the writer's processor time (benchmarks/direct_write.py).
        """
        self.about_to("create", path)
        with open(path, "wb", buffering=0) as file:
            descriptor = file.fileno()
            if direct:
                with contextlib.suppress(
                    OSError
                ):  # not on this file system: `write` sees the flag that is not set
                    fcntl.fcntl(
                        descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | O_DIRECT
                    )
            yield Output(self, path, descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Rename a file or directory in one step, in place of a file or an empty directory of that name."""
        self.about_to("rename", target)
        os.replace(source, target)

    def unlink(self, path: Path) -> None:
        """Remove a file, if it exists."""
        self.about_to("unlink", path)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)

    def remove_dir(self, path: Path) -> None:
        """Remove an empty directory, if it exists."""
        self.about_to("rmdir", path)
        with contextlib.suppress(FileNotFoundError):
            os.rmdir(path)

    def remove_tree(self, path: Path) -> None:
        """Remove a directory and all in it, or a file. Symbolic links are removed, never followed."""
        if path.is_symlink() or path.is_file():
            self.unlink(path)
            return
        with contextlib.suppress(FileNotFoundError):
            for entry in list(path.iterdir()):
                self.remove_tree(entry)
        self.remove_dir(path)

    def sync_dir(self, path: Path) -> None:
        """Return when the directory's entries (new files, new names) are on the disk."""
        self.about_to("fsync_dir", path)
        self._fsync(path)

    def sync_tree(self, path: Path) -> None:
        """Return when all files under a directory that others wrote, and their names, are on the disk."""
        for entry in (*path.rglob("*"), path):
            self.about_to("fsync_dir" if entry.is_dir() else "fsync", entry)
            self._fsync(entry)

    @staticmethod
    def _fsync(path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in (
                errno.EINVAL,
                errno.ENOTSUP,
            ):  # file systems without fsync of a directory
                raise
        finally:
            os.close(descriptor)

    def write_bytes(self, path: Path, data: bytes) -> None:
        """Write a new file, durable when this returns but for its name. A kill may leave it torn."""
        with self.create(path) as output:
            output.write(data)
            output.sync()

    def replace(self, path: Path, data: bytes, durable: bool = True) -> None:
        """Put a file in place of another one or of none: a reader sees the old or the new one, whole, and with `durable`
        the new one is on the disk when this returns. One process at a time.
        """
        fresh = path.with_name(f".{path.name}.new")
        try:
            with self.create(fresh) as output:
                output.write(data)
                if durable:
                    output.sync()
            self.rename(fresh, path)
        except OSError:
            with contextlib.suppress(OSError):
                self.unlink(fresh)
            raise
        if durable:
            self.sync_dir(path.parent)


def write_atomic(path: Path, data: str | bytes) -> None:
    """Write a file that readers see whole or not at all; raises OSError, leaving nothing. Not synced."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(data.encode() if isinstance(data, str) else data)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; empty where the file is missing, torn or holds something else."""
    with contextlib.suppress(OSError, ValueError):
        value = json.loads(path.read_text(encoding="utf-8", errors="replace"))
        return value if isinstance(value, dict) else {}
    return {}


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSON-lines file; a torn line (a kill in mid-write) is left out, a missing file has none."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return
    for line in text.split("\n"):
        with contextlib.suppress(ValueError):
            value = json.loads(line)
            if isinstance(value, dict):
                yield value


def to_json(value: Any) -> bytes:
    """Compact JSON; raises ValueError for a NaN or an infinity, which JSON does not have."""
    return (json.dumps(value, allow_nan=False) + "\n").encode()
