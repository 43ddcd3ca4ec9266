"""Read a prepared source: its tokens as one row, the table of its documents, and the number of
documents that a recipe needs (`data.max_tokens`).
"""

from __future__ import annotations

import os
import threading
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from windlass.data.recipe_sources import SourceSpec
from windlass.data.remote import RemoteFile
from windlass.data.shards import Index, Shard, bad_shard, on_disk, unknown_id
from windlass.data.tokenizer import Tokenizer

CACHE = ".cache"  # of the remote shards of all sources, beside their directories
OPEN_FILES = 128


@dataclass(frozen=True)
class Corpus:
    """A source, prepared as far as a recipe needs it."""

    directory: Path
    index: Index
    spec: SourceSpec
    tokenizer: Tokenizer
    is_new: bool = False  # this process has written some of it
    change: str = ""  # a sentence on a change since then, if the recipe keeps the tokens

    @cached_property
    def stream(self) -> Stream:
        return Stream(self.directory, self.index, self.spec.cache_bytes)

    @cached_property
    def table(self) -> Table:
        return Table(self.directory, self.index)

    def places_of(self, documents: Sequence[int], characters: Sequence[int]) -> Iterator[int]:
        """The token of the source at which each document has reached its number of characters."""
        table = self.table
        starts = np.append(table.rows("start").view(np.int64), self.index.tokens)
        all_sizes = table.rows("characters").astype(np.int64)
        for document, limit in zip(documents, characters, strict=True):
            first, last = int(table.first[document]), int(table.last[document]) + 1
            sizes = all_sizes[first:last]  # of the parts of the document
            ends = np.cumsum(sizes)
            part = int(np.searchsorted(ends, limit, side="right"))
            if part == len(sizes):
                yield int(starts[last])
                continue
            start, stop = starts[first + part : first + part + 2].tolist()
            start += len(self.tokenizer.first) if part == 0 else 0
            yield self._place(start, stop, limit - int(ends[part] - sizes[part]))

    def _place(self, start: int, stop: int, characters: int) -> int:
        """The token at which the tokens from `start` on have reached a number of characters."""
        tokens = self.stream.read(start, stop)

        def is_reached(count: int) -> bool:
            return len(self.tokenizer.decode(tokens[:count])) > characters

        return start + bisect_left(range(1, len(tokens) + 1), True, key=is_reached)


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
        self._lock = threading.Lock()
        self._cache_bytes = cache_bytes

    def __len__(self) -> int:
        return int(self.edges[-1])

    def read_into(self, start: int, out: np.ndarray) -> None:
        """Copy the tokens from `start` on into `out` [n], of any wide enough integer type."""
        done = 0
        for shard, begin, end in self._shards_of(start, start + len(out)):
            count = end - begin
            dtype = on_disk(shard.dtype)
            offset = shard.offset + begin * dtype.itemsize
            raw = self._pread(shard.file, count * dtype.itemsize, offset, shard.sha256)
            ids = np.frombuffer(raw, dtype)
            if "://" in shard.file and int(ids.max()) >= self.index.tokenizer.vocab:
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
            shard = self.shards[place]
            begin = start - int(self.edges[place])
            end = min(begin + stop - start, shard.tokens)
            yield shard, begin, end
            start += end - begin
            place += 1

    def _pread(self, name: str, count: int, offset: int, version: str = "") -> bytes:
        if (file := self._open.get(name)) is None:
            with self._lock:
                local = [key for key, one in self._open.items() if isinstance(one, LocalFile)]
                if len(local) >= OPEN_FILES:  # a remote file does not have a descriptor
                    self._open.pop(local[0])
                try:
                    if "://" in name:
                        cache = self._directory.parent / CACHE
                        file = RemoteFile(name, cache, self._cache_bytes, version)
                    else:
                        file = LocalFile(self._directory / name)
                except OSError as error:
                    raise bad_shard(self._directory / name, f"cannot be read: {error}") from None
                self._open[name] = file
        raw = file.pread(count, offset)
        if len(raw) != count:
            raise bad_shard(name, "ends too early: it was truncated after it was checked")
        return raw


class Table:
    """The documents of a source; a field is read from the files each time that it is asked for.

    - `first` and `last`: the rows of the table that each document begins and ends with.
    """

    def __init__(self, directory: Path, index: Index):
        self._directory, self._index = directory, index
        ends = self.rows("more") == 0
        self.last = np.flatnonzero(ends)
        self.first = np.flatnonzero(np.append(True, ends)[:-1])[: len(self.last)]

    def __len__(self) -> int:
        return len(self.last)

    def rows(self, name: str) -> np.ndarray:
        """A field of all rows."""
        kind = self._index.row
        fields = [np.zeros(0, kind[name])]
        for shard in self._index.shards:  # one table at a time: a field is a part of it
            if shard.table:  # another process may extend the last one meanwhile
                path = self._directory / shard.beside(".documents")
                fields.append(np.fromfile(path, kind, shard.rows)[name])
        return np.concatenate(fields)

    def field(self, name: str) -> np.ndarray:
        """A field of each document."""
        return self.rows(name)[self.last]

    @property
    def groups(self) -> np.ndarray:
        """The hashes that decide whether each document is held out, uint64 [documents]."""
        return self.field("group" if self._index.masked else "text")

    @property
    def edges(self) -> np.ndarray:
        """The first token of each document, and the end of the last one, int64 [documents + 1]."""
        starts = np.append(self.rows("start").view(np.int64), self._index.tokens)
        end = starts[self.last[-1] + 1] if len(self) else 0
        return np.append(starts[self.first], end)

    @property
    def characters(self) -> np.ndarray:
        """The characters of each document, int64 [documents]."""
        ends = np.append(0, np.cumsum(self.rows("characters"), dtype=np.int64))
        return ends[self.last + 1] - ends[self.first]


FEW = 100  # the first ones of a source decide how validation data is held out (`split.py`)


def documents_read(table: Table, spec: SourceSpec) -> int | None:
    """The number of documents that a recipe reads: the first ones that have `spec.limit` tokens, or
    characters of separate validation data. None if the table has too few, or without a limit.

    Training reads at least FEW texts, or FEW groups of examples.
    """
    if not spec.limit:
        return None
    if spec.is_val:
        last = int(np.searchsorted(np.cumsum(table.characters), spec.limit))
    else:
        first = np.sort(np.unique(table.groups, return_index=True)[1])  # of each group
        few = int(first[FEW - 1]) if len(first) >= FEW else len(table)
        last = max(few, int(np.searchsorted(table.edges[1:], spec.limit)))
    return last + 1 if last < len(table) else None


class Need:
    """`documents_read` while the documents come, one after another."""

    def __init__(self, spec: SourceSpec, table: Table | None = None):
        """`table` has the documents before."""
        self._limit, self._is_val = spec.limit, spec.is_val
        self._characters = 0
        self._groups = set[int]()
        if table is not None:
            self._characters = int(table.characters.sum())
            self._groups = set(np.unique(table.groups)[:FEW].tolist())

    def is_met(self, group: int, characters: int, tokens: int) -> bool:
        """Whether a document is the last that is needed; `tokens`: of all documents up to it."""
        self._characters += characters
        if self._is_val:
            return 0 < self._limit <= self._characters
        if len(self._groups) < FEW:
            self._groups.add(group)
        return len(self._groups) >= FEW and 0 < self._limit <= tokens
