"""A prepared source as it is read: its tokens as one row, and the table of its documents."""

from __future__ import annotations

import os
import threading
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from windlass.data.locate import SourceSpec
from windlass.data.remote import RemoteFile
from windlass.data.shards import Index, Shard, bad_shard, on_disk, unknown_id
from windlass.data.tokenizer import Tokenizer

CACHE = "cache"  # of remote shards, in the data directory
OPEN_FILES = 128


@dataclass(frozen=True)
class Corpus:
    """One prepared source."""

    directory: Path
    index: Index
    spec: SourceSpec
    tokenizer: Tokenizer
    cache_bytes: int = 0  # of remote shards on this machine's disk
    is_new: bool = False  # this process has written some of it
    change: str = ""  # a sentence on a change since then, if the recipe keeps the tokens

    @cached_property
    def stream(self) -> Stream:
        return Stream(self.directory, self.index, self.cache_bytes)

    def places_of(self, documents: Sequence[int], characters: Sequence[int]) -> Iterator[int]:
        """The token of the source at which each document has reached its number of characters."""
        parts = self.stream.table.parts(documents)
        for (places, sizes), limit in zip(parts, characters, strict=True):
            ends = np.cumsum(sizes)
            part = int(np.searchsorted(ends, limit, side="right"))
            if part == len(sizes):
                yield int(places[-1])
                continue
            start, stop = places[part : part + 2].tolist()
            start += len(self.tokenizer.first) if part == 0 else 0
            yield self._place(start, stop, limit - int(ends[part] - sizes[part]))

    def _place(self, start: int, stop: int, characters: int) -> int:
        """The token at which the tokens from `start` on have reached a number of characters."""
        tokens, decode = self.stream.read(start, stop), self.tokenizer.decode
        counts = range(1, len(tokens) + 1)
        return start + bisect_left(counts, True, key=lambda n: len(decode(tokens[:n])) > characters)


class LocalFile:
    """A file of this machine, read with `pread`: a mapped page faults with Python's lock held."""

    def __init__(self, path: Path):
        self._descriptor = os.open(path, os.O_RDONLY)
        # A thread may still read when the interpreter ends, and the system closes the file.
        weakref.finalize(self, os.close, self._descriptor).atexit = False
        self.size = os.fstat(self._descriptor).st_size

    def pread(self, count: int, offset: int) -> bytes:
        return os.pread(self._descriptor, count, offset)


class Stream:
    """The tokens of a source's shards as one row. Threads may share it."""

    def __init__(self, directory: Path, index: Index, cache_bytes: int = 0):
        """`cache_bytes`: of remote shards on this machine's disk."""
        self.index, self.shards, self._directory = index, index.shards, directory
        # The start of each shard in the row, and the row's end, int64 [shards + 1].
        self.edges = np.cumsum([0, *(shard.tokens for shard in self.shards)], dtype=np.int64)
        self._open: dict[str, LocalFile | RemoteFile] = {}
        self._lock, self._cache_bytes = threading.Lock(), cache_bytes

    def __len__(self) -> int:
        return int(self.edges[-1])

    def read_into(self, start: int, out: np.ndarray) -> None:
        """Copy the tokens from `start` on into `out` [n], of any wide enough integer type."""
        done = 0
        for shard, begin, end in self._shards_of(start, start + len(out)):
            count, dtype = end - begin, on_disk(shard.dtype)
            offset, size = shard.offset + begin * dtype.itemsize, count * dtype.itemsize
            ids = np.frombuffer(self._pread(shard.file, size, offset, shard.sha256), dtype)
            if shard.is_remote and int(ids.max()) >= self.index.tokenizer.vocab:
                raise unknown_id(shard.file, ids, self.index.tokenizer.vocab, begin)
            out[done : done + count] = ids
            done += count

    def read(self, start: int, stop: int) -> np.ndarray:
        """int64 [stop - start]."""
        out = np.empty(stop - start, dtype=np.int64)
        self.read_into(start, out)
        return out

    def marks(self, start: int, stop: int) -> np.ndarray:
        """Whether each token from `start` to `stop` counts in the loss, bool [stop - start]."""
        parts = [np.zeros(0, bool)]
        for shard, begin, end in self._shards_of(start, stop):
            raw = self._pread(shard.beside(".mask"), -(-end // 8) - begin // 8, begin // 8)
            bits = np.unpackbits(np.frombuffer(raw, np.uint8), bitorder="little")
            parts.append(bits[begin % 8 :][: end - begin].view(bool))
        return np.concatenate(parts)

    def _shards_of(self, start: int, stop: int) -> Iterator[tuple[Shard, int, int]]:
        """The shards of the tokens from `start` to `stop`, and where these are in each shard."""
        place = bisect_right(self.edges, start) - 1
        while start < stop:
            shard, begin = self.shards[place], start - int(self.edges[place])
            end = min(begin + stop - start, shard.tokens)
            yield shard, begin, end
            start, place = start + end - begin, place + 1

    def _pread(self, name: str, count: int, offset: int, version: str = "") -> bytes:
        file = self._open.get(name) or self._opened(name, version)
        raw = file.pread(count, offset)
        if len(raw) != count:
            raise bad_shard(name, "ends too early: it was truncated after it was checked")
        return raw

    def _opened(self, name: str, version: str) -> LocalFile | RemoteFile:
        with self._lock:
            local = [key for key, file in self._open.items() if isinstance(file, LocalFile)]
            if len(local) >= OPEN_FILES:  # a remote file does not have a descriptor
                self._open.pop(local[0])
            try:
                if "://" in name:
                    cache = self._directory / CACHE
                    self._open[name] = RemoteFile(name, cache, self._cache_bytes, version)
                else:
                    self._open[name] = LocalFile(self._directory / name)
            except OSError as error:
                raise bad_shard(self._directory / name, f"cannot be read: {error}") from None
            return self._open[name]

    @cached_property
    def table(self) -> Table:
        return Table(self._directory, self.index)


class Table:
    """The documents of a source; a field is read from the files each time that it is asked for."""

    def __init__(self, directory: Path, index: Index):
        self._directory, self._index = directory, index
        ends = self._rows("more") == 0
        self._last = np.flatnonzero(ends)
        if index.is_cut and len(index.full_shards) == len(index.shards) and ends[-1]:
            self._last = self._last[:-1]  # a preparation was killed in this row
        self._first = np.flatnonzero(np.append(True, ends)[:-1])[: len(self._last)]

    def __len__(self) -> int:
        return len(self._last)

    def _rows(self, name: str) -> np.ndarray:
        """A field of all rows."""
        fields, kind = [np.zeros(0, self._index.row[name])], self._index.row
        for shard in self._index.shards:  # one table at a time: a field is a part of it
            if shard.table:  # another process may extend the last one meanwhile
                path = self._directory / shard.beside(".documents")
                fields.append(np.fromfile(path, kind, shard.rows)[name])
        return np.concatenate(fields)

    def field(self, name: str) -> np.ndarray:
        """A field of each document: `text` (uint64), or of examples `group`, `tail`, `reach`,
        `marked`."""
        return self._rows(name)[self._last]

    @property
    def groups(self) -> np.ndarray:
        """The hash that decides whether each document is held out, uint64 [documents]."""
        return self.field("group" if self._index.masked else "text")

    @property
    def edges(self) -> np.ndarray:
        """The first token of each document, and the end of the last one, int64 [documents + 1]."""
        starts = np.append(self._rows("start").view(np.int64), self._index.tokens)
        end = starts[self._last[-1] + 1] if len(self) else 0
        return np.append(starts[self._first], end)

    @property
    def characters(self) -> np.ndarray:
        """The characters of each document, int64 [documents]."""
        ends = np.append(0, np.cumsum(self._rows("characters"), dtype=np.int64))
        return ends[self._last + 1] - ends[self._first]

    def parts(self, documents: Iterable[int]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The parts of each document: the first token of each and the end, int64 [parts + 1]; and
        the characters of each, int64 [parts]."""
        starts = np.append(self._rows("start").view(np.int64), self._index.tokens)
        sizes = self._rows("characters").astype(np.int64)
        for document in documents:
            first, last = self._first[document], self._last[document] + 1
            yield starts[first : last + 1], sizes[first:last]
