"""Write and read the shards of a data directory. Each has tokens (`shard-00000.bin`), little endian,
a table of documents (`.documents`) and, for examples, a bit for each token that counts in the loss
(`.mask`). `index.json` lists the complete ones; it may also list the shards of other tools.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import weakref
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from windlass.data.recipe_sources import SourceSpec
from windlass.data.remote import RemoteFile
from windlass.data.tokenizer import Description, Tokenizer
from windlass.errors import UserError
from windlass.fileio import Files, HashedFile

FORMAT = 8
INDEX = "index.json"
CACHE = ".cache"  # of the remote shards of all sources, beside their directories
OPEN_FILES = 128
# A document, or a part of a long one (`more` is 1 but in the last part): its first token in the
# source's tokens, its characters, and a hash of the whole text in the last part.
TEXT_ROW = np.dtype([("start", "<u8"), ("text", "<u8"), ("characters", "<u4"), ("more", "<u4")])
# A question or conversation: also the hash that decides whether it is held out, the last tokens
# that a cut keeps, the first ones that it must keep, and the tokens that count in the loss.
EXAMPLE_ROW = np.dtype(
    [*TEXT_ROW.descr, ("group", "<u8"), ("tail", "<u4"), ("reach", "<u4"), ("marked", "<u4")]
)


def on_disk(dtype: str) -> np.dtype[Any]:
    """The type of tokens in a file, little endian on every machine."""
    return np.dtype(dtype).newbyteorder("<")


class Shard(BaseModel):
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
    def identity(self) -> str:
        """Differs for other tokens, and is equal in any directory."""
        return f"{self.file} {self.sha256}" if "://" in self.file else self.sha256

    def beside(self, ending: str) -> str:
        """The file of the shard's table (`.documents`) or mask (`.mask`)."""
        return str(Path(self.file).with_suffix(ending))

    def files(self, row: np.dtype[Any]) -> dict[str, tuple[int, str]]:
        """Size and SHA-256 of each of its files on this machine, by name."""
        if "://" in self.file:
            return {}
        size = self.offset + self.tokens * on_disk(self.dtype).itemsize
        files = {self.file: (size, self.sha256)}
        if self.table:
            files[self.beside(".documents")] = self.rows * row.itemsize, self.table
        if self.mask:
            files[self.beside(".mask")] = -(-self.tokens // 8), self.mask
        return files


class Resume(NamedTuple):
    """Where the shard after the last full one begins."""

    item: int = 0  # number in the source
    rows: int = 0  # of the item, in the shards before
    left_out: int = 0  # items left out before the item


class Index(BaseModel):
    key: dict[str, Any]  # what determines the tokens; the directory's name has a hash of it
    source: dict[str, Any]  # `Source.description`
    tokenizer: Description
    template: str = ""  # the layout of conversations, in words
    single_text: bool = False  # one text file, whose text no token begins
    masked: bool = False  # questions or conversations
    shard_tokens: int
    shards: list[Shard] = []
    resume: Resume = Resume()
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

    def _checksum(self) -> str:
        return hashlib.sha256(self.model_dump_json(exclude={"checksum"}).encode()).hexdigest()

    def save(self, directory: Path) -> Index:
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


def check_ids(place: str, ids: np.ndarray, vocab: int, before: int) -> None:
    """UserError for an id that the tokenizer does not have; `before`: the shard's earlier ids."""
    if int(ids.max()) >= vocab:
        first = int(np.argmax(ids >= vocab))
        id_ = f"the token id {int(ids[first]):,} at place {before + first:,}"
        reason = f"the vocabulary has {vocab:,} ids: another tokenizer wrote it"
        raise bad_shard(place, f"has {id_}, and {reason}")


class Row(NamedTuple):
    item: int  # number of the item in its source
    tokens: np.ndarray  # int64 [n]
    marks: np.ndarray | None = None  # bool [n], whether a token counts in the loss; None: text
    text: int = 0  # hash of the document, in its last row
    characters: int = 0  # in the last row of an item of several examples
    more: bool = False  # the next row continues the document
    group: int = 0  # the rest of an example, as in EXAMPLE_ROW
    tail: int = 0
    reach: int = 0
    problem: str = ""  # the reason why the item cannot be encoded
    unread: tuple[str, ...] = ()  # keys of the item that Windlass ignores, in its last row


class ShardWriter:
    """Writes rows as shards, each full after the row that reaches `shard_tokens`; then the index. An
    error in its `with` block removes the shard that is not complete."""

    def __init__(self, directory: Path, index: Index, dtype: str):
        self.directory, self.dtype = directory, dtype
        # More text changes a short last shard only, so continue after the full ones.
        full = [shard for shard in index.shards if shard.tokens >= index.shard_tokens]
        parts = {"shards": full, "complete": False, "left_out": index.resume.left_out}
        self.index = index.model_copy(update=parts).save(directory)
        self.tokens = self.index.tokens  # with the shard being filled
        # The item being written: its number, its rows in the full shards, which come again, the
        # items left out before it, and its rows that have come.
        self._item, self._skip, self._left_out = index.resume
        self._rows = 0
        self._goes_on = False  # the next row continues a document
        # The shard being filled: its files by their endings, its tokens, rows and documents, and
        # the bits of its mask that are less than a byte.
        self._open, self._files = contextlib.ExitStack(), dict[str, HashedFile]()
        self._counts, self._bits = Counter[str](), np.zeros(0, bool)

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)

    def add(self, row: Row) -> bool:
        """Append a row, or count one with a problem; whether it was appended. After a resume, rows
        come again from the start of the item that the next shard begins with."""
        if row.item != self._item:
            self._item, self._rows, self._skip = row.item, 0, 0
            self._left_out = self.index.left_out
        if row.problem:
            self.index.left_out += 1
            return False
        self._rows += 1
        begins, self._goes_on = not self._goes_on, row.more
        if self._rows <= self._skip:  # a full shard has the row
            return False
        if not self._files:
            for ending in ("bin", "documents", "mask")[: 3 if self.index.masked else 2]:
                path = self.directory / f"shard-{len(self.index.shards):05d}.{ending}"
                self._files[ending] = HashedFile(self._open.enter_context(Files().replacing(path)))
        line = [self.tokens, row.text, row.characters, row.more]
        if row.marks is not None:
            line += [row.group, row.tail, row.reach, int(row.marks.sum())]
            self._bits = np.concatenate([self._bits, row.marks])
            whole = len(self._bits) // 8 * 8
            self._files["mask"].write(np.packbits(self._bits[:whole], bitorder="little").tobytes())
            self._bits = self._bits[whole:]
        self._files["documents"].write(np.array(tuple(line), self.index.row).tobytes())
        self._files["bin"].write(row.tokens.astype(on_disk(self.dtype)).tobytes())
        self._counts.update(tokens=len(row.tokens), rows=1, documents=int(begins))
        self.tokens += len(row.tokens)
        if self._counts["tokens"] >= self.index.shard_tokens:
            self.index.resume = Resume(row.item, self._rows, self._left_out)
            if row.marks is None and not row.more:
                self.index.resume = Resume(row.item + 1, 0, self.index.left_out)
            self._commit()
        return True

    def finish(self, complete: bool) -> Index:
        self.index.complete = complete
        return self._commit()

    def _commit(self) -> Index:
        """Complete the shard being filled, if any, and write the index."""
        if self._files:
            if self.index.masked:
                self._files["mask"].write(np.packbits(self._bits, bitorder="little").tobytes())
            digests = {ending: file.finish() for ending, file in self._files.items()}
            self._open.close()
            shard = Shard(
                file=f"shard-{len(self.index.shards):05d}.bin",
                sha256=digests["bin"],
                dtype=self.dtype,
                table=digests["documents"],
                mask=digests.get("mask", ""),
                **self._counts,
            )
            self.index.shards.append(shard)
            self._files, self._counts, self._bits = {}, Counter(), self._bits[:0]
        self.index = self.index.save(self.directory)
        return self.index


class LocalFile:
    """A file of this machine, read with `pread`: a mapped page faults with Python's lock held."""

    def __init__(self, path: Path):
        try:
            self._descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise bad_shard(path, f"cannot be read: {error}") from None
        # A thread may still read when the interpreter ends, and the system closes the file.
        weakref.finalize(self, os.close, self._descriptor).atexit = False
        self.size = os.fstat(self._descriptor).st_size

    def pread(self, count: int, offset: int) -> bytes:
        return os.pread(self._descriptor, count, offset)


@dataclass(frozen=True)
class Corpus:
    """A source, prepared as far as a recipe needs it: its tokens as one row, and the table of its
    documents. Threads may share it.
    """

    directory: Path
    index: Index
    spec: SourceSpec
    tokenizer: Tokenizer
    is_new: bool = False  # this process has written some of it
    change: str = ""  # a sentence on a change since then, if the recipe keeps the tokens

    @cached_property
    def edges(self) -> np.ndarray:
        """The start of each shard in the row, and the row's end, int64 [shards + 1]."""
        return np.cumsum([0, *(shard.tokens for shard in self.index.shards)], dtype=np.int64)

    @cached_property
    def table(self) -> Table:
        return Table(self.directory, self.index)

    def read(self, start: int, stop: int) -> np.ndarray:
        """The tokens from `start` to `stop`, int64 [stop - start]."""
        parts = [np.zeros(0, np.int64)]
        for shard, begin, end in self._shards_of(start, stop):
            dtype = on_disk(shard.dtype)
            size, offset = (end - begin) * dtype.itemsize, shard.offset + begin * dtype.itemsize
            ids = np.frombuffer(self._pread(shard.file, size, offset, shard.sha256), dtype)
            if "://" in shard.file:
                check_ids(shard.file, ids, self.index.tokenizer.vocab, begin)
            parts.append(ids)
        return np.concatenate(parts)

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
            shard = self.index.shards[place]
            begin = start - int(self.edges[place])
            end = min(begin + stop - start, shard.tokens)
            yield shard, begin, end
            start += end - begin
            place += 1

    @cached_property
    def _local(self) -> Callable[[str], LocalFile]:
        directory = self.directory  # not `self`, which would keep the files open in a circle
        return lru_cache(OPEN_FILES)(lambda name: LocalFile(directory / name))

    @cached_property
    def _remote(self) -> Callable[[str, str], RemoteFile]:  # they need no descriptors
        place, most = self.directory.parent / CACHE, self.spec.cache_bytes
        return cache(lambda url, version: RemoteFile(url, place, most, version))

    def _pread(self, name: str, count: int, offset: int, version: str = "") -> bytes:
        """Bytes of a file in the directory, or of a URL that must have this version."""
        file = self._remote(name, version) if "://" in name else self._local(name)
        raw = file.pread(count, offset)
        if len(raw) != count:
            raise bad_shard(name, "ends too early: it was truncated after it was checked")
        return raw

    def places_of(self, documents: np.ndarray, characters: np.ndarray) -> np.ndarray:
        """The token of the source at which each document has reached its number of characters, all
        int64 [n]."""
        table, places = self.table, list[int]()
        starts = np.append(table.rows("start").view(np.int64), self.index.tokens)
        all_sizes = table.rows("characters").astype(np.int64)
        for document, limit in zip(documents.tolist(), characters.tolist(), strict=True):
            first, last = int(table.first[document]), int(table.last[document]) + 1
            ends = np.cumsum(all_sizes[first:last])  # of the parts of the document
            part = int(np.searchsorted(ends, limit, side="right"))
            if part == len(ends):
                places.append(int(starts[last]))
                continue
            more = limit - int(ends[part] - all_sizes[first + part])  # characters in this part
            start, stop = starts[first + part : first + part + 2].tolist()
            start += len(self.tokenizer.first) if part == 0 else 0
            tokens, decode = self.read(start, stop), self.tokenizer.decode
            counts = range(1, len(tokens) + 1)
            reached = bisect_left(counts, True, key=lambda n: len(decode(tokens[:n])) > more)
            places.append(start + reached)
        return np.array(places, np.int64)


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
