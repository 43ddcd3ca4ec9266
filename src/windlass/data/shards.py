"""What lies in a data directory: its index, how token shards are written, read, and checked.

A data directory holds

- `index.json`, which is written last: if it is there, everything is;
- `shard-00000.bin` ...: token ids, little endian, 16 or 32 bits by the size of the vocabulary. A second source has
  `shard.1-00000.bin` ..., a validation corpus of its own `eval-shard-00000.bin` ...;
- `shard-00000.documents` ...: a row of DOCUMENT for each document that starts in the shard;
- `tokenizer/`; with questions or conversations `train.npz` and `val.npz` in place of shards.

One process writes, under the directory's lock.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from windlass.data.sources import sha256_of
from windlass.data.tokenizer import Description
from windlass.errors import UserError, first_line
from windlass.fileio import Files, read_json, write_atomic

if TYPE_CHECKING:
    from windlass.parallel.dist import Ranks

FORMAT = 4
INDEX, VERIFIED = "index.json", "verified.json"
MAIN, EVAL = (
    "shard",
    "eval-shard",
)  # the streams of tokens in a data directory, by the first part of their files' names
OPEN_FILES = 128
LLMC_HEADER_BYTES = 1024
LLMC_TYPES = {20240520: "uint16", 20240801: "uint32"}  # by magic number: GPT-2's tokens, Llama 3's
BLOCK_TOKENS = 1 << 21
# Where a document starts in its shard, the bytes of its UTF-8 text (and one for its end-of-text token), a hash of the text.
DOCUMENT = np.dtype([("start", "<u8"), ("size", "<u8"), ("text", "<u8")])


class Shard(BaseModel):
    """One file of tokens."""

    model_config = ConfigDict(frozen=True)

    file: str  # name in the data directory, or the absolute path of a shard that another tool wrote
    tokens: int
    documents: int  # that start in it; 0: not known (shards of other tools)
    sha256: str
    dtype: str  # `uint16` or `uint32`
    offset: int = 0  # bytes of header before the first token
    table: str = ""  # SHA-256 of its table of documents; empty: it has none (shards of other tools)

    @property
    def table_file(self) -> str:
        return str(Path(self.file).with_suffix(".documents"))


class Range(BaseModel):
    """Some tokens of a stream."""

    stream: str
    start: int
    stop: int


class Split(BaseModel):
    """The tokens that are for training or for validation: ranges of streams, one after the other."""

    ranges: list[Range]
    documents: int = 0  # that start in them; 0: not known
    text: str = ""  # of `val`: a hash of its text, equal for every tokenizer; empty: not known

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
    left_out: int  # items of which nothing to learn was left
    text: str = ""  # of `val`: as in `Split`


class Index(BaseModel):
    """Everything that a data directory holds, and the settings that determine it."""

    settings: dict[str, Any]
    source: dict[str, Any]  # where the text came from, by stream
    tokenizer: Description
    streams: dict[str, list[Shard]] = {}
    splits: dict[str, Split] = {}  # `train`, and `val` where there is one
    rows: dict[str, RowsFile] = {}  # the same for questions and conversations
    template: str = ""  # how conversations are written down, in words
    format: int = FORMAT
    fingerprint: str = ""

    @property
    def shards(self) -> list[Shard]:
        return [shard for stream in self.streams.values() for shard in stream]

    def documents(self, stem: str) -> int:
        """Documents of a stream; one that is divided between training and validation counts once."""
        return sum(shard.documents for shard in self.streams[stem]) - bool(
            self.source[stem].get("divided")
        )

    def compute_fingerprint(self) -> str:
        """A hash of the tokens, their split and their tokenizer: equal data has equal fingerprints, wherever it lies."""
        content = [
            FORMAT,
            self.tokenizer.model_dump(exclude={"kind", "start"}),
            {
                name: [s.model_dump(exclude={"file", "table"}) for s in shards]
                for name, shards in self.streams.items()
            },
            {
                name: split.model_dump(exclude={"documents", "text"})
                for name, split in self.splits.items()
            },
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


def on_disk(dtype: str) -> np.dtype[Any]:
    """The type in a file: little endian on every machine."""
    return np.dtype(dtype).newbyteorder("<")


class ShardWriter:
    """Writes a stream of documents as shards of equal size, each committed whole; the one being filled is in memory.

    A document may reach over several shards. `resume` is where the next shard starts: the number of the document that the
    last committed shard ends in, and how many of its tokens are committed.
    """

    def __init__(
        self,
        directory: Path,
        stem: str,
        dtype: str,
        shard_tokens: int,
        shards: Sequence[Shard] = (),
        resume: tuple[int, int] = (0, 0),
        on_commit: Callable[[ShardWriter], None] = lambda writer: None,
    ):
        self.directory, self.stem, self.dtype, self.shard_tokens = (
            directory,
            stem,
            dtype,
            shard_tokens,
        )
        self.shards, self.resume, self.finished, self._on_commit = (
            list(shards),
            resume,
            False,
            on_commit,
        )
        self.tokens = sum(s.tokens for s in self.shards)  # also those of the shard being filled
        self._number, self._done, self._skip = resume[0], 0, resume[1]
        self._raw, self._documents = bytearray(), list[tuple[int, int, int]]()

    def add(self, tokens: np.ndarray, number: int, size: int = 0, text: int = 0) -> None:
        """Append tokens (int64 [n]) of document `number`, of which DOCUMENT has `size` and `text`; documents come in order, one may
        come in several parts. After a resume the document is added from its start again, and what was committed of it is skipped."""
        if number != self._number:
            self._number, self._done = number, 0
        passed = min(len(tokens), self._skip)
        self._skip -= passed
        self._done += passed
        tokens = tokens[passed:]
        if len(tokens) and not self._done:
            self._documents.append((self.tokens % self.shard_tokens, size, text))
        while len(tokens):
            room = self.shard_tokens - self.tokens % self.shard_tokens
            part, tokens = tokens[:room], tokens[room:]
            self._raw += part.astype(on_disk(self.dtype)).tobytes()
            self.tokens += len(part)
            self._done += len(part)
            if len(part) == room:
                self._commit((number, self._done))

    def _commit(self, resume: tuple[int, int]) -> None:
        name, tokens = (
            f"{self.stem}-{len(self.shards):05d}.bin",
            len(self._raw) // np.dtype(self.dtype).itemsize,
        )
        raw, table = bytes(self._raw), np.array(self._documents, DOCUMENT).tobytes()
        shard = Shard(
            file=name,
            tokens=tokens,
            documents=len(self._documents),
            sha256=hashlib.sha256(raw).hexdigest(),
            dtype=self.dtype,
            table=hashlib.sha256(table).hexdigest(),
        )
        Files().replace(self.directory / shard.table_file, table)
        Files().replace(self.directory / name, raw)
        self.shards.append(shard)
        self._raw, self._documents, self.resume = bytearray(), [], resume
        self._on_commit(self)

    def finish(self) -> list[Shard]:
        """Commit what is left; returns all shards."""
        self.finished = True
        if self._raw:
            self._commit((0, 0))
        else:
            self._on_commit(self)
        return self.shards


class Stream:
    """The tokens of shards as one long row, read with `pread`: no mapped page that faults while Python's lock is held."""

    def __init__(self, directory: Path, shards: Sequence[Shard]):
        self.shards, self._directory = list(shards), directory
        # Where each shard starts in the row, and the row's end, int64 [shards + 1].
        self.edges = np.cumsum([0, *(s.tokens for s in self.shards)], dtype=np.int64)
        self._open: dict[int, int] = {}  # file descriptors by the number of the shard
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return int(self.edges[-1])

    def read_into(self, start: int, out: np.ndarray) -> None:
        """Copy the tokens from `start` on into `out` [n], any integer type that holds them."""
        place = int(np.searchsorted(self.edges, start, side="right")) - 1
        done = 0
        while done < len(out):
            shard, begin = self.shards[place], start + done - int(self.edges[place])
            count, dtype, path = (
                min(len(out) - done, shard.tokens - begin),
                on_disk(shard.dtype),
                self._directory / shard.file,
            )
            with self._lock:
                if place not in self._open:
                    if len(self._open) >= OPEN_FILES:
                        os.close(self._open.pop(next(iter(self._open))))
                    try:
                        self._open[place] = os.open(path, os.O_RDONLY)
                    except OSError as error:
                        raise UserError(f"the shard {path} cannot be read: {error}") from None
                raw = os.pread(
                    self._open[place], count * dtype.itemsize, shard.offset + begin * dtype.itemsize
                )
            if len(raw) != count * dtype.itemsize:
                raise UserError(f"{path} ends too early: it was truncated after it was checked")
            out[done : done + count] = np.frombuffer(raw, dtype=dtype)
            done += count
            place += 1

    def read(self, start: int, stop: int) -> np.ndarray:
        """int64 [stop - start]."""
        out = np.empty(stop - start, dtype=np.int64)
        self.read_into(start, out)
        return out

    def documents(self) -> np.ndarray:
        """The documents that start in these shards, DOCUMENT [documents], `start` counted in the row."""
        tables = [np.zeros(0, dtype=DOCUMENT)]
        for shard, edge in zip(self.shards, self.edges, strict=False):
            if shard.table:
                table = np.fromfile(self._directory / shard.table_file, DOCUMENT)
                table["start"] += np.uint64(edge)
                tables.append(table)
        return np.concatenate(tables)

    def __del__(self) -> None:
        if os is not None and os.close is not None:  # at the interpreter's end modules go first
            for descriptor in getattr(self, "_open", {}).values():
                os.close(descriptor)


def cut_shards(shards: Sequence[Shard], start: int, stop: int) -> list[Shard]:
    """The shards of a stream that hold its tokens from `start` to `stop`, the first and the last cut to them."""
    parts, edge = list[Shard](), 0
    for shard in shards:
        first, last = max(start, edge), min(stop, edge + shard.tokens)
        if first < last:
            offset = shard.offset + (first - edge) * on_disk(shard.dtype).itemsize
            parts.append(shard.model_copy(update={"offset": offset, "tokens": last - first}))
        edge += shard.tokens
    return parts


# -- are the shards what the index says? Sizes always; SHA-256 once for each state of a file, remembered beside the shards.


def file_states(directory: Path, shards: Iterable[Shard]) -> dict[str, list[int | str]]:
    """The size, the time of the last change (ns) and the SHA-256 of each file, by its name; UserError for a wrong size."""
    states: dict[str, list[int | str]] = {}
    for shard in shards:
        files = {
            shard.file: (shard.offset + shard.tokens * on_disk(shard.dtype).itemsize, shard.sha256)
        }
        if shard.table:
            files[shard.table_file] = shard.documents * DOCUMENT.itemsize, shard.table
        for file, (size, sha256) in files.items():
            path = directory / file
            try:
                stat = path.stat()
            except OSError:
                raise UserError(
                    f"the shard {path} is missing; {prepare_again(directory)}"
                ) from None
            if stat.st_size != size:
                raise UserError(
                    f"the shard {path} has {stat.st_size:,} bytes, not {size:,}; {prepare_again(directory)}"
                )
            states[file] = [stat.st_size, stat.st_mtime_ns, sha256]
    return states


def verify(
    directory: Path, index: Index, tick: Callable[[float], None], ranks: Ranks | None = None
) -> None:
    """Check every shard as `file_states`, and its SHA-256 if the file has changed since the last check. The ranks of a host
    divide the files, because each host may have a copy of its own. `tick` gets the share of this rank's files that is read."""
    states, verified = file_states(directory, index.shards), read_json(directory / VERIFIED)
    changed = [file for file in states if verified.get(file) != states[file]]
    rank, world = 0, 1
    if ranks is not None and ranks.world > 1:
        rank, world = ranks.env.local_rank, ranks.env.local_world
        # A rank that comes late may read what another one has remembered: all use the list of the host's first rank.
        lists = ranks.all_gather_object("changed shards", [ranks.env.node, rank, changed])
        if not any(files for _, _, files in lists):
            return
        changed = next(
            (files for node, first, files in lists if (node, first) == (ranks.env.node, 0)), changed
        )
    own, problem = changed[rank::world], ""
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        for done, (file, sha256) in enumerate(
            zip(own, pool.map(lambda f: sha256_of(directory / f), own), strict=True), 1
        ):
            if sha256 != states[file][2]:
                problem = (
                    f"the shard {directory / file} is damaged (SHA-256); {prepare_again(directory)}"
                )
                break
            tick(done / len(own))
    problems = (
        [problem]
        if world == 1 or ranks is None
        else ranks.all_gather_object("damaged shards", problem)
    )
    if damaged := next(filter(None, problems), ""):
        raise UserError(damaged)
    if changed and rank == 0:
        remember(directory, states)


def remember(directory: Path, states: dict[str, list[int | str]]) -> None:
    """Store the states of verified files; where the directory cannot be written, the next start verifies again."""
    if os.access(directory, os.W_OK):
        write_atomic(directory / VERIFIED, json.dumps(states, indent=1) + "\n")


# -- shards that other tools wrote, read in place: nanoGPT's .bin, build-nanogpt's .npy, llm.c's .bin with its header


def scan(path: Path, vocab: int) -> Shard:
    """Read a shard of another tool once, for its SHA-256; raises UserError where it is truncated or has an id >= `vocab`."""
    size, name, offset = path.stat().st_size, "uint16", 0
    tokens = size // 2
    if path.suffix == ".npy":
        try:
            array = np.load(
                path, mmap_mode="r", allow_pickle=False
            )  # an array of objects would run code when loaded
        except (ValueError, EOFError) as error:
            raise UserError(
                f"the shard {path} is no whole .npy file of tokens: {first_line(error)}"
            ) from None
        name = {"<u2": "uint16", "<u4": "uint32"}.get(array.dtype.str, "")
        if not name or array.ndim != 1:
            raise UserError(
                f"the shard {path} holds {array.dtype} of shape {array.shape}, not a row of uint16 or uint32"
            )
        offset, tokens = array.offset, len(array)
    elif path.suffix != ".bin":
        raise UserError(f"the shard {path} is neither .npy nor .bin")
    elif (
        size >= LLMC_HEADER_BYTES
        and (head := np.fromfile(path, "<i4", 3).tolist())[0] in LLMC_TYPES
    ):
        name, offset, tokens = LLMC_TYPES[head[0]], LLMC_HEADER_BYTES, head[2]
    dtype, digest, done = on_disk(name), hashlib.sha256(), 0
    if not tokens or size != offset + tokens * dtype.itemsize:
        raise UserError(
            f"the shard {path} is truncated, or none: {size:,} bytes for {tokens:,} tokens of {name}"
        )
    with path.open("rb") as file:
        digest.update(file.read(offset))
        while raw := file.read(BLOCK_TOKENS * dtype.itemsize):
            digest.update(raw)
            block = np.frombuffer(raw, dtype)
            if int(block.max()) >= vocab:
                place = int(np.argmax(block >= vocab))
                raise UserError(
                    f"the shard {path} holds the token id {int(block[place]):,} at place {done + place:,}, and the vocabulary has "
                    f"{vocab:,}: it was made with another tokenizer, or is no token shard"
                )
            done += len(block)
    file_name = str(path.resolve())
    return Shard(
        file=file_name,
        tokens=tokens,
        documents=0,
        sha256=digest.hexdigest(),
        dtype=name,
        offset=offset,
    )
