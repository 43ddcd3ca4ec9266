"""Durable file operations, the atomic writer, the lock, and JSON files.

A save changes the disk through one `Files` object, so that a test can stop, fail or kill the
process at each operation. As in POSIX, the bytes of a file are on the disk after its `fsync`, and a
name (a new file, a rename, a removal) after the `fsync` of its directory.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import math
import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from windlass.errors import UserError

LOCK_POLL_SECONDS = 0.1
PIECE_BYTES = 16 * 2**20  # that a thread writes or hashes before it needs Python's lock again
BUFFER_BYTES = 2**20  # of a `HashedFile`


def make_dir(path: Path, instead: str) -> None:
    """Make a directory that the user named, unless it exists; UserError if it is not writable."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}); {instead}") from None


@contextlib.contextmanager
def new_directory(directory: Path) -> Iterator[Path]:
    """An empty directory to fill; it becomes `directory` after the block, or vanishes."""
    if directory.is_file() or (directory.is_dir() and any(directory.iterdir())):
        raise UserError(f"{directory} is a file or not empty: name a new directory")
    make_dir(directory.absolute().parent, f"name another directory than {directory}")
    partial = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir()
        yield partial
        partial.replace(directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@dataclass
class NewFile:
    """A new file, open for writing."""

    files: Files
    path: Path
    descriptor: int

    def write(self, data: memoryview | bytes) -> None:
        view = memoryview(data)
        while view:
            self.files.about_to("write", self.path, self, view)
            view = view[os.write(self.descriptor, view) :]

    def sync(self) -> None:
        """Return when the file's bytes are on the disk."""
        self.files.about_to("fsync", self.path)
        os.fsync(self.descriptor)


class HashedFile:
    """A new file, hashed while it is written, by way of a small buffer."""

    def __init__(self, output: NewFile):
        self.output, self.bytes = output, 0
        self._digest, self._piece = hashlib.sha256(), bytearray()

    def write(self, data: bytes) -> None:
        self._piece += data
        self.bytes += len(data)
        if len(self._piece) >= BUFFER_BYTES:
            self._flush()

    def _flush(self) -> None:
        self._digest.update(self._piece)
        self.output.write(bytes(self._piece))
        self._piece = bytearray()

    def finish(self) -> str:
        """Write the rest; returns the SHA-256."""
        self._flush()
        return self._digest.hexdigest()


class Files:
    """The file operations of a save; each raises OSError as the system does."""

    def about_to(
        self,
        operation: str,
        path: Path,
        output: NewFile | None = None,
        data: memoryview | None = None,
    ) -> None:
        """Called before every operation; tests override it to record, fail or kill."""

    def make_dir(self, path: Path) -> None:
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
    def create(self, path: Path) -> Iterator[NewFile]:
        """A new, empty file for writing, in place of any file of that name."""
        self.about_to("create", path)
        with open(path, "wb", buffering=0) as file:
            yield NewFile(self, path, file.fileno())

    def rename(self, source: Path, target: Path) -> None:
        """Rename in one step, in place of a file or an empty directory of that name."""
        self.about_to("rename", target)
        os.replace(source, target)

    def unlink(self, path: Path) -> None:
        self.about_to("unlink", path)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)

    def remove_dir(self, path: Path) -> None:
        self.about_to("rmdir", path)
        with contextlib.suppress(FileNotFoundError):
            os.rmdir(path)

    def remove_tree(self, path: Path) -> None:
        """Remove a file, or a directory with its content; symbolic links are not followed."""
        if path.is_symlink() or path.is_file():
            self.unlink(path)
            return
        with contextlib.suppress(FileNotFoundError):
            for entry in list(path.iterdir()):
                self.remove_tree(entry)
        self.remove_dir(path)

    def sync_tree(self, path: Path) -> None:
        """Return when everything under a directory is on the disk."""
        for entry in (*path.rglob("*"), path):
            self.sync_dir(entry)

    def sync_dir(self, path: Path) -> None:
        """Return when a directory's entries (new files, new names) are on the disk."""
        self.about_to("fsync_dir", path)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # no fsync of a directory here
                raise
        finally:
            os.close(descriptor)

    def write_bytes(self, path: Path, data: bytes) -> None:
        """Write a new file; its bytes are durable, its name is not. A kill may leave it torn."""
        with self.create(path) as output:
            output.write(data)
            output.sync()

    @contextlib.contextmanager
    def replacing(self, path: Path, durable: bool = True) -> Iterator[NewFile]:
        """A new file, which takes the place of `path` at the end of the block.

        A reader sees the old file or the new one, whole. With `durable` the new file is on the disk
        after the block, and one process at a time may write it. Otherwise any number may.
        """
        writer = "" if durable else f".{os.getpid()}"
        fresh = path.with_name(f".{path.name}{writer}.new")
        try:
            with self.create(fresh) as output:
                yield output
                if durable:
                    output.sync()
            self.rename(fresh, path)
        except BaseException:
            with contextlib.suppress(OSError):
                self.unlink(fresh)
            raise
        if durable:
            self.sync_dir(path.parent)

    def replace(self, path: Path, data: bytes | memoryview, durable: bool = True) -> None:
        """Write a whole file as `replacing` does."""
        with self.replacing(path, durable) as output:
            output.write(data)


def write_atomic(path: Path, data: str | bytes) -> None:
    """`Files.replace` of a file that need not be durable."""
    Files().replace(path, data.encode() if isinstance(data, str) else data, durable=False)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class LockHeld(Exception):
    """Another process holds a lock; the message is the content of the lock file, which names it."""


def acquire_lock(path: Path, seconds: float = math.inf) -> IO[str] | None:
    """Hold a lock until the file is closed; None without locks, LockHeld after `seconds`."""
    end = time.monotonic() + seconds
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # If another process has renamed the directory, this is not the lock of `path`.
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                break
        except FileNotFoundError:
            pass
        except BlockingIOError:
            if time.monotonic() >= end:
                with file:
                    file.seek(0)
                    raise LockHeld(file.read()) from None
            file.close()  # only the holder has it open for long
            time.sleep(LOCK_POLL_SECONDS)
        except OSError:
            file.close()
            return None
        file.close()
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    return file


def locked(path: Path) -> AbstractContextManager[Any]:
    """Wait for a lock file and hold it in a `with`; a file system without locks does not wait."""
    return acquire_lock(path) or contextlib.nullcontext()


def lock_held(path: Path) -> bool | None:
    """Whether a process holds a lock file; None if this host cannot know."""
    try:
        with path.open(encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # released when the file closes
            holder = file.read()
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False if holder.endswith(f" on {socket.gethostname()}") else None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; empty if the file is missing, torn or holds something else."""
    with contextlib.suppress(OSError, ValueError):
        value = json.loads(path.read_text(encoding="utf-8", errors="replace"))
        return value if isinstance(value, dict) else {}
    return {}


def to_json(value: Any) -> bytes:
    """Compact JSON; raises ValueError for a NaN or an infinity, which JSON lacks."""
    return (json.dumps(value, allow_nan=False) + "\n").encode()
