"""A prepared source as it is read: its tokens as one row, and the table of its documents."""

from __future__ import annotations

import hashlib
import io
import os
import threading
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, partial
from pathlib import Path

import numpy as np

from windlass.data.files import local_files
from windlass.data.locate import Member, S, SourceSpec
from windlass.data.progress import Progress
from windlass.data.remote import RemoteFile, list_urls
from windlass.data.shards import Index, Shard, bad_shard, on_disk, unknown_id
from windlass.data.tokenizer import Tokenizer
from windlass.errors import first_line
from windlass.recipe import DataSettings

CACHE = ".cache"  # of the remote shards of all sources, beside their directories
OPEN_FILES = 128


@dataclass(frozen=True)
class Corpus:
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
        table = self.stream.table
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
            shard, begin = self.shards[place], start - int(self.edges[place])
            end = min(begin + stop - start, shard.tokens)
            yield shard, begin, end
            start, place = start + end - begin, place + 1

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

    @cached_property
    def table(self) -> Table:
        return Table(self._directory, self.index)


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
        fields, kind = [np.zeros(0, self._index.row[name])], self._index.row
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


@dataclass(frozen=True)
class Limit:
    """The first documents of a source that have `most` tokens, or characters; 0: all documents.

    Training reads at least FEW texts, or FEW groups of examples. Separate validation data, which
    counts characters, needs no minimum.
    """

    most: int
    is_val: bool = False  # of separate validation data

    def documents(self, table: Table) -> int | None:
        """The number of documents that are read; None if the table has too few."""
        if self.is_val:
            last = int(np.searchsorted(np.cumsum(table.characters), self.most))
        else:
            first = np.sort(np.unique(table.groups, return_index=True)[1])  # of each group
            few = int(first[FEW - 1]) if len(first) >= FEW else len(table)
            last = max(few, int(np.searchsorted(table.edges[1:], self.most)))
        return last + 1 if self.most and last < len(table) else None


class Need:
    """`Limit.documents` while the documents come, one after another."""

    def __init__(self, limit: Limit, table: Table | None = None):
        """`table` has the documents before."""
        self._limit, self._characters, self._groups = limit, 0, set[int]()
        if table is not None:
            self._characters = int(table.characters.sum())
            self._groups |= set(np.unique(table.groups)[:FEW].tolist())

    def is_met(self, group: int, characters: int, tokens: int) -> bool:
        """Whether a document is the last that is needed; `tokens`: of all documents up to it."""
        self._characters += characters
        if self._limit.is_val:
            return 0 < self._limit.most <= self._characters
        if len(self._groups) < FEW:
            self._groups.add(group)
        return len(self._groups) >= FEW and 0 < self._limit.most <= tokens


def with_limits(member: Member[S]) -> list[tuple[S, Limit]]:
    """The sources of a member, training first, with their limits (`data.max_tokens`)."""
    most = member.data.max_tokens
    characters = int(most * Fraction(str(member.data.val_fraction)))
    train, val = len(member.train), len(member.val)
    of_train = Limit(-(-most // max(1, train)))
    of_val = Limit(-(-characters // max(1, val)), is_val=True)
    return list(zip(member.sources, [of_train] * train + [of_val] * val, strict=True))


BLOCK_TOKENS = 1 << 21
LLMC_HEADER_BYTES = 1024
LLMC_TYPES = {20240520: "uint16", 20240801: "uint32"}  # by magic number: GPT-2's tokens, Llama 3's
# Megatron's `.idx`: 9 bytes, the version (8 bytes), then the code of the type of the `.bin` beside.
MEGATRON, MEGATRON_TYPES = b"MMIDIDX\x00\x00", {8: "uint16", 4: "uint32"}


def scan_source(
    spec: SourceSpec, data: DataSettings, directory: Path, index: Index, progress: Progress
) -> Index:
    """Read the shards of a source `shards:...` once; returns the index as written."""
    is_remote = "://" in spec.path
    places = list_urls(spec.path) if is_remote else [str(file) for file in local_files(spec)[0]]
    read = partial(scan, vocab=index.tokenizer.vocab, data=data, cache=directory.parent / CACHE)
    with ThreadPoolExecutor(data.workers or None) as pool:
        for shard in pool.map(read, places):
            index.shards.append(shard)
            progress.update(f"shards of {spec.name}", len(index.shards) / len(places))
    index.complete = True
    return index.save(directory)


def scan(place: str, vocab: int, data: DataSettings, cache: Path) -> Shard:
    """Read another tool's shard once; of a URL only its beginning."""
    path, is_remote = Path(place), "://" in place
    file = RemoteFile(place, cache, int(data.cache_gb * 1e9)) if is_remote else LocalFile(path)
    head = file.pread(LLMC_HEADER_BYTES, 0)
    magic, _, count = np.frombuffer(head[:12].ljust(12, b"\0"), "<i4").tolist()
    dtype, offset, tokens = "", 0, None  # as the file or its `.idx` names them
    if path.suffix == ".npy":
        dtype, offset, tokens = _numpy_header(place, head)
    elif path.suffix != ".bin":
        raise bad_shard(place, "is neither .npy nor .bin")
    elif len(head) == LLMC_HEADER_BYTES and magic in LLMC_TYPES:
        dtype, offset, tokens = LLMC_TYPES[magic], LLMC_HEADER_BYTES, count
    elif not is_remote and (index := path.with_suffix(".idx")).is_file():
        about = LocalFile(index).pread(18, 0)
        dtype = MEGATRON_TYPES.get(about[-1], "") if about.startswith(MEGATRON) else ""
        if not dtype:
            raise bad_shard(place, f"has a {index.name} that is not Megatron's for token ids")
    guess = "uint16" if vocab <= 1 << 16 else "uint32"
    kind = on_disk(dtype or (guess if data.shards_dtype == "auto" else data.shards_dtype))
    tokens = file.size // kind.itemsize if tokens is None else tokens
    if not tokens or file.size != offset + tokens * kind.itemsize:
        content = f"{file.size:,} bytes for {tokens:,} tokens of {kind.name}"
        raise bad_shard(place, f"is truncated or not a shard: {content}")
    digest, zeros = hashlib.sha256(file.pread(offset, 0)), True
    for done in range(0, min(tokens, BLOCK_TOKENS) if is_remote else tokens, BLOCK_TOKENS):
        size = min(BLOCK_TOKENS, tokens - done) * kind.itemsize
        raw = file.pread(size, offset + done * kind.itemsize)
        digest.update(raw)
        block = np.frombuffer(raw, kind)
        if int(block.max()) >= vocab:
            raise unknown_id(place, block, vocab, done)
        zeros = zeros and not block[1::2].any()
    if zeros and tokens > 1 and kind.itemsize == 2 and not dtype:
        remedy = 'set data.shards_dtype="uint32"'
        raise bad_shard(place, f"has 32-bit ids: every second 16 bits are 0; {remedy}")
    name, content = str(path.resolve()), digest.hexdigest()
    if isinstance(file, RemoteFile):
        name, content = place, file.version
    return Shard(file=name, tokens=tokens, sha256=content, dtype=kind.name, offset=offset)


def _numpy_header(place: str, head: bytes) -> tuple[str, int, int]:
    """Type, bytes of header, and number of the ids of a `.npy` file."""
    file = io.BytesIO(head)
    try:
        np.lib.format.read_magic(file)
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    except ValueError as error:
        raise bad_shard(place, f"is not a whole .npy file: {first_line(error)}") from None
    if dtype.str not in ("<u2", "<u4") or len(shape) != 1:
        raise bad_shard(place, f"holds {dtype} of shape {shape}, not a row of uint16 or uint32")
    return dtype.name, file.tell(), shape[0]
