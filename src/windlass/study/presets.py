"""Presets of studies: a recipe with changes, and the options of `windlass scale` or `windlass sweep`. No torch."""

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
    """With `sweep`: the axes, as they are typed."""
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


def load_study(name: Any, verb: str, overrides: Changes = ()) -> tuple[Recipe, dict[str, Any]]:
    """The recipe that a study was asked for by, and the options that come with its preset, the preset's name among them.

    `name` is a preset of studies, or anything that `Recipe.load` takes, which comes without options.
    """
    text, files = str(name), study_presets()
    if text in files and not Path(text).exists():
        preset = StudyPreset(**tomllib.loads(files[text].read_text(encoding="utf-8")))
        if preset.verb != verb:
            raise UserError(f"{text} is a preset for {preset.verb}, not for {verb}")
        recipe = Recipe.load(preset.recipe, dotted(preset.set) | dotted(overrides))
        options = preset.model_dump(exclude={"verb", "recipe", "set"}, exclude_unset=True)
        return recipe, options | {"preset": text}
    is_name = isinstance(name, str) and not Path(text).exists() and not set("/=.") & set(text)
    if is_name and text not in presets():
        near = did_you_mean(text, [*files, *presets()])
        raise UserError(f"there is no preset {text} ({near}); or give a .toml or a directory")
    return Recipe.load(name, overrides) if isinstance(name, str | Path) else as_recipe(name), {}


def preset_dir(recipe: Recipe, options: dict[str, Any]) -> Path | None:
    """Where the study of a preset is by default."""
    return Path("studies") / f"{options['preset']}-{recipe.config_hash[:8]}" if options else None
