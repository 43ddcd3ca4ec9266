"""What lies in a data directory: its index, how token shards are written, read, and checked.

A data directory holds `index.json` (written last: where it is, everything is), `shard-00000.bin` ... (token ids, little
endian, 16 or 32 bits by the size of the vocabulary), `shard-00000.documents` ... (where each document starts, as 64-bit
offsets into its shard), the same with `eval-` where the validation corpus is one of its own, and `tokenizer/`. With
questions or conversations it holds `train.npz` and `val.npz` in place of shards. Everything is written under the
directory's lock, by one process.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from windlass.data.remote import sha256_of
from windlass.data.tokenizer import Description
from windlass.errors import UserError
from windlass.fileio import Files, read_json, write_atomic

FORMAT = 2
INDEX, VERIFIED = "index.json", "verified.json"
MAIN, EVAL = "shard", "eval-shard"
"""The two streams of tokens that a data directory can hold, by the first part of their files' names."""
OPEN_FILES = 128


class Shard(BaseModel):
    """One file of tokens."""

    model_config = ConfigDict(frozen=True)

    file: str
    """Name in the data directory, or an absolute path of a file that others wrote."""
    tokens: int
    documents: int
    """Documents that start in it; 0: not known (shards that others wrote)."""
    bytes: int
    sha256: str
    dtype: str
    """`uint16` or `uint32`."""
    offset: int = 0
    """Bytes of header before the first token."""
    starts_file: str = ""
    starts_sha256: str = ""


class Split(BaseModel):
    """The range of a stream's tokens, and of its documents, that is for training or for validation."""

    stream: str
    start: int
    stop: int
    first_document: int
    last_document: int


class RowsFile(BaseModel):
    """The rows of a split: `train.npz` or `val.npz`."""

    items: int
    fingerprint: str
    unmasked: int
    """Labels in an epoch that count in the loss."""


class Index(BaseModel):
    """Everything that a data directory holds, and the settings that determine it."""

    settings: dict[str, Any]
    source: dict[str, Any]
    """Where the text came from, by stream."""
    tokenizer: Description
    tokenizer_files: dict[str, str] = {}
    """The SHA-256 of each local file that `data.tokenizer` names, by path."""
    streams: dict[str, list[Shard]] = {}
    splits: dict[str, Split] = {}
    """`train`, and `val` where there is one."""
    rows: dict[str, RowsFile] = {}
    """The same for questions and conversations."""
    format: int = FORMAT
    fingerprint: str = ""

    @property
    def shards(self) -> list[Shard]:
        return [shard for stream in self.streams.values() for shard in stream]

    def compute_fingerprint(self) -> str:
        """A hash of the tokens, their split and their tokenizer: equal data has equal fingerprints, wherever it lies."""
        place = {"file", "starts_file"}
        content = [
            FORMAT,
            self.tokenizer.model_dump(exclude={"kind", "sha256"}),
            {name: [s.model_dump(exclude=place) for s in shards] for name, shards in self.streams.items()},
            {name: split.model_dump() for name, split in self.splits.items()},
            {name: rows.fingerprint for name, rows in self.rows.items()},
        ]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def save(self, directory: Path) -> Index:
        """Write `index.json`, with the fingerprint; returns the index as written."""
        index = self.model_copy(update={"fingerprint": self.compute_fingerprint()})
        Files().replace(directory / INDEX, index.model_dump_json(indent=1).encode())
        return index

    @staticmethod
    def load(directory: Path) -> Index | None:
        """The index of a data directory; None where there is none yet."""
        path = directory / INDEX
        try:
            index = Index.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except NotADirectoryError:
            raise UserError(f"{directory} is a file, not a data directory; give another data.dir") from None
        except ValidationError:
            raise UserError(f"{path} is damaged, or of another version; {prepare_again(directory)}") from None
        if index.format != FORMAT or index.fingerprint != index.compute_fingerprint():
            raise UserError(f"{path} was changed after it was written; {prepare_again(directory)}")
        return index


def prepare_again(directory: Path) -> str:
    return f"delete {directory} and run `windlass prepare` again"


def on_disk(dtype: str) -> np.dtype[Any]:
    """The type in a file: little endian on every machine."""
    return np.dtype(dtype).newbyteorder("<")


class ShardWriter:
    """Writes a stream of documents as shards of equal size, each committed whole.

    A document may reach over several shards. `resume` says where the next shard starts: the number of the document that the
    last committed shard ends in, and how many of its tokens are committed.
    """

    def __init__(
        self, directory: Path, stem: str, dtype: str, shard_tokens: int, shards: Sequence[Shard] = (),
        resume: tuple[int, int] = (0, 0), on_commit: Callable[[ShardWriter], None] = lambda writer: None,
    ):  # fmt: skip
        self.directory, self.stem, self.dtype, self.shard_tokens = directory, stem, dtype, shard_tokens
        self.shards, self.resume, self._on_commit = list(shards), resume, on_commit
        self.tokens = sum(s.tokens for s in self.shards)
        """Tokens written so far, in committed shards and in the one being written."""
        self._number, self._done, self._skip = resume[0], 0, resume[1]
        self._partial = directory / f".{stem}.tmp"
        self._file: BinaryIO | None = None
        self._begin_shard()

    def _begin_shard(self) -> None:
        self._count, self._starts = 0, list[int]()
        self._hash = hashlib.sha256()

    def add(self, tokens: np.ndarray, number: int) -> None:
        """Append tokens (int64 [n]) of document `number`; documents come in order, one may come in several parts.

        After a resume the document is added from its start again, and what was committed of it is passed over.
        """
        if number != self._number:
            self._number, self._done = number, 0
        passed = min(len(tokens), self._skip)
        self._skip -= passed
        self._done += passed
        tokens = tokens[passed:]
        if len(tokens) and self._done == 0:
            self._starts.append(self._count)
        while len(tokens):
            part = tokens[: self.shard_tokens - self._count]
            tokens = tokens[len(part) :]
            if self._file is None:
                self._file = self._partial.open("wb")
            raw = part.astype(on_disk(self.dtype)).tobytes()
            self._hash.update(raw)
            self._file.write(raw)
            self._count += len(part)
            self.tokens += len(part)
            self._done += len(part)
            if self._count == self.shard_tokens:
                self._commit((number, self._done))

    def _commit(self, resume: tuple[int, int]) -> None:
        assert self._file is not None
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None
        name = f"{self.stem}-{len(self.shards):05d}"
        starts = np.array(self._starts, dtype="<u8").tobytes()
        files = Files()
        files.replace(self.directory / f"{name}.documents", starts)
        files.rename(self._partial, self.directory / f"{name}.bin")
        files.sync_dir(self.directory)
        self.shards.append(
            Shard(
                file=f"{name}.bin",
                tokens=self._count,
                documents=len(self._starts),
                bytes=self._count * np.dtype(self.dtype).itemsize,
                sha256=self._hash.hexdigest(),
                dtype=self.dtype,
                starts_file=f"{name}.documents",
                starts_sha256=hashlib.sha256(starts).hexdigest(),
            )
        )
        self.resume = resume
        self._begin_shard()
        self._on_commit(self)

    def finish(self, documents: int) -> list[Shard]:
        """Commit what is left, after `documents` documents of the source; returns all shards."""
        if self._count:
            self._commit((documents, 0))
        return self.shards

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._partial.unlink(missing_ok=True)
            self._file = None


class Stream:
    """The tokens of shards as one long row, read with `pread`: no mapped page that faults while Python's lock is held."""

    def __init__(self, directory: Path, shards: Sequence[Shard]):
        self.shards = list(shards)
        self._paths = [directory / s.file for s in self.shards]
        self._starts = [directory / s.starts_file if s.starts_file else None for s in self.shards]
        self.edges = np.concatenate([[0], np.cumsum([s.tokens for s in self.shards])]).astype(np.int64)
        """Where each shard starts in the row, and the row's end, int64 [shards + 1]."""
        self._layout = [(s.tokens, s.offset, on_disk(s.dtype)) for s in self.shards]
        self._open: dict[int, int] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return int(self.edges[-1])

    def read_into(self, start: int, out: np.ndarray) -> None:
        """Copy the tokens from `start` on into `out` [n], any integer type that holds them."""
        place = int(np.searchsorted(self.edges, start, side="right")) - 1
        done = 0
        while done < len(out):
            tokens, offset, dtype = self._layout[place]
            begin = start + done - int(self.edges[place])
            count = min(len(out) - done, tokens - begin)
            size = count * dtype.itemsize
            with self._lock:
                raw = os.pread(self._descriptor(place), size, offset + begin * dtype.itemsize)
            if len(raw) != size:
                raise UserError(f"{self._paths[place]} ends too early: it was truncated after it was checked")
            out[done : done + count] = np.frombuffer(raw, dtype=dtype)
            done += count
            place += 1

    def read(self, start: int, stop: int) -> np.ndarray:
        """int64 [stop - start]."""
        out = np.empty(stop - start, dtype=np.int64)
        self.read_into(start, out)
        return out

    def _descriptor(self, place: int) -> int:
        if place not in self._open:
            if len(self._open) >= OPEN_FILES:
                os.close(self._open.pop(next(iter(self._open))))
            try:
                self._open[place] = os.open(self._paths[place], os.O_RDONLY)
            except OSError as error:
                raise UserError(f"the shard {self._paths[place]} cannot be read: {error}") from None
        return self._open[place]

    def document_starts(self) -> np.ndarray:
        """Where each document starts in the row, int64 [documents]."""
        parts = [np.zeros(0, dtype=np.int64)]
        for path, edge in zip(self._starts, self.edges, strict=False):
            if path:
                parts.append(np.fromfile(path, dtype="<u8").astype(np.int64) + edge)
        return np.concatenate(parts)

    def __del__(self) -> None:
        if os is not None and os.close is not None:  # at the interpreter's end modules go first
            for descriptor in getattr(self, "_open", {}).values():
                os.close(descriptor)


# -- are the shards what the index says? Sizes always; SHA-256 once for each state of a file, remembered beside the shards.


def parts(shards: Iterable[Shard]) -> list[tuple[str, int, str]]:
    """(file, bytes, SHA-256) of every file that belongs to the shards."""
    shards = list(shards)
    starts = [(s.starts_file, 8 * s.documents, s.starts_sha256) for s in shards if s.starts_file]
    return [*((s.file, s.bytes, s.sha256) for s in shards), *starts]


def check_sizes(directory: Path, index: Index) -> None:
    """Raise UserError, naming the file, where a shard is missing or is not as long as the index says."""
    for file, size, _ in parts(index.shards):
        path = directory / file
        try:
            actual = path.stat().st_size
        except OSError:
            raise UserError(f"the shard {path} is missing; {prepare_again(directory)}") from None
        if actual != size:
            what = "truncated" if actual < size else "too long"
            raise UserError(f"the shard {path} is {what}: {actual:,} bytes, not {size:,}; {prepare_again(directory)}")


def unverified(directory: Path, index: Index) -> list[tuple[str, int, str]]:
    """The files whose SHA-256 was not read since they were changed last."""
    verified = read_json(directory / VERIFIED)
    return [part for part in parts(index.shards) if verified.get(part[0]) != file_state(directory / part[0], part[2])]


def verify(directory: Path, index: Index, tick: Callable[[float], None]) -> None:
    """Read the SHA-256 of every unverified file; `tick` gets the share done. Raises UserError, naming the file."""
    left, verified = unverified(directory, index), read_json(directory / VERIFIED)

    def check(part: tuple[str, int, str]) -> tuple[str, list[int | str]]:
        path, sha256 = directory / part[0], part[2]
        before = file_state(path, sha256)  # a change while we read must not pass as checked
        actual = sha256_of(path)
        if actual != sha256:
            raise UserError(
                f"the shard {path} is damaged: its SHA-256 is {actual[:16]}..., not {sha256[:16]}...; "
                f"{prepare_again(directory)}"
            )
        return part[0], before

    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        for done, (file, state) in enumerate(pool.map(check, left), 1):
            verified[file] = state
            tick(done / len(left))
    remember(directory, verified)


def file_state(path: Path, sha256: str) -> list[int | str]:
    """What is remembered of a file that was verified: its size, the time of its last change (ns), its SHA-256."""
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, sha256]


def remember(directory: Path, verified: dict[str, Any]) -> None:
    """Keep what was verified; where the directory cannot be written, the next start verifies again."""
    if os.access(directory, os.W_OK):
        write_atomic(directory / VERIFIED, json.dumps(verified, indent=1) + "\n")
