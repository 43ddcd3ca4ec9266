"""Shell completion: presets and recipes, run directories, settings with their values. No torch."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import typer


def recipes(incomplete: str) -> list[str]:
    """Presets, `.toml` files and run directories."""
    from windlass.recipe import presets

    files = [] if "*" in incomplete else map(str, Path().glob(f"{incomplete}*.toml"))
    return [*presets(), *files, *runs(incomplete)]


def studies(incomplete: str) -> list[str]:
    """Presets of studies, and everything that `recipes` gives."""
    from windlass.recipe import study_presets

    return [*study_presets(), *recipes(incomplete)]


def runs(incomplete: str) -> list[str]:
    """Run and study directories in `runs/`, in `studies/` and behind the typed characters."""
    patterns = ("runs/*", "studies/*", f"{incomplete}*", f"{incomplete}*/*")
    marks = [f"{pattern}/{name}" for pattern in patterns for name in ("recipe.toml", "study.json")]
    directories = (str(path.parent) for mark in marks for path in Path().glob(mark))
    return [path for path in dict.fromkeys(directories) if path != "."]


def keys(incomplete: str) -> list[tuple[str, str]]:
    from windlass.recipe import settings

    return [(key, _hint(field)) for key, field in settings().items()]


def overrides(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Keys with their `=`, and behind it the values that the setting takes, or its present value.

    Bash ends a word at `=`, so the key may be the word before.
    """
    from windlass.errors import UserError
    from windlass.recipe import Recipe, settings, typed
    from windlass.recipe.keys import choices

    fields = settings()
    before = [word for word in context.params.get("overrides") or () if word != "="]
    key, equals, _ = incomplete.partition("=")
    split = not equals and bool(before) and before[-1] in fields
    if split:
        key, equals = before[-1], "="
    matching = [key] if equals else [k for k in fields if k.startswith(incomplete)]
    offers = [] if equals else [(f"{k}=", _hint(fields[k])) for k in matching]
    # With a second offer bash writes no space behind the `=`.
    if len(matching) == 1 and (key := matching[0]) in fields:
        try:
            flat = Recipe.load(context.params.get("recipe") or "quickstart").flat()
        except UserError:
            flat = {}
        values = choices(fields[key]) or [typed(flat.get(key, fields[key].default))]
        offers += [(value if split else f"{key}={value}", "") for value in values]
    return offers


def _hint(field: Any) -> str:
    return textwrap.shorten(str(field.description), 60, placeholder=" ...")  # one line in a shell
