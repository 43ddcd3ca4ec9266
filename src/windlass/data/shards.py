"""The files of a data directory: its index, and how token shards are written, read and checked.

A data directory has the tokens of one source by one tokenizer:

- `index.json`: the source, the tokenizer and the shards that are committed;
- `shard-00000.bin` ...: token ids, little endian, 16 or 32 bits by the size of the vocabulary;
- `shard-00000.documents` ...: a row of the table for each document that starts in the shard;
- `shard-00000.mask` ...: with questions or conversations, a bit for each token: 1 if it counts in
  the loss;
- `tokenizer/`, `left-out.txt` (items that could not be read), `verified.json`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import weakref
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from windlass.data.remote import RemoteFile
from windlass.data.tokenizer import Description
from windlass.errors import UserError
from windlass.fileio import Files, HashedFile

FORMAT = 6
INDEX, CACHE = "index.json", "cache"
OPEN_FILES = 128
# A document, or a part of a long one (then `more` is 1 but in the last part): its first token in the
# source's tokens, its characters, and a hash of the whole text in the last part.
TEXT_ROW = np.dtype([("start", "<u8"), ("text", "<u8"), ("characters", "<u4"), ("more", "<u4")])
# A question or conversation: also the hash that decides whether it is held out, the last tokens that
# a cut keeps, the first ones that it must keep, and the tokens that count in the loss.
EXAMPLE_ROW = np.dtype(
    [*TEXT_ROW.descr, ("group", "<u8"), ("tail", "<u4"), ("reach", "<u4"), ("marked", "<u4")]
)


class Shard(BaseModel):
    """One file of tokens."""

    model_config = ConfigDict(frozen=True)

    file: str  # name in the data directory; absolute path or URL of a shard that another tool wrote
    tokens: int
    rows: int = 0  # of its table
    documents: int = 0  # that start in it; 0: unknown (shards of other tools)
    sha256: str  # of a remote shard its version
    dtype: str  # `uint16` or `uint32`
    offset: int = 0  # bytes of header before the first token
    table: str = ""  # SHA-256 of its table; empty: no table (shards of other tools)
    mask: str = ""  # SHA-256 of its mask; empty: no mask

    @property
    def is_remote(self) -> bool:
        return "://" in self.file

    @property
    def identity(self) -> str:
        """What tells its tokens from others, in any directory."""
        return f"{self.file} {self.sha256}" if self.is_remote else self.sha256

    def beside(self, ending: str) -> str:
        """The file of the shard's table (`.documents`) or mask (`.mask`)."""
        return str(Path(self.file).with_suffix(ending))

    def files(self, row: np.dtype[Any]) -> dict[str, tuple[int, str]]:
        """Size and SHA-256 of each of its files on this machine, by name."""
        if self.is_remote:
            return {}
        size = self.offset + self.tokens * on_disk(self.dtype).itemsize
        files = {self.file: (size, self.sha256)}
        if self.table:
            files[self.beside(".documents")] = self.rows * row.itemsize, self.table
        if self.mask:
            files[self.beside(".mask")] = -(-self.tokens // 8), self.mask
        return files


class Index(BaseModel):
    """The content of a data directory."""

    key: dict[str, Any]  # what determines the tokens; the directory's name has a hash of it
    source: dict[str, Any]  # `Source.description`
    tokenizer: Description
    template: str = ""  # the layout of conversations, in words
    single_text: bool = False  # one text file, whose text no token begins
    masked: bool = False  # questions or conversations
    shard_tokens: int
    shards: list[Shard] = []
    # Where the shard after the last full one begins: the number of its item, the item's tokens in
    # the shards before, and the items left out before.
    resume: tuple[int, int, int] = (0, 0, 0)
    is_cut: bool = False  # it begins inside a row
    items: int = 0  # that are read, empty ones and those left out included
    left_out: int = 0  # items that could not be read (`data.on_bad_item`)
    complete: bool = False  # False: the source has more
    format: int = FORMAT
    checksum: str = ""

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.shards)

    @property
    def row(self) -> np.dtype[Any]:
        """The type of a row of the tables."""
        return EXAMPLE_ROW if self.masked else TEXT_ROW

    @property
    def full_shards(self) -> list[Shard]:
        """The shards that more text of the source does not change."""
        return [shard for shard in self.shards if shard.tokens == self.shard_tokens]

    def _checksum(self) -> str:
        return hashlib.sha256(self.model_dump_json(exclude={"checksum"}).encode()).hexdigest()

    def save(self, directory: Path) -> Index:
        """Write `index.json`; returns the index as written."""
        index = self.model_copy(update={"checksum": self._checksum()})
        Files().replace(directory / INDEX, index.model_dump_json(indent=1).encode())
        return index

    @staticmethod
    def load(directory: Path) -> Index | None:
        """The index of a data directory; None before it is written, UserError if damaged."""
        path = directory / INDEX
        with contextlib.suppress(ValidationError):
            try:
                index = Index.model_validate_json(path.read_bytes())
            except (FileNotFoundError, NotADirectoryError):
                return None
            if index.format == FORMAT and index.checksum == index._checksum():
                return index
        remedy = prepare_again(directory)
        raise UserError(f"{path} is damaged, changed or of another version; {remedy}")


def prepare_again(directory: Path) -> str:
    return f"delete {directory} and prepare the data again"


def bad_shard(path: Path | str, problem: str) -> UserError:
    return UserError(f"the shard {path} {problem}")


def unknown_id(place: str, block: np.ndarray, vocab: int, done: int) -> UserError:
    """The error of an id that the tokenizer does not have; `done`: the ids of the shard before."""
    at = int(np.argmax(block >= vocab))
    id_ = f"the token id {int(block[at]):,} at place {done + at:,}"
    reason = f"the vocabulary has {vocab:,} ids: it was made with another tokenizer"
    return bad_shard(place, f"has {id_}, and {reason}")


@cache
def on_disk(dtype: str) -> np.dtype[Any]:
    """The type of tokens in a file, little endian on every machine."""
    return np.dtype(dtype).newbyteorder("<")


# -- writing


class Row(NamedTuple):
    """A document, or a part of a long one, as tokens."""

    item: int  # number of the item in its source
    tokens: np.ndarray  # int64 [n]
    marks: np.ndarray | None = None  # bool [n], whether a token counts in the loss; None: text
    text: int = 0  # hash of the document, in its last row
    characters: int = 0
    more: bool = False  # the next row continues the document
    group: int = 0  # the rest of an example, as in EXAMPLE_ROW
    tail: int = 0
    reach: int = 0


class ShardWriter:
    """Writes rows as shards of equal size, and the index after each one; an error in its `with`
    block removes the shard that is not complete."""

    def __init__(self, directory: Path, index: Index, dtype: str):
        """Continue after the full shards of `index`."""
        self.directory, self.dtype = directory, dtype
        self.index = index.model_copy(update={"shards": index.full_shards})
        self.tokens = self.index.tokens  # with the shard being filled
        # of the item being written: its number, and its tokens in the full shards, which come again
        self._item, self._skip, _ = index.resume
        self._written = self._skip
        self._files = contextlib.ExitStack()  # of the shard being filled
        self._open: list[HashedFile] = []
        self._documents, self._bits = 0, np.zeros(0, bool)  # of the shard being filled
        self._goes_on = False  # the next row continues a document

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *error: Any) -> None:
        self._files.__exit__(*error)

    def add(self, row: Row) -> None:
        """Append a row. After a resume the first rows are those of the item that the next shard
        begins with, from the item's start."""
        if row.item != self._item:
            self._item, self._written, self._skip = row.item, 0, 0
        size, done = self.index.shard_tokens, min(self._skip, len(row.tokens))
        if self._skip:  # the table has the row
            self._skip -= done
        else:  # a row without tokens may end a document
            line = [self.tokens, row.text, row.characters, row.more]
            if row.marks is not None:
                line += [row.group, row.tail, row.reach, int(row.marks.sum())]
            self._outputs()[1].write(np.array(tuple(line), self.index.row).tobytes())
            self._documents += not self._goes_on
        self._goes_on = row.more
        while done < len(row.tokens):
            raw, _, *mask = self._outputs()
            part = row.tokens[done:][: size - self.tokens % size]
            raw.write(part.astype(on_disk(self.dtype)).tobytes())
            if row.marks is not None:
                self._bits = np.concatenate([self._bits, row.marks[done : done + len(part)]])
                whole = len(self._bits) // 8 * 8
                mask[0].write(np.packbits(self._bits[:whole], bitorder="little").tobytes())
                self._bits = self._bits[whole:]
            done += len(part)
            self._written += len(part)
            self.tokens += len(part)
            if self.tokens % size == 0:
                is_end = done == len(row.tokens) and row.marks is None and not row.more
                place = (row.item + 1, 0) if is_end else (row.item, self._written)
                self._commit(place, is_cut=done < len(row.tokens))

    def _outputs(self) -> list[HashedFile]:
        """The files of the shard being filled: tokens, table, and the mask."""
        if not self._open:
            for ending in ("bin", "documents", "mask")[: 2 + self.index.masked]:
                path = self.directory / f"shard-{len(self.index.shards):05d}.{ending}"
                self._open.append(HashedFile(self._files.enter_context(Files().replacing(path))))
        return self._open

    def _commit(self, place: tuple[int, int] | None = None, is_cut: bool = False) -> None:
        """Complete the shard being filled; `place` and `is_cut` are of the next one; None: it is
        short."""
        raw, table, *mask = self._open
        if mask:
            mask[0].write(np.packbits(self._bits, bitorder="little").tobytes())
        shard = Shard(
            file=f"shard-{len(self.index.shards):05d}.bin",
            tokens=raw.bytes // np.dtype(self.dtype).itemsize,
            rows=table.bytes // self.index.row.itemsize,
            documents=self._documents,
            sha256=raw.finish(),
            dtype=self.dtype,
            table=table.finish(),
            mask=mask[0].finish() if mask else "",
        )
        self._open, self._documents, self._bits = [], 0, np.zeros(0, bool)
        self._files.close()
        self.index.shards.append(shard)
        if place is not None:
            self.index.resume, self.index.is_cut = (*place, self.index.left_out), is_cut
            self.index = self.index.save(self.directory)

    def finish(self, complete: bool) -> Index:
        """Commit the last shard and save the index; `complete`: the source has no more."""
        if self._open:
            self._commit()
        self.index.complete = complete
        return self.index.save(self.directory)


# -- reading


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
            if len(local) >= OPEN_FILES:  # a remote file has no descriptor
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
