"""The Hugging Face Hub: names become local directories, and what cannot be had is said in one sentence.

Imports nothing heavy: the Hub's own libraries read their environment when they are imported, so `prepare` comes first.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from windlass.errors import UserError

PROBE_SECONDS = 3.0
"""How long to wait for the Hub to answer before working offline; its libraries would retry for most of a minute."""

MODEL_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.model", "*.txt", "*.py"]
"""Of a repository only these are downloaded: no pickled weights, no other formats."""


def prepare() -> None:
    """Work offline, from what is already downloaded, where the Hub cannot be reached; to be called before any import of it.

    Does nothing where HF_HUB_OFFLINE is set already, either way.
    """
    if "HF_HUB_OFFLINE" in os.environ or any(name in os.environ for name in ("HTTPS_PROXY", "https_proxy")):
        return
    address = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        socket.create_connection((address.hostname or "", port), timeout=PROBE_SECONDS).close()
    except OSError:
        os.environ["HF_HUB_OFFLINE"] = "1"
        if "huggingface_hub.constants" in sys.modules:  # imported before us: it has read its environment
            sys.modules["huggingface_hub.constants"].HF_HUB_OFFLINE = True  # type: ignore[attr-defined]


def offline() -> bool:
    """Whether the Hub's libraries were told to stay offline."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn what the Hub's libraries raise into a UserError: `what` names the thing wanted and where to change it."""
    try:
        yield
    except UserError:
        raise
    except ImportError as error:
        raise UserError(f"{what} needs the package {error.name}: install windlass[hf]") from None
    except (OSError, ValueError) as error:  # the Hub's own errors are all of these
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        if offline():
            raise UserError(
                f"{what} is not on this machine, and the Hub is out of reach (or HF_HUB_OFFLINE is set): "
                "download it where there is a network, or give a local directory"
            ) from None
        raise UserError(f"{what} cannot be had: {first[:300]}") from None


def directory(name: str, revision: str = "", key: str = "model.name") -> Path:
    """The local directory of a model or tokenizer: a directory is itself, anything else is fetched from the Hub once.

    Raises UserError where there is neither.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise UserError(f"{key}: there is no directory {name}")
    prepare()
    with explained(f"{key}: {name}{'@' + revision if revision else ''}"):
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, revision=revision or None, allow_patterns=MODEL_FILES))
