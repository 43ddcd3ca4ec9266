"""The items in local files: texts in blocks, JSON and CSV item by item, Parquet in batches of rows,
so that memory is bounded.
"""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import io
import json
import lzma
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from itertools import repeat
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from windlass.data.recipe_sources import SourceSpec
from windlass.data.tokenizer import cut_place
from windlass.errors import UserError, first_line, plural

BLOCK = 1 << 20  # characters of a text in one item at most
READ = 1 << 18  # bytes of a file at once
TABLE_BYTES = 8 << 20  # of a table at once
CODECS = (".gz", ".bz2", ".xz", ".zst")
TABLES = (".jsonl", ".ndjson", ".parquet", ".csv", ".tsv")
CONVERSATION_KEYS = {"messages", "conversations", "prompt", "instruction"}
MARKS = ("<|endoftext|>", "<|end_of_text|>")  # between the documents of some text files
TO_UTF8 = "convert it to UTF-8, for example iconv -f latin1 -t utf-8 OLD > NEW"
TO_JSON = "write one object a line (.jsonl), or one array (.json)"
# Of damaged files, by the libraries that read them; pyarrow's own are among Python's.
UNPACKING = (EOFError, zlib.error, lzma.LZMAError)
DAMAGE = (*UNPACKING, OSError, ValueError, NotImplementedError, RecursionError, csv.Error)
KINDS = {dict: "an object", list: "a list", str: "text", type(None): "null", bool: "true or false"}


class Item(NamedTuple):
    """A document, a block of one, or an error in place of one that cannot be read."""

    place: str  # file and line, for messages
    # str: text, or a block of one; bytes: an undecoded JSON line; dict: a record; None: null text;
    # UserError: an error, which `text_of` and `record_of` raise
    value: Any
    more: bool = False  # the next item continues this text
    fraction: float = 0.0  # of the source read so far; 0: unknown


def read_files(
    spec: SourceSpec, files: list[Path], sizes: list[int], start: int = 0
) -> Iterator[Item]:
    """The items of files from document number `start` on; an unreadable file ends in an error."""
    number, before, total = 0, 0, max(1, sum(sizes))
    for path, size in zip(files, sizes, strict=True):
        if number < start and is_text(path, spec) and not spec.separator:
            number += 1  # without reading the file
        else:
            continues = False
            for item, done in _file_items(path, size, spec, start - number):
                number += not continues
                continues = item.more
                if number > start:
                    yield Item(item.place, item.value, item.more, (before + done) / total)
        before += size


def _file_items(path: Path, size: int, spec: SourceSpec, skip: int) -> Iterator[tuple[Item, float]]:
    """The items of a file, the last one perhaps an error, and the bytes before each; the first
    `skip` ones may lack a value."""
    place, ending = shown(path), suffixes(path)[0]
    try:
        with path.open("rb") as file:
            # Some readers close their stream at its end.
            raw = io.BufferedReader(io.FileIO(file.fileno(), closefd=False), READ)
            stream = raw if ending == ".parquet" else unpacked(path, raw)
            if ending == ".parquet":
                items = _parquet(raw, place, spec, skip)
            elif is_text(path, spec):
                if spec.on_bad_item == "skip":  # then a text with an error is left out whole
                    with path.open("rb") as checked:
                        for _ in _decoded(unpacked(path, checked)):
                            pass
                items = _texts(_decoded(stream), place, spec.separator)
            elif spec.format == "squad":
                items = _questions(stream, place)
            elif ending in (".csv", ".tsv"):
                items = _rows(stream, place, "\t" if ending == ".tsv" else ",", spec)
            else:
                items = (_json_items if ending == ".json" else _lines)(stream, place)
            for item in items:
                yield item, item.fraction * size or os.lseek(file.fileno(), 0, os.SEEK_CUR)
    except UserError as error:
        yield Item(place, error), size
    except DAMAGE as error:
        if isinstance(error, OSError) and error.errno:  # of the disk, not of the content
            raise UserError(f"{place} cannot be read: {error.strerror}") from None
        problem = f"is damaged, cut short or cannot be read: {first_line(error)}"
        if isinstance(error, UnicodeDecodeError):
            problem = f"has the byte 0x{error.object[error.start]:02x}, not UTF-8; {TO_UTF8}"
        yield Item(place, UserError(f"{place} {problem}")), size


def suffixes(path: Path) -> tuple[str, str]:
    """The ending that names the format, and the ending of the compression or ''."""
    codec = path.suffix.lower() if path.suffix.lower() in CODECS else ""
    return (Path(path.stem) if codec else path).suffix.lower(), codec


def shown(path: Path) -> str:
    """A path as UTF-8; bytes of a name in another encoding are escaped."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def is_text(path: Path, spec: SourceSpec) -> bool:
    return spec.format == "text" and suffixes(path)[0] not in (*TABLES, ".json")


def unpacked(path: Path, raw: BinaryIO) -> BinaryIO:
    codec = suffixes(path)[1]
    if codec == ".zst":
        import pyarrow as pa  # unlike zstandard's stream, it rejects a truncated last frame

        stream = pa.CompressedInputStream(pa.PythonFile(raw, "r"), "zstd")
        return io.BufferedReader(stream, READ)
    opens: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    return cast(BinaryIO, opens[codec](raw)) if codec else raw


def _decoded(stream: BinaryIO) -> Iterator[str]:
    """A UTF-8 text in pieces, without a byte order mark."""
    with io.TextIOWrapper(stream, "utf-8-sig", newline="") as reader:
        while text := reader.read(READ):
            yield text


def _texts(pieces: Iterable[str], place: str, separator: str) -> Iterator[Item]:
    """The documents of a text (without empty ones, if it has separators), in blocks."""
    rest, continues, most = "", False, BLOCK - READ
    edges = "\r\n" if separator else ""
    for piece in pieces:
        rest += piece
        if separator:
            *texts, rest = rest.split(separator)
            for text in texts:
                document = text.rstrip(edges) if continues else text.strip(edges)
                if document or continues:
                    yield Item(place, document)
                continues = False
        while len(rest) > most:
            end = cut_place(rest, 0, most - len(separator))
            yield Item(place, rest[:end] if continues else rest[:end].lstrip(edges), more=True)
            rest, continues = rest[end:], True
    rest = rest.rstrip(edges) if continues else rest.strip(edges)
    if rest or continues or not separator:
        yield Item(place, rest)


def _lines(stream: Iterable[bytes], place: str) -> Iterator[Item]:
    for number, line in enumerate(stream, 1):
        content = line if number > 1 else line.removeprefix(codecs.BOM_UTF8)
        if content.strip():
            yield Item(f"{place}, line {number:,}", content)


def _json_items(stream: BinaryIO, place: str) -> Iterator[Item]:
    """The items of a JSON array, or values one after another, such as JSON lines."""
    reader, decode = io.TextIOWrapper(stream, "utf-8-sig"), json.JSONDecoder().raw_decode
    gap, text, number, is_end = re.compile(r"[\s,]*"), reader.read(READ).lstrip(), 0, False
    is_array = text.startswith("[")
    at = int(is_array)
    while True:
        start = end = cast(re.Match[str], gap.match(text, at)).end()
        if text.startswith("]", start) if is_array else is_end and start == len(text):
            return
        where, problem, is_cut = f"{place}, item {number + 1:,}", "the array does not end", True
        if start < len(text):
            try:
                value, end = decode(text, start)
            except (ValueError, RecursionError) as error:
                problem, broken = getattr(error, "msg", first_line(error)), getattr(error, "pos", 0)
                is_cut = problem.startswith("Unterminated") or broken > len(text) - 16
        if is_cut and not is_end and end in (start, len(text)):
            more = reader.read(max(READ, len(text) - start))
            text, at, is_end = text[start:] + more, 0, not more
        elif end == start:
            raise UserError(f"{where} is not JSON: {problem}; {TO_JSON}")
        else:
            yield Item(where, value)
            number, at = number + 1, end


def _rows(stream: BinaryIO, place: str, comma: str, spec: SourceSpec) -> Iterator[Item]:
    """The rows of a `.csv` or `.tsv` file, whose first row names the columns."""
    csv.field_size_limit(1 << 30)
    reader = io.TextIOWrapper(stream, "utf-8-sig", newline="")
    rows = csv.reader(reader, delimiter=comma, strict=True)
    names = next(rows, [])
    if spec.format == "text" and spec.text_key not in names:
        raise UserError(f"{place} lacks the column {spec.text_key!r}; {other_keys(names)}")
    while True:
        where, problem = f"{place}, line {rows.line_num + 1:,}", ""
        try:
            if (row := next(rows, None)) is None:
                return
            if row and len(row) != len(names):
                counts = f"{plural(len(row), 'field')}, and the first row {len(names)}"
                problem = f"{where} has {counts}"
        except csv.Error as error:
            problem = f"{where}: {error}; write a quotation mark in a quoted field twice"
        if problem:
            yield Item(where, UserError(problem))
        elif row:
            yield Item(where, dict(zip(names, row, strict=True)))


def _parquet(raw: BinaryIO, place: str, spec: SourceSpec, skip: int) -> Iterator[Item]:
    """The rows of a Parquet file; a row group before row `skip` is not read."""
    import pyarrow.parquet as pq

    # Without `buffer_size` pyarrow reads a whole column of a row group at once; `pre_buffer` more.
    table = pq.ParquetFile(raw, pre_buffer=False, buffer_size=READ)
    names, key, number, about = table.schema_arrow.names, spec.text_key, 0, table.metadata
    is_text = spec.format == "text"
    columns = [key] if is_text else None
    if is_text and key not in names and key.partition(".")[0] not in names:
        raise UserError(f"{place} lacks the column {key!r}; {other_keys(names)}")
    for group in range(about.num_row_groups):
        rows, size = about.row_group(group).num_rows, about.row_group(group).total_byte_size
        if number + rows <= skip:
            yield from repeat(Item(place, None), rows)
            number += rows
            continue
        at_once = min(1024, max(1, rows * TABLE_BYTES // max(1, size)))
        for batch in table.iter_batches(at_once, [group], columns, use_threads=False):
            is_flat = is_text and key in names
            for value in batch.column(0).to_pylist() if is_flat else batch.to_pylist():
                number += 1
                where = f"{place}, row {number:,}"
                content = column_value(value, key) if is_text else without_nulls(value)
                yield Item(where, content, fraction=number / about.num_rows)


def without_nulls(value: Any) -> Any:
    """A record without nulls: Arrow gives each object the keys of all others."""
    if isinstance(value, dict):
        return {key: without_nulls(part) for key, part in value.items() if part is not None}
    return [without_nulls(part) for part in value] if isinstance(value, list) else value


def column_value(value: Any, key: str) -> Any:
    """A record, or the value of the column `key`; a record again if it is not text."""
    return value if isinstance(value, str | dict | None) else {key: value}


def _questions(stream: BinaryIO, place: str) -> Iterator[Item]:
    """The questions of SQuAD's JSON, each with its context and the title of its article."""
    try:
        for article in json.loads(stream.read().removeprefix(codecs.BOM_UTF8))["data"]:
            for part in article["paragraphs"]:
                own = {"context": part["context"], "title": str(article.get("title", ""))}
                for question in part["qas"]:
                    yield Item(f"{place}, question {question['id']}", {**question, **own})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{place} is not SQuAD's JSON: {type(error).__name__} {error}") from None


def text_of(item: Item, spec: SourceSpec) -> str:
    """The text of an item; an empty text for null. UserError if it has none."""
    value, key = item.value, spec.text_key
    if not isinstance(value, str | None):
        value = record = record_of(item)
        try:
            for name in (key,) if key in record else key.split("."):
                value = value[name]
        except (KeyError, TypeError):
            raise UserError(f"{item.place} has no {key!r}; {other_keys(record)}") from None
    if not isinstance(value, str | None):
        raise UserError(f"{item.place}: {key!r} is {kind_of(value)}, not text: set data.text_key")
    return value or ""


def record_of(item: Item) -> dict[str, Any]:
    value = item.value
    if isinstance(value, bytes):
        try:
            value = json.loads(value.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise UserError(f"{item.place}: {error}; {TO_UTF8}") from None
        except (ValueError, RecursionError) as error:
            raise UserError(f"{item.place} is not JSON: {error}; {TO_JSON}") from None
    if isinstance(value, UserError):
        raise value
    if not isinstance(value, dict):
        raise UserError(f"{item.place} is {kind_of(value)}, not a JSON object")
    return value


def kind_of(value: Any) -> str:
    return KINDS.get(type(value), "a number")


def other_keys(names: Iterable[str]) -> str:
    first = list(names)[:12]
    remedy = "set data.text_key"
    if CONVERSATION_KEYS.intersection(first):
        remedy = 'write data.format="chat", for conversations'
    return f"it has {', '.join(map(repr, first))}: {remedy}"
