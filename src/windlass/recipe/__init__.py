"""Recipes: one TOML file that defines a run, every setting typed, documented and checked."""

from windlass.recipe.explain import explain
from windlass.recipe.layers import (
    Changes,
    dotted,
    flatten,
    parse_override,
    plain,
    presets,
    study_presets,
    typed,
)
from windlass.recipe.load import NON_SEMANTIC, Recipe, RecipeError, as_recipe, settings
from windlass.recipe.network import ModelSettings
from windlass.recipe.settings import DataSettings, OptimSettings, ScheduleSettings
from windlass.recipe.units import BatchPlan, Duration, Horizon, plan_batch

__all__ = [
    "NON_SEMANTIC",
    "BatchPlan",
    "Changes",
    "DataSettings",
    "Duration",
    "Horizon",
    "ModelSettings",
    "OptimSettings",
    "Recipe",
    "RecipeError",
    "ScheduleSettings",
    "as_recipe",
    "dotted",
    "explain",
    "flatten",
    "parse_override",
    "plain",
    "plan_batch",
    "presets",
    "settings",
    "study_presets",
    "typed",
]
