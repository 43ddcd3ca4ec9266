"""The Hugging Face Hub: names become local directories, and each failure a message with a remedy.

The Hub's libraries read their environment at import, so call `detect_offline` before that.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from windlass.errors import UserError, argument, first_line, needs, require
from windlass.fileio import read_json

PROBE_SECONDS = 6.0  # to reach the Hub; its libraries would retry for 50 s
HUB = "https://huggingface.co"
UNREACHABLE = "the Hub is out of reach (or HF_HUB_OFFLINE is set)"
PROXIES = ("HTTPS_PROXY", "ALL_PROXY")
SMALL_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "*.py"]  # configuration, tokenizer, code
SUBFOLDERS = ["*/*"]  # other formats of the same weights
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PROBLEMS = {
    "GatedRepoError": "is gated: accept its licence on its page on the Hub, and set HF_TOKEN to a "
    "token of that account",
    "RevisionNotFoundError": "lacks this revision on the Hub: name another commit, tag or branch",
    "RepositoryNotFoundError": "is not on the Hub, or is private: check the spelling, or set "
    "HF_TOKEN to a token that may read it",
}
"""Problem and remedy for each error of the Hub's client; a gated repository is also not found."""


def detect_offline() -> None:
    """Set HF_HUB_OFFLINE if the Hub is out of reach, unless it is set or there is a proxy."""
    proxy = any(os.environ.get(name) or os.environ.get(name.lower()) for name in PROXIES)
    if "HF_HUB_OFFLINE" in os.environ or proxy:
        return
    with suppress(OSError):
        address = urlsplit(os.environ.get("HF_ENDPOINT") or HUB)
        port = address.port or (80 if address.scheme == "http" else 443)
        socket.create_connection((address.hostname or "", port), PROBE_SECONDS).close()
        return
    os.environ["HF_HUB_OFFLINE"] = "1"
    if "huggingface_hub.constants" in sys.modules:  # it has read its environment already
        sys.modules["huggingface_hub.constants"].HF_HUB_OFFLINE = True  # type: ignore[attr-defined]


def offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn an error of the Hub's libraries into a UserError about `what`, a model and its key."""
    try:
        yield
    except UserError:
        raise
    except ImportError as error:
        raise UserError(f"{what} {missing_package(error)}") from None
    except (OSError, ValueError) as error:  # the Hub's own errors are all of these
        cause: BaseException | None = error
        kinds = set[str]()
        while cause is not None:
            kinds |= {kind.__name__ for kind in type(cause).__mro__}
            cause = cause.__cause__ or cause.__context__
        problem = f"cannot be loaded: {first_line(error)}"
        if offline():
            advice = "download it on a machine with a network, or give a local directory"
            problem = f"is not on this machine, and {UNREACHABLE}: {advice}"
        problem = next((text for name, text in PROBLEMS.items() if name in kinds), problem)
        raise UserError(f"{what} {problem}") from None


def missing_package(error: ImportError) -> str:
    """The package that a failed import needs, and the command that installs it."""
    name = (error.name or "").partition(".")[0]
    return needs(name) if name else f"needs a package that is missing: {first_line(error)}"


def directory(
    name: str,
    revision: str = "",
    key: str = "model.name",
    weights: bool = False,
    download: bool = True,
) -> Path:
    """The directory `name`, or a download from the Hub (without `download`: in its cache)."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise UserError(f"{key}: {name} is not a directory")
    if download:
        detect_offline()
    with explained(f"{key}: {name}{'@' + revision if revision else ''}"):
        from huggingface_hub import snapshot_download

        version, local = revision or None, not download
        small: dict[str, Any] = {"allow_patterns": SMALL_FILES, "ignore_patterns": SUBFOLDERS}
        folder = Path(snapshot_download(name, revision=version, local_files_only=local, **small))
        if weights:
            version = commit_of(folder) or version
            files = weight_files(folder)
            snapshot_download(name, revision=version, local_files_only=local, allow_patterns=files)
        return folder


def check_push(repo: str) -> None:
    """Raise UserError if an upload to the Hub cannot work."""
    detect_offline()
    option = argument("push", repo)
    require("huggingface_hub", option)
    from huggingface_hub import get_token

    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", repo):
        raise UserError(f"{option}: write a repository of the Hub as NAME/MODEL")
    if not get_token():
        raise UserError(f"{option} needs a write token: set HF_TOKEN, or run `hf auth login`")
    if offline():
        raise UserError(f"{option}: {UNREACHABLE}; export without it, and push later")


def push(folder: Path, repo: str) -> None:
    """Upload a directory to a repository of the Hub, by default a new private one, or UserError."""
    from huggingface_hub import HfApi

    try:
        HfApi().create_repo(repo, private=True, exist_ok=True)
        message = "Export of a Windlass run"
        HfApi().upload_folder(folder_path=folder, repo_id=repo, commit_message=message)
    except (OSError, ValueError) as error:  # the Hub's own errors are all of these
        problem = f"the Hub rejected {folder}, which is complete: {first_line(error)}"
        advice = "check that the name is yours and that the token may write (HF_TOKEN)"
        raise UserError(f"{argument('push', repo)}: {problem}; {advice}") from None


def tokenizer_directory(place: str, key: str = "data.tokenizer") -> Path:
    """The local directory for `hf:PLACE`: a directory, a file in one, `NAME` or `NAME@REVISION`."""
    path = Path(place).expanduser()
    if path.exists():
        return path.parent if path.is_file() else path
    name, _, revision = place.partition("@")
    return directory(name, revision, key)


def weight_files(folder: Path) -> list[str]:
    """The names of a model's safetensors files, by its index, or the single one."""
    files = read_json(folder / INDEX).get("weight_map", {})
    names = files.values() if isinstance(files, dict) else [""]
    outside = any(not isinstance(name, str) or Path(name).name != name for name in names)
    if outside or (not files and (folder / INDEX).is_file()):
        raise UserError(f"{folder / INDEX} is not an index of safetensors files")
    return sorted(set(files.values())) or [SINGLE]


def commit_of(folder: Path) -> str:
    """The commit of a directory in the Hub's cache, by its path; empty for any other directory."""
    cached = folder.parent.name == "snapshots" and re.fullmatch("[0-9a-f]{40}", folder.name)
    return folder.name if cached else ""


def repository_of(folder: Path) -> str:
    """The repository of a directory in the Hub's cache, by its path; empty for any other one."""
    kind, _, name = folder.parent.parent.name.partition("--")
    return name.replace("--", "/") if kind == "models" and commit_of(folder) else ""
