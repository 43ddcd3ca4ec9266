"""Are the shards what the index says? Sizes always; SHA-256 once for each state of a file, remembered beside the shards."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from windlass.data.lock import only_one
from windlass.data.progress import Progress
from windlass.data.shards import Index, Shard, write_json
from windlass.errors import UserError

VERIFIED = "verified.json"
BLOCK = 1 << 22
Seen = dict[str, list[int | str]]
"""By file: size, time of the last change (ns), SHA-256."""


def sha256_of(path: Path, tick: Callable[[int], None] | None = None) -> str:
    """The SHA-256 of a file; `tick` gets the number of bytes of each block (Python's lock is not held while hashing)."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
            if tick is not None:
                tick(len(block))
    return digest.hexdigest()


def state_of(path: Path, sha256: str) -> list[int | str]:
    """What is remembered of a file that was verified."""
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, sha256]


def parts(shards: Iterable[Shard]) -> list[tuple[str, int, str]]:
    """(file, bytes, SHA-256) of every file that belongs to the shards."""
    found = []
    for shard in shards:
        found.append((shard.file, shard.bytes, shard.sha256))
        if shard.starts_file:
            found.append((shard.starts_file, 8 * shard.documents, shard.starts_sha256))
    return found


def check_sizes(directory: Path, index: Index) -> None:
    """Raise UserError, naming the file, where a shard is missing or is not as long as the index says."""
    for file, size, _ in parts(index.shards):
        path = directory / file
        try:
            actual = path.stat().st_size
        except OSError:
            raise UserError(f"the shard {path} is missing; {_again(directory)}") from None
        if actual != size:
            what = "truncated" if actual < size else "too long"
            raise UserError(f"the shard {path} is {what}: {actual:,} bytes, not {size:,}; {_again(directory)}")


def check_range(directory: Path, index: Index, vocab: int) -> None:
    """Raise UserError, naming the shard and the token, where an id is not in the vocabulary."""
    for shard in index.shards:
        if shard.largest >= vocab:
            raise UserError(
                f"the shard {directory / shard.file} holds the token id {shard.largest:,}, and the vocabulary has "
                f"{vocab:,}: it was made with another tokenizer"
            )


def check_sums(directory: Path, index: Index, progress: Progress) -> None:
    """Raise UserError, naming the file, where a SHA-256 is not the index's.

    A file is hashed once for each size and time of change; what was found is kept in the directory or, where that cannot be
    written, in the user's cache. Of several processes one hashes, and the others wait for it.
    """
    wanted = parts(index.shards)
    if not _unverified(directory, wanted, _remembered(directory)):
        return
    if not os.access(directory, os.W_OK):
        _verify(directory, wanted, progress)
        return

    def done() -> bool:
        return not _unverified(directory, wanted, _remembered(directory))

    with only_one(directory, done, progress.note, "checks") as left:
        if left:
            _verify(directory, wanted, progress)


def _unverified(directory: Path, wanted: list[tuple[str, int, str]], seen: Seen) -> list[tuple[str, int, str]]:
    left = []
    for file, size, sha256 in wanted:
        try:
            known = seen.get(file) == state_of(directory / file, sha256)
        except OSError:
            known = False
        if not known:
            left.append((file, size, sha256))
    return left


def _verify(directory: Path, wanted: list[tuple[str, int, str]], progress: Progress) -> None:
    seen = _remembered(directory)
    left = _unverified(directory, wanted, seen)
    total, read, lock = sum(size for _, size, _ in left), 0, threading.Lock()

    def tick(count: int) -> None:
        nonlocal read
        with lock:
            read += count
            progress.update("checking SHA-256", read / max(1, total), 0)

    def check(part: tuple[str, int, str]) -> tuple[str, list[int | str]]:
        file, _, sha256 = part
        path = directory / file
        before = state_of(path, sha256)  # a change while we read must not pass as checked
        actual = sha256_of(path, tick)
        if actual != sha256:
            raise UserError(
                f"the shard {path} is damaged: its SHA-256 is {actual[:16]}..., not {sha256[:16]}...; {_again(directory)}"
            )
        return file, before

    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        seen.update(pool.map(check, left))
    remember(directory, seen)


def _again(directory: Path) -> str:
    return f"delete {directory} and run `windlass prepare` again"


def _cache(directory: Path) -> Path:
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = hashlib.sha256(str(directory.resolve()).encode()).hexdigest()[:16]
    return root / "windlass" / f"verified-{name}.json"


def _remembered(directory: Path) -> Seen:
    for path in (directory / VERIFIED, _cache(directory)):
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(found, dict):
            return found
    return {}


def remember(directory: Path, seen: Seen) -> None:
    """Keep what was verified; where neither place can be written, the next start verifies again."""
    for path in (directory / VERIFIED, _cache(directory)):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, seen)
            return
        except OSError:
            continue
