"""`model.init_from`: weights of another run, of an adapter, or of a directory of `transformers`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor, nn

from windlass import hub
from windlass.checkpoint.base import fill_base
from windlass.checkpoint.choose import find_checkpoint
from windlass.checkpoint.state_dict import restore
from windlass.errors import UserError, require
from windlass.model import convert
from windlass.model.adapters import CONFIG, adapter_settings, fill_from_adapter
from windlass.model.gpt import GPT, generator
from windlass.model.hf_files import WeightFiles
from windlass.model.share import assign, whole_shape
from windlass.parallel.dist import Ranks
from windlass.recipe import Recipe
from windlass.recipe.layers import typed
from windlass.recipe.network import LoraSettings
from windlass.run import Run

# Entries of a configuration that do not change what a network of the same shapes computes.
IRRELEVANT = re.compile(
    "_name_or_path|architectures|auto_map|(torch_)?dtype|transformers_version|use_cache|id2label|"
    "label2id|problem_type|task_specific_params|finetuning_task|initializer_range|pretraining_tp|"
    "vocab_size|return_dict|output_attentions|output_hidden_states|router_aux_loss_coef|"
    "output_router_logits|.*(dropout|_pdrop|_token_id|summary_|chunk_size_feed_forward).*"
)


def load_initial(model: nn.Module, recipe: Recipe, ranks: Ranks | None = None) -> None:
    """Fill a model, whole or sharded, from `model.init_from`; UserError if it does not fit.

    Collective over `ranks`, which share the hashing of a checkpoint.
    """
    name = recipe.model.init_from
    path = Path(name).expanduser()
    if (path / CONFIG).is_file() and not Run(path).exists:
        there = LoraSettings(**adapter_settings(path)["lora"])
        check_adapter(there, recipe, ("rank", "alpha", "rslora", "dora"))
        model.fill_weights(recipe.run.seed)  # type: ignore[operator]
        fill_from_adapter(model.model, path)  # type: ignore[arg-type]
        return
    foreign = (path / "config.json").is_file() and not Run(path).exists
    if foreign or name.startswith("hf:"):
        directory = hub.directory(name.removeprefix("hf:"), key="model.init_from", weights=True)
        if isinstance(model, GPT):
            fill_from_hf(model, directory, recipe.run.seed)
        else:
            check_same_network(model, directory)
            model.fill_weights(recipe.run.seed, directory)  # type: ignore[operator]
        return
    try:
        checkpoint = find_checkpoint(path if path.exists() else name, ranks)
        source = checkpoint.path.parent.parent / "recipe.toml"
        origin = Recipe.load(source).model if source.is_file() else recipe.model
        keys = [key for key in LoraSettings.model_fields if key != "dropout"]
        check_adapter(origin.lora, recipe, keys)
        fill_base(checkpoint, model, recipe, ranks)
        restore(checkpoint, model)
        if origin.multipliers != recipe.model.multipliers:
            settings = origin.mup.model_dump() if origin.mup.base_width else {"base_width": 0}
            lines = "; ".join(f"model.mup.{key} = {value}" for key, value in settings.items())
            raise UserError(f"its weights are for other multipliers of muP; write {lines}")
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


def check_same_network(model: nn.Module, directory: Path) -> None:
    """Raise UserError, with the differences, if `directory` holds weights of another network."""
    ours: Any = model
    here = ours.config.to_dict()
    there = _config(directory, ours.settings.trust_remote_code).to_dict()
    differs = [
        f"{key} = {there.get(key)!r} (it is {here.get(key)!r})"
        for key in sorted({*here, *there})
        if here.get(key) != there.get(key) and not IRRELEVANT.fullmatch(key)
    ]
    if differs:
        problem = f"the weights in {directory} belong to another network than {ours.settings.name}"
        advice = "write its own configuration as model.name, or put the weights beside yours"
        raise UserError(f"model.init_from: {problem}: {'; '.join(differs[:8])}; {advice}")


def _config(directory: Path, remote_code: bool = False) -> Any:
    require("transformers", f"model.init_from: {directory}")
    hub.prepare()
    with hub.explained(f"model.init_from: {directory}"):
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(directory, trust_remote_code=remote_code)


def fill_from_hf(model: GPT, directory: Path, seed: int) -> None:
    """Copy weights into our GPT; rows of an embedding that the file lacks follow from the seed."""
    config = _config(directory)
    there = convert.settings_of(config)
    convert.check_fit(model.settings, model.vocab, there, str(directory))
    files = WeightFiles(directory)
    prefix = "transformer" if config.model_type == "gpt2" else "model"

    def read(name: str) -> Tensor:
        key = files.find(name, prefix)
        if key is None:
            raise UserError(f"model.init_from: {directory} lacks the weight {name}")
        tensor: Tensor = files.files[key].get_tensor(key)
        return tensor.float()

    def reject(problem: str) -> NoReturn:
        raise UserError(f"model.init_from: in {directory} {problem}")

    for name in convert.unit_weights(model.settings):
        if (read(name) != 1).any():
            reject(f"{name} is not 1, and the model norms queries and keys without weights")
    for name in convert.dropped(model.settings, there):
        if convert.from_hf(model.settings, name, read).any():
            reject(f"the bias for {name} is not zero, and the model lacks a bias there")
    for name, parameter in model.named_parameters():
        value, shape = convert.from_hf(model.settings, name, read), whole_shape(parameter)
        if value.shape[0] < shape[0] and name in ("embedding.weight", "head.weight"):
            whole = model.initial_value(name, shape, generator(seed, name))
            whole[: value.shape[0]] = value
            value = whole
        if value.shape != shape:
            shapes = f"{list(value.shape)}, and its configuration says {list(shape)}"
            reject(f"the weight for {name} has the shape {shapes}")
        assign(parameter, value)
