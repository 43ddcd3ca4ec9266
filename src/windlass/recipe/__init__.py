"""Recipes: one TOML file that defines a run, every setting typed, documented and checked."""

from windlass.recipe.batch import BatchPlan, plan_batch
from windlass.recipe.durations import Duration, Horizon
from windlass.recipe.load import NON_SEMANTIC, Recipe, RecipeError, load, parse_override, presets, settings, typed
from windlass.recipe.settings import DataSettings, ModelSettings, OptimSettings, ScheduleSettings

__all__ = [
    "NON_SEMANTIC",
    "BatchPlan",
    "DataSettings",
    "Duration",
    "Horizon",
    "ModelSettings",
    "OptimSettings",
    "Recipe",
    "RecipeError",
    "ScheduleSettings",
    "load",
    "parse_override",
    "plan_batch",
    "presets",
    "settings",
    "typed",
]
