"""Open what `data.source` names: local files, a file of the web, a data set of `datasets`, or
Python's own modules; and describe it, so that a later start finds a change.
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
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from windlass import __version__, hub
from windlass.data.files import (
    SHARDS,
    check_columns,
    is_text,
    listing,
    local_files,
    read_files,
    row_value,
    shown,
    suffixes,
)
from windlass.data.items import CONVERSATION_KEYS, Item, record_of
from windlass.data.recipe_sources import SourceSpec
from windlass.errors import RunFailed, UserError, first_line, require
from windlass.fileio import sha256_of

HASHED_BYTES = 64_000_000  # files up to this total are compared by content, others by size and time
TIMEOUT_SECONDS = 60.0
SQUAD = "rajpurkar/squad"  # on the Hub
# Directories of the standard library that hold packages of others, tests, or tables.
SKIPPED = "site-packages dist-packages test tests idle_test __pycache__ encodings pydoc_data"
Notify = Callable[[str], None]


@dataclass
class Source:
    spec: SourceSpec
    description: dict[str, Any]  # when it was opened, for the index; shows a changed source
    # The items from a document number (default 0) on; the blocks of one text count once.
    items: Callable[..., Iterator[Item]]
    single_text: bool = False  # one text file without separator: no token begins its text


def open_source(spec: SourceSpec, notify: Notify = print) -> Source:
    """Find a source; UserError if it does not exist. Says which files it does not read."""
    if spec.kind == "stdlib":
        return Source(spec, describe_source(spec), partial(read_files, spec, _stdlib_modules()))
    if spec.kind == "hf" or spec.place == "squad":
        return _open_dataset(spec)
    if spec.kind == "https":
        files = [download(spec.place, spec.sha256, spec.downloads, notify)]
        others = list[Path]()
    else:
        files, others = local_files(spec)
    if len(files) > 1 or others:
        left_out = f"; not read: {listing(others)}" if others else ""
        notify(f"{spec.name}: {listing(files)}{left_out}")
    for path in files:
        place = f"{spec.setting}: {shown(path)}"
        if suffixes(path)[0] in SHARDS:
            raise UserError(f"{place}: write shards:GLOB for token shards")
        if {".parquet", ".zst"}.intersection(suffixes(path)):
            require("pyarrow", place)
    single_text = len(files) == 1 and is_text(files[0], spec) and not spec.separator
    description = {"files": describe_files(files)}
    return Source(spec, description, partial(read_files, spec, files), single_text)


def describe_source(spec: SourceSpec) -> dict[str, Any]:
    """The description of a local source now; empty if it is gone or not local."""
    if spec.kind == "stdlib":
        files = _stdlib_modules()
        size = sum(path.stat().st_size for path in files)
        return {"python": platform.python_version(), "modules": len(files), "bytes": size}
    if spec.kind != "https" and spec.place != "squad":
        with suppress(UserError, OSError):
            return {"files": describe_files(local_files(spec)[0])}
    return {}


def describe_files(files: Iterable[Path]) -> list[dict[str, Any]]:
    """Name, size and SHA-256 of files, or the time of change if they are large."""
    stats = [(path, path.stat()) for path in files]
    are_small = sum(stat.st_size for _, stat in stats) <= HASHED_BYTES
    described = list[dict[str, Any]]()
    for path, stat in stats:
        content = {"sha256": sha256_of(path)} if are_small else {"changed_ns": stat.st_mtime_ns}
        described.append({"file": shown(path), "bytes": stat.st_size, **content})
    return described


def changes(then: dict[str, Any], now: dict[str, Any]) -> str:
    """A difference of two descriptions, as a part of a sentence; '' if there is none."""
    for key in sorted(then.keys() & now.keys() - {"files"}):
        if then[key] != now[key]:
            return f"its {key} is {now[key]}, and was {then[key]}"
    old, new = _by_path(then), _by_path(now)
    different = (path for path in sorted(old.keys() | new.keys()) if old.get(path) != new.get(path))
    return next((f"{path} has changed, or is new or gone" for path in different), "")


def _by_path(description: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The files of a description by their paths in its directory: moved data are the same."""
    files = description.get("files", ())
    folders = [os.path.dirname(file["file"]) for file in files]
    shared = os.path.commonpath(folders) if folders else ""
    return {os.path.relpath(file["file"], shared or "."): file | {"file": ""} for file in files}


def form_of(source: str, setting: str) -> dict[str, str]:
    """The settings of `data` that fit a local source's first item; empty for remote ones."""
    spec = SourceSpec(source, source, setting=setting)
    if spec.kind in ("https", "hf") or "://" in spec.path:
        return {}
    files = local_files(spec)[0] if spec.path else []
    if spec.kind == "squad":
        return {"format": "squad"}
    tables = [path for path in files if spec.kind == "files" and not is_text(path, spec)]
    first = next(read_files(replace(spec, format="chat"), tables), None)
    record = record_of(first) if first else {"text": ""}
    if not CONVERSATION_KEYS.isdisjoint(record):
        return {"format": "chat"}
    texts = [key for key, value in record.items() if isinstance(value, str)]
    if "text" not in record and len(texts) == 1:
        return {"format": "text", "text_key": texts[0]}
    return {"format": "text"}


def _stdlib_modules() -> list[Path]:
    """The modules, ordered by a hash of their names (any part is typical)."""
    root, names = Path(sysconfig.get_path("stdlib")), list[Path]()
    for folder, below, files in os.walk(root):
        below[:] = set(below).difference(SKIPPED.split())
        names += [Path(folder, name).relative_to(root) for name in files if name.endswith(".py")]
    if not names:
        raise UserError(f"data.source: {root} lacks the standard library; give a text file")
    names.sort(key=lambda name: hashlib.sha256(name.as_posix().encode()).digest())
    return [root / name for name in names]


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


def _open_dataset(spec: SourceSpec) -> Source:
    """A data set of `datasets` (`NAME`, `NAME:CONFIG`, a directory), or SQuAD of the Hub."""
    place = SQUAD if spec.kind == "squad" else spec.path
    name, what = f"hf:{place}, {spec.split}", f"{spec.setting}: hf:{place}, split {spec.split!r}"
    options = {"split": spec.split, "streaming": spec.streaming}
    revision = spec.revision or None
    try:
        require("datasets", f"{spec.setting}: hf:{place}")
        if (folder := Path(place).expanduser()).is_dir():
            import datasets

            table, revision = datasets.load_dataset(str(folder), **options), None
        else:
            repository, _, config = place.partition(":")
            hub.detect_offline()
            with hub.explained(what):
                import datasets

                if not hub.offline():
                    from huggingface_hub import HfApi

                    revision = str(HfApi().dataset_info(repository, revision=revision).sha)
                options["revision"] = revision
                table = datasets.load_dataset(repository, config or None, **options)
    except Exception as error:  # of any kind, from the libraries behind it
        problem = str(error)
        if not isinstance(error, UserError):
            cause = first_line(error.__cause__ or error)
            problem = f"{what} cannot be loaded ({type(error).__name__}: {cause})"
        if spec.kind == "squad":
            problem += "; or give a file: squad:FILE.json, eval.squad_file"
        raise UserError(problem) from error
    rows = 0 if spec.streaming else len(table)
    description = {"split": spec.split, "rows": rows} | describe_source(spec)
    if revision and re.fullmatch("[0-9a-f]{40}", revision):
        description["commit"] = revision
    if rows and spec.format == "text":  # no other column is decoded
        names, key = table.column_names, spec.text_key
        check_columns(names, spec, name)
        table = table.select_columns([key if key in names else key.partition(".")[0]])
    return Source(spec, description, partial(_read_dataset, table, spec, name, rows))


def _read_dataset(
    table: Any, spec: SourceSpec, name: str, rows: int, start: int = 0
) -> Iterator[Item]:
    """The rows of a data set; `rows` is 0 if it is streamed."""
    number = start
    try:
        for batch in table.skip(start).iter(batch_size=64):
            for values in zip(*batch.values(), strict=True):
                number += 1
                record = row_value(dict(zip(batch, values, strict=True)), spec)
                fraction = number / rows if rows else 0.0
                yield Item(f"{name}, row {number:,}", record, fraction=fraction)
    except Exception as error:  # of any kind, from the libraries behind it
        reason = f"{type(error).__name__}: {first_line(error.__cause__ or error)}"
        raise RunFailed(f"reading {name} broke off; start again to resume ({reason})") from error
