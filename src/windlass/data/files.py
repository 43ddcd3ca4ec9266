"""Local files of a source: finding them, describing them for the index, and reading their records.

A record is one document or one JSON item. A file is text, JSON (lines or one array) or Parquet;
text and JSON may be compressed (`.gz`, `.zst`).
"""

from __future__ import annotations

import codecs
import glob
import hashlib
import io
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from windlass.errors import UserError, is_utf8, plural

CODECS = {".gz": "gzip", ".zst": "zstd"}
JSON_LINES = (".jsonl", ".ndjson")
# The files that a directory contributes. A `.json` in a directory may describe the other files.
ENDINGS = (".txt", *JSON_LINES, ".parquet")
# Files that a glob may match by accident.
ABOUT = re.compile(
    r"(?i)\.|(readme|licen[cs]e|copying|notice|changelog|authors|contributing|requirements)\b"
)
HASHED_BYTES = 64_000_000  # files up to this total are compared by content, others by size and time
CONVERSATION_KEYS = {"messages", "conversations", "prompt", "instruction"}
TO_UTF8 = "convert it to UTF-8, for example iconv -f latin1 -t utf-8 OLD > NEW"


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file. Other threads run meanwhile."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# -- which files


def find_files(
    pattern: str, setting: str = "data.source", endings: tuple[str, ...] = ENDINGS
) -> list[Path]:
    """The files behind a path, a directory or a glob, sorted; UserError if there are none."""
    path = Path(pattern).expanduser()
    if path.is_dir():
        places = [p for p in sorted(path.rglob("*")) if suffixes(p)[0] in endings]
    else:
        names = [str(path)] if path.is_file() else sorted(glob.glob(str(path), recursive=True))
        places = list(map(Path, names))
    if files := [place for place in places if place.is_file()]:
        if odd := [file for file in files if not is_utf8(str(file))]:
            shown = str(odd[0]).encode("utf-8", "backslashreplace").decode()
            raise UserError(f"{setting}: the name of {shown} is not UTF-8: rename the file")
        return files
    hint, skipped = "", left_out(pattern, endings)
    if skipped:
        hint = f"{skipped}: a glob reads them, as {setting}='{path}/**/*.md'"
    if "," in pattern:
        names = [part.strip(" []'\"") for part in pattern.split(",")]
        value = json.dumps(names, ensure_ascii=False)
        option = f"{setting} '{value}'" if setting.startswith("--") else f"'{setting}={value}'"
        hint = f"; several are a list: {option}"
    raise UserError(
        f"{setting}: there is no file {pattern} (of a directory: {', '.join(endings)}); "
        f"a source is stdlib, a path or glob, https://..., hf:NAME, squad, or shards:GLOB{hint}"
    )


def left_out(pattern: str, endings: tuple[str, ...] = ENDINGS) -> str:
    """The endings of a directory's files that are not read, as `; not read: 3 .md`; else empty."""
    top = Path(pattern).expanduser()
    places = [path for path in top.rglob("*") if path.is_file()] if top.is_dir() else []
    visible = (p for p in places if not any(x.startswith(".") for x in p.relative_to(top).parts))
    kinds = Counter(suffixes(path)[0] or "without ending" for path in visible)
    counts = [f"{kinds[x]:,} {x}" for x in sorted(kinds) if x not in endings]
    return f"; not read: {', '.join(counts)}" if counts else ""


def check_source(source: str, setting: str, conversations: bool = False) -> None:
    """Raise UserError if a source names local files and none exists."""
    kind, _, place = source.partition(":")
    if kind == "hf" or source in ("stdlib", "squad") or source.startswith(("http://", "https://")):
        return
    path = place if kind in ("shards", "squad") else source
    find_files(path, setting, JSON_LINES if conversations else ENDINGS)


def listing(files: list[Path]) -> str:
    """The number of files, a few names, and files that a pattern may match by accident."""
    more = f" and {len(files) - 4:,} more" if len(files) > 4 else ""
    names = ", ".join(path.name for path in files[:4]) + more
    kinds = Counter(suffixes(path)[0] or "without ending" for path in files)
    counts = ", ".join(f"{count:,} {ending}" for ending, count in kinds.most_common(4))
    text = f"{plural(len(files), 'file')}{f' ({counts})' if len(kinds) > 1 else ''}: {names}"
    if odd := [path.name for path in files if ABOUT.match(path.name)]:
        shown = ", ".join(odd[:4]) + (", ..." if len(odd) > 4 else "")
        text += f"; with {shown}: narrow the source if that is not meant"
    return text


def suffixes(path: Path) -> tuple[str, str]:
    """The ending that names the format, and the ending of the compression or ''."""
    codec = path.suffix.lower() if path.suffix.lower() in CODECS else ""
    return (Path(path.stem) if codec else path).suffix.lower(), codec


def describe_files(files: list[Path]) -> list[dict[str, Any]]:
    """Files for the index: name, size, and the SHA-256; the time of change if they are large."""
    stats = [(path, path.stat()) for path in files]
    small = sum(stat.st_size for _, stat in stats) <= HASHED_BYTES
    return [
        {"file": str(path), "bytes": stat.st_size}
        | ({"sha256": sha256_of(path)} if small else {"changed_ns": stat.st_mtime_ns})
        for path, stat in stats
    ]


def has_changed(source: str, description: dict[str, Any]) -> bool:
    """Whether local files differ from the prepared ones; False if they no longer exist."""
    with suppress(UserError, OSError):
        if not source.startswith(("http://", "https://", "hf:", "shards:")) and source != "stdlib":
            now, then = describe_files(find_files(source)), description["files"]
            for file in (*now, *then):
                file["file"] = Path(file["file"]).name  # a moved file is the same
            return now != then
    return False


# -- records


def read_records(
    path: Path, raw: BinaryIO, text_key: str, *, lines: bool = False
) -> Iterator[tuple[str, Any]]:
    """The documents of a file, each with its place for messages.

    Text and JSON lines are undecoded bytes, so that a resume skips them cheaply. With `lines` a
    `.json` is JSON lines, too.
    """
    ending = suffixes(path)[0]
    if ending == ".parquet":
        import pyarrow.parquet as pq

        # `pre_buffer` would keep most of the file in memory.
        table = pq.ParquetFile(raw, pre_buffer=False)
        names = table.schema_arrow.names
        if text_key not in names:
            raise UserError(f"{path} has no column {text_key!r}; {other_keys(names)}")
        for batch in table.iter_batches(1024, columns=[text_key], use_threads=False):
            for value in batch.column(0).to_pylist():
                yield f"{path}", value
    elif ending == ".json" and not lines:
        yield from read_json_items(path)
    else:
        stream = _decompressed(path, raw)  # held, because it closes `raw` when it is deleted
        if ending not in (*JSON_LINES, ".json"):
            yield f"{path}", stream.read()
            return
        for number, line in enumerate(stream, 1):
            if line.strip():
                yield f"{path}, line {number:,}", line


def read_json_items(path: Path) -> Iterator[tuple[str, Any]]:
    """The items of JSON lines, or of a `.json` array, with their places; UserError if damaged."""
    place = str(path)
    try:
        with path.open("rb") as raw:
            lines = _decompressed(path, raw)
            if suffixes(path)[0] == ".json":
                content = lines.read().removeprefix(codecs.BOM_UTF8)
                if content.lstrip()[:1] == b"[":
                    for number, item in enumerate(json.loads(content), 1):
                        yield f"{path}, item {number:,}", item
                    return
                lines = content.split(b"\n")
            for number, line in enumerate(lines, 1):
                place = f"{path}, line {number:,}"
                if line.strip():
                    yield place, json.loads(line.removeprefix(codecs.BOM_UTF8))
    except UnicodeDecodeError as error:
        raise UserError(f"{place}: {error}; {TO_UTF8}") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{place} is not JSON: {error}; write one object a line (.jsonl), or one array (.json)"
        ) from None


def document(record: Any, is_json: bool, place: str, text_key: str) -> str:
    """The text of a record; an empty text for null. UserError if it has none."""
    if isinstance(record, bytes):
        try:
            record = record.decode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"{place}: {error}; {TO_UTF8}") from None
        if not is_json:
            return str(record.removeprefix("\ufeff"))
    if is_json:
        try:
            record = json.loads(record) if isinstance(record, str) else record
            record = record[text_key]
        except (ValueError, RecursionError, KeyError, TypeError) as error:
            hint = f"{error}: set data.text_key"
            hint = other_keys(record) if isinstance(record, dict) else hint
            raise UserError(f"{place} is not a JSON object with {text_key!r}; {hint}") from None
    if not isinstance(record, str | None):
        kind = type(record).__name__
        raise UserError(f"{place}: {text_key!r} holds {kind}, not text: set data.text_key")
    return record or ""


def other_keys(names: Iterable[str]) -> str:
    """The keys of a record that has no text, and the setting to change."""
    shown = list(names)[:12]
    remedy = "set data.text_key"
    if CONVERSATION_KEYS.intersection(shown):
        remedy = 'write data.format="chat", for conversations'
    return f"it has {', '.join(map(repr, shown))}: {remedy}"


def _decompressed(path: Path, raw: BinaryIO) -> Any:
    if not (codec := suffixes(path)[1]):
        return raw
    # Unlike Python's and zstandard's streams, pyarrow rejects a truncated last frame.
    import pyarrow as pa

    stream = pa.CompressedInputStream(pa.PythonFile(raw, "r"), CODECS[codec])
    return io.BufferedReader(stream, 1 << 20)
