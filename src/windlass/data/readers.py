"""Documents out of files: text, JSON lines and Parquet, plain or compressed.

Each reader is a generator that leaves out the first `skip` documents as cheaply as the format allows and returns (as a
generator does, through StopIteration) the number of documents in the whole file.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import IO, Any, cast

from windlass.errors import UserError

Documents = Generator[str, None, int]
Tick = Callable[[int], None]
"""Called now and then with the number of bytes of the file that were read."""

COMPRESSED = (".gz", ".zst")
TABLES = (".parquet",)
LINES = (".jsonl", ".ndjson")
KNOWN = (".txt", *LINES, *TABLES)
TOKENS = (".bin", ".npy")


def kind_of(path: Path) -> str:
    """`text`, `lines` or `table`, by the name; raises UserError for names that are certainly something else."""
    suffixes = [s.lower() for s in path.suffixes]
    packed = bool(suffixes) and suffixes[-1] in COMPRESSED
    last = suffixes[-1 - packed] if len(suffixes) > packed else ""
    if last in TOKENS:
        raise UserError(f"data.source: {path} looks like token shards; write shards:{path}")
    if last == ".json":
        raise UserError(f"data.source: {path}: a corpus in JSON is one object a line in a .jsonl file")
    if last in TABLES:
        return "table"
    return "lines" if last in LINES else "text"


def is_text(path: Path) -> bool:
    """Whether a file is one document as a whole."""
    return kind_of(path) == "text"


def read_documents(path: Path, text_key: str, skip: int, tick: Tick) -> Documents:
    """The documents of a file from number `skip` on. Raises UserError, naming the file and the place, where it is damaged."""
    try:
        kind = kind_of(path)
        if kind == "text":
            return (yield from _whole(path, skip, tick))
        if kind == "lines":
            return (yield from _lines(path, text_key, skip, tick))
        return (yield from _table(path, text_key, skip, tick))
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path} is damaged or cut short: {error}") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error}") from None


def _open(path: Path) -> tuple[IO[bytes], IO[bytes]]:
    """The file, decompressed, and the file as it lies."""
    raw = path.open("rb")
    name = path.name.lower()
    if name.endswith(".gz"):
        return cast(IO[bytes], gzip.GzipFile(fileobj=raw)), raw
    if name.endswith(".zst"):
        return io.BufferedReader(_Zstandard(raw), 1 << 20), raw
    return raw, raw


class _Zstandard(io.RawIOBase):
    """A decompressed view of a .zst file, of any number of frames; EOFError where the last one is cut short."""

    def __init__(self, raw: IO[bytes]):
        import zstandard

        self._raw, self._library = raw, zstandard
        self._frame: Any = None
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            packed = self._frame.unused_data if self._frame is not None and self._frame.eof else b""
            packed = packed or self._raw.read(1 << 18)
            if not packed:
                if self._frame is not None and not self._frame.eof:
                    raise EOFError("the last frame is not complete")
                return 0
            if self._frame is None or self._frame.eof:
                self._frame = self._library.ZstdDecompressor().decompressobj()
            try:
                self._ready = memoryview(self._frame.decompress(packed))
            except self._library.ZstdError as error:
                raise EOFError(str(error)) from None
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count


def _utf8(raw: bytes, path: Path, place: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8: byte 0x{raw[error.start]:02x} at {place}byte {error.start:,}; convert it first, for "
            f"example with iconv -t utf-8"
        ) from None


def _whole(path: Path, skip: int, tick: Tick) -> Documents:
    if skip < 1:
        stream, raw = _open(path)
        with raw:
            text = _utf8(stream.read(), path, "")
        yield text.removeprefix("\ufeff")
        tick(path.stat().st_size)
    return 1


def _lines(path: Path, text_key: str, skip: int, tick: Tick) -> Documents:
    count = 0
    stream, raw = _open(path)
    with raw:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            count += 1
            if count <= skip:
                continue
            if count % 16 == 0:
                tick(raw.tell())
            yield _text_of(_utf8(line, path, f"line {number:,}, "), text_key, f"{path}, line {number:,}")
    tick(path.stat().st_size)
    return count


def _text_of(line: str, text_key: str, where: str) -> str:
    try:
        record = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise UserError(f"{where} is no JSON: {error}") from None
    if not isinstance(record, dict):
        raise UserError(f"{where}: each line is one object with the text under {text_key!r} (data.text_key)")
    if text_key not in record:
        there = ", ".join(map(repr, list(record)[:12])) or "nothing"
        raise UserError(f"{where} has no {text_key!r}; it has {there}: set data.text_key")
    return as_text(record[text_key], text_key, where)


def as_text(value: Any, text_key: str, where: str) -> str:
    """A field's value as text; nothing at all is the empty text."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UserError(f"{where}: {text_key!r} holds {type(value).__name__}, not text: set data.text_key")
    return value


def _table(path: Path, text_key: str, skip: int, tick: Tick) -> Documents:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as table:
            names = table.schema_arrow.names
            if text_key not in names:
                raise UserError(f"{path} has no column {text_key!r}; it has {', '.join(names)}: set data.text_key")
            seen = 0
            for group in range(table.num_row_groups):
                rows = table.metadata.row_group(group).num_rows
                if seen + rows > skip:
                    yield from _rows(table, group, text_key, path, max(0, skip - seen))
                seen += rows
                tick(int(path.stat().st_size * (group + 1) / table.num_row_groups))
            return seen
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path} is no Parquet file, or is damaged: {error}") from None


def _rows(table: Any, group: int, text_key: str, path: Path, skip: int) -> Iterator[str]:
    for batch in table.iter_batches(batch_size=1024, row_groups=[group], columns=[text_key]):
        for value in batch.column(0).to_pylist()[skip:]:
            yield as_text(value, text_key, f"{path}, row group {group}")
        skip = max(0, skip - batch.num_rows)
