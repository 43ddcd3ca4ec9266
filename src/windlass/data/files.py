"""Local files of a source: which ones a path, a directory or a glob names."""

from __future__ import annotations

import glob
import json
import os
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

from windlass.errors import UserError, is_utf8

CODECS = (".gz", ".bz2", ".xz", ".zst")
SHARDS = (".bin", ".npy")  # token shards of other tools


def find(
    pattern: str, setting: str, endings: tuple[str, ...], has_items: Callable[[Path], bool]
) -> tuple[list[Path], str]:
    """The files of a path, directory or glob, each real file once; and what a directory has more.

    `endings`: of the files that a directory contributes; `has_items` decides about its `.json`.
    UserError if there are none.
    """
    top, files = Path(os.path.expanduser(pattern)), list[Path]()
    others, own = list[Path](), list[Path]()  # which are not read; made by Windlass
    if not is_utf8(str(top)):
        raise UserError(f"{setting}: the name of {shown(top)} is not UTF-8: rename it")
    try:
        if os.path.isdir(top):
            for folder, inside in folders(top):
                own += [folder] if inside is None else []
                for path in inside or ():
                    ending = suffixes(path)[0]
                    belongs = ending in endings or (ending == ".json" and has_items(path))
                    (files if belongs else others).append(path)
            files.sort()
        else:
            paths = [top] if os.path.isfile(top) else [Path(name) for name in expand(str(top))]
            files = [path for path in paths if os.path.isfile(path)]
    except OSError as error:
        raise UserError(f"{setting}: {error.filename} cannot be read ({error.strerror})") from None
    note = f"; not read: {listing(others)}" if others else ""
    note += f"; {len(own):,} made by Windlass ({_first(own)})" if own else ""
    if files:
        first_names = {os.path.realpath(path): path for path in reversed(files)}
        return list(reversed(first_names.values())), note
    hint = f"{note}: a glob reads them, as {setting}='{top}/**/*.md'" if others else note
    if "," in pattern:
        names = [part.strip(" []'\"") for part in pattern.split(",")]
        value = json.dumps(names, ensure_ascii=False)
        option = f"{setting} '{value}'" if setting.startswith("--") else f"'{setting}={value}'"
        hint = f"; several are a list: {option}"
    raise UserError(
        f"{setting}: there is no file {pattern} (of a directory: {', '.join(endings)}); "
        f"a source is stdlib, a path or glob, https://..., hf:NAME, squad, or shards:GLOB{hint}"
    )


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


def suffixes(path: Path) -> tuple[str, str]:
    """The ending that names the format, and the ending of the compression or ''."""
    codec = path.suffix.lower() if path.suffix.lower() in CODECS else ""
    return (Path(path.stem) if codec else path).suffix.lower(), codec


def shown(path: Path) -> str:
    """A path as UTF-8; bytes of a name in another encoding are escaped."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def listing(files: list[Path]) -> str:
    """Files by their endings, with the first names: `2 .md (a.md, b.md), 1 .txt (c.txt)`."""
    kinds: dict[str, list[Path]] = {}
    for path in sorted(files):
        kinds.setdefault(suffixes(path)[0] or "without ending", []).append(path)
    return ", ".join(f"{len(kinds[x]):,} {x} ({_first(kinds[x])})" for x in sorted(kinds))


def _first(paths: list[Path]) -> str:
    return ", ".join(shown(Path(path.name)) for path in paths[:3]) + ", ..." * (len(paths) > 3)
