"""Read files of other machines by ranges through fsspec, with a bounded cache on this disk. The
processes of a host may share it, because a block is a file that appears when it is whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from windlass.errors import RunFailed, UserError, first_line
from windlass.fileio import Files, locked

Value = TypeVar("Value")

BLOCK_BYTES = 4 << 20
RETRY_SECONDS = (0.5, 1.0, 2.0, 4.0, 8.0)  # pauses after failed attempts
# What tells two versions of a file apart, as far as its file system says it.
VERSION = (
    *("size", "ETag", "etag", "blob_id", "md5Hash", "generation", "mtime", "created"),
    *("Last-Modified", "LastModified", "last_modified"),
)


class RemoteFile:
    """One URL. Threads may share it; another content of the URL has another `version`."""

    def __init__(self, url: str, cache: Path, cache_bytes: int, version: str = ""):
        """`cache` has the blocks of any files, `cache_bytes` at most."""
        self.url, self._cache, self._cache_bytes = url, cache, cache_bytes
        self._files, self._path = _file_system(url)
        self.size, self.version = _retried(url, self._state)
        if version and version != self.version:
            remedy = "bring it back, or prepare the data again"
            raise UserError(f"{url} has changed since it was prepared: {remedy}")
        # the beginning of the blocks' names
        self._name = hashlib.sha256(f"{url}\n{self.version}".encode()).hexdigest()[:16]

    def pread(self, count: int, offset: int) -> bytes:
        """The bytes from `offset` on, fewer than `count` at the end of the file."""
        parts = list[bytes]()
        stop = min(offset + count, self.size)
        while offset < stop:
            number, begin = divmod(offset, BLOCK_BYTES)
            end = min(BLOCK_BYTES, begin + stop - offset)
            parts.append(self._part(number, begin, end))
            offset += end - begin
        return b"".join(parts)

    def _part(self, number: int, begin: int, end: int) -> bytes:
        """A part of a block, from the cache or the network; one process of a host at a time asks
        the network for it."""
        path = self._cache / f"{self._name}-{number:06d}"
        length = min(BLOCK_BYTES, self.size - number * BLOCK_BYTES)
        if (part := _cached(path, length, begin, end)) is not None:
            return part
        try:
            with locked(self._cache / f"{self._name}.lock"):
                if (part := _cached(path, length, begin, end)) is None:
                    block = _retried(self.url, lambda: self._download(number, length))
                    with locked(self._cache / ".lock"):
                        self._store(path, block)
                    part = block[begin:end]
                return part
        except OSError as error:
            remedy = "free some space, or lower data.cache_gb"
            raise RunFailed(f"{self._cache}: {error.strerror}; {remedy}") from None

    def _store(self, path: Path, block: bytes) -> None:
        """Store a block in place of the least recently used ones, if there is enough room."""
        # also what a killed process left (`.new`); an entry keeps the result of `stat`
        files = [file for file in os.scandir(self._cache) if not file.name.endswith(".lock")]
        used = len(block) + sum(file.stat().st_size for file in files)
        for old in sorted(files, key=lambda file: file.stat().st_mtime_ns):
            if used <= self._cache_bytes:
                break
            Path(old).unlink(missing_ok=True)
            used -= old.stat().st_size
        if used <= self._cache_bytes:
            Files().replace(path, block, durable=False)

    def _download(self, number: int, length: int) -> bytes:
        first = number * BLOCK_BYTES
        try:
            block: bytes = self._files.cat_file(self._path, start=first, end=first + length)
        finally:  # a file that is shorter now lacks the range
            if self._state() != (self.size, self.version):
                problem = "has changed since this run opened it, so its tokens are others"
                raise RunFailed(f"{self.url} {problem}: bring it back, or prepare the data again")
        if len(block) > length:
            problem = "the server sends the whole file for a part of it"
            raise RunFailed(f"{self.url}: {problem}; download it and name the file")
        if len(block) < length:
            raise ConnectionError(f"{len(block):,} of {length:,} bytes came")
        return block

    def _state(self) -> tuple[int, str]:
        if not self.url.startswith("hf:"):  # whose listing would count against its rate limit
            self._files.invalidate_cache()
        info: dict[str, Any] = self._files.info(self._path)
        if not isinstance(info.get("size"), int):
            raise UserError(f"{self.url} cannot be read: the server does not say its size")
        return info["size"], " ".join(f"{key}={info[key]}" for key in VERSION if key in info)


def _cached(path: Path, length: int, begin: int, end: int) -> bytes | None:
    """A part of a block of `length` bytes; None if the cache does not have the whole block."""
    try:
        with path.open("rb", buffering=0) as file:
            part = os.pread(file.fileno(), end - begin, begin)
            is_whole = os.fstat(file.fileno()).st_size == length
    except OSError:
        return None
    with contextlib.suppress(OSError):  # another process may just have deleted it
        os.utime(path)
    return part if is_whole else None


def list_urls(pattern: str) -> list[str]:
    """The URLs that match a pattern with `*` or `[`, sorted; any other URL by itself."""
    if "*" not in pattern and "[" not in pattern:
        return [pattern]
    files, path = _file_system(pattern)
    urls = [files.unstrip_protocol(name) for name in _retried(pattern, lambda: files.glob(path))]
    if not urls:
        raise UserError(f"no file matches {pattern}")
    return sorted(urls)


def _file_system(url: str) -> tuple[Any, str]:
    import fsspec

    try:
        files, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:  # names the package or the protocol
        raise UserError(f"{url}: {first_line(error)}") from None
    return files, str(path)


def _retried(url: str, action: Callable[[], Value]) -> Value:
    """The result of an action; UserError for a final answer, RunFailed after the last attempt."""
    for seconds in (*RETRY_SECONDS, 0.0):
        try:
            return action()
        except (UserError, RunFailed):
            raise
        except Exception as error:  # of fsspec, or of the client behind it
            cause = error.__cause__ or error
            # For HTTP fsspec reports every failure as a missing file.
            answer = cause if url.startswith("http") else error
            status = getattr(answer, "status", 0)
            is_refused = 400 <= status < 500 and status not in (408, 429)
            text = first_line(cause)
            if status == 404 or isinstance(answer, FileNotFoundError):
                is_refused, text = True, "it does not exist"
            if is_refused or isinstance(answer, PermissionError):
                remedy = "check the URL, and the credentials of its file system"
                raise UserError(f"{url} cannot be read: {text}; {remedy}") from None
        time.sleep(seconds)
    problem = f"{url} cannot be read after {len(RETRY_SECONDS) + 1} attempts: {text}"
    raise RunFailed(f"{problem}; start again to resume")
