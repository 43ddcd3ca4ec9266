"""Presets of studies: a recipe with changes, and options of `windlass scale` or `sweep`."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from windlass.errors import UserError, did_you_mean
from windlass.recipe import Changes, Recipe, as_recipe, presets, study_presets
from windlass.recipe.layers import dotted


class StudyPreset(BaseModel):
    """A file of `presets/studies`."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    verb: Literal["scale", "sweep"]
    recipe: str
    """The preset of the recipe that all cells share."""
    set: dict[str, Any] = {}
    """Settings that it changes."""
    axes: list[str] = []
    """With `sweep`: the axes, as typed."""
    world: int = 1
    """With `sweep`: ranks of each cell."""
    mode: str = "strong"
    """With `scale`: this and the following are the options of `windlass scale`."""
    grow: str = ""
    worlds: list[int] = []
    repeats: int = 1
    warmup: int = 5
    project: list[int] = []
    precisions: list[str] = []


def load_study(
    source: Any, verb: str, overrides: Changes = ()
) -> tuple[Recipe, dict[str, Any], Path | None]:
    """The recipe of a new or an existing study, the options of its preset, and its directory.

    Args:
        source: a preset of studies, whose options include its name as `preset`; or anything
            that `Recipe.load` takes, without options.
        verb: `scale` or `sweep`; UserError for a preset of the other one.
        overrides: changes to the recipe.

    The directory is None for a recipe: it depends on the grid.
    """
    text, files = str(source), study_presets()
    if text in files and not Path(text).exists():
        preset = StudyPreset(**tomllib.loads(files[text].read_text(encoding="utf-8")))
        if preset.verb != verb:
            raise UserError(f"{text} is a preset for {preset.verb}, not for {verb}")
        recipe = Recipe.load(preset.recipe, dotted(preset.set) | dotted(overrides))
        options = preset.model_dump(exclude={"verb", "recipe", "set"}, exclude_unset=True)
        path = Path("studies") / f"{text}-{recipe.config_hash[:8]}"
        return recipe, options | {"preset": text}, path
    is_name = isinstance(source, str) and not Path(text).exists() and not set("/=.") & set(text)
    if is_name and text not in presets():
        near = did_you_mean(text, [*files, *presets()])
        raise UserError(f"there is no preset {text} ({near}); or give a .toml or a directory")
    if isinstance(source, str | Path):
        recipe = Recipe.load(source, overrides)
    else:
        recipe = as_recipe(source).replace(overrides)
    place = Path(getattr(source, "path", text))
    return recipe, {}, place if (place / "study.json").is_file() else None
