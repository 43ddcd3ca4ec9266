"""What `data.source` may be, as documents: files (text, JSON lines, Parquet, also .gz and .zst), `https://`, `hf:`, `stdlib`.

A corpus is a sequence of documents that can be read again from any of them on, because a preparation that was killed
resumes in the middle.
"""

from __future__ import annotations

import codecs
import glob
import hashlib
import http.client
import io
import json
import os
import platform
import re
import shutil
import sysconfig
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from windlass import __version__, hub
from windlass.errors import RunFailed, UserError, first_line, require
from windlass.recipe.settings import DataSettings

CODECS = {".gz": "gzip", ".zst": "zstd"}
JSON_LINES = (".jsonl", ".ndjson")
ENDINGS = (
    ".txt",
    *JSON_LINES,
    ".parquet",
)  # of a directory's files; a `.json` in one may be about the others
NOT_PROSE = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "__pycache__",  # not the library itself
    "encodings",
    "pydoc_data",  # tables, not code
}
ABOUT = re.compile(
    r"(?i)\.|(readme|licen[cs]e|copying|notice|changelog|authors|contributing|requirements)\b"
)
HASHED_BYTES = (
    64_000_000  # corpora up to this size are told apart by content, larger ones by size and time
)
CONVERSED = {"messages", "conversations", "prompt", "instruction"}  # the keys of conversations
TO_UTF8 = "convert it to UTF-8, for example iconv -f latin1 -t utf-8 OLD > NEW"
DOWNLOADS = Path("data") / "downloads"
TIMEOUT_SECONDS = 60.0


@dataclass
class Corpus:
    """A sequence of documents."""

    name: str
    # `read(start)`: the documents from number `start` on, each with the share of the corpus read so far (0: not known).
    read: Callable[[int], Iterator[tuple[str, float]]]
    description: dict[str, Any] = field(
        default_factory=dict
    )  # for the index: by what a changed source is noticed
    single_text: bool = False  # one document is the corpus: it is split by characters and needs no end-of-text token
    limit: int | None = None  # documents at most
    size: int = 0  # about how much there is, in bytes; 0: not known
    share: float = 0.0  # read so far

    def documents(self, start: int = 0) -> Iterator[str]:
        """The documents from number `start` on, empty ones included."""
        for text, share in islice(self.read(start), self.limit and max(0, self.limit - start)):
            self.share = share
            yield text


def open_corpora(
    data: DataSettings,
    sources: list[str],
    *,
    sha256: str = "",
    split: str = "",
    notify: Callable[[str], None] = print,
) -> list[Corpus]:
    """The corpora behind `data.source` or `data.eval_source`; UserError if there is none."""
    corpora = [
        open_corpus(data, source, sha256=sha256, split=split, notify=notify) for source in sources
    ]
    for corpus in corpora:
        corpus.single_text &= len(corpora) == 1  # a text among others ends with a token
    return corpora


def open_corpus(
    data: DataSettings,
    source: str,
    *,
    sha256: str = "",
    split: str = "",
    notify: Callable[[str], None] = print,
) -> Corpus:
    """The corpus behind one source; raises UserError where there is none."""
    if source == "stdlib":
        return _open_stdlib()
    if source.startswith("hf:"):
        return _open_hf(source[3:], split or data.split, data.text_key, data.streaming)
    if source.startswith(("http://", "https://")):
        return _open_files(source, [download(source, sha256, DOWNLOADS, notify)], data.text_key)
    if source.startswith("shards:"):
        raise UserError(
            f"data.source and data.eval_source must both be token shards, or neither: {source}"
        )
    files = find_files(source)
    if len(files) > 1:
        notify(f"{source}: {listing(files)}")
    return _open_files(source, files, data.text_key)


def slug(source: str) -> str:
    """A source as a short name for a directory: `stdlib`, `input`, `c4-en`."""
    place = source.removeprefix("hf:").removeprefix("shards:").split("?")[0].rstrip("/*")
    name = re.sub(r"[^A-Za-z0-9]+", "-", place.rsplit("/", 1)[-1].split(".")[0])
    return name.strip("-").lower()[:40] or "corpus"


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file (Python's lock is not held while hashing)."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# -- files


def find_files(
    pattern: str, setting: str = "data.source", endings: tuple[str, ...] = ENDINGS
) -> list[Path]:
    """The files behind a path, a directory or a glob, sorted by name; raises UserError where there are none."""
    path = Path(pattern).expanduser()
    if path.is_dir():
        files = [p for p in sorted(path.rglob("*")) if p.is_file() and _suffix(p)[0] in endings]
    else:
        places = [str(path)] if path.is_file() else sorted(glob.glob(str(path), recursive=True))
        files = [Path(place) for place in places if Path(place).is_file()]
    if not files:
        several = json.dumps(
            [part.strip(" []'\"") for part in pattern.split(",")], ensure_ascii=False
        )
        written = f"{setting} '{several}'" if setting.startswith("--") else f"'{setting}={several}'"
        many = f"; several are a list: {written}" if "," in pattern else ""
        raise UserError(
            f"{setting}: there is no file {pattern} (of a directory: {', '.join(endings)}); a source is stdlib, a path or "
            "glob, https://..., hf:NAME, squad, or shards:GLOB" + many
        )
    return files


def check_source(source: str, setting: str, conversations: bool = False) -> None:
    """Raise UserError if a source that names local files has none."""
    kind, _, place = source.partition(":")
    if kind == "hf" or source in ("stdlib", "squad") or source.startswith(("http://", "https://")):
        return
    find_files(
        place if kind in ("shards", "squad") else source,
        setting,
        JSON_LINES if conversations else ENDINGS,
    )


def listing(files: list[Path]) -> str:
    """How many files there are, the names of a few, and those that a pattern may have matched by accident."""
    names = ", ".join(path.name for path in files[:4]) + (
        f" and {len(files) - 4:,} more" if len(files) > 4 else ""
    )
    kinds = Counter(_suffix(path)[0] or "without ending" for path in files)
    counts = ", ".join(f"{count:,} {ending}" for ending, count in kinds.most_common(4))
    unlike = f" ({counts})" if len(kinds) > 1 else ""
    unusual = set(kinds) - {*ENDINGS, ".json"}
    unusual = (
        unusual if unusual < set(kinds) else set()
    )  # where all are of one's own kind, none is odd
    odd = [
        path.name
        for path in files
        if ABOUT.match(path.name) or (_suffix(path)[0] or "without ending") in unusual
    ]
    among = f"; with {', '.join(odd[:4])}{', ...' if len(odd) > 4 else ''}: narrow the source if that is not meant"
    return f"{len(files):,} files{unlike}: {names}{among if odd else ''}"


def _suffix(path: Path) -> tuple[str, str]:
    """The ending that names the format, and the one of a compressed file or ''."""
    codec = path.suffix.lower() if path.suffix.lower() in CODECS else ""
    return (Path(path.stem) if codec else path).suffix.lower(), codec


def describe_files(files: list[Path]) -> list[dict[str, Any]]:
    """Files as the index has them: size, and SHA-256 where all of them are small, else the time of the last change."""
    stats = [(path, path.stat()) for path in files]
    if sum(stat.st_size for _, stat in stats) <= HASHED_BYTES:
        return [
            {"file": str(path), "bytes": stat.st_size, "sha256": sha256_of(path)}
            for path, stat in stats
        ]
    return [
        {"file": str(path), "bytes": stat.st_size, "changed_ns": stat.st_mtime_ns}
        for path, stat in stats
    ]


def has_changed(source: str, description: dict[str, Any]) -> bool:
    """Whether local files differ from the files that were prepared; False if they are not there any more."""
    with suppress(UserError, OSError):
        if not source.startswith(("http://", "https://", "hf:", "shards:")) and source != "stdlib":
            return describe_files(find_files(source)) != description["files"]
    return False


def _open_files(source: str, files: list[Path], text_key: str) -> Corpus:
    for path in files:
        if _suffix(path)[0] in (".bin", ".npy"):
            raise UserError(f"data.source: {path}: write shards:GLOB for token shards")
        if _suffix(path)[0] == ".parquet" or _suffix(path)[1]:
            require("pyarrow", f"data.source: {path.name}")
    sizes = [path.stat().st_size for path in files]

    def read(start: int) -> Iterator[tuple[str, float]]:
        number, before, total = 0, 0, max(1, sum(sizes))
        for path, size in zip(files, sizes, strict=True):
            is_json = _suffix(path)[0] in (*JSON_LINES, ".json")
            try:
                with path.open("rb") as raw:
                    for place, record in _records(path, raw, text_key):
                        number += 1
                        if number > start:  # what was read before is left out without being decoded
                            yield (
                                _document(record, is_json, place, text_key),
                                (before + raw.tell()) / total,
                            )
            except UserError:
                raise
            except (
                OSError,
                ValueError,
                NotImplementedError,
            ) as error:  # pyarrow's are of these kinds
                raise UserError(
                    f"{path} is damaged, cut short or cannot be read: {first_line(error)}"
                ) from None
            before += size

    single_text = len(files) == 1 and _suffix(files[0])[0] not in (*ENDINGS[1:], ".json")
    return Corpus(source, read, {"files": describe_files(files)}, single_text, size=sum(sizes))


def _records(path: Path, raw: BinaryIO, text_key: str) -> Iterator[tuple[str, Any]]:
    """The documents of a file, each with its place for messages: values of Parquet, else bytes that are not decoded yet."""
    ending = _suffix(path)[0]
    if ending == ".parquet":
        import pyarrow.parquet as pq

        table = pq.ParquetFile(raw)
        names = table.schema_arrow.names
        if text_key not in names:
            raise UserError(f"{path} has no column {text_key!r}; {_instead(names)}")
        for batch in table.iter_batches(batch_size=1024, columns=[text_key]):
            for value in batch.column(0).to_pylist():
                yield f"{path}", value
        return
    if ending == ".json":
        yield from read_json_items(path)
        return
    stream = _decompressed(path, raw)
    if ending not in JSON_LINES:
        yield f"{path}", stream.read()
        return
    for number, line in enumerate(stream, 1):
        if line.strip():
            yield f"{path}, line {number:,}", line


def _decompressed(path: Path, raw: BinaryIO) -> Any:
    if not (codec := _suffix(path)[1]):
        return raw
    import pyarrow as pa  # unlike Python's and zstandard's own streams, it refuses a cut last frame in both formats

    return io.BufferedReader(
        pa.CompressedInputStream(pa.PythonFile(raw, "r"), CODECS[codec]), 1 << 20
    )


def read_json_items(path: Path) -> Iterator[tuple[str, Any]]:
    """The items of a file of JSON, one a line or (`.json`) all in an array, each with its place for messages; UserError."""
    where = str(path)
    try:
        with path.open("rb") as raw:
            lines = _decompressed(path, raw)
            if _suffix(path)[0] == ".json":
                content = lines.read().removeprefix(codecs.BOM_UTF8)
                if content.lstrip()[:1] == b"[":
                    items = enumerate(json.loads(content), 1)
                    yield from ((f"{path}, item {number:,}", item) for number, item in items)
                    return
                lines = content.split(b"\n")
            for number, line in enumerate(lines, 1):
                where = f"{path}, line {number:,}"
                if line.strip():
                    yield where, json.loads(line.removeprefix(codecs.BOM_UTF8))
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: {error}; {TO_UTF8}") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{where} is no JSON: {error}; write an object a line (.jsonl), or one array (.json)"
        ) from None


def _document(record: Any, is_json: bool, place: str, text_key: str) -> str:
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
            there = _instead(record) if isinstance(record, dict) else f"{error}: set data.text_key"
            raise UserError(f"{place} is no JSON object with {text_key!r}; {there}") from None
    return _as_text(record, text_key, place)


def _instead(names: Iterable[str]) -> str:
    """What records without the text have, and what to do: conversations have a format of their own."""
    shown = list(names)[:12]
    chat = (
        'write data.format="chat", for conversations'
        if CONVERSED.intersection(shown)
        else "set data.text_key"
    )
    return f"it has {', '.join(map(repr, shown))}: {chat}"


def _as_text(value: Any, text_key: str, where: str) -> str:
    """A null is the empty text."""
    if not isinstance(value, str | None):
        raise UserError(
            f"{where}: {text_key!r} holds {type(value).__name__}, not text: set data.text_key"
        )
    return value or ""


def _open_stdlib() -> Corpus:
    """The standard library's own modules, in an order drawn from their names: what is held out is then like the rest."""
    root = Path(sysconfig.get_path("stdlib"))
    names = list[Path]()
    for folder, below, files in os.walk(root):
        below[:] = [
            name for name in below if name not in NOT_PROSE
        ]  # site-packages can be large: don't even look
        names += [Path(folder, name).relative_to(root) for name in files if name.endswith(".py")]
    if not names:
        raise UserError(
            f"data.source: {root} has no source of Python's standard library; give a text file"
        )
    names.sort(key=lambda name: hashlib.sha256(name.as_posix().encode()).digest())

    def read(start: int) -> Iterator[tuple[str, float]]:
        for number, name in enumerate(names[start:], start + 1):
            yield (
                (root / name).read_bytes().decode("utf-8", "replace").replace("\r\n", "\n"),
                number / len(names),
            )

    size = sum((root / name).stat().st_size for name in names)
    description = {"python": platform.python_version(), "modules": len(names), "bytes": size}
    return Corpus("stdlib", read, description, size=size)


# -- elsewhere: a file of the web, accepted by its checksum alone, and data sets of Hugging Face's `datasets`


def download(url: str, sha256: str, folder: Path, notify: Callable[[str], None] = print) -> Path:
    """The file behind `url`, from `folder` where it is there already; UserError where it has another SHA-256."""
    if not sha256:
        raise UserError("data.sha256: a source that is downloaded needs the SHA-256 it must have")
    target = folder / f"{sha256[:16]}-{Path(urllib.parse.urlsplit(url).path).name}"
    if target.is_file() and sha256_of(target) == sha256:
        return target
    notify(f"downloading {url}")
    folder.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        request = urllib.request.Request(url, headers={"User-Agent": f"windlass/{__version__}"})
        with (
            urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer,
            partial.open("wb") as out,
        ):
            shutil.copyfileobj(answer, out, 1 << 22)
        if (actual := sha256_of(partial)) != sha256:
            raise UserError(
                f"{url} broke off, or is another file: its SHA-256 is {actual}, data.sha256 = {sha256}"
            )
        partial.replace(target)
    except UserError:
        raise
    except (OSError, http.client.HTTPException, ValueError) as error:
        getattr(error, "close", lambda: None)()  # an HTTPError holds the connection
        raise UserError(
            f"{url} could not be downloaded ({first_line(error)}); give the path of a file"
        ) from None
    finally:
        partial.unlink(missing_ok=True)
    return target


def load_dataset(place: str, split: str, streaming: bool = False) -> Any:
    """A split (also a slice of one, `train[:1%]`) of `NAME`, `NAME:CONFIG` or a directory (of `save_to_disk`, or of files) of
    Hugging Face's `datasets`; raises UserError where there is no such data set or split, or it cannot be reached."""
    folder = Path(place).expanduser()
    if not folder.is_dir():
        hub.prepare()
    what = f"data.source: hf:{place}, split {split!r}"
    require("datasets", f"data.source: hf:{place}")
    with _explained(f"{what} cannot be loaded", UserError), hub.explained(what):
        import datasets

        if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
            rows = datasets.load_from_disk(str(folder))
            if isinstance(rows, dict) and split not in rows:
                raise UserError(
                    f"hf:{place} has no split {split!r}; it has {', '.join(rows)}: set data.split"
                )
            rows = rows[split] if isinstance(rows, dict) else rows
            return rows.to_iterable_dataset() if streaming else rows
        name, _, config = (str(folder), "", "") if folder.is_dir() else place.partition(":")
        return datasets.load_dataset(name, config or None, split=split, streaming=streaming)


@contextmanager
def _explained(what: str, kind: type[Exception]) -> Iterator[None]:
    """Turn any error of the libraries behind `datasets` into one sentence."""
    try:
        yield
    except (UserError, RunFailed):
        raise
    except Exception as error:
        raise kind(
            f"{what} ({type(error).__name__}: {first_line(error.__cause__ or error)})"
        ) from error


def _open_hf(place: str, split: str, text_key: str, streaming: bool) -> Corpus:
    table, where = load_dataset(place, split, streaming), f"hf:{place}, {split}"
    rows = 0 if streaming else len(table)

    def read(start: int) -> Iterator[tuple[str, float]]:
        chosen = table.skip(start) if start else table
        if rows and text_key in table.column_names:  # no other column is decoded
            chosen = chosen.select_columns([text_key]).with_format(None)
        number = start
        with _explained(f"reading {where} broke off; start again to resume", RunFailed):
            for batch in chosen.iter(batch_size=1000):
                if text_key not in batch:
                    raise UserError(f"{where} has no column {text_key!r}; {_instead(batch)}")
                for value in batch[text_key]:
                    number += 1
                    yield _as_text(value, text_key, where), number / rows if rows else 0.0

    size = int(getattr(getattr(table, "data", None), "nbytes", 0))
    return Corpus(where, read, {"split": split, "rows": rows}, size=size)
