"""The local files of a source, and the items in each, read in bounded memory."""

from __future__ import annotations

import bz2
import codecs
import csv
import glob
import gzip
import io
import json
import lzma
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from itertools import chain, repeat
from pathlib import Path
from typing import Any, BinaryIO, cast

from windlass.data.items import CONVERSATION_KEYS, TO_JSON, TO_UTF8, Item, other_keys, record_of
from windlass.data.recipe_sources import SourceSpec
from windlass.errors import UserError, first_line, plural

TABLES = (".jsonl", ".ndjson", ".parquet", ".csv", ".tsv")
SHARDS = (".bin", ".npy")  # token shards of other tools
CODECS = (".gz", ".bz2", ".xz", ".zst")
READ = 1 << 18  # bytes of a file at once, and characters of a text
TABLE_BYTES = 8 << 20  # of a table at once
# Errors of the libraries that read damaged files; pyarrow's own are among Python's.
DAMAGE = (EOFError, zlib.error, lzma.LZMAError, OSError, ValueError, NotImplementedError, csv.Error)
BETWEEN_VALUES = re.compile(r"[\s,]*")


def local_files(spec: SourceSpec) -> tuple[list[Path], list[Path]]:
    """The files of a source, each real file once, and the other files of its directory."""
    top = Path(spec.path).expanduser()
    if spec.kind == "hf":
        return [path for _, files in folders(top) for path in files], []
    endings: tuple[str, ...] = (".txt", *TABLES) if spec.format == "text" else TABLES
    if spec.kind == "squad":
        endings = (".json",)
    elif spec.kind == "shards":
        endings = SHARDS
    files, others = list[Path](), list[Path]()
    if os.path.isdir(top):
        for _, inside in folders(top):
            for path in inside:
                is_read = suffixes(path)[0] in endings or _is_json_of(path, spec)
                (files if is_read else others).append(path)
        files.sort()
    else:
        paths = [top] if os.path.isfile(top) else [Path(name) for name in expand(str(top))]
        files = [path for path in paths if os.path.isfile(path)]
    if not files:
        problem = f"no file matches {spec.path} (of a directory: {', '.join(endings)})"
        remedy = "a source is stdlib, a path or glob, https://..., hf:NAME, squad, or shards:GLOB"
        if "mix" not in spec.setting:
            remedy += f'; several are a list, as \'{spec.setting}=["a","b"]\''
        if others:
            remedy += f"; not read: {listing(others)}"
        raise UserError(f"{spec.setting}: {problem}; {remedy}")
    first_names = {os.path.realpath(path): path for path in reversed(files)}
    return list(reversed(first_names.values())), others


def _is_json_of(path: Path, spec: SourceSpec) -> bool:
    """Whether a `.json` file begins with a record of the source; others configure programs."""
    if spec.kind != "files" or suffixes(path)[0] != ".json":
        return False
    try:
        record = record_of(next(read_files(spec, [path])))
    except (UserError, StopIteration):
        return False
    if spec.format == "chat":
        return bool(spec.columns) or not CONVERSATION_KEYS.isdisjoint(record)
    return spec.text_key in record or spec.text_key.partition(".")[0] in record


def folders(top: Path) -> Iterator[tuple[Path, list[Path]]]:
    """The visible directories in `top`, each once, with their files, without Windlass's own."""
    seen = {str(above) for above in top.resolve().parents}
    for folder, below, files in os.walk(top, onerror=_stop, followlinks=True):
        names = {*below, *files}
        is_run = "recipe.toml" in names and names & {"metrics.jsonl", "lineage.json", "study.json"}
        is_own = is_run or {"index.json", "tokenizer"} <= names
        real = os.path.realpath(folder)
        if real in seen or (is_own and Path(folder) != top):
            below.clear()
            continue
        seen.add(real)
        below[:] = sorted(name for name in below if name[0] != ".")
        visible = (Path(folder, name) for name in sorted(files) if name[0] != ".")
        yield Path(folder), [path for path in visible if os.path.isfile(path)]


def _stop(error: OSError) -> None:
    raise error


def expand(pattern: str) -> list[str]:
    """The paths of a glob, sorted; `**` stands for the directories of `folders`."""
    head, stars, rest = pattern.partition("**")
    if not stars:
        return sorted(glob.glob(pattern))
    paths = list[str]()
    for top in filter(os.path.isdir, glob.glob(head) if head else ["."]):
        for folder, _ in folders(Path(top)):
            paths += expand(f"{glob.escape(str(folder))}/{rest.lstrip('/') or '*'}")
    return sorted(paths)


def listing(files: list[Path]) -> str:
    """Files by their endings, each with one of their names: `2 .md (a.md), 1 .txt (c.txt)`."""
    kinds: dict[str, list[Path]] = {}
    for path in sorted(files):
        kinds.setdefault(suffixes(path)[0] or "without ending", []).append(path)
    return ", ".join(
        f"{len(paths):,} {kind} ({shown(Path(paths[0].name))})" for kind, paths in kinds.items()
    )


def suffixes(path: Path) -> tuple[str, str]:
    """The ending that names the format, and the ending of the compression or ''."""
    codec = path.suffix.lower() if path.suffix.lower() in CODECS else ""
    return (Path(path.stem) if codec else path).suffix.lower(), codec


def shown(path: Path) -> str:
    """A path as UTF-8; bytes of a name in another encoding are escaped."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def is_text(path: Path, spec: SourceSpec) -> bool:
    """Whether the file is one text, or several between separators."""
    return spec.format == "text" and suffixes(path)[0] not in (*TABLES, ".json")


# -- the items in a file


def read_files(spec: SourceSpec, files: list[Path], start: int = 0) -> Iterator[Item]:
    """The items of files from document number `start` on; an unreadable file ends in an error."""
    sizes = [path.stat().st_size for path in files]
    number, before, total = 0, 0, max(1, sum(sizes))  # documents and bytes before
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
        if spec.on_bad_item == "skip" and is_text(path, spec):
            with path.open("rb") as checked:  # a text with an error is left out whole
                for _ in _decoded(unpacked(path, checked)):
                    pass
        with path.open("rb") as file:
            # Some readers close their stream at its end.
            raw = io.BufferedReader(io.FileIO(file.fileno(), closefd=False), READ)
            if ending == ".parquet":
                items = _parquet(raw, place, spec, skip)
            elif is_text(path, spec):
                text, mark = _decoded(unpacked(path, raw)), spec.separator
                items = _documents(text, place, mark) if mark else _text(text, place)
            elif spec.format == "squad":
                items = _questions(unpacked(path, raw), place)
            elif ending in (".csv", ".tsv"):
                items = _rows(unpacked(path, raw), place, "\t" if ending == ".tsv" else ",", spec)
            else:
                read = _json_values if ending == ".json" else _lines
                items = read(unpacked(path, raw), place)
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


def _text(pieces: Iterator[str], place: str) -> Iterator[Item]:
    """A whole text, in pieces."""
    last = next(pieces, "")
    for piece in pieces:
        yield Item(place, last, more=True)
        last = piece
    yield Item(place, last)


def _documents(pieces: Iterable[str], place: str, separator: str) -> Iterator[Item]:
    """The documents of a text between separators, without empty ones; long ones in pieces."""
    rest, continues, edges = "", False, "\r\n"  # the text after the last item, which it continues
    for piece in chain(pieces, [""]):
        *texts, rest = (rest + piece).split(separator) if piece else [rest, ""]
        for text in texts:
            document = text.rstrip(edges) if continues else text.strip(edges)
            if document or continues:
                yield Item(place, document)
            continues = False
        # A part of a separator may end `rest`, after the line feeds at the end of its document.
        begun = rest[: -len(separator)].rstrip(edges)
        if len(begun) > READ:
            yield Item(place, begun if continues else begun.lstrip(edges), more=True)
            rest, continues = rest[len(begun) :], True


def _lines(stream: Iterable[bytes], place: str) -> Iterator[Item]:
    for number, line in enumerate(stream, 1):
        content = line if number > 1 else line.removeprefix(codecs.BOM_UTF8)
        if content.strip():
            yield Item(f"{place}, line {number:,}", content)


def _json_values(stream: BinaryIO, place: str, array: str = r"\s*\[") -> Iterator[Item]:
    """The items of a JSON array, whose beginning `array` matches, or values one after another, such
    as JSON lines."""
    reader, decoder = io.TextIOWrapper(stream, "utf-8-sig"), json.JSONDecoder()
    text = reader.read(READ)
    begun, is_end, number = re.match(array, text), False, 1
    at = begun.end() if begun else 0
    while True:
        at = cast(re.Match[str], BETWEEN_VALUES.match(text, at)).end()
        if text.startswith("]", at) if begun else is_end and at == len(text):
            return
        problem = ""
        try:
            value, end = decoder.raw_decode(text, at)
            is_cut = end == len(text)  # a number may go on
        except (ValueError, RecursionError) as error:
            problem = getattr(error, "msg", first_line(error))
            is_near_end = getattr(error, "pos", 0) > len(text) - 16
            is_cut = problem.startswith("Unterminated") or is_near_end
        if is_cut and not is_end:
            more = reader.read(max(READ, len(text) - at))
            text, at, is_end = text[at:] + more, 0, not more
            continue
        if problem:
            raise UserError(f"{place}, item {number:,} is not JSON: {problem}; {TO_JSON}")
        yield Item(f"{place}, item {number:,}", value)
        at, number = end, number + 1


def _rows(stream: BinaryIO, place: str, comma: str, spec: SourceSpec) -> Iterator[Item]:
    """The rows of a `.csv` or `.tsv` file, whose first row names the columns."""
    csv.field_size_limit(1 << 30)
    reader = io.TextIOWrapper(stream, "utf-8-sig", newline="")
    rows = csv.DictReader(reader, delimiter=comma, strict=True)
    names = list(rows.fieldnames or ())
    check_columns(names, spec, place)
    while True:
        where = f"{place}, line {rows.line_num + 1:,}"
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            remedy = "write a quotation mark in a quoted field twice"
            yield Item(where, UserError(f"{where}: {error}; {remedy}"))
            continue
        if None in row or None in row.values():
            problem = f"has not {plural(len(names), 'field')}, as the first row"
            yield Item(where, UserError(f"{where} {problem}"))
        else:
            yield Item(where, row)


def _parquet(raw: BinaryIO, place: str, spec: SourceSpec, skip: int) -> Iterator[Item]:
    """The rows of a Parquet file; a row group before row `skip` is not read."""
    import pyarrow.parquet as pq

    # Without `buffer_size` pyarrow reads a whole column of a row group at once; `pre_buffer` more.
    table = pq.ParquetFile(raw, pre_buffer=False, buffer_size=READ)
    check_columns(table.schema_arrow.names, spec, place)
    columns = [spec.text_key] if spec.format == "text" else None
    metadata = table.metadata
    number = 0
    for group in range(metadata.num_row_groups):
        rows, size = metadata.row_group(group).num_rows, metadata.row_group(group).total_byte_size
        if number + rows <= skip:
            yield from repeat(Item(place, None), rows)
            number += rows
            continue
        at_once = min(1024, max(1, rows * TABLE_BYTES // max(1, size)))
        for batch in table.iter_batches(at_once, [group], columns, use_threads=False):
            for row in batch.to_pylist():
                number += 1
                fraction = number / metadata.num_rows
                yield Item(f"{place}, row {number:,}", row_value(row, spec), fraction=fraction)


def check_columns(names: list[str], spec: SourceSpec, place: str) -> None:
    """Reject a table without the column of `data.text_key`, which may be nested in another."""
    key = spec.text_key
    if spec.format == "text" and key not in names and key.partition(".")[0] not in names:
        raise UserError(f"{place} lacks the column {key!r}; {other_keys(names)}")


def row_value(row: dict[str, Any], spec: SourceSpec) -> Any:
    """The text of a table's row, or the row, if it is a record or if its text is nested in it."""
    if spec.format != "text":
        return without_nulls(row)
    value = row.get(spec.text_key, row)
    return value if isinstance(value, str | dict | None) else row


def without_nulls(value: Any) -> Any:
    """A record without nulls: Arrow gives each object the keys of all others."""
    if isinstance(value, dict):
        return {key: without_nulls(part) for key, part in value.items() if part is not None}
    return [without_nulls(part) for part in value] if isinstance(value, list) else value


def _questions(stream: BinaryIO, place: str) -> Iterator[Item]:
    """The questions of SQuAD's JSON, each with its context and the title of its article."""
    try:
        for item in _json_values(stream, place, r'(?s).*?"data"\s*:\s*\['):
            article = record_of(item)
            for part in article["paragraphs"]:
                shared = {"context": part["context"], "title": str(article.get("title", ""))}
                for question in part["qas"]:
                    yield Item(f"{place}, question {question['id']}", {**question, **shared})
    except (UserError, KeyError, TypeError) as error:
        raise UserError(f"{place} is not SQuAD's JSON: {type(error).__name__} {error}") from None
