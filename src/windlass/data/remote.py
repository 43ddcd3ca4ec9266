"""Data from elsewhere: a file of the web, accepted by its checksum alone, and data sets of Hugging Face's `datasets`."""

from __future__ import annotations

import hashlib
import http.client
import os
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from windlass import __version__, hub
from windlass.errors import RunFailed, UserError, first_line

TIMEOUT_SECONDS = 60.0
BLOCK_BYTES = 1 << 22


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file (Python's lock is not held while hashing)."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def download(url: str, sha256: str, folder: Path, notify: Callable[[str], None] = print) -> Path:
    """The file behind `url`, from `folder` where it is there already; UserError where it has another SHA-256."""
    if not sha256:
        raise UserError("data.sha256: a source that is downloaded needs the SHA-256 it must have")
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", urllib.parse.urlsplit(url).path.rsplit("/", 1)[-1]) or "file"
    target = folder / f"{sha256[:16]}-{name}"
    if target.is_file() and sha256_of(target) == sha256:
        return target
    notify(f"downloading {url}")
    folder.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    request = urllib.request.Request(url, headers={"User-Agent": f"windlass/{__version__}"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer, partial.open("wb") as out:
            while block := answer.read(BLOCK_BYTES):
                out.write(block)
            if answer.length:  # what was announced and did not come
                raise UserError(f"{url} broke off, {answer.length:,} bytes before its end; try again")
        actual = sha256_of(partial)
        if actual != sha256:
            raise UserError(f"{url} is another file than the recipe's: its SHA-256 is {actual}, data.sha256 = {sha256}")
        partial.replace(target)
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        reason = getattr(error, "reason", None) or error
        code = ""
        if isinstance(error, urllib.error.HTTPError):
            code = f"HTTP {error.code} "
            error.close()  # it holds the connection
        raise UserError(
            f"{url} could not be downloaded ({code}{reason}); download it by other means and give the file's path"
        ) from None
    finally:
        partial.unlink(missing_ok=True)
    return target


def load_dataset(place: str, split: str, streaming: bool = False) -> Any:
    """A split (also a slice of one, `train[:1%]`) of `NAME`, `NAME:CONFIG` or a directory of Hugging Face's `datasets`.

    A directory was written by `save_to_disk`, or holds files that `datasets` reads. With `streaming` the rows are read as
    they come. Raises UserError where there is no such data set or split, or it cannot be reached.
    """
    folder = Path(place).expanduser()
    if not folder.is_dir():
        hub.prepare()
    what = f"data.source: hf:{place}, split {split!r}"
    with explained(f"{what} cannot be loaded", UserError), hub.explained(what):
        import datasets

        if not folder.is_dir():
            name, _, config = place.partition(":")
            return datasets.load_dataset(name, config or None, split=split, streaming=streaming)
        if (folder / "state.json").is_file():
            rows = datasets.load_from_disk(str(folder))
        elif (folder / "dataset_dict.json").is_file():
            rows = datasets.load_from_disk(str(folder))
            if split not in rows:
                raise UserError(f"hf:{place} has no split {split!r}; it has {', '.join(rows)}: set data.split")
            rows = rows[split]
        else:
            return datasets.load_dataset(str(folder), split=split, streaming=streaming)
        return rows.to_iterable_dataset() if streaming else rows


@contextmanager
def explained(what: str, kind: type[Exception]) -> Iterator[None]:
    """Turn whatever the libraries behind `datasets` raise into one sentence."""
    try:
        yield
    except (UserError, RunFailed):
        raise
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise kind(f"{what} ({type(error).__name__}: {first_line(cause)})") from error
