"""Secrets in environment variables, settings and texts. No torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

# PWD and OLDPWD are the shell's directories: every path would read ***. `_PWD` after another word
# is a password. `data.text_key` names a field, `tiktoken` a package.
SECRET_NAME = re.compile(
    r"(?i)((api|access|secret|private|auth)[_-]?keys?"
    r"|(?<!text)(?<!public)(?<!primary)(?<!foreign)(?<!sort)[_-]key"
    r"|(^|[._-]|access|auth|api|bearer|refresh|session|git(hub|lab)|gh|hf|hub)token"
    r"|jwt|cookie|secret|passw(or)?d|passphrase|credentials?|access[_-]?key[_-]?id"
    r"|(^|[._-]|ssh|db|ftp|mysql|pg|smtp)pass|[._-]pwd|(^|[._-])pat)$"
)
HIDDEN = "***"
SHORT = 8  # characters; no text is a secret that is shorter
# A match is replaced by its first group and HIDDEN.
PATTERNS = [
    re.compile(pattern)
    for pattern in (
        # the user and password of a URL; a password may have an @
        r"(://)[^/?#\s\"'<>]+(?=@)",
        # secrets in the query of a URL
        r"(?i)([?&#;](?:[\w.-]*(?:token|key|keyid|secret|signature|sig|passw(?:or)?d|pass|pwd"
        r"|credential|auth|jwt|pat))=)[^&#\s\"'<>]+",
        # `password=x` of a connection string, `"api_key": "x"` of JSON inside a text
        r"(?i)([\w.-]*(?:passw(?:or)?d|passphrase|secret|(?:api|access|private|secret|auth)[_-]?key"
        r"|(?:access|auth|api)[_-]?token)(?:=|[\"']\s*[:=]\s*)[\"']?)[^\s\"'&,;<>]+",
        # keys of common shapes
        r"()\b(?:hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"
        r"|sk-[A-Za-z0-9_-]{16,}|A[KS]IA[A-Z0-9]{16}|AIza[\w-]{30,}|nvapi-[\w-]{16,}"
        r"|pypi-[\w-]{30,}|wandb_v\d_\w{16,}|xox[abpr]-[A-Za-z0-9-]{10,}"
        r"|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*)",
    )
]


@lru_cache(10_000)  # the same few hundred names, in each of a report's thousands of texts
def names_secret(name: str) -> bool:
    return bool(SECRET_NAME.search(name))


def scrub(value: Any, environ: Mapping[str, str] | None = None) -> Any:
    """A value without secrets, for everything that leaves the run; lists and mappings at any depth.

    It hides users in URLs and tokens in their queries, keys of common shapes, the values of secret
    variables, and the values that a mapping has under the name of a secret.
    """
    if isinstance(value, int | float | None) or (isinstance(value, str) and len(value) < SHORT):
        return value
    # Short values, such as `1` or `test`, would be replaced in every text. A secret that contains
    # another one comes first.
    variables = (os.environ if environ is None else environ).items()
    secrets = [v for name, v in variables if len(v) >= SHORT and names_secret(name)]
    secrets.sort(key=len, reverse=True)

    def clean(value: Any, secret: bool = False) -> Any:
        if isinstance(value, Mapping):
            return {
                clean(key): clean(x, secret or names_secret(str(key))) for key, x in value.items()
            }
        if isinstance(value, list | tuple):
            return [clean(inner, secret) for inner in value]
        if secret and value not in (None, "") and not isinstance(value, bool):
            return HIDDEN
        if not isinstance(value, str) or len(value) < SHORT:
            return value
        for hidden in secrets:
            value = value.replace(hidden, HIDDEN)
        for pattern in PATTERNS:
            value = pattern.sub(rf"\1{HIDDEN}", value)
        return value

    return clean(value)
