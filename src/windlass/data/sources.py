"""The items behind `data.source`: files, `https://`, data sets of `datasets`, Python's own modules.

`open_source` finds a source and says which files it does not read. `Source.items` reads from any
document on, because a preparation that was killed resumes in the middle.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import platform
import re
import shutil
import sysconfig
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from windlass import __version__, hub
from windlass.data.files import SHARDS, describe_files, listing, local_files
from windlass.data.locate import SourceSpec
from windlass.data.records import (
    CONVERSATION_KEYS,
    TABLE_BYTES,
    Item,
    column_value,
    is_text,
    other_keys,
    read_files,
    record_of,
    shown,
    suffixes,
    without_nulls,
)
from windlass.errors import RunFailed, UserError, first_line, require
from windlass.fileio import sha256_of

PACKED = (".zip", ".tar", ".tgz", ".7z", ".rar", ".lz4", ".br")
# Directories of the standard library that hold packages of others, tests, or tables.
SKIPPED = "site-packages dist-packages test tests idle_test __pycache__ encodings pydoc_data"
TIMEOUT_SECONDS = 60.0
Notify = Callable[[str], None]


@dataclass
class Source:
    """A source that exists."""

    spec: SourceSpec
    description: dict[str, Any]  # when it was opened, for the index; shows a changed source
    # The items from a document number (default 0) on; the blocks of one text count once.
    items: Callable[..., Iterator[Item]]
    single_text: bool = False  # one text file without separator: no token begins its text


def open_source(spec: SourceSpec, notify: Notify = print) -> Source:
    """Find a source; UserError if it does not exist. Says which files it does not read."""
    if spec.kind == "stdlib":
        return Source(spec, describe_source(spec) or {}, _read_stdlib)
    if spec.kind == "hf" or spec.place == "squad":
        return _open_dataset(spec)
    if spec.kind == "https":
        files, not_read = [download(spec.place, spec.sha256, spec.downloads, notify)], ""
    else:
        files, not_read = local_files(spec)
    if len(files) > 1 or not_read:
        notify(f"{spec.name}: {listing(files)}{not_read}")
    for path in files:
        place = f"{spec.setting}: {shown(path)}"
        if path.suffix.lower() in PACKED:
            raise UserError(f"{place}: unpack it, and name what is inside")
        if suffixes(path)[0] in SHARDS:
            raise UserError(f"{place}: write shards:GLOB for token shards")
        if {".parquet", ".zst"}.intersection(suffixes(path)):
            require("pyarrow", place)
    texts = [path for path in files if is_text(path, spec)]
    description = {"files": describe_files(files)}
    sizes = [file["bytes"] for file in description["files"]]
    single_text = len(files) == len(texts) == 1 and not spec.separator
    return Source(spec, description, partial(read_files, spec, files, sizes), single_text)


def form_of(source: str, setting: str) -> dict[str, str]:
    """The settings of `data` that fit the first item of a source: its format, perhaps its text_key.

    Empty for the web and the Hub. UserError if this machine does not have the files.
    """
    spec = SourceSpec(source, source, setting=setting)
    if spec.kind in ("https", "hf") or "://" in spec.path:
        return {}
    files = local_files(spec)[0] if spec.path else []
    if spec.kind == "squad":
        return {"format": "squad"}
    tables = [path for path in files if spec.kind == "files" and not is_text(path, spec)]
    items = read_files(replace(spec, format="chat"), tables, [1] * len(tables))
    if (item := next(items, None)) is None:
        return {"format": "text"}
    record = record_of(item)
    if isinstance(record.get("data"), list) and "text" not in record:
        raise UserError(f"{setting}: {source} has questions: write squad:{source}")
    if not CONVERSATION_KEYS.isdisjoint(record):
        return {"format": "chat"}
    texts = [key for key, value in record.items() if isinstance(value, str)]
    is_other = "text" not in record and len(texts) == 1
    return {"format": "text", "text_key": texts[0]} if is_other else {"format": "text"}


def describe_source(spec: SourceSpec) -> dict[str, Any] | None:
    """The description of a local source now; None if it is gone or not local."""
    if spec.kind == "stdlib":
        files = _stdlib_modules()
        size = sum(path.stat().st_size for path in files)
        return {"python": platform.python_version(), "modules": len(files), "bytes": size}
    if spec.kind != "https" and spec.place != "squad":
        with suppress(UserError, OSError):
            return {"files": describe_files(local_files(spec)[0])}
    return None


# -- the standard library, the web, the Hub


def _stdlib_modules() -> list[Path]:
    """Python's own modules, ordered by a hash of their names (any part is typical)."""
    root, names = Path(sysconfig.get_path("stdlib")), list[Path]()
    for folder, below, files in os.walk(root):
        below[:] = set(below).difference(SKIPPED.split())
        names += [Path(folder, name).relative_to(root) for name in files if name.endswith(".py")]
    if not names:
        raise UserError(f"data.source: {root} lacks the standard library; give a text file")
    names.sort(key=lambda name: hashlib.sha256(name.as_posix().encode()).digest())
    return [root / name for name in names]


def _read_stdlib(start: int = 0) -> Iterator[Item]:
    files = _stdlib_modules()
    for number, path in enumerate(files[start:], start + 1):
        text = path.read_bytes().decode("utf-8", "replace").replace("\r\n", "\n")
        yield Item(str(path), text, fraction=number / len(files))


def download(url: str, sha256: str, folder: Path, notify: Notify = print) -> Path:
    """The file at `url`, downloaded if it is not in `folder`; UserError for another SHA-256."""
    name = os.fsencode(Path(urllib.parse.urlsplit(url).path).name)[-200:].decode("utf-8", "ignore")
    target = folder / f"{sha256[:16]}-{name}"
    if target.is_file() and sha256_of(target) == sha256:
        return target
    notify(f"downloading {url}")
    folder.mkdir(parents=True, exist_ok=True)
    partial_file = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        request = urllib.request.Request(url, headers={"User-Agent": f"windlass/{__version__}"})
        with (
            urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer,
            partial_file.open("wb") as out,
        ):
            shutil.copyfileobj(answer, out, 1 << 22)
        if (actual := sha256_of(partial_file)) == sha256:
            partial_file.replace(target)
            return target
    except (OSError, http.client.HTTPException, ValueError) as error:
        getattr(error, "close", lambda: None)()  # an HTTPError holds the connection
        reason = first_line(error)
        raise UserError(f"{url} cannot be downloaded ({reason}); give the path of a file") from None
    finally:
        partial_file.unlink(missing_ok=True)
    hashes = f"its SHA-256 is {actual}, data.sha256 = {sha256}"
    raise UserError(f"{url} is incomplete or another file: {hashes}")


@contextmanager
def explained(what: str, kind: type[Exception]) -> Iterator[None]:
    """Turn any error of the libraries behind `datasets` into one sentence."""
    try:
        yield
    except (UserError, RunFailed):
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error.__cause__ or error)}"
        raise kind(f"{what} ({reason})") from error


def _load_table(spec: SourceSpec, place: str) -> tuple[Any, str]:
    """A split (perhaps `train[:1%]`) of a data set, and the commit that the Hub names, or ''.

    `place` is `NAME`, `NAME:CONFIG`, or a directory of files.
    """
    folder, split = Path(place).expanduser(), spec.split
    what = f"{spec.setting}: hf:{place}, split {split!r}"
    require("datasets", f"{spec.setting}: hf:{place}")
    how: dict[str, Any] = {"split": split, "streaming": spec.streaming}
    with explained(f"{what} cannot be loaded", UserError):
        if folder.is_dir():
            import datasets

            return datasets.load_dataset(str(folder), **how), ""
    hub.prepare()
    with explained(f"{what} cannot be loaded", UserError), hub.explained(what):
        import datasets

        (name, _, config), revision = place.partition(":"), spec.revision
        if not hub.offline():
            from huggingface_hub import HfApi

            revision = str(HfApi().dataset_info(name, revision=revision or None).sha)
        rows = datasets.load_dataset(name, config or None, revision=revision or None, **how)
        # Without a network, the URLs of a copy in the cache name its commit.
        urls = " ".join(getattr(rows.info, "download_checksums", None) or ())
        commits = re.findall(r"(?<![0-9a-f])[0-9a-f]{40}(?![0-9a-f])", f"{revision} {urls}")
        return rows, next(iter(commits), "")


def _open_dataset(spec: SourceSpec) -> Source:
    """A data set of `datasets`, or SQuAD of the Hub."""
    place = "rajpurkar/squad" if spec.kind == "squad" else spec.path
    try:
        table, commit = _load_table(spec, place)
    except UserError as error:
        advice = "; or give a file: squad:FILE.json, eval.squad_file" * (spec.kind == "squad")
        raise UserError(f"{error}{advice}") from None
    rows = 0 if spec.streaming else len(table)
    description = {"split": spec.split, "rows": rows} | ({"commit": commit} if commit else {})
    description |= describe_source(spec) or {}
    column, name = spec.text_key.partition(".")[0], f"hf:{place}, {spec.split}"
    if rows and spec.format == "text":  # no other column is decoded
        column = spec.text_key if spec.text_key in table.column_names else column
        if column not in table.column_names:
            problem = f"{name} lacks the column {spec.text_key!r}"
            raise UserError(f"{problem}; {other_keys(table.column_names)}")
        table = table.select_columns([column])
    size = max(1, int(getattr(getattr(table, "data", None), "nbytes", 0)))
    at_once = min(1000, max(1, rows * TABLE_BYTES // size)) if rows else 64

    def items(start: int = 0) -> Iterator[Item]:
        number = start
        with explained(f"reading {name} broke off; start again to resume", RunFailed):
            rest = table.skip(start) if start else table
            for batch in (rest.with_format(None) if rows else rest).iter(batch_size=at_once):
                for values in zip(*batch.values(), strict=True):
                    number += 1
                    record: Any = dict(zip(batch, values, strict=True))
                    if spec.format == "text" and spec.text_key in record:
                        record = column_value(record[spec.text_key], spec.text_key)
                    elif spec.format == "chat":
                        record = without_nulls(record)
                    if spec.kind == "squad":
                        answers = record["answers"]  # lists of equal length, by key
                        pairs = zip(*answers.values(), strict=True)
                        record["answers"] = [dict(zip(answers, p, strict=True)) for p in pairs]
                    fraction = number / rows if rows else 0.0
                    yield Item(f"{name}, row {number:,}", record, fraction=fraction)

    return Source(spec, description, items)
