"""The files of a data directory: its index, and how token shards are written, read and checked.

A data directory contains

- `index.json`, written last, so that it exists only if everything else does;
- `shard-00000.bin` ...: token ids, little endian, 16 or 32 bits by the size of the vocabulary; a
  second source has `shard.1-...`, a separate validation corpus `eval-shard-...`;
- `shard-00000.documents` ...: a row of DOCUMENT for each document that starts in the shard;
- `tokenizer/`; for questions or conversations `train.npz` and `val.npz` instead of shards;
- with `data.disk_tokens` a directory `stream-...` for each run, see `disk.py`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from windlass.data.files import sha256_of
from windlass.data.tokenizer import Description
from windlass.errors import UserError, first_line
from windlass.fileio import Files, HashedFile, read_json, write_atomic

if TYPE_CHECKING:
    from windlass.parallel.dist import Ranks

FORMAT = 4
INDEX, VERIFIED = "index.json", "verified.json"
MAIN, EVAL = "shard", "eval-shard"  # kinds of streams; their files' names begin with them
OPEN_FILES = 128
LLMC_HEADER_BYTES = 1024
LLMC_TYPES = {20240520: "uint16", 20240801: "uint32"}  # by magic number: GPT-2's tokens, Llama 3's
BLOCK_TOKENS = 1 << 21
# A document's start in its shard, its size (`division.text_size`), and a hash of its text.
DOCUMENT = np.dtype([("start", "<u8"), ("size", "<u8"), ("text", "<u8")])


class Shard(BaseModel):
    """One file of tokens."""

    model_config = ConfigDict(frozen=True)

    file: str  # name in the data directory, or the absolute path of a shard that another tool wrote
    tokens: int
    documents: int = 0  # that start in it; 0: unknown (shards of other tools)
    sha256: str
    dtype: str  # `uint16` or `uint32`
    offset: int = 0  # bytes of header before the first token
    table: str = ""  # SHA-256 of its table of documents; empty: no table (shards of other tools)

    @property
    def table_file(self) -> str:
        return table_name(self.file)

    @property
    def end(self) -> int:
        """Bytes from the start of the file to the end of the last token."""
        return self.offset + self.tokens * on_disk(self.dtype).itemsize


def table_name(file: str) -> str:
    """The file with the table of a shard's documents."""
    return str(Path(file).with_suffix(".documents"))


class Range(BaseModel):
    """Some tokens of a stream."""

    stream: str
    start: int
    stop: int


class Split(BaseModel):
    """The tokens for training or for validation: ranges of streams, in this order."""

    ranges: list[Range]
    documents: int = 0  # that start in them; 0: unknown
    text: str = ""  # of `val`: a hash of its text, equal for every tokenizer; empty: unknown

    @property
    def tokens(self) -> int:
        return sum(part.stop - part.start for part in self.ranges)


class RowsFile(BaseModel):
    """The rows of a split: `train.npz` or `val.npz`."""

    items: int
    fingerprint: str
    tokens: int  # in an epoch, without padding
    unmasked: int  # labels in an epoch that count in the loss
    lengths: dict[str, int]  # of whole items, in tokens, by percentile
    cut: int  # items longer than the context
    cut_tokens: int  # that they lost
    left_out: int  # items with nothing left to learn
    text: str = ""  # of `val`: as in `Split`


class SourceFile(BaseModel):
    """A file of a streamed source."""

    file: str  # its path, or `hf://datasets/NAME@COMMIT/PATH`
    bytes: int = 0  # of a local file
    sha256: str = ""  # of the end of a local file; a commit pins a file of the Hub


class StreamedSource(BaseModel):
    """Training data that is streamed: the files, and where it begins in them."""

    files: list[SourceFile]
    revision: str  # the commit of the Hub; empty for local files
    start: list[int]  # a `stream.Place`
    shard_tokens: int  # of a shard at most

    @property
    def identity(self) -> list[Any]:
        """What determines the tokens; local files may have other paths."""
        files = [(f.bytes, f.sha256) if f.sha256 else f.file for f in self.files]
        return [files, self.start, self.shard_tokens]


class Index(BaseModel):
    """Everything in a data directory, and the settings that determine it."""

    settings: dict[str, Any]
    source: dict[str, Any]  # by stream
    tokenizer: Description
    streams: dict[str, list[Shard]] = {}
    splits: dict[str, Split] = {}  # `train`, and perhaps `val`
    rows: dict[str, RowsFile] = {}  # the same for questions and conversations
    template: str = ""  # the layout of conversations, in words
    stream: StreamedSource | None = None  # the training data with `data.disk_tokens`
    format: int = FORMAT
    fingerprint: str = ""

    @property
    def shards(self) -> list[Shard]:
        return [shard for stream in self.streams.values() for shard in stream]

    def documents(self, stream: str) -> int:
        """Documents of a stream; a document divided between training and validation counts once."""
        divided = bool(self.source[stream].get("divided"))
        return sum(shard.documents for shard in self.streams[stream]) - divided

    def compute_fingerprint(self) -> str:
        """A hash of the tokens, their split and their tokenizer, equal in every directory."""
        shown = {"file", "table"}, {"documents", "text"}
        content = [
            FORMAT,
            self.tokenizer.model_dump(exclude={"kind", "start"}),
            {k: [s.model_dump(exclude=shown[0]) for s in v] for k, v in self.streams.items()},
            {k: split.model_dump(exclude=shown[1]) for k, split in self.splits.items()},
            {k: rows.fingerprint for k, rows in self.rows.items()},
            *([self.stream.identity] if self.stream else ()),
        ]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def save(self, directory: Path) -> Index:
        """Write `index.json`, with the fingerprint; returns the index as written."""
        index = self.model_copy(update={"fingerprint": self.compute_fingerprint()})
        Files().replace(directory / INDEX, index.model_dump_json(indent=1).encode())
        return index

    @staticmethod
    def load(directory: Path) -> Index | None:
        """The index of a data directory; None before it is written, UserError if damaged."""
        path = directory / INDEX
        try:
            index = Index.model_validate_json(path.read_bytes())
            if index.format == FORMAT and index.fingerprint == index.compute_fingerprint():
                return index
        except (FileNotFoundError, NotADirectoryError):
            return None
        except ValidationError:
            pass
        raise UserError(
            f"{path} is damaged, changed or of another version; {prepare_again(directory)}"
        )


def prepare_again(directory: Path) -> str:
    return f"delete {directory} and prepare the data again"


def bad_shard(path: Path, problem: str) -> UserError:
    return UserError(f"the shard {path} {problem}")


@cache
def on_disk(dtype: str) -> np.dtype[Any]:
    """The type of tokens in a file, little endian on every machine."""
    return np.dtype(dtype).newbyteorder("<")


class ShardWriter:
    """Writes a stream of documents as shards of equal size; an error in its `with` block removes
    the shard that is not complete.

    `resume` is where the next shard starts: the number of the document in which the last committed
    shard ends, and how many of its tokens are committed.
    """

    def __init__(
        self,
        directory: Path,
        stream: str,
        dtype: str,
        shard_tokens: int,
        shards: Sequence[Shard] = (),
        resume: tuple[int, int] = (0, 0),
        on_commit: Callable[[ShardWriter], None] = lambda writer: None,
    ):
        self.directory, self.stream, self.dtype = directory, stream, dtype
        self.shard_tokens, self._on_commit = shard_tokens, on_commit
        self.shards, self.resume, self.finished = list(shards), resume, False
        self.tokens = sum(s.tokens for s in self.shards)  # including the shard being filled
        self._number, self._done, self._skip = resume[0], 0, resume[1]
        self._files = contextlib.ExitStack()  # of the shard being filled
        self._raw: HashedFile | None = None
        self._table: HashedFile | None = None

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *error: Any) -> None:
        self._files.__exit__(*error)

    def add(self, tokens: np.ndarray, number: int, size: int = 0, text: int = 0) -> None:
        """Append tokens (int64 [n]) of document `number`; `size` and `text` are for DOCUMENT.

        Documents come in order, perhaps in several parts. After a resume the caller adds the
        document from its start, and the writer skips its committed tokens.
        """
        if number != self._number:
            self._number, self._done = number, 0
        passed = min(len(tokens), self._skip)
        self._skip -= passed
        self._done += passed
        tokens = tokens[passed:]
        while len(tokens):
            place = self.tokens % self.shard_tokens
            if self._raw is None or self._table is None:
                self._raw, self._table = self._create()
            if not self._done:
                self._table.write(struct.pack("<3Q", place, size, text))  # a DOCUMENT
            room = self.shard_tokens - place
            part, tokens = tokens[:room], tokens[room:]
            self._raw.write(part.astype(on_disk(self.dtype)).tobytes())
            self.tokens += len(part)
            self._done += len(part)
            if len(part) == room:
                self._commit((number, self._done))

    @property
    def _name(self) -> str:
        return f"{self.stream}-{len(self.shards):05d}.bin"

    def _create(self) -> tuple[HashedFile, HashedFile]:
        """The files of the next shard: tokens, and the table of documents, which appears first."""
        paths = self.directory / self._name, self.directory / table_name(self._name)
        raw, table = (self._files.enter_context(Files().replacing(path)) for path in paths)
        return HashedFile(raw), HashedFile(table)

    def _commit(self, resume: tuple[int, int]) -> None:
        assert self._raw is not None and self._table is not None
        shard = Shard(
            file=self._name,
            tokens=self._raw.bytes // np.dtype(self.dtype).itemsize,
            documents=self._table.bytes // DOCUMENT.itemsize,
            sha256=self._raw.finish(),
            dtype=self.dtype,
            table=self._table.finish(),
        )
        self._raw = self._table = None
        self._files.close()
        self.shards.append(shard)
        self.resume = resume
        self._on_commit(self)

    def finish(self) -> list[Shard]:
        """Commit the last shard; returns all shards."""
        self.finished = True
        if self._raw:
            self._commit((0, 0))
        else:
            self._on_commit(self)
        return self.shards


class Stream:
    """Tokens of shards as one row, read with `pread`: a mapped page faults with Python's lock."""

    def __init__(self, directory: Path, shards: Sequence[Shard]):
        self.shards, self._directory = list(shards), directory
        # The start of each shard in the row, and the row's end, int64 [shards + 1].
        self.edges = np.cumsum([0, *(s.tokens for s in self.shards)], dtype=np.int64)
        self._open: dict[int, int] = {}  # file descriptors by the number of the shard
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return int(self.edges[-1])

    def read_into(self, start: int, out: np.ndarray) -> None:
        """Copy the tokens from `start` on into `out` [n], of any wide enough integer type."""
        place = bisect_right(self.edges, start) - 1
        done = 0
        while done < len(out):
            shard, begin = self.shards[place], start + done - int(self.edges[place])
            count, dtype = min(len(out) - done, shard.tokens - begin), on_disk(shard.dtype)
            size = count * dtype.itemsize
            with self._lock:
                if place not in self._open:
                    if len(self._open) >= OPEN_FILES:
                        os.close(self._open.pop(next(iter(self._open))))
                    path = self._directory / shard.file
                    try:
                        self._open[place] = os.open(path, os.O_RDONLY)
                    except OSError as error:
                        raise bad_shard(path, f"cannot be read: {error}") from None
                raw = os.pread(self._open[place], size, shard.offset + begin * dtype.itemsize)
            if len(raw) != size:
                path, problem = (
                    self._directory / shard.file,
                    "it was truncated after it was checked",
                )
                raise UserError(f"{path} ends too early: {problem}")
            out[done : done + count] = np.frombuffer(raw, dtype=dtype)
            done += count
            place += 1

    def read(self, start: int, stop: int) -> np.ndarray:
        """int64 [stop - start]."""
        out = np.empty(stop - start, dtype=np.int64)
        self.read_into(start, out)
        return out

    def column(self, name: str) -> np.ndarray:
        """A field of DOCUMENT of the documents that start in these shards, uint64 [documents].

        `start` is in the row.
        """
        fields = [np.zeros(0, dtype=np.uint64)]
        for shard, edge in zip(self.shards, self.edges, strict=False):
            if shard.table:  # one table at a time: a field is a third of it
                field = np.fromfile(self._directory / shard.table_file, DOCUMENT)[name]
                fields.append(field + np.uint64(edge if name == "start" else 0))
        return np.concatenate(fields)

    def starts(self) -> np.ndarray:
        """Where the documents begin in the row, int64 [documents]."""
        return self.column("start").view(np.int64)

    # bound here, because modules are removed before objects when the interpreter ends
    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        for descriptor in self._open.values():
            close(descriptor)


def cut_shards(shards: Sequence[Shard], start: int, stop: int) -> list[Shard]:
    """The shards of a stream's tokens from `start` to `stop`, the first and last one cut."""
    parts, edge = list[Shard](), 0
    for shard in shards:
        first, last = max(start, edge), min(stop, edge + shard.tokens)
        if first < last:
            offset = shard.offset + (first - edge) * on_disk(shard.dtype).itemsize
            parts.append(shard.model_copy(update={"offset": offset, "tokens": last - first}))
        edge += shard.tokens
    return parts


# -- checks: always the sizes; the SHA-256 once for each state of a file


def file_states(directory: Path, shards: Iterable[Shard]) -> dict[str, list[int | str]]:
    """Size, time of change (ns) and SHA-256 of each file by name; UserError for a wrong size."""
    states: dict[str, list[int | str]] = {}
    for shard in shards:
        files = {shard.file: (shard.end, shard.sha256)}
        if shard.table:
            files[shard.table_file] = shard.documents * DOCUMENT.itemsize, shard.table
        for file, (size, sha256) in files.items():
            path, remedy = directory / file, prepare_again(directory)
            try:
                stat = path.stat()
            except OSError:
                raise bad_shard(path, f"is missing; {remedy}") from None
            if stat.st_size != size:
                raise bad_shard(path, f"has {stat.st_size:,} bytes, not {size:,}; {remedy}")
            states[file] = [stat.st_size, stat.st_mtime_ns, sha256]
    return states


def verify(
    directory: Path, index: Index, tick: Callable[[float], None], ranks: Ranks | None = None
) -> None:
    """Check every shard as `file_states`, and its SHA-256 if it changed since the last check.

    The ranks of a host divide the files, because each host may have its own copy. `tick` gets the
    fraction of this rank's files that is read. UserError on every rank if a shard is damaged.
    """
    states, verified = file_states(directory, index.shards), read_json(directory / VERIFIED)
    changed = [file for file in states if verified.get(file) != states[file]]
    rank, world = 0, 1
    if ranks is not None and ranks.world > 1:
        rank, world = ranks.env.local_rank, ranks.env.local_world
        # A late rank may read what another has remembered: all use the first local rank's list.
        lists = ranks.all_gather_object("changed shards", [ranks.env.node, rank, changed])
        if not any(files for _, _, files in lists):
            return
        first = (ranks.env.node, 0)
        changed = next((files for node, r, files in lists if (node, r) == first), changed)
    own, damaged = changed[rank::world], list[Path]()
    with ThreadPoolExecutor(4) as pool:
        digests = pool.map(lambda file: sha256_of(directory / file), own)
        for done, (file, sha256) in enumerate(zip(own, digests, strict=True), 1):
            if sha256 != states[file][2]:
                damaged.append(directory / file)
                break
            tick(done / len(own))
    if world > 1 and ranks is not None:
        damaged = [p for part in ranks.all_gather_object("damaged shards", damaged) for p in part]
    if damaged:
        raise bad_shard(damaged[0], f"is damaged (SHA-256); {prepare_again(directory)}")
    if changed and rank == 0:
        remember(directory, states)


def remember(directory: Path, states: dict[str, list[int | str]]) -> None:
    """Store the states of verified files; in a read-only directory each start verifies."""
    if os.access(directory, os.W_OK):
        write_atomic(directory / VERIFIED, json.dumps(states, indent=1) + "\n")


# -- shards of other tools, in place: nanoGPT's .bin, build-nanogpt's .npy, llm.c's .bin


def scan(path: Path, vocab: int) -> Shard:
    """Read another tool's shard once; UserError if it is truncated or has an id >= `vocab`."""
    size, dtype_name, offset = path.stat().st_size, "uint16", 0
    tokens = size // 2
    if path.suffix == ".npy":
        try:  # without pickle: an array of objects would run code when loaded
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise bad_shard(path, f"is not a whole .npy file: {first_line(error)}") from None
        dtype_name, offset, tokens = array.dtype.name, array.offset, array.size
        if array.dtype.str not in ("<u2", "<u4") or array.ndim != 1:
            content = f"{array.dtype} of shape {array.shape}, not a row of uint16 or uint32"
            raise bad_shard(path, f"holds {content}")
    elif path.suffix != ".bin":
        raise bad_shard(path, "is neither .npy nor .bin")
    elif size >= LLMC_HEADER_BYTES:
        magic, _, count = np.fromfile(path, "<i4", 3).tolist()
        if magic in LLMC_TYPES:
            dtype_name, offset, tokens = LLMC_TYPES[magic], LLMC_HEADER_BYTES, count
    dtype, digest, done = on_disk(dtype_name), hashlib.sha256(), 0
    if not tokens or size != offset + tokens * dtype.itemsize:
        found = f"{size:,} bytes for {tokens:,} tokens of {dtype_name}"
        raise bad_shard(path, f"is truncated or not a shard: {found}")
    with path.open("rb") as file:
        digest.update(file.read(offset))
        while raw := file.read(BLOCK_TOKENS * dtype.itemsize):
            digest.update(raw)
            block = np.frombuffer(raw, dtype)
            if int(block.max()) >= vocab:
                at = int(np.argmax(block >= vocab))
                raise bad_shard(
                    path,
                    f"has the token id {int(block[at]):,} at place {done + at:,}, and the "
                    f"vocabulary has {vocab:,} ids: it was made with another tokenizer",
                )
            done += len(block)
    place, sha256 = str(path.resolve()), digest.hexdigest()
    return Shard(file=place, tokens=tokens, sha256=sha256, dtype=dtype_name, offset=offset)
