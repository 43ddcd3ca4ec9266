"""Write the shards of a data directory. Each has tokens (`shard-00000.bin`, little endian), a table
of documents (`.documents`) and, for examples, a bit for each token that counts in the loss (`.mask`).
`index.json` lists the complete ones.
"""

from __future__ import annotations

import contextlib
import hashlib
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from windlass.data.tokenizer import Description
from windlass.errors import UserError
from windlass.fileio import Files, HashedFile

FORMAT = 8
INDEX = "index.json"
# A document, or a part of a long one (`more` is 1 but in the last part): its first token in the
# source's tokens, its characters, and a hash of the whole text in the last part.
TEXT_ROW = np.dtype([("start", "<u8"), ("text", "<u8"), ("characters", "<u4"), ("more", "<u4")])
# A question or conversation: also the hash that decides whether it is held out, the last tokens
# that a cut keeps, the first ones that it must keep, and the tokens that count in the loss.
EXAMPLE_ROW = np.dtype(
    [*TEXT_ROW.descr, ("group", "<u8"), ("tail", "<u4"), ("reach", "<u4"), ("marked", "<u4")]
)


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


def unknown_id(place: str, block: np.ndarray, vocab: int, done: int) -> UserError:
    """The error of an id that the tokenizer does not have; `done`: the ids of the shard before."""
    at = int(np.argmax(block >= vocab))
    id_ = f"the token id {int(block[at]):,} at place {done + at:,}"
    reason = f"the vocabulary has {vocab:,} ids: another tokenizer wrote it"
    return bad_shard(place, f"has {id_}, and {reason}")


@cache
def on_disk(dtype: str) -> np.dtype[Any]:
    """The type of tokens in a file, little endian on every machine."""
    return np.dtype(dtype).newbyteorder("<")


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


class ShardWriter:
    """Writes rows as shards, each full after the row that reaches `shard_tokens`, and then the index.
    An error in its `with` block removes the shard that is not complete."""

    def __init__(self, directory: Path, index: Index, dtype: str):
        self.directory, self.dtype = directory, dtype
        # More text changes a short last shard only, so continue after the full ones.
        full = [shard for shard in index.shards if shard.tokens >= index.shard_tokens]
        parts = {"shards": full, "complete": False, "left_out": index.resume.left_out}
        self.index = index.model_copy(update=parts).save(directory)
        self.tokens = self.index.tokens  # with the shard being filled
        self._shard: _NewShard | None = None  # being filled
        # The item being written: its number, its rows in the full shards, which come again, the
        # items left out before it, and its rows that have come.
        self._item, self._skip, self._left_out = index.resume
        self._rows = 0
        self._goes_on = False  # the next row continues a document

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *error: Any) -> None:
        if self._shard is not None:
            self._shard.files.__exit__(*error)

    def add(self, row: Row) -> None:
        """Append a row; one with a problem is counted. After a resume the first rows come again: from
        the start of the item that the next shard begins with."""
        if row.item != self._item:
            self._item, self._rows, self._skip = row.item, 0, 0
            self._left_out = self.index.left_out
        if row.problem:
            self.index.left_out += 1
            return
        self._rows += 1
        begins, self._goes_on = not self._goes_on, row.more
        if self._rows <= self._skip:  # a full shard has the row
            return
        if self._shard is None:
            number = len(self.index.shards)
            self._shard = _NewShard(self.directory, number, self.dtype, self.index.masked)
        self._shard.add(row, self.tokens, begins)
        self.tokens += len(row.tokens)
        if self._shard.tokens >= self.index.shard_tokens:
            self.index.shards.append(self._shard.finish())
            self._shard = None
            if row.marks is None and not row.more:
                self.index.resume = Resume(row.item + 1, 0, self.index.left_out)
            else:
                self.index.resume = Resume(row.item, self._rows, self._left_out)
            self.index = self.index.save(self.directory)

    def finish(self, complete: bool) -> Index:
        if self._shard is not None:
            self.index.shards.append(self._shard.finish())
            self._shard = None
        self.index.complete = complete
        return self.index.save(self.directory)


class _NewShard:
    """The files of a shard while it is filled."""

    def __init__(self, directory: Path, number: int, dtype: str, masked: bool):
        self.tokens = self.rows = self.documents = 0
        self.files = contextlib.ExitStack()
        self._dtype, self._kind = dtype, EXAMPLE_ROW if masked else TEXT_ROW
        self._name = f"shard-{number:05d}"
        self._raw, self._table = self._open(directory, "bin"), self._open(directory, "documents")
        self._mask = self._open(directory, "mask") if masked else None
        self._bits = np.zeros(0, bool)  # of the mask, less than a byte

    def _open(self, directory: Path, ending: str) -> HashedFile:
        path = directory / f"{self._name}.{ending}"
        return HashedFile(self.files.enter_context(Files().replacing(path)))

    def add(self, row: Row, start: int, begins: bool) -> None:
        """Write a row, which has the token `start` of the source and may begin a document."""
        line = [start, row.text, row.characters, row.more]
        if self._mask is not None:
            assert row.marks is not None
            line += [row.group, row.tail, row.reach, int(row.marks.sum())]
            self._bits = np.concatenate([self._bits, row.marks])
            whole = len(self._bits) // 8 * 8
            self._mask.write(np.packbits(self._bits[:whole], bitorder="little").tobytes())
            self._bits = self._bits[whole:]
        self._table.write(np.array(tuple(line), self._kind).tobytes())
        self._raw.write(row.tokens.astype(on_disk(self._dtype)).tobytes())
        self.tokens += len(row.tokens)
        self.rows += 1
        self.documents += begins

    def finish(self) -> Shard:
        if self._mask is not None:
            self._mask.write(np.packbits(self._bits, bitorder="little").tobytes())
        shard = Shard(
            file=f"{self._name}.bin",
            tokens=self.tokens,
            rows=self.rows,
            documents=self.documents,
            sha256=self._raw.finish(),
            dtype=self._dtype,
            table=self._table.finish(),
            mask=self._mask.finish() if self._mask else "",
        )
        self.files.close()
        return shard
