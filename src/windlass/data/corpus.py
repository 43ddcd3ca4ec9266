"""Where the text comes from: a corpus is a row of documents that can be read again from any one of them on."""

from __future__ import annotations

import glob
import hashlib
import os
import platform
import re
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from windlass.data import readers
from windlass.errors import UserError
from windlass.recipe.settings import DataSettings

NOT_PROSE = {
    "site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__",  # not the library itself
    "encodings", "pydoc_data",  # tables, not code
}  # fmt: skip
HASHED_BYTES = 64_000_000
"""Corpora up to this size are told apart by content, larger ones by size and time."""
DOWNLOADS = Path("data") / "downloads"


@dataclass
class Corpus:
    """A row of documents."""

    name: str
    """For messages."""
    read: Callable[[int, Corpus], Iterator[str]]
    """`read(start, corpus)`: the documents from number `start` on; it keeps `bytes_read` up to date."""
    description: dict[str, Any] = field(default_factory=dict)
    """For the index: what a reader wants to know, and what a changed source differs in."""
    single_text: bool = False
    """One document that is the whole corpus: it is split by characters and needs no end-of-text token."""
    bytes_total: int = 0
    """Size of what is read, for the progress; 0: not known."""
    bytes_read: int = 0
    limit: int = 0
    """Documents at most; 0: all."""

    def documents(self, start: int = 0) -> Iterator[str]:
        """The documents from number `start` on, empty ones included."""
        found = self.read(start, self)
        return islice(found, max(0, self.limit - start)) if self.limit else found

    @property
    def fraction(self) -> float | None:
        """How much of the corpus was read so far; None where that is not known."""
        return min(1.0, self.bytes_read / self.bytes_total) if self.bytes_total else None


def slug(source: str) -> str:
    """A source as a short name for a directory: `stdlib`, `input`, `c4-en`."""
    kind, _, rest = source.partition(":")
    place = (rest if kind in ("hf", "shards") else source).split("?")[0]
    for part in reversed(re.split(r"[/\\]", place)):
        bare = re.sub(r"(\.(txt|jsonl|ndjson|parquet|bin|npy|gz|zst))+$", "", part, flags=re.IGNORECASE)
        name = re.sub(r"[^A-Za-z0-9]+", "-", bare).strip("-").lower()
        if name:
            return name[:40]
    return "corpus"


def open_corpus(data: DataSettings, source: str, *, sha256: str = "", split: str = "", notify: Any = None) -> Corpus:
    """The corpus behind `data.source` or `data.eval_source`.

    Args:
        data: For `text_key`, `streaming` and `split`.
        source: What is to be read.
        sha256: Of a source that is downloaded.
        split: With `hf:`: the split.
        notify: Called with a line of text when something takes long (a download).

    Raises:
        UserError: There is no such source; nothing fits the pattern.
    """
    if source == "stdlib":
        return _stdlib()
    if source.startswith("hf:"):
        from windlass.data import hf

        return hf.open_dataset(source[3:], split or data.split, data.text_key, data.streaming)
    if source.startswith(("http://", "https://")):
        from windlass.data import download

        return _files(source, [download.fetch(source, sha256, DOWNLOADS, notify)], data.text_key)
    if source.startswith("shards:"):
        raise UserError(f"data.source and data.eval_source must both be token shards, or neither: {source}")
    return _files(source, find_files(source), data.text_key)


def find_files(pattern: str, setting: str = "data.source") -> list[Path]:
    """The files behind a path, a directory or a glob, sorted by name; raises UserError where there are none."""
    path = Path(pattern).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        found = [p for p in sorted(path.rglob("*")) if p.is_file() and _readable(p)]
        kinds = "/".join(k.lstrip(".") for k in readers.KNOWN)
        missing = f"{setting}: there is no {kinds} file in the directory {pattern}"
    else:
        found = [Path(p) for p in sorted(glob.glob(str(path), recursive=True)) if Path(p).is_file()]
        missing = f"{setting}: nothing fits the pattern {pattern}"
        if not glob.has_magic(str(path)):
            missing = (
                f"{setting}: there is no file {pattern}; a source is stdlib, a path or glob, https://..., hf:NAME, "
                "squad, or shards:GLOB"
            )
    if not found:
        raise UserError(missing)
    return found


def _readable(path: Path) -> bool:
    name = path.name.lower()
    for ending in readers.COMPRESSED:
        name = name.removesuffix(ending)
    return name.endswith(readers.KNOWN)


def _files(source: str, files: list[Path], text_key: str) -> Corpus:
    kinds = {path: readers.kind_of(path) for path in files}
    sizes = [path.stat().st_size for path in files]

    def read(start: int, corpus: Corpus) -> Iterator[str]:
        before = 0
        for path, size in zip(files, sizes, strict=True):
            base = before

            def tick(read_bytes: int, base: int = base) -> None:
                corpus.bytes_read = base + read_bytes

            start -= yield from readers.read_documents(path, text_key, start, tick)
            before += size

    return Corpus(
        name=source,
        read=read,
        description=describe_files(files),
        single_text=len(files) == 1 and kinds[files[0]] == "text",
        bytes_total=sum(sizes),
    )


def describe_files(files: list[Path]) -> dict[str, Any]:
    """Files as the index keeps them: size, and SHA-256 where all of them are small, else the time of the last change."""
    stats = [path.stat() for path in files]
    small = sum(stat.st_size for stat in stats) <= HASHED_BYTES
    described = []
    for path, stat in zip(files, stats, strict=True):
        state = {"sha256": hashlib.sha256(path.read_bytes()).hexdigest()} if small else {"changed_ns": stat.st_mtime_ns}
        described.append({"file": str(path), "bytes": stat.st_size, **state})
    return {"kind": "files", "files": described}


def has_changed(source: str, description: dict[str, Any]) -> bool:
    """Whether local files are others than those that were prepared; False where they are not there any more."""
    if description.get("kind") != "files" or source.startswith(("http://", "https://")):
        return False
    try:
        return describe_files(find_files(source))["files"] != description.get("files")
    except (UserError, OSError):
        return False


def _stdlib() -> Corpus:
    """The standard library's own modules, in an order drawn from their names: what is held out is then like the rest."""
    root = Path(sysconfig.get_path("stdlib"))
    names = []
    for folder, below, files in os.walk(root):
        below[:] = [name for name in below if name not in NOT_PROSE]  # site-packages can be large: don't even look
        names += [Path(folder, name).relative_to(root) for name in files if name.endswith(".py")]
    if not names:
        raise UserError(
            f"data.source: this Python has no source of its standard library at {root}; give a text file instead"
        )
    names.sort(key=lambda name: hashlib.sha256(name.as_posix().encode()).digest())
    sizes = [(root / name).stat().st_size for name in names]

    def read(start: int, corpus: Corpus) -> Iterator[str]:
        corpus.bytes_read = sum(sizes[:start])
        for name, size in islice(zip(names, sizes, strict=True), start, None):
            corpus.bytes_read += size
            yield (root / name).read_bytes().decode("utf-8", "replace").replace("\r\n", "\n")

    description = {"kind": "stdlib", "python": platform.python_version(), "files": len(names), "bytes": sum(sizes)}
    return Corpus("stdlib", read, description, bytes_total=sum(sizes))
