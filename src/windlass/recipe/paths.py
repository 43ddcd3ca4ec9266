"""Settings that may name files or directories, and the directory that relative ones start from.

Paths that a user types start from the working directory. Paths in a run's recipe start from the
directory in which the run began (`run.base`), so a run can be copied, moved, or read from anywhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

PATHS = re.compile(
    r"data\.(source|eval_source|mix|dir|tokenizer|chat_template)"
    r"|data\.mix\.[^.]+\.(source|eval_source)"
    r"|model\.(name|init_from)|eval\.(hellaswag_file|squad_file|lm_eval_tasks)"
    r"|checkpoint\.base"
)
"""The settings; `run.dir` always starts from the working directory."""
WORDS = re.compile(r"|stdlib|squad|auto|byte|char|bpe|gpt2|~.*|(shards:)?\w+://.*", re.DOTALL)
"""Values that are not relative paths."""
PREFIX = re.compile("(hf|squad|shards|gpt2):")


def home_of(base: str) -> Path | None:
    """The directory that the relative paths of a recipe start from; None: the working directory.

    Windlass ignores a base that does not exist here, as after a move to another machine.
    """
    home = Path(base).expanduser()
    return home if base and home.is_dir() and home.absolute() != Path.cwd() else None


def located(key: str, value: Any, home: Path) -> Any:
    """A setting's value with its relative paths as absolute ones from `home`.

    `hf:NAME` and `model.name` are names on the Hub unless such a directory exists.
    """
    if not PATHS.fullmatch(key):
        return value
    if isinstance(value, list):
        return [located(key, one, home) for one in value]
    if isinstance(value, Mapping):  # a source of a mixture
        return {name: located(f"data.mix.0.{name}", one, home) for name, one in value.items()}
    if isinstance(value, BaseModel):
        return value.model_copy(update=located(key, dict(value), home))
    if not isinstance(value, str) or WORDS.fullmatch(value):
        return value
    prefix = match[0] if (match := PREFIX.match(value)) else ""
    path = home / value.removeprefix(prefix)
    may_be_name = prefix == "hf:" or key == "model.name"
    return value if may_be_name and not path.exists() else f"{prefix}{path}"


def from_here(changes: Mapping[str, Any], base: str) -> dict[str, Any]:
    """Dotted settings, typed in the working directory, for a recipe with another `run.base`."""
    if home_of(base) is None or "run.base" in changes:
        return dict(changes)
    return {key: located(key, value, Path.cwd()) for key, value in changes.items()}
