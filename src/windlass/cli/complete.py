"""Shell completion: presets and recipes, run directories and settings. No torch."""

from __future__ import annotations

import textwrap
from pathlib import Path


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


def keys() -> list[tuple[str, str]]:
    """Settings, each with the start of its description."""
    from windlass.recipe import settings

    fields = settings().items()
    return [(k, textwrap.shorten(str(f.description), 60, placeholder=" ...")) for k, f in fields]


def overrides() -> list[tuple[str, str]]:
    """Settings with the `=` of an override."""
    return [(f"{key}=", hint) for key, hint in keys()]
