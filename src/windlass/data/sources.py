"""The items behind `data.source`: files, `https://`, data sets of `datasets`, Python's own modules.
`Source.items` reads from any document on, so that a preparation resumes in the middle.
"""

from __future__ import annotations

import glob
import hashlib
import http.client
import os
import platform
import re
import shutil
import sysconfig
import urllib.parse
import urllib.request
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from windlass import __version__, hub
from windlass.data.recipe_sources import SourceSpec
from windlass.data.records import (
    CONVERSATION_KEYS,
    TABLE_BYTES,
    TABLES,
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
from windlass.errors import RunFailed, UserError, first_line, is_utf8, require
from windlass.fileio import sha256_of

SHARDS = (".bin", ".npy")  # token shards of other tools
HASHED_BYTES = 64_000_000  # files up to this total are compared by content, others by size and time


def local_files(spec: SourceSpec) -> tuple[list[Path], str]:
    """The files of a source, each real file once, and a note on the others in its directory."""
    top, setting = Path(spec.path).expanduser(), spec.setting
    if spec.kind == "hf":
        return [path for _, files in folders(top) for path in files], ""
    tables = (".txt", *TABLES) if spec.format == "text" else TABLES
    endings = {"squad": (".json",), "shards": SHARDS}.get(spec.kind, tables)
    files, others = list[Path](), list[Path]()
    if not is_utf8(str(top)):
        raise UserError(f"{setting}: the name of {shown(top)} is not UTF-8: rename it")
    try:
        if os.path.isdir(top):
            for _, inside in folders(top):
                for path in inside:
                    is_read = (ending := suffixes(path)[0]) in endings
                    if ending == ".json" and not is_read:  # if it begins with such an item
                        with suppress(UserError, StopIteration):
                            record = record_of(next(read_files(spec, [path], [1])))
                            keys = {spec.text_key, spec.text_key.partition(".")[0]}
                            keys = CONVERSATION_KEYS if spec.format == "chat" else keys
                            renames = spec.format == "chat" and bool(spec.columns)
                            is_read = renames or not keys.isdisjoint(record)
                    (files if is_read else others).append(path)
            files.sort()
        else:
            paths = [top] if os.path.isfile(top) else [Path(name) for name in expand(str(top))]
            files = [path for path in paths if os.path.isfile(path)]
    except OSError as error:
        raise UserError(f"{setting}: {error.filename} cannot be read ({error.strerror})") from None
    note = f"; not read: {listing(others)}" if others else ""
    if files:
        first_names = {os.path.realpath(path): path for path in reversed(files)}
        return list(reversed(first_names.values())), note
    several = "" if "mix" in setting else f'; several are a list, as \'{setting}=["a","b"]\''
    raise UserError(
        f"{setting}: no file matches {spec.path} (of a directory: {', '.join(endings)}); "
        "a source is stdlib, a path or glob, https://..., hf:NAME, squad, or shards:GLOB"
        f"{several}{note}"
    )


def folders(top: Path) -> Iterator[tuple[Path, list[Path]]]:
    """The visible directories in `top`, each once, with their files, without Windlass's own."""
    waiting, seen = deque([top]), {str(above) for above in top.resolve().parents}
    while waiting:
        folder = waiting.popleft()
        if (real := os.path.realpath(folder)) in seen:
            continue
        seen.add(real)
        with os.scandir(folder) as entries:
            visible = sorted((e for e in entries if e.name[0] != "."), key=lambda e: e.name)
        names = {entry.name for entry in visible}
        is_run = "recipe.toml" in names and names & {"metrics.jsonl", "lineage.json", "study.json"}
        if folder != top and (is_run or {"index.json", "tokenizer"} <= names):
            continue
        for entry in reversed(visible):
            if entry.is_dir():
                (waiting.append if entry.is_symlink() else waiting.appendleft)(Path(entry.path))
        yield folder, [Path(entry.path) for entry in visible if entry.is_file()]


def expand(pattern: str) -> list[str]:
    """The paths of a glob, sorted; `**` stands for the directories of `folders`."""
    parts = pattern.split("/")
    if "**" not in parts:
        return sorted(glob.glob(pattern))
    place = parts.index("**")
    head = "/".join(parts[:place]) or ("/" if place else ".")
    rest = "/".join(parts[place + 1 :]) or "*"
    paths = list[str]()
    for top in filter(os.path.isdir, expand(head)):
        for folder, _ in folders(Path(top)):
            paths += expand(f"{glob.escape(str(folder))}/{rest}")
    return sorted(paths)


def listing(files: list[Path]) -> str:
    """Files by their endings, each with one of their names: `2 .md (a.md), 1 .txt (c.txt)`."""
    kinds: dict[str, list[Path]] = {}
    for path in sorted(files):
        kinds.setdefault(suffixes(path)[0] or "without ending", []).append(path)
    return ", ".join(
        f"{len(paths):,} {kind} ({shown(Path(paths[0].name))})" for kind, paths in kinds.items()
    )


def describe_files(files: Iterable[Path]) -> list[dict[str, Any]]:
    """Name, size and SHA-256 of files, or the time of change if they are large."""
    stats = [(path, path.stat()) for path in files]
    small = sum(stat.st_size for _, stat in stats) <= HASHED_BYTES
    return [
        {"file": shown(path), "bytes": stat.st_size}
        | ({"sha256": sha256_of(path)} if small else {"changed_ns": stat.st_mtime_ns})
        for path, stat in stats
    ]


def changes(then: dict[str, Any], now: dict[str, Any]) -> str:
    """A difference of two descriptions, as a part of a sentence; '' if there is none."""
    for key in sorted(then.keys() & now.keys() - {"files"}):
        if then[key] != now[key]:
            return f"its {key} is {now[key]}, and was {then[key]}"
    by_path = list[dict[str, dict[str, Any]]]()
    for files in (then.get("files", ()), now.get("files", ())):
        folders = [os.path.dirname(file["file"]) for file in files]
        shared = os.path.commonpath(folders) if folders else ""  # moved data are the same
        by_path.append({os.path.relpath(file["file"], shared or "."): file for file in files})
    old, new = by_path
    for path in sorted(old.keys() | new.keys()):
        if path not in new:
            return f"{path} is gone"
        if path not in old:
            return f"{path} is new"
        if any(old[path].get(key, x) != x for key, x in new[path].items() if key != "file"):
            return f"{path} has changed"
    return ""


PACKED = (".zip", ".tar", ".tgz", ".7z", ".rar", ".lz4", ".br")
# Directories of the standard library that hold packages of others, tests, or tables.
SKIPPED = "site-packages dist-packages test tests idle_test __pycache__ encodings pydoc_data"
TIMEOUT_SECONDS = 60.0
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
    """The settings of `data` that fit a local source's first item; empty for remote ones."""
    spec = SourceSpec(source, source, setting=setting)
    if spec.kind in ("https", "hf") or "://" in spec.path:
        return {}
    files = local_files(spec)[0] if spec.path else []
    if spec.kind == "squad":
        return {"format": "squad"}
    tables = [path for path in files if spec.kind == "files" and not is_text(path, spec)]
    items = read_files(replace(spec, format="chat"), tables, [1] * len(tables))
    record = record_of(next(items, Item("", {"text": ""})))
    if isinstance(record.get("data"), list) and "text" not in record:
        raise UserError(f"{setting}: {source} has questions: write squad:{source}")
    if not CONVERSATION_KEYS.isdisjoint(record):
        return {"format": "chat"}
    texts = [key for key, value in record.items() if isinstance(value, str)]
    is_other = "text" not in record and len(texts) == 1
    return {"format": "text"} | ({"text_key": texts[0]} if is_other else {})


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


def _open_dataset(spec: SourceSpec) -> Source:
    """A data set of `datasets` (`NAME`, `NAME:CONFIG`, a directory), or SQuAD of the Hub."""
    place = "rajpurkar/squad" if spec.kind == "squad" else spec.path
    what = f"{spec.setting}: hf:{place}, split {spec.split!r}"
    folder, how = Path(place).expanduser(), {"split": spec.split, "streaming": spec.streaming}
    (name, _, config), revision = place.partition(":"), spec.revision
    commits = list[str]()
    try:
        require("datasets", f"{spec.setting}: hf:{place}")
        if folder.is_dir():
            import datasets

            table: Any = datasets.load_dataset(str(folder), **how)
        else:
            hub.prepare()
            with hub.explained(what):
                import datasets

                if not hub.offline():
                    from huggingface_hub import HfApi

                    revision = str(HfApi().dataset_info(name, revision=revision or None).sha)
                table = datasets.load_dataset(
                    name, config or None, revision=revision or None, **how
                )
                # Without a network, the URLs of a copy in the cache name its commit.
                urls = " ".join(getattr(table.info, "download_checksums", None) or ())
                commits = re.findall(r"(?<![0-9a-f])[0-9a-f]{40}(?![0-9a-f])", f"{revision} {urls}")
    except Exception as error:  # of any kind, from the libraries behind it
        advice = "; or give a file: squad:FILE.json, eval.squad_file" * (spec.kind == "squad")
        reason = str(error)
        if not isinstance(error, UserError):
            cause = first_line(error.__cause__ or error)
            reason = f"{what} cannot be loaded ({type(error).__name__}: {cause})"
        raise UserError(f"{reason}{advice}") from error
    rows = 0 if spec.streaming else len(table)
    description = {"split": spec.split, "rows": rows} | ({"commit": commits[0]} if commits else {})
    description |= describe_source(spec) or {}
    column, shown_name = spec.text_key.partition(".")[0], f"hf:{place}, {spec.split}"
    if rows and spec.format == "text":  # no other column is decoded
        column = spec.text_key if spec.text_key in table.column_names else column
        if column not in table.column_names:
            problem = f"{shown_name} lacks the column {spec.text_key!r}"
            raise UserError(f"{problem}; {other_keys(table.column_names)}")
        table = table.select_columns([column])
    return Source(spec, description, partial(_read_dataset, table, spec, shown_name, rows))


def _read_dataset(
    table: Any, spec: SourceSpec, name: str, rows: int, start: int = 0
) -> Iterator[Item]:
    """The rows of a data set; `rows` is 0 if it is streamed."""
    size = max(1, int(getattr(getattr(table, "data", None), "nbytes", 0)))
    at_once = min(1000, max(1, rows * TABLE_BYTES // size)) if rows else 64
    number = start
    try:
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
    except Exception as error:  # of any kind, from the libraries behind it
        reason = f"{type(error).__name__}: {first_line(error.__cause__ or error)}"
        raise RunFailed(f"reading {name} broke off; start again to resume ({reason})") from error
