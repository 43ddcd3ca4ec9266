"""Recipes: one TOML file that defines a run, every setting typed, documented and checked."""

from windlass.recipe.explain import explain
from windlass.recipe.load import NON_SEMANTIC, Recipe, RecipeError, parse_override, presets, settings, typed
from windlass.recipe.settings import DataSettings, ModelSettings, OptimSettings, ScheduleSettings
from windlass.recipe.units import BatchPlan, Duration, Horizon, plan_batch

__all__ = [
    "NON_SEMANTIC", "BatchPlan", "DataSettings", "Duration", "Horizon", "ModelSettings", "OptimSettings", "Recipe",
    "RecipeError", "ScheduleSettings", "explain", "parse_override", "plan_batch", "presets", "settings", "typed",
]  # fmt: skip
