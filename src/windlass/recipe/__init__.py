"""Recipes: one TOML file that defines a run, every setting typed, documented and checked."""

from windlass.recipe.data import DataSettings
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
from windlass.recipe.settings import OptimSettings, ScheduleSettings
from windlass.recipe.units import BatchPlan, Duration, Horizon, plan_batch
