"""Token shards on disk: their index, how they are written, and how a stretch of tokens is read across them.

A data directory holds `index.json` (written last: where it is, everything is), `shard-00000.bin` ... (token ids, little
endian, 16 or 32 bits by the size of the vocabulary), `documents-00000.bin` ... (where each document starts, as 64-bit
offsets into its shard), the same with `eval-` where the validation corpus is one of its own, and `tokenizer/`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from windlass.errors import UserError

FORMAT = 1
INDEX, PROGRESS = "index.json", "progress.json"
MAIN, EVAL = "shard", "eval-shard"
"""The two streams of tokens that a data directory can hold, by the first part of their files' names."""
OPEN_FILES = 128
HOST = re.sub(r"[^A-Za-z0-9-]+", "-", socket.gethostname())
LEFT_SECONDS = 3600.0


@dataclass(frozen=True)
class Shard:
    """One file of tokens."""

    file: str
    """Name in the data directory, or an absolute path of a file that others wrote."""
    tokens: int
    documents: int
    """Documents that start in it; 0 where that is not known (shards that others wrote)."""
    bytes: int
    sha256: str
    largest: int
    """The largest token id in it."""
    dtype: str
    """`uint16` or `uint32`."""
    offset: int = 0
    """Bytes of header before the first token."""
    starts_file: str = ""
    starts_sha256: str = ""


@dataclass(frozen=True)
class Split:
    """The stretch of a stream's tokens, and of its documents, that is for training or for validation."""

    stream: str
    start: int
    stop: int
    first_document: int
    last_document: int


@dataclass(frozen=True)
class Index:
    """Everything that a data directory holds."""

    settings: dict[str, Any]
    """The settings of the recipe that shaped the tokens."""
    source: dict[str, Any]
    """Where the text came from, for the reader."""
    tokenizer: dict[str, Any]
    """`name`, `fingerprint`, `vocab`, `eot`."""
    streams: dict[str, list[Shard]]
    splits: dict[str, Split]
    """`train`, and `val` where there is one."""
    format: int = FORMAT
    fingerprint: str = field(default="", compare=False)

    @property
    def shards(self) -> list[Shard]:
        """All shards of all streams."""
        return [shard for stream in self.streams.values() for shard in stream]

    def compute_fingerprint(self) -> str:
        """A hash of the tokens, their split and their tokenizer: equal data has equal fingerprints, wherever it lies."""
        streams = {
            name: [[s.tokens, s.documents, s.dtype, s.offset, s.sha256, s.starts_sha256] for s in shards]
            for name, shards in self.streams.items()
        }
        known = [
            FORMAT,
            self.tokenizer["fingerprint"],
            self.tokenizer["vocab"],
            self.tokenizer["eot"],
            streams,
            {name: asdict(split) for name, split in self.splits.items()},
        ]
        return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()

    def save(self, directory: Path) -> Index:
        """Write `index.json`, with the fingerprint; returns the index as written."""
        whole = Index(**{**self.__dict__, "fingerprint": self.compute_fingerprint()})
        write_json(directory / INDEX, asdict(whole))
        return whole

    @staticmethod
    def load(directory: Path) -> Index | None:
        """The index of a data directory; None where there is none yet. Raises UserError where it is damaged."""
        path = directory / INDEX
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except NotADirectoryError:
            raise UserError(f"{directory} is a file, not a data directory; give another data.dir") from None
        except (json.JSONDecodeError, UnicodeDecodeError):
            raise UserError(f"{path} is damaged (no JSON); delete it and run `windlass prepare` again") from None
        if not isinstance(raw, dict) or raw.get("format") != FORMAT:
            raise UserError(f"{path} is not of the format {FORMAT} that this version reads; prepare the data again")
        try:
            raw["streams"] = {name: [Shard(**s) for s in shards] for name, shards in raw["streams"].items()}
            raw["splits"] = {name: Split(**split) for name, split in raw["splits"].items()}
            index = Index(**raw)
            whole = index.fingerprint == index.compute_fingerprint()
        except (KeyError, TypeError, AttributeError):
            whole = False
        if not whole:
            raise UserError(f"{path} was changed after it was written; delete it and run `windlass prepare` again")
        return index


def dtype_for(vocab: int) -> str:
    """The smallest integer type that holds every id of a vocabulary."""
    return "uint16" if vocab <= 1 << 16 else "uint32"


def on_disk(dtype: str) -> np.dtype[Any]:
    """The type as it lies in a file: little endian on every machine."""
    return np.dtype(dtype).newbyteorder("<")


def temporary(path: Path) -> Path:
    """Where a file is written before it is renamed to `path`: a name that no other process on any host has."""
    return path.with_name(f".{path.name}.{HOST}.{os.getpid()}.tmp")


def sweep(directory: Path) -> None:
    """Remove what killed processes left half written: those of this host at once, those of others after an hour.

    To be called by the one process of this host that may write there.
    """
    for leftover in [p for name in (MAIN, EVAL, INDEX, PROGRESS) for p in directory.glob(f".{name}*.tmp")]:
        try:
            if f".{HOST}." in leftover.name or time.time() - leftover.stat().st_mtime > LEFT_SECONDS:
                leftover.unlink()
        except OSError:
            continue


def write_json(path: Path, value: Any) -> None:
    """Write JSON so that a reader sees the old file or the new one, also after a crash of the machine."""
    partial = temporary(path)
    with partial.open("w", encoding="utf-8") as file:
        file.write(json.dumps(value, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    commit_file(partial, path)


def commit_file(partial: Path, final: Path) -> None:
    """Rename a file that was written and synced to its name, and sync the directory."""
    partial.replace(final)
    folder = os.open(final.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    except OSError:
        pass  # some network file systems cannot sync a directory
    finally:
        os.close(folder)


class ShardWriter:
    """Writes a stream of documents as shards of equal size, each committed whole.

    A document may go on in the next shard. `resume` says where the next shard goes on: the number of the document that the
    last committed shard ends in, and how many of its tokens are committed.
    """

    def __init__(
        self, directory: Path, stem: str, dtype: str, shard_tokens: int, shards: Sequence[Shard] = (),
        resume: tuple[int, int] = (0, 0), on_commit: Callable[[ShardWriter], None] | None = None,
    ):  # fmt: skip
        self.directory, self.stem, self.dtype, self.shard_tokens = directory, stem, dtype, shard_tokens
        self.shards = list(shards)
        self.resume = resume
        self.tokens = sum(s.tokens for s in self.shards)
        """Tokens written so far, in committed shards and in the one being written."""
        self.documents = sum(s.documents for s in self.shards)
        """Documents started so far."""
        self._on_commit = on_commit
        self._number, self._done, self._skip = resume[0], 0, resume[1]
        self._file: BinaryIO | None = None
        self._begin()

    def _begin(self) -> None:
        self._count, self._largest, self._starts = 0, 0, list[int]()
        self._hash = hashlib.sha256()

    @property
    def _partial(self) -> Path:
        return temporary(self.directory / self.stem)

    def add(self, tokens: np.ndarray, number: int) -> None:
        """Append tokens of document `number` of the source; documents come in order, one may come in several stretches.

        After a resumption the document is added from its start again, and what was committed of it is passed over.
        """
        if number != self._number:
            self._number, self._done = number, 0
        passed = min(len(tokens), self._skip)
        self._skip -= passed
        self._done += passed
        tokens = tokens[passed:]
        if len(tokens) and self._done == 0:
            self._starts.append(self._count)
            self.documents += 1
        while len(tokens):
            part = tokens[: self.shard_tokens - self._count]
            self._write(part)
            tokens = tokens[len(part) :]
            self._done += len(part)
            if self._count == self.shard_tokens:
                self._commit((number, self._done))

    def _write(self, part: np.ndarray) -> None:
        if self._file is None:
            self._file = self._partial.open("wb")
        raw = part.astype(on_disk(self.dtype)).tobytes()
        self._hash.update(raw)
        self._file.write(raw)
        self._largest = max(self._largest, int(part.max()))
        self._count += len(part)
        self.tokens += len(part)

    def _commit(self, resume: tuple[int, int]) -> None:
        assert self._file is not None
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None
        number = len(self.shards)
        file, starts_file = f"{self.stem}-{number:05d}.bin", f"{self.stem}-{number:05d}.documents"
        starts = np.array(self._starts, dtype="<u8").tobytes()
        partial = temporary(self.directory / starts_file)
        with partial.open("wb") as out:
            out.write(starts)
            out.flush()
            os.fsync(out.fileno())
        commit_file(partial, self.directory / starts_file)
        commit_file(self._partial, self.directory / file)
        size = self._count * np.dtype(self.dtype).itemsize
        self.shards.append(
            Shard(
                file, self._count, len(self._starts), size, self._hash.hexdigest(), self._largest, self.dtype, 0,
                starts_file, hashlib.sha256(starts).hexdigest(),
            )
        )  # fmt: skip
        self.resume = resume
        self._begin()
        if self._on_commit is not None:
            self._on_commit(self)

    def finish(self, documents: int) -> list[Shard]:
        """Commit what is left, after `documents` documents of the source; returns all shards."""
        if self._count:
            self._commit((documents, 0))
        return self.shards

    def close(self) -> None:
        """Leave off: what is not committed is thrown away."""
        if self._file is not None:
            self._file.close()
            self._partial.unlink(missing_ok=True)
            self._file = None


class Stream:
    """The tokens of shards as one long row, read with `pread`: no mapped page that faults while Python's lock is held."""

    def __init__(self, directory: Path, shards: Sequence[Shard]):
        self.directory, self.shards = directory, list(shards)
        self.edges = np.concatenate([[0], np.cumsum([s.tokens for s in self.shards])]).astype(np.int64)
        """Where each shard starts in the row, and the row's end, int64 [shards + 1]."""
        self._dtypes = [on_disk(s.dtype) for s in self.shards]
        self._open: OrderedDict[int, int] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return int(self.edges[-1])

    @property
    def documents(self) -> int:
        """Documents in it; 0 where that is not known."""
        return sum(s.documents for s in self.shards)

    def read_into(self, start: int, out: np.ndarray) -> None:
        """Copy the tokens from `start` on into `out` [n], any integer type that holds them."""
        place = int(np.searchsorted(self.edges, start, side="right")) - 1
        done = 0
        while done < len(out):
            begin = start + done - int(self.edges[place])
            count = min(len(out) - done, self.shards[place].tokens - begin)
            out[done : done + count] = self._pread(place, begin, count)
            done += count
            place += 1

    def read(self, start: int, stop: int) -> np.ndarray:
        """The tokens of a stretch, int64 [stop - start]."""
        out = np.empty(stop - start, dtype=np.int64)
        self.read_into(start, out)
        return out

    def _pread(self, place: int, begin: int, count: int) -> np.ndarray:
        shard, dtype = self.shards[place], self._dtypes[place]
        size = count * dtype.itemsize
        with self._lock:
            raw = os.pread(self._descriptor(place), size, shard.offset + begin * dtype.itemsize)
        if len(raw) != size:
            raise UserError(f"{self.directory / shard.file} ends too early: it was truncated after it was checked")
        return np.frombuffer(raw, dtype=dtype)

    def _descriptor(self, place: int) -> int:
        if place in self._open:
            self._open.move_to_end(place)
            return self._open[place]
        while len(self._open) >= OPEN_FILES:
            os.close(self._open.popitem(last=False)[1])
        try:
            self._open[place] = os.open(self.directory / self.shards[place].file, os.O_RDONLY)
        except OSError as error:
            raise UserError(f"the shard {self.directory / self.shards[place].file} cannot be read: {error}") from None
        return self._open[place]

    def document_starts(self) -> np.ndarray:
        """Where each document starts in the row, int64 [documents]."""
        parts = [np.zeros(0, dtype=np.int64)]
        for shard, edge in zip(self.shards, self.edges, strict=False):
            if shard.starts_file:
                raw = np.fromfile(self.directory / shard.starts_file, dtype="<u8")
                parts.append(raw.astype(np.int64) + edge)
        return np.concatenate(parts)

    def close(self) -> None:
        """Close the files."""
        with self._lock:
            while self._open:
                os.close(self._open.popitem()[1])

    def __del__(self) -> None:
        if os is not None and os.close is not None:  # at the interpreter's end modules go first
            for descriptor in getattr(self, "_open", {}).values():
                os.close(descriptor)
