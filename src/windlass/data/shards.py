"""Write and read the shards of a data directory. Each has tokens (`shard-00000.bin`), little endian,
and a table of documents (`.documents`). `index.json` lists the complete shards; it may also list
the shards of other tools.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from windlass.data.recipe_sources import SourceSpec
from windlass.data.remote import RemoteFile
from windlass.data.tokenizer import Description, Tokenizer
from windlass.errors import UserError
from windlass.fileio import Files, HashedFile

FORMAT = 9
INDEX = "index.json"
CACHE = ".cache"  # of the remote shards of all sources, beside their directories
OPEN_FILES = 128
MARK = 1 << 31  # added to the id of a token that counts in the loss, in examples
FEW = 100  # documents: `split` divides a source with fewer by other rules
# A document, or a part of a long one (`more` is 1 but in the last part): its first token in the
# source's tokens, its characters, and a hash of the whole text in the last part.
TEXT_ROW = np.dtype([("start", "<u8"), ("text", "<u8"), ("characters", "<u4"), ("more", "<u4")])
# A question or conversation: also the hash that decides whether it is held out, the last tokens
# that a cut keeps, the first ones that it must keep, and the tokens that count in the loss.
EXAMPLE_ROW = np.dtype(
    [*TEXT_ROW.descr, ("group", "<u8"), ("tail", "<u4"), ("reach", "<u4"), ("marked", "<u4")]
)


def smallest_dtype(vocab: int) -> str:
    """The type of the ids of a vocabulary in shards, little endian on every machine."""
    return "<u2" if vocab <= 1 << 16 else "<u4"


class Shard(BaseModel):
    model_config = ConfigDict(frozen=True)

    # Name in the data directory; of another tool's shard the path, from there or absolute, or a URL
    file: str
    tokens: int
    rows: int = 0  # of its table
    sha256: str  # of a remote shard its version
    dtype: str  # "<u2" or "<u4": 16 or 32 bits an id, little endian
    offset: int = 0  # bytes of header before the first token
    table_sha256: str = ""  # empty: no table (shards of other tools)

    @property
    def is_remote(self) -> bool:
        return "://" in self.file

    @property
    def identity(self) -> str:
        """Differs for other tokens, and is equal in any directory."""
        return f"{self.file} {self.sha256}" if self.is_remote else self.sha256

    @property
    def table(self) -> str:
        """The file of its table."""
        return str(Path(self.file).with_suffix(".documents"))

    def files(self, row: np.dtype[Any]) -> dict[str, tuple[int, str]]:
        """Size and SHA-256 of each of its files on this machine, by name."""
        if self.is_remote:
            return {}
        size = self.offset + self.tokens * np.dtype(self.dtype).itemsize
        files = {self.file: (size, self.sha256)}
        if self.table_sha256:
            files[self.table] = self.rows * row.itemsize, self.table_sha256
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

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @property
    def rows(self) -> int:
        return sum(shard.rows for shard in self.shards)

    @property
    def row(self) -> np.dtype[Any]:
        """The type of a row of the tables."""
        return EXAMPLE_ROW if self.masked else TEXT_ROW

    def save(self, directory: Path) -> None:
        Files().replace(directory / INDEX, self.model_dump_json(indent=1).encode())

    @staticmethod
    def load(directory: Path) -> Index | None:
        """The index of a data directory; None before it is written, UserError if damaged."""
        path = directory / INDEX
        with contextlib.suppress(ValidationError):
            try:
                index = Index.model_validate_json(path.read_bytes())
            except (FileNotFoundError, NotADirectoryError):
                return None
            if index.format == FORMAT:
                return index
        remedy = prepare_again(directory)
        raise UserError(f"{path} is damaged or of another version; {remedy}")


def located(directory: Path, file: str) -> Path:
    """A file of a data directory, or another tool's shard, named from there: the directory may be a
    link."""
    return Path(os.path.normpath(directory / file))


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

    def __init__(self, directory: Path, index: Index):
        self.directory = directory
        self.dtype = "<u4" if index.masked else smallest_dtype(index.tokenizer.vocab)
        # More text changes a short last shard only, so continue after the full ones.
        full = [shard for shard in index.shards if shard.tokens >= index.shard_tokens]
        parts = {"shards": full, "complete": False, "left_out": index.resume.left_out}
        self.index = index.model_copy(update=parts)
        self.index.save(directory)
        self.tokens = self.index.tokens  # with the shard being filled
        self._item, self._rows = index.resume.item, 0  # the item that comes, and its rows so far
        # The shard being filled: its two files, its tokens and rows
        self._open, self._files = contextlib.ExitStack(), list[HashedFile]()
        self._counts = Counter[str]()

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)

    def add(self, row: Row) -> bool:
        """Append a row, or count one with a problem; whether it was appended. The rows come from the
        start of `index.resume.item`, and a full shard may have the first ones."""
        if row.problem:
            self.index.left_out += 1
            return False
        self._rows = self._rows + 1 if row.item == self._item else 1
        self._item = row.item
        if (self._item, self._rows) <= self.index.resume[:2]:
            return False
        if not self._files:
            for name in (self._name, Path(self._name).with_suffix(".documents").name):
                output = self._open.enter_context(Files().replacing(self.directory / name))
                self._files.append(HashedFile(output))
        bin_file, table = self._files
        tokens, line = row.tokens, [self.tokens, row.text, row.characters, row.more]
        if row.marks is not None:
            tokens = tokens + MARK * row.marks
            line += [row.group, row.tail, row.reach, int(row.marks.sum())]
        table.write(np.array(tuple(line), self.index.row).tobytes())
        bin_file.write(tokens.astype(self.dtype).tobytes())
        self._counts.update(tokens=len(tokens), rows=1)
        self.tokens += len(tokens)
        if self._counts["tokens"] >= self.index.shard_tokens:
            self.index.resume = Resume(self._item, self._rows, self.index.left_out)
            self._commit()
        return True

    def finish(self, complete: bool) -> Index:
        self.index.complete = complete
        return self._commit()

    @property
    def _name(self) -> str:
        return f"shard-{len(self.index.shards):05d}.bin"

    def _commit(self) -> Index:
        """Complete the shard being filled, if any, and write the index."""
        if self._files:
            hashes = [file.finish() for file in self._files]
            self._open.close()
            parts = {"sha256": hashes[0], "table_sha256": hashes[1], **self._counts}
            self.index.shards.append(Shard(file=self._name, dtype=self.dtype, **parts))
            self._files, self._counts = [], Counter()
        self.index.save(self.directory)
        return self.index


def spans(edges: np.ndarray, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """The parts of a row, divided at `edges`, from `start` to `stop`: the number of each part, and
    the begin and end in it."""
    number = bisect_right(edges, start) - 1
    while start < stop:
        begin, end = int(edges[number]), min(stop, int(edges[number + 1]))
        yield number, start - begin, end - begin
        start, number = end, number + 1


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
    documents. Threads may share it. A field of the table is read each time that it is asked for.
    """

    directory: Path
    index: Index
    spec: SourceSpec
    tokenizer: Tokenizer
    is_new: bool = False  # this process has written some of it
    change: str = ""  # a sentence on a change since then, if the recipe keeps the tokens

    @property
    def has_documents(self) -> bool:
        """Whether its documents are known: shards of other tools do not name them."""
        return self.spec.kind != "shards"

    @cached_property
    def shard_edges(self) -> np.ndarray:
        """The start of each shard in the row, and the row's end, int64 [shards + 1]."""
        return np.cumsum([0, *(shard.tokens for shard in self.index.shards)], dtype=np.int64)

    @cached_property
    def _file(self) -> Callable[[int], LocalFile | RemoteFile]:
        """The open file of each shard. It does not refer to `self`, which would be a circle."""
        directory, cache_bytes, shards = self.directory, self.spec.cache_bytes, self.index.shards

        @lru_cache(OPEN_FILES)
        def opened(place: int) -> LocalFile | RemoteFile:
            shard = shards[place]
            if shard.is_remote:
                return RemoteFile(shard.file, directory.parent / CACHE, cache_bytes, shard.sha256)
            return LocalFile(located(directory, shard.file))

        return opened

    def read(self, start: int, stop: int) -> np.ndarray:
        """The tokens from `start` to `stop`, int64 [stop - start]; of examples with their MARK."""
        parts = [np.zeros(0, np.int64)]
        for place, begin, end in spans(self.shard_edges, start, stop):
            shard = self.index.shards[place]
            dtype = np.dtype(shard.dtype)
            size, offset = (end - begin) * dtype.itemsize, shard.offset + begin * dtype.itemsize
            raw = self._file(place).pread(size, offset)
            if len(raw) != size:
                problem = "ends too early: it was truncated after it was checked"
                raise bad_shard(shard.file, problem)
            ids = np.frombuffer(raw, dtype)
            if shard.is_remote:
                check_ids(shard.file, ids, self.index.tokenizer.vocab, begin)
            parts.append(ids)
        return np.concatenate(parts)

    # -- the documents; those of an item that another process is still writing do not count

    def rows(self, name: str) -> np.ndarray:
        """A field of all rows of the table."""
        kind = self.index.row
        fields = [np.zeros(0, kind[name])]
        for shard in self.index.shards:  # one at a time: a field is a part of it
            if shard.table_sha256:  # another process may extend the last one meanwhile
                fields.append(np.fromfile(self.directory / shard.table, kind, shard.rows)[name])
        return np.concatenate(fields)

    @cached_property
    def _last(self) -> np.ndarray:
        """The number of the last row of each document."""
        return np.flatnonzero(self.rows("more") == 0)

    @property
    def documents(self) -> int:
        """The number of documents; 0 in shards of other tools."""
        return len(self._last)

    def field(self, name: str) -> np.ndarray:
        """A field of each document."""
        return self.rows(name)[self._last]

    @property
    def groups(self) -> np.ndarray:
        """The hashes that decide whether each document is held out, uint64 [documents]."""
        return self.field("group" if self.index.masked else "text")

    @property
    def document_edges(self) -> np.ndarray:
        """The first token of each document, and the end of the last one, int64 [documents + 1]."""
        starts = np.append(self.rows("start").view(np.int64), self.index.tokens)
        return np.append(0, starts[self._last + 1])

    @property
    def characters(self) -> np.ndarray:
        """The characters of each document, int64 [documents]."""
        ends = np.cumsum(self.rows("characters"), dtype=np.int64)
        return np.diff(ends[self._last], prepend=0)

    @cached_property
    def documents_read(self) -> int | None:
        """The number of documents that a recipe reads: the first ones that have `spec.limit`
        tokens, or characters of separate validation data. None if the corpus has too few, or
        without a limit.

        Training reads at least FEW texts, or FEW groups of examples.
        """
        limit = self.spec.limit
        if not limit:
            return None
        if self.spec.is_val:
            last = int(np.searchsorted(np.cumsum(self.characters), limit))
        else:
            first = np.sort(np.unique(self.groups, return_index=True)[1])  # of each group
            few = int(first[FEW - 1]) if len(first) >= FEW else self.documents
            last = max(few, int(np.searchsorted(self.document_edges[1:], limit)))
        return last + 1 if last < self.documents else None

    @property
    def is_enough(self) -> bool:
        """Whether it has what the recipe reads."""
        return self.index.complete or self.documents_read is not None

    def places_of(self, documents: np.ndarray, characters: np.ndarray) -> np.ndarray:
        """The token of the source at which each document has reached its number of characters, all
        int64 [n]."""
        starts = np.append(self.rows("start").view(np.int64), self.index.tokens)
        ends = np.append(0, np.cumsum(self.rows("characters"), dtype=np.int64))  # characters
        first = np.append(0, self._last + 1)  # row of each document
        wanted = ends[first[documents]] + characters
        rows = np.searchsorted(ends, wanted, side="right") - 1
        rows = np.minimum(rows, first[documents + 1])
        places = starts[rows]
        for n in np.flatnonzero(rows < first[documents + 1]).tolist():  # inside of a row
            row, more, decode = int(rows[n]), int(wanted[n] - ends[rows[n]]), self.tokenizer.decode
            begin = len(self.tokenizer.first) if row == first[documents[n]] else 0
            tokens = self.read(int(starts[row]) + begin, int(starts[row + 1]))
            counts = range(1, len(tokens) + 1)
            reached = bisect_left(counts, True, key=lambda k: len(decode(tokens[:k])) > more)
            places[n] += begin + reached
        return places


class Need:
    """`Corpus.documents_read` while the rows come, one after another."""

    def __init__(self, corpus: Corpus):
        """`corpus` has the rows before."""
        self._spec, self._groups = corpus.spec, set[int](np.unique(corpus.groups)[:FEW].tolist())
        self._characters = int(corpus.rows("characters").sum())

    def is_met(self, row: Row, tokens: int) -> bool:
        """Whether a row ends the last document that is needed; `tokens`: of all rows up to it."""
        self._characters += row.characters
        if row.more or not self._spec.limit:
            return False
        if self._spec.is_val:
            return self._characters >= self._spec.limit
        if len(self._groups) < FEW:
            self._groups.add(row.group or row.text)
        return len(self._groups) >= FEW and tokens >= self._spec.limit
