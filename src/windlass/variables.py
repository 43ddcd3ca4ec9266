"""Secrets in environment variables, settings and texts. No torch.

Everything that leaves a run goes through `scrub`: to a tracker, into a report, a model card or
environment.json.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

# PWD and OLDPWD are the shell's directories: every path would read ***. `_PWD` after another word is a password.
# `data.text_key` names a field, `tiktoken` a package.
SECRET_NAME = re.compile(
    r"(?i)((api|access|secret|private|auth)[_-]?keys?|(?<!text)(?<!public)(?<!primary)(?<!foreign)(?<!sort)[_-]key"
    r"|(^|[._-]|access|auth|api|bearer|refresh|session|git(hub|lab)|gh|hf|hub)token|jwt|cookie|secret|passw(or)?d"
    r"|passphrase|credentials?|access[_-]?key[_-]?id|(^|[._-]|ssh|db|ftp|mysql|pg|smtp)pass|[._-]pwd|(^|[._-])pat)$"
)
HIDDEN = "***"
SECRET_SHAPE = re.compile(
    r"\b(hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|sk-[A-Za-z0-9_-]{16,}"
    r"|A[KS]IA[A-Z0-9]{16}|AIza[\w-]{30,}|nvapi-[\w-]{16,}|pypi-[\w-]{30,}"
    r"|wandb_v\d_\w{16,}|xox[abpr]-[A-Za-z0-9-]{10,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*)"
)
URL_USER = re.compile(
    r"(?<=://)[^/?#\s\"'<>]+(?=@)"
)  # the user and password of a URL; a password may have an @
URL_QUERY = re.compile(
    r"(?i)([?&#;](?:[\w.-]*(?:token|key|keyid|secret|signature|sig|passw(?:or)?d|pass|pwd|credential|auth|jwt|pat))=)[^&#\s\"'<>]+"
)
# `password=x` of a connection string, `"api_key": "x"` of JSON inside a text
ASSIGNED = re.compile(
    r"(?i)([\w.-]*(?:passw(?:or)?d|passphrase|secret|(?:api|access|private|secret|auth)[_-]?key|(?:access|auth|api)[_-]?token)"
    r"(?:=|[\"']\s*[:=]\s*)[\"']?)[^\s\"'&,;<>]+"
)


def scrub(value: Any, environ: Mapping[str, str] | None = None) -> Any:
    """A value without what looks like a secret, for everything that leaves the run; lists and mappings at any depth.

    Hidden are users in URLs and tokens in their queries, keys of common shapes, the values of secret variables, and
    what a mapping has under the name of a secret.
    """
    if (
        isinstance(value, int | float)
        or value is None
        or (isinstance(value, str) and len(value) < 8)
    ):
        return value
    variables = (os.environ if environ is None else environ).items()
    # `1` or `test` would be replaced in every text; a secret that contains another one comes first
    secrets = sorted(
        (v for name, v in variables if len(v) >= 8 and SECRET_NAME.search(name)),
        key=len,
        reverse=True,
    )

    def clean(value: Any, secret: bool = False) -> Any:
        if isinstance(value, Mapping):
            return {
                clean(key): clean(inner, secret or _names_secret(key))
                for key, inner in value.items()
            }
        if isinstance(value, list | tuple):
            return [clean(inner, secret) for inner in value]
        if secret and value not in (None, "") and not isinstance(value, bool):
            return HIDDEN
        if not isinstance(value, str) or len(value) < 8:
            return value
        for hidden in secrets:
            value = value.replace(hidden, HIDDEN)
        for pattern, shown in (
            (URL_USER, HIDDEN),
            (URL_QUERY, rf"\1{HIDDEN}"),
            (ASSIGNED, rf"\1{HIDDEN}"),
        ):
            value = pattern.sub(shown, value)
        return SECRET_SHAPE.sub(HIDDEN, value)

    return clean(value)


def _names_secret(key: Any) -> bool:
    return isinstance(key, str) and bool(SECRET_NAME.search(key))
