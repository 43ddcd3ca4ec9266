"""The documents behind `data.source`: files, `https://`, `hf:` data sets, `stdlib`.

A corpus is a sequence of documents that can be read from any of them on, because a preparation that
was killed resumes in the middle.
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
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from windlass import __version__, hub
from windlass.data.files import (
    ENDINGS,
    JSON_LINES,
    describe_files,
    document,
    find_files,
    left_out,
    listing,
    other_keys,
    read_records,
    sha256_of,
    suffixes,
)
from windlass.errors import RunFailed, UserError, first_line, require
from windlass.recipe.settings import DataSettings

# Directories of the standard library that hold packages of others, tests, or tables.
SKIPPED_FOLDERS = {
    *("site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"),
    *("encodings", "pydoc_data"),
}
DOWNLOADS = Path("data") / "downloads"
TIMEOUT_SECONDS = 60.0
Notify = Callable[[str], None]


@dataclass
class Corpus:
    """A sequence of documents."""

    name: str
    # `read(start)`: the documents from `start` on, and the fraction read so far (0: unknown)
    read: Callable[[int], Iterator[tuple[str, float]]]
    description: dict[str, Any]  # in the index; shows a changed source
    single_text: bool = False  # one document: split by characters, without an end-of-text token
    limit: int | None = None  # documents at most
    size: int = 0  # bytes, approximately; 0: unknown
    fraction_read: float = 0.0

    def documents(self, start: int = 0) -> Iterator[str]:
        """The documents from number `start` on, empty ones included."""
        for text, fraction in islice(self.read(start), self.limit and max(0, self.limit - start)):
            self.fraction_read = fraction
            yield text


def open_corpora(
    data: DataSettings,
    sources: list[str],
    split: str = "",
    notify: Notify = print,
    sha256: str = "",
) -> list[Corpus]:
    """The corpora of `data.source` or `data.eval_source`; UserError if one does not exist."""
    corpora = [open_corpus(data, source, split, notify, sha256) for source in sources]
    for corpus in corpora:
        corpus.single_text &= len(corpora) == 1  # one text among several ends with a token
    return corpora


def open_corpus(
    data: DataSettings, source: str, split: str = "", notify: Notify = print, sha256: str = ""
) -> Corpus:
    """The corpus of one source; UserError if the source does not exist."""
    if source == "stdlib":
        return _open_stdlib()
    if source.startswith("hf:"):
        return _open_hf(source[3:], split or data.split, data)
    if source.startswith(("http://", "https://")):
        return _open_files(source, [download(source, sha256, DOWNLOADS, notify)], data.text_key)
    files, skipped = find_files(source), left_out(source)
    if len(files) > 1 or skipped:
        notify(f"{source}: {listing(files)}{skipped}")
    return _open_files(source, files, data.text_key)


def slug(source: str) -> str:
    """A source as a short name for a directory: `stdlib`, `input`, `c4-en`."""
    place = source.removeprefix("hf:").removeprefix("shards:").split("?")[0].rstrip("/*")
    name = re.sub(r"[^A-Za-z0-9]+", "-", place.rsplit("/", 1)[-1].split(".")[0])
    return name.strip("-").lower()[:40] or "corpus"


def _open_files(source: str, files: list[Path], text_key: str) -> Corpus:
    for path in files:
        ending, codec = suffixes(path)
        if ending in (".bin", ".npy"):
            raise UserError(f"data.source: {path}: write shards:GLOB for token shards")
        if ending == ".parquet" or codec:
            require("pyarrow", f"data.source: {path.name}")
    sizes = [path.stat().st_size for path in files]

    def read(start: int) -> Iterator[tuple[str, float]]:
        number, before, total = 0, 0, max(1, sum(sizes))
        for path, size in zip(files, sizes, strict=True):
            is_json = suffixes(path)[0] in (*JSON_LINES, ".json")
            try:
                with path.open("rb") as raw:
                    for place, record in read_records(path, raw, text_key):
                        number += 1
                        if number > start:
                            text = document(record, is_json, place, text_key)
                            yield text, (before + raw.tell()) / total
            except UserError:
                raise
            except (OSError, ValueError, NotImplementedError) as error:  # pyarrow's kinds too
                problem = f"is damaged, cut short or cannot be read: {first_line(error)}"
                raise UserError(f"{path} {problem}") from None
            before += size

    single_text = len(files) == 1 and suffixes(files[0])[0] not in (*ENDINGS[1:], ".json")
    return Corpus(source, read, {"files": describe_files(files)}, single_text, size=sum(sizes))


def _open_stdlib() -> Corpus:
    """The standard library's modules, ordered by a hash of their names (any part is typical)."""
    root = Path(sysconfig.get_path("stdlib"))
    names = list[Path]()
    for folder, below, files in os.walk(root):
        below[:] = [name for name in below if name not in SKIPPED_FOLDERS]
        names += [Path(folder, name).relative_to(root) for name in files if name.endswith(".py")]
    if not names:
        raise UserError(
            f"data.source: {root} does not contain Python's standard library; give a text file"
        )
    names.sort(key=lambda name: hashlib.sha256(name.as_posix().encode()).digest())

    def read(start: int) -> Iterator[tuple[str, float]]:
        for number, name in enumerate(names[start:], start + 1):
            text = (root / name).read_bytes().decode("utf-8", "replace")
            yield text.replace("\r\n", "\n"), number / len(names)

    size = sum((root / name).stat().st_size for name in names)
    description = {"python": platform.python_version(), "modules": len(names), "bytes": size}
    return Corpus("stdlib", read, description, size=size)


# -- sources on the network: a web file with its checksum, and Hugging Face's `datasets`


def download(url: str, sha256: str, folder: Path, notify: Notify = print) -> Path:
    """The file at `url`, downloaded if it is not in `folder`; UserError for another SHA-256."""
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
            hashes = f"its SHA-256 is {actual}, data.sha256 = {sha256}"
            raise UserError(f"{url} is incomplete or another file: {hashes}")
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


def load_dataset(
    place: str,
    split: str,
    streaming: bool = False,
    setting: str = "data.source",
    revision: str = "",
) -> Any:
    """A split (perhaps `train[:1%]`) of a data set of `datasets`; UserError if it cannot be loaded.

    `place` is `NAME`, `NAME:CONFIG`, or a directory of files or of `save_to_disk`. `setting` is for
    messages, `revision` a commit, tag or branch of the Hub.
    """
    folder = Path(place).expanduser()
    if not folder.is_dir():
        hub.prepare()
    what = f"{setting}: hf:{place}, split {split!r}"
    require("datasets", f"{setting}: hf:{place}")
    with explained(f"{what} cannot be loaded", UserError), hub.explained(what):
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
        how: dict[str, Any] = {"split": split, "streaming": streaming}
        if revision and not folder.is_dir():
            how["revision"] = revision
        return datasets.load_dataset(name, config or None, **how)


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


def _open_hf(place: str, split: str, data: DataSettings) -> Corpus:
    text_key, name = data.text_key, f"hf:{place}, {split}"
    # The revision belongs to `data.source`, not to a separate validation corpus.
    revision = data.revision if f"hf:{place}" in data.sources else ""
    table = load_dataset(place, split, data.streaming, revision=revision)
    rows = 0 if data.streaming else len(table)

    def read(start: int) -> Iterator[tuple[str, float]]:
        remaining = table.skip(start) if start else table
        if rows and text_key in table.column_names:  # no other column is decoded
            remaining = remaining.select_columns([text_key]).with_format(None)
        number = start
        with explained(f"reading {name} broke off; start again to resume", RunFailed):
            for batch in remaining.iter(batch_size=1000):
                if text_key not in batch:
                    raise UserError(f"{name} has no column {text_key!r}; {other_keys(batch)}")
                for value in batch[text_key]:
                    number += 1
                    yield document(value, False, name, text_key), number / rows if rows else 0.0

    size = int(getattr(getattr(table, "data", None), "nbytes", 0))
    return Corpus(name, read, {"split": split, "rows": rows}, size=size)
