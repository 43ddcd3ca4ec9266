"""What `data.source` may be, as documents: files (text, JSON lines, Parquet, also .gz and .zst), `https://`, `hf:`, `stdlib`.

A corpus is a sequence of documents that can be read again from any of them on, because a preparation that was killed
resumes in the middle. Each reader of files is a generator that leaves out the first `skip` documents as cheaply as the
format allows, and returns (through StopIteration) the number of documents in the whole file.
"""

from __future__ import annotations

import glob
import hashlib
import io
import json
import os
import platform
import re
import sysconfig
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, Any

from windlass.data.remote import download, explained, load_dataset, sha256_of
from windlass.errors import RunFailed, UserError, first_line
from windlass.recipe.settings import DataSettings

CODECS = {".gz": "gzip", ".zst": "zstd"}
KNOWN = (".txt", ".jsonl", ".ndjson", ".parquet")
NOT_PROSE = {
    "site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__",  # not the library itself
    "encodings", "pydoc_data",  # tables, not code
}  # fmt: skip
HASHED_BYTES = 64_000_000
"""Corpora up to this size are told apart by content, larger ones by size and time."""
DOWNLOADS = Path("data") / "downloads"
BATCH_ROWS = 1000

Documents = Generator[str, None, int]
Tick = Callable[[int], None]
"""Called now and then with the number of bytes of the file that were read."""


@dataclass
class Corpus:
    """A sequence of documents."""

    name: str
    read: Callable[[int, Corpus], Iterator[str]]
    """`read(start, corpus)`: the documents from number `start` on; it keeps `bytes_read` up to date."""
    description: dict[str, Any] = field(default_factory=dict)
    """For the index: by what a changed source is noticed."""
    single_text: bool = False
    """One document that is the whole corpus: it is split by characters and needs no end-of-text token."""
    bytes_total: int = 0
    """0: not known."""
    bytes_read: int = 0
    limit: int = 0
    """Documents at most; 0: all."""

    def documents(self, start: int = 0) -> Iterator[str]:
        """The documents from number `start` on, empty ones included."""
        texts = self.read(start, self)
        return islice(texts, max(0, self.limit - start)) if self.limit else texts

    @property
    def fraction(self) -> float | None:
        """Share of the corpus read so far; None where that is not known."""
        return min(1.0, self.bytes_read / self.bytes_total) if self.bytes_total else None


def open_corpus(
    data: DataSettings, source: str, *, sha256: str = "", split: str = "", notify: Callable[[str], None] = print
) -> Corpus:
    """The corpus behind `data.source` or `data.eval_source`; raises UserError where there is none.

    Of `data` only `text_key`, `streaming` and `split` are read. `notify` gets a line of text before a download.
    """
    if source == "stdlib":
        return _open_stdlib()
    if source.startswith("hf:"):
        return _open_hf(source[3:], split or data.split, data.text_key, data.streaming)
    if source.startswith(("http://", "https://")):
        return _open_files(source, [download(source, sha256, DOWNLOADS, notify)], data.text_key)
    if source.startswith("shards:"):
        raise UserError(f"data.source and data.eval_source must both be token shards, or neither: {source}")
    return _open_files(source, find_files(source), data.text_key)


def slug(source: str) -> str:
    """A source as a short name for a directory: `stdlib`, `input`, `c4-en`."""
    place = source.removeprefix("hf:").removeprefix("shards:").split("?")[0].rstrip("/*")
    name = re.sub(r"[^A-Za-z0-9]+", "-", place.rsplit("/", 1)[-1].split(".")[0])
    return name.strip("-").lower()[:40] or "corpus"


# -- files


def find_files(pattern: str, setting: str = "data.source") -> list[Path]:
    """The files behind a path, a directory or a glob, sorted by name; raises UserError where there are none."""
    path = Path(pattern).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        files = [p for p in sorted(path.rglob("*")) if p.is_file() and _suffix(p)[0] in KNOWN]
        missing = f"there is no {'/'.join(k[1:] for k in KNOWN)} file in the directory {pattern}"
    else:
        files = [Path(p) for p in sorted(glob.glob(str(path), recursive=True)) if Path(p).is_file()]
        missing = f"there is no file {pattern}; a source is stdlib, a path or glob, https://..., hf:NAME, squad, or shards:GLOB"
    if not files:
        raise UserError(f"{setting}: {missing}")
    return files


def _suffix(path: Path) -> tuple[str, str]:
    """The ending that says the format, and the one of a compressed file or ''."""
    codec = path.suffix.lower() if path.suffix.lower() in CODECS else ""
    return (Path(path.stem) if codec else path).suffix.lower(), codec


def describe_files(files: list[Path]) -> dict[str, Any]:
    """Files as the index keeps them: size, and SHA-256 where all of them are small, else the time of the last change."""
    stats = [path.stat() for path in files]
    small = sum(stat.st_size for stat in stats) <= HASHED_BYTES
    described = []
    for path, stat in zip(files, stats, strict=True):
        state = {"sha256": sha256_of(path)} if small else {"changed_ns": stat.st_mtime_ns}
        described.append({"file": str(path), "bytes": stat.st_size, **state})
    return {"kind": "files", "files": described}


def has_changed(source: str, description: dict[str, Any]) -> bool:
    """Whether local files differ from those that were prepared; False where they are not there any more."""
    if description.get("kind") != "files" or source.startswith(("http://", "https://")):
        return False
    try:
        return describe_files(find_files(source))["files"] != description.get("files")
    except (UserError, OSError):
        return False


def _open_files(source: str, files: list[Path], text_key: str) -> Corpus:
    for path in files:
        ending = _suffix(path)[0]
        if ending in (".bin", ".npy"):
            raise UserError(f"data.source: {path} looks like token shards; write shards:{path}")
        if ending == ".json":
            raise UserError(f"data.source: {path}: a corpus in JSON is one object a line in a .jsonl file")
    sizes = [path.stat().st_size for path in files]

    def read(start: int, corpus: Corpus) -> Iterator[str]:
        before = 0
        for path, size in zip(files, sizes, strict=True):

            def tick(count: int, before: int = before) -> None:
                corpus.bytes_read = before + count

            reader = {".parquet": _read_parquet, ".jsonl": _read_lines, ".ndjson": _read_lines}
            try:
                count = yield from reader.get(_suffix(path)[0], _read_text)(path, text_key, max(0, start), tick)
            except UserError:
                raise
            except (OSError, ValueError, NotImplementedError) as error:  # pyarrow's are of these kinds
                raise UserError(f"{path} is damaged, cut short or cannot be read: {first_line(error)}") from None
            tick(size)
            start -= count
            before += size

    single_text = len(files) == 1 and _suffix(files[0])[0] not in KNOWN[1:]
    return Corpus(source, read, describe_files(files), single_text, bytes_total=sum(sizes))


def _open(path: Path) -> tuple[IO[bytes], IO[bytes]]:
    """The file, decompressed, and the file as it lies."""
    raw = path.open("rb")
    codec = _suffix(path)[1]
    if not codec:
        return raw, raw
    import pyarrow as pa  # unlike Python's and zstandard's own streams, it refuses a cut last frame in both formats

    return io.BufferedReader(pa.CompressedInputStream(pa.PythonFile(raw, "r"), CODECS[codec]), 1 << 20), raw


def _utf8(raw: bytes, path: Path, place: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8: byte 0x{raw[error.start]:02x} at {place}byte {error.start:,}; convert it first, for "
            f"example with iconv -t utf-8"
        ) from None


def _read_text(path: Path, text_key: str, skip: int, tick: Tick) -> Documents:
    if skip < 1:
        stream, raw = _open(path)
        with raw:
            yield _utf8(stream.read(), path, "").removeprefix("\ufeff")
    return 1


def _read_lines(path: Path, text_key: str, skip: int, tick: Tick) -> Documents:
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
            where = f"{path}, line {number:,}"
            try:
                record = json.loads(_utf8(line, path, f"line {number:,}, "))
            except (json.JSONDecodeError, RecursionError) as error:
                raise UserError(f"{where} is no JSON: {error}") from None
            if not isinstance(record, dict):
                raise UserError(f"{where}: each line is one object with the text under {text_key!r} (data.text_key)")
            if text_key not in record:
                keys = ", ".join(map(repr, list(record)[:12])) or "nothing"
                raise UserError(f"{where} has no {text_key!r}; it has {keys}: set data.text_key")
            yield _as_text(record[text_key], text_key, where)
    return count


def _as_text(value: Any, text_key: str, where: str) -> str:
    """A null is the empty text."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UserError(f"{where}: {text_key!r} holds {type(value).__name__}, not text: set data.text_key")
    return value


def _read_parquet(path: Path, text_key: str, skip: int, tick: Tick) -> Documents:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as table:
        names = table.schema_arrow.names
        if text_key not in names:
            raise UserError(f"{path} has no column {text_key!r}; it has {', '.join(names)}: set data.text_key")
        count = 0
        for group in range(table.num_row_groups):
            rows = table.metadata.row_group(group).num_rows
            left_out = max(0, skip - count)
            count += rows
            if left_out >= rows:
                continue
            for batch in table.iter_batches(batch_size=1024, row_groups=[group], columns=[text_key]):
                for value in batch.column(0).to_pylist()[left_out:]:
                    yield _as_text(value, text_key, f"{path}, row group {group}")
                left_out = max(0, left_out - batch.num_rows)
            tick(int(path.stat().st_size * (group + 1) / table.num_row_groups))
        return count


# -- elsewhere


def _open_stdlib() -> Corpus:
    """The standard library's own modules, in an order drawn from their names: what is held out is then like the rest."""
    root = Path(sysconfig.get_path("stdlib"))
    names = []
    for folder, below, files in os.walk(root):
        below[:] = [name for name in below if name not in NOT_PROSE]  # site-packages can be large: don't even look
        names += [Path(folder, name).relative_to(root) for name in files if name.endswith(".py")]
    if not names:
        raise UserError(
            f"data.source: this Python has no source of its standard library at {root}; give a text file instead"
        )
    names.sort(key=lambda name: hashlib.sha256(name.as_posix().encode()).digest())
    sizes = [(root / name).stat().st_size for name in names]

    def read(start: int, corpus: Corpus) -> Iterator[str]:
        corpus.bytes_read = sum(sizes[:start])
        for name, size in islice(zip(names, sizes, strict=True), start, None):
            corpus.bytes_read += size
            yield (root / name).read_bytes().decode("utf-8", "replace").replace("\r\n", "\n")

    description = {"kind": "stdlib", "python": platform.python_version(), "files": len(names), "bytes": sum(sizes)}
    return Corpus("stdlib", read, description, bytes_total=sum(sizes))


def _open_hf(place: str, split: str, text_key: str, streaming: bool) -> Corpus:
    table = load_dataset(place, split, streaming)
    where, columns = f"hf:{place}, {split}", table.column_names
    if columns is not None and text_key not in columns:
        raise UserError(f"hf:{place} has no column {text_key!r}; it has {', '.join(columns)}: set data.text_key")
    rows = None if streaming or not hasattr(table, "__len__") else len(table)

    def read(start: int, corpus: Corpus) -> Iterator[str]:
        chosen = table.skip(start) if start else table
        if rows is not None:  # no other column is decoded
            chosen = chosen.select_columns([text_key]).with_format(None)
        corpus.bytes_read = start
        with explained(f"reading {where} broke off; start again to resume", RunFailed):
            for batch in chosen.iter(batch_size=BATCH_ROWS):
                if text_key not in batch:
                    raise UserError(f"{where} has no {text_key!r}; it has {', '.join(batch)}: set data.text_key")
                for value in batch[text_key]:
                    corpus.bytes_read += 1
                    yield _as_text(value, text_key, where)

    # Rows stand for bytes in the progress.
    return Corpus(where, read, {"kind": "hf", "split": split, "rows": rows}, bytes_total=rows or 0)
