"""A plan of a recipe whose data are not prepared and not known: what follows from the recipe alone, and what does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from windlass.errors import UserError
from windlass.estimate.grid import memory_grid
from windlass.estimate.milestones import milestones
from windlass.estimate.optimum import known_vocab
from windlass.estimate.plan import (
    checkpoint_size,
    flops_part,
    horizon_of,
    memory_part,
    milestones_part,
    model_part,
    recommendation_part,
    time_part,
)
from windlass.estimate.time import Speed, project
from windlass.model.size import count
from windlass.recipe import Horizon

if TYPE_CHECKING:
    from windlass.estimate.plan import Setting

PREPARE = "unknown until the data is prepared"


def vocabulary_known(setting: Setting) -> bool:
    """Whether the rows of the embedding are known: from the recipe, from the data, or from a model's configuration."""
    return bool(setting.hf or setting.facts.vocab or known_vocab(setting.recipe))


def known_horizon(setting: Setting) -> Horizon | None:
    """The run's length; None where it follows from what is not known yet."""
    try:
        return horizon_of(setting)
    except UserError:
        return None


def partial_plan(setting: Setting, speeds: Sequence[Speed]) -> dict[str, Any]:
    """The parts of a plan that are known, under the names that `plan` gives them; `unknown` lists the others.

    Args:
        setting: of our own GPT or a model of `transformers`, with its vocabulary or its length unknown.
        speeds: measured or assumed ones; empty where nothing is known.
    """
    recipe, horizon = setting.recipe, known_horizon(setting)
    sized = setting.network is not None and vocabulary_known(setting)
    made: dict[str, Any] = {
        "recipe": recipe.preset, "digest": recipe.config_hash, "run_dir": str(recipe.run_dir), "world": setting.world,
        "device": asdict(setting.device) | {"usable_bytes": setting.device.usable_bytes},
        "precision": setting.precision, "length": _length(setting, horizon), "model": None, "unknown": [],
    }  # fmt: skip
    if setting.note:
        made["note"] = setting.note
    if sized:
        flops = flops_part(setting, Horizon(0, 0, recipe.train.global_batch))
        made |= {
            "model": model_part(setting),
            "flops": {key: value for key, value in flops.items() if not key.startswith("run")},
            "memory": memory_part(setting),
            "memory_grid": memory_grid(setting),
            "recommendation": recommendation_part(setting),
            "checkpoint_bytes": checkpoint_size(setting),
        }
    elif recipe.model.kind == "gpt":
        made["model"] = _without_table(setting)
        made["unknown"] += ["vocabulary", "parameters in all", "FLOPs", "memory", "checkpoint size"]
    if horizon is None:
        made["unknown"] += ["steps", "tokens", "time to finish", "milestones"]
    if speeds:
        speed = project(speeds, setting.world)
        found = milestones(recipe, horizon) if horizon else []
        time = time_part(setting, horizon or Horizon(0, 0, recipe.train.global_batch), found, speed) or {}
        made["time"] = time if horizon else {k: v for k, v in time.items() if not k.endswith(("seconds", "hours"))}
    if horizon is not None:
        found, speed_now = milestones(recipe, horizon), project(speeds, setting.world) if speeds else None
        made["milestones"] = milestones_part(setting, horizon, found, speed_now)
    return made


def _length(setting: Setting, horizon: Horizon | None) -> dict[str, Any]:
    batch, recipe = setting.recipe.train.global_batch, setting.recipe
    return {
        "setting": recipe.train.steps,
        "steps": horizon.steps if horizon else None,
        "tokens": round(horizon.steps * batch * setting.tokens_per_sample) if horizon else None,
        "done": setting.now,
        "tokens_per_step": batch * setting.tokens_per_sample,
        "padded_tokens_per_step": batch * recipe.model.context,
        "data_is_prepared": False,
    }


def _without_table(setting: Setting) -> dict[str, Any]:
    """A GPT's parameters but for what grows with the vocabulary, and what each of its ids adds."""
    none, one = count(setting.recipe.model, 0), count(setting.recipe.model, 1)
    names = ("positions", "attention", "feed_forward", "norms")
    return {
        "vocab": None,
        "parameters": None,
        "non_embedding": none.non_embedding,
        "parts": {name: getattr(none, name) for name in names},
        "parameters_of_an_id": one.total - none.total,
    }
