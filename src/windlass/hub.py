"""The Hugging Face Hub: names become local directories, and what it does not give is one message with what to do.

Imports nothing heavy: the Hub's own libraries read their environment when they are imported, so `prepare` comes first.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from windlass.errors import UserError, argument, first_line, needs, require
from windlass.fileio import read_json

# How long to wait for the Hub, and once more, before working offline; its libraries would retry for most of a minute.
PROBE_SECONDS = (3.0, 6.0)
YES = ("1", "ON", "YES", "TRUE")
PROXIES = ("HTTPS_PROXY", "ALL_PROXY")
# Configuration, tokenizer and code; of weights the safetensors files that `transformers` would read, and no others.
SMALL_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "*.py"]
SUBFOLDERS = ["*/*"]  # other formats of the same weights lie there
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
REFUSALS = {
    "GatedRepoError": "is gated: accept its licence on its page on the Hub, and set HF_TOKEN to a token of the account that did",
    "RevisionNotFoundError": "has no such revision on the Hub: name a commit, a tag or a branch that it has",
    "RepositoryNotFoundError": "is not on the Hub, or is private: check the spelling, or set HF_TOKEN to a token that may read it",
}
"""What to do where the Hub does not give a name, by its client's errors; a gated one is also a missing one."""


def prepare() -> None:
    """Work offline where the Hub cannot be reached, unless HF_HUB_OFFLINE is set either way, or a proxy; before any import
    of the Hub's libraries.
    """
    if "HF_HUB_OFFLINE" in os.environ or any(
        os.environ.get(n) or os.environ.get(n.lower()) for n in PROXIES
    ):
        return
    address = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    port = address.port or (80 if address.scheme == "http" else 443)
    for seconds in PROBE_SECONDS:
        try:
            socket.create_connection((address.hostname or "", port), timeout=seconds).close()
            return
        except TimeoutError:
            continue  # perhaps only slow
        except OSError:
            break
    os.environ["HF_HUB_OFFLINE"] = "1"
    if "huggingface_hub.constants" in sys.modules:  # imported before: it has read its environment
        sys.modules["huggingface_hub.constants"].HF_HUB_OFFLINE = True  # type: ignore[attr-defined]


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn what the Hub's libraries raise into a UserError: `what` names the thing wanted and where to change it."""
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
        if reason := next((text for name, text in REFUSALS.items() if name in kinds), ""):
            raise UserError(f"{what} {reason}") from None
        if os.environ.get("HF_HUB_OFFLINE", "").upper() in YES:
            raise UserError(
                f"{what} is not on this machine, and the Hub is out of reach (or HF_HUB_OFFLINE is set): "
                "download it where there is a network, or give a local directory"
            ) from None
        raise UserError(f"{what} cannot be loaded: {first_line(error)}") from None


def missing_package(error: ImportError) -> str:
    """Which package an import that failed needs, and what installs it."""
    name = (error.name or "").partition(".")[0]
    return needs(name) if name else f"needs a package that is missing: {first_line(error)}"


def directory(
    name: str, revision: str = "", key: str = "model.name", weights: bool = False
) -> Path:
    """The local directory of a model or tokenizer: a directory is itself, anything else is fetched from the Hub once.

    `revision` is a commit, tag or branch of the Hub, `key` the setting that names it. With `weights` those come too: the
    files that the index names, or the single one. Raises UserError where the Hub does not give it.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise UserError(f"{key}: there is no directory {name}")
    prepare()
    with explained(f"{key}: {name}{'@' + revision if revision else ''}"):
        from huggingface_hub import snapshot_download

        version = revision or None
        folder = Path(
            snapshot_download(
                name, revision=version, allow_patterns=SMALL_FILES, ignore_patterns=SUBFOLDERS
            )
        )
        if weights:
            snapshot_download(
                name, revision=commit_of(folder) or version, allow_patterns=weight_files(folder)
            )
        return folder


def check_push(repo: str) -> None:
    """Raise UserError where nothing can be uploaded to a repository of the Hub: no token, or no network."""
    prepare()
    require("huggingface_hub", argument("push", repo))
    from huggingface_hub import get_token

    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", repo):
        raise UserError(f"{argument('push', repo)}: write a repository of the Hub as NAME/MODEL")
    if not get_token():
        raise UserError(
            f"{argument('push', repo)} needs a token that may write: set HF_TOKEN, or run `hf auth login`"
        )
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in YES:
        raise UserError(
            f"{argument('push', repo)}: the Hub is out of reach (or HF_HUB_OFFLINE is set): leave it out, push later"
        )


def push(folder: Path, repo: str) -> None:
    """Upload a directory to a repository of the Hub, which is made, private, where it is not there; or UserError."""
    from huggingface_hub import HfApi

    try:
        HfApi().create_repo(repo, private=True, exist_ok=True)
        HfApi().upload_folder(
            folder_path=folder, repo_id=repo, commit_message="Export of a Windlass run"
        )
    except (OSError, ValueError) as error:  # the Hub's own errors are all of these
        raise UserError(
            f"{argument('push', repo)}: the Hub did not take {folder}, which is whole: {first_line(error)}; "
            "is the name yours, and may the token write (HF_TOKEN)?"
        ) from None


def tokenizer_directory(place: str, key: str = "data.tokenizer") -> Path:
    """The local directory of what follows `hf:` in a tokenizer's setting: a directory, a file in one, `NAME` or `NAME@REVISION`."""
    path = Path(place).expanduser()
    if path.exists():
        return path.parent if path.is_file() else path
    name, _, revision = place.partition("@")
    return directory(name, revision, key)


def weight_files(folder: Path) -> list[str]:
    """The names of the safetensors files of a model: those of its index, or the single one. Raises UserError."""
    files = read_json(folder / INDEX).get("weight_map", {})
    if not isinstance(files, dict) or (not files and (folder / INDEX).is_file()):
        raise UserError(f"{folder / INDEX} is no index of safetensors files")
    return sorted(set(files.values())) or [SINGLE]


def commit_of(folder: Path) -> str:
    """The commit of a directory that came from the Hub, by its place in the cache; empty for any other directory."""
    return (
        folder.name
        if folder.parent.name == "snapshots" and re.fullmatch("[0-9a-f]{40}", folder.name)
        else ""
    )
