"""The local files of a source: which ones a path, a directory or a glob names, and their state."""

from __future__ import annotations

import glob
import json
import os
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from windlass.data.locate import SourceSpec
from windlass.data.records import (
    CONVERSATION_KEYS,
    TABLES,
    read_files,
    record_of,
    shown,
    suffixes,
)
from windlass.errors import UserError, is_utf8
from windlass.fileio import sha256_of

SHARDS = (".bin", ".npy")  # token shards of other tools
HASHED_BYTES = 64_000_000  # files up to this total are compared by content, others by size and time


def local_files(spec: SourceSpec) -> tuple[list[Path], str]:
    """The files of a source, each real file once, and a note on the others in its directory.

    UserError if there are none.
    """
    top, setting = Path(spec.path).expanduser(), spec.setting
    if spec.kind == "hf":
        return [path for _, files in folders(top) for path in files or ()], ""
    tables = (".txt", *TABLES) if spec.format == "text" else TABLES
    endings = {"squad": (".json",), "shards": SHARDS}.get(spec.kind, tables)
    files, others, own = list[Path](), list[Path](), list[Path]()
    if not is_utf8(str(top)):
        raise UserError(f"{setting}: the name of {shown(top)} is not UTF-8: rename it")
    try:
        if os.path.isdir(top):
            for folder, inside in folders(top):
                own += [folder] if inside is None else []
                for path in inside or ():
                    ending = suffixes(path)[0]
                    is_read = ending in endings or (ending == ".json" and _has_items(path, spec))
                    (files if is_read else others).append(path)
            files.sort()
        else:
            paths = [top] if os.path.isfile(top) else [Path(name) for name in expand(str(top))]
            files = [path for path in paths if os.path.isfile(path)]
    except OSError as error:
        raise UserError(f"{setting}: {error.filename} cannot be read ({error.strerror})") from None
    note = f"; not read: {listing(others)}" if others else ""
    note += f"; {len(own):,} from Windlass ({_first(own)})" if own else ""
    if files:
        first_names = {os.path.realpath(path): path for path in reversed(files)}
        return list(reversed(first_names.values())), note
    hint = f"{note}: a glob reads them, as {setting}='{top}/**/*.md'" if others else note
    if "," in spec.path:
        names = [part.strip(" []'\"") for part in spec.path.split(",")]
        value = json.dumps(names, ensure_ascii=False)
        option = f"{setting} '{value}'" if setting.startswith("--") else f"'{setting}={value}'"
        hint = f"; several are a list: {option}"
    raise UserError(
        f"{setting}: there is no file {spec.path} (of a directory: {', '.join(endings)}); "
        f"a source is stdlib, a path or glob, https://..., hf:NAME, squad, or shards:GLOB{hint}"
    )


def _has_items(path: Path, spec: SourceSpec) -> bool:
    """Whether a `.json` file begins with an item of the source's format."""
    with suppress(UserError, StopIteration):
        record = record_of(next(read_files(spec, [path], [1])))
        if spec.format == "chat":
            return bool(spec.columns) or not CONVERSATION_KEYS.isdisjoint(record)
        return not {spec.text_key, spec.text_key.partition(".")[0]}.isdisjoint(record)
    return False


def folders(top: Path) -> Iterator[tuple[Path, list[Path] | None]]:
    """The visible directories in `top` with their files: each real one once, linked ones last.

    A link to a directory above `top` is not followed. A run, a study or prepared data of Windlass
    has None instead of files.
    """
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
            yield folder, None
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
        for folder, files in folders(Path(top)):
            paths += [] if files is None else expand(f"{glob.escape(str(folder))}/{rest}")
    return sorted(paths)


def listing(files: list[Path]) -> str:
    """Files by their endings, with the first names: `2 .md (a.md, b.md), 1 .txt (c.txt)`."""
    kinds: dict[str, list[Path]] = {}
    for path in sorted(files):
        kinds.setdefault(suffixes(path)[0] or "without ending", []).append(path)
    return ", ".join(f"{len(kinds[x]):,} {x} ({_first(kinds[x])})" for x in sorted(kinds))


def _first(paths: list[Path]) -> str:
    return ", ".join(shown(Path(path.name)) for path in paths[:3]) + ", ..." * (len(paths) > 3)


# -- their state, which shows a change


def describe_files(files: Iterable[Path]) -> list[dict[str, Any]]:
    """Files for the index: name, size, and the SHA-256; the time of change if they are large."""
    stats = [(path, path.stat()) for path in files]
    small = sum(stat.st_size for _, stat in stats) <= HASHED_BYTES
    return [
        {"file": shown(path), "bytes": stat.st_size}
        | ({"sha256": sha256_of(path)} if small else {"changed_ns": stat.st_mtime_ns})
        for path, stat in stats
    ]


def changes(then: dict[str, Any], now: dict[str, Any]) -> str:
    """The differences of two descriptions of a source, as a part of a sentence; empty if none.

    Paths count from the directory that all files share, so that moved data are the same.
    """
    old, new = _by_path(then), _by_path(now)
    parts = [
        f"its {key} is {now[key]}, and was {then[key]}"
        for key in then.keys() & now.keys() - {"files"}
        if then[key] != now[key]
    ]
    parts += [f"{path} is gone" for path in old if path not in new]
    parts += [f"{path} is new" for path in new if path not in old]
    parts += [
        f"{path} has changed"
        for path in old.keys() & new.keys()
        if any(old[path].get(key, x) != x for key, x in new[path].items() if key != "file")
    ]
    rest = f" and {len(parts) - 3:,} more changes" if len(parts) > 3 else ""
    return ", ".join(sorted(parts)[:3]) + rest


def _by_path(description: dict[str, Any]) -> dict[str, dict[str, Any]]:
    files = description.get("files", ())
    shared = os.path.commonpath([os.path.dirname(file["file"]) for file in files]) if files else ""
    return {os.path.relpath(file["file"], shared or "."): file for file in files}
