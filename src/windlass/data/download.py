"""A file from the web, once, and only with the checksum that the recipe names."""

from __future__ import annotations

import hashlib
import http.client
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path

from windlass import __version__
from windlass.data.shards import temporary
from windlass.data.verify import sha256_of
from windlass.errors import UserError

BLOCK = 1 << 20
TIMEOUT_SECONDS = 60.0


def fetch(url: str, sha256: str, folder: Path, notify: Callable[[str], None] | None = None) -> Path:
    """The file behind `url`, from `folder` where it is there already; raises UserError where it is not what was asked for."""
    if not sha256:
        raise UserError("data.sha256: a source that is downloaded needs the SHA-256 it must have")
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", urllib.parse.urlsplit(url).path.rsplit("/", 1)[-1]) or "file"
    target = folder / f"{sha256[:16]}-{name}"
    if target.is_file() and sha256_of(target) == sha256:
        return target
    if notify is not None:
        notify(f"downloading {url}")
    folder.mkdir(parents=True, exist_ok=True)
    partial = temporary(target)
    try:
        actual = _download(url, partial)
        if actual != sha256:
            raise UserError(
                f"{url} is not the file that the recipe means: its SHA-256 is {actual}, and data.sha256 says {sha256}"
            )
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    return target


def _download(url: str, partial: Path) -> str:
    request = urllib.request.Request(url, headers={"User-Agent": f"windlass/{__version__}"})
    digest = hashlib.sha256()
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer, partial.open("wb") as out:
            while block := answer.read(BLOCK):
                digest.update(block)
                out.write(block)
            if answer.length:  # what was announced and did not come
                raise UserError(f"{url} broke off, {answer.length:,} bytes before its end; try again")
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        code = f"HTTP {error.code} " if isinstance(error, urllib.error.HTTPError) else ""
        raise UserError(
            f"{url} could not be downloaded ({code}{reason}); download it by other means and give the file's path"
        ) from None
    return digest.hexdigest()
