"""`model.init_from`: weights of another run or of an adapter."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from torch import nn

from windlass.checkpoint.base import fill_base
from windlass.checkpoint.choose import find_checkpoint
from windlass.checkpoint.format import Checkpoint
from windlass.checkpoint.state_dict import restore
from windlass.errors import UserError
from windlass.model.adapters import CONFIG, adapter_settings, fill_from_adapter
from windlass.parallel.ranks import Ranks
from windlass.recipe import Recipe
from windlass.recipe.layers import typed
from windlass.recipe.network import LoraSettings
from windlass.run import Run


def load_initial(model: nn.Module, recipe: Recipe, ranks: Ranks | None = None) -> Checkpoint | None:
    """Fill a model, whole or sharded, from `model.init_from`; UserError if it does not fit.

    Returns the checkpoint that it names; None if it names an adapter. Collective over `ranks`,
    which share the hashing of a checkpoint.
    """
    name = recipe.model.init_from
    path = Path(name).expanduser()
    if (path / CONFIG).is_file() and not Run(path).exists:
        there = LoraSettings(**adapter_settings(path)["lora"])
        check_adapter(there, recipe, ("rank", "alpha"))
        model.fill_weights(recipe.run.seed)  # type: ignore[operator]
        fill_from_adapter(model.model, path)  # type: ignore[arg-type]
        return None
    try:
        checkpoint = find_checkpoint(name, ranks)
        source = checkpoint.path.parent.parent / "recipe.toml"
        origin = Recipe.load(source).model if source.is_file() else recipe.model
        keys = [key for key in LoraSettings.model_fields if key != "dropout"]
        check_adapter(origin.lora, recipe, keys)
        fill_base(checkpoint, model, recipe, ranks)
        restore(checkpoint, model)
        if origin.width_multiple != recipe.model.width_multiple:
            write = f"write model.mup_base_width = {origin.mup_base_width}"
            raise UserError(f"its weights are for another width multiple of muP; {write}")
        return checkpoint
    except UserError as error:
        raise UserError(f"model.init_from = {name}: {error}") from None


def check_adapter(there: LoraSettings, recipe: Recipe, keys: Iterable[str]) -> None:
    here, name = recipe.model.lora, recipe.model.init_from
    differs = [key for key in keys if getattr(there, key) != getattr(here, key)]
    if differs and (there.rank or here.rank):
        lines = " ".join(f"model.lora.{key}={typed(getattr(there, key))}" for key in differs)
        merged = f"export {name}, which merges the weights, and write its directory as model.name"
        raise UserError(
            f"{name} was trained with {lines}: write that to train it further, or {merged}"
        )
