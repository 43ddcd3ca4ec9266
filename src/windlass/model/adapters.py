"""Low-rank adapters of `peft` on a model of `transformers`, and their directories.

Modules that are trained whole stay in their places, unlike in `peft`, which copies them.
"""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from windlass.errors import UserError, first_line, require
from windlass.fileio import read_json
from windlass.model.hf_files import WeightFiles
from windlass.model.sharding import assign, whole_shape
from windlass.recipe.network import LoraSettings

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # of the names in an adapter's file
LINEAR = ("Linear", "Linear4bit", "Conv1D")
MAMBA = ("mamba", "mamba2", "falcon_mamba", "falcon_h1", "nemotron_h")  # as `peft` lists them
UNLIKE_OURS = (
    *("lora_bias", "rank_pattern", "alpha_pattern", "trainable_token_indices"),
    *("target_parameters", "layer_replication", "use_qalora", "use_bdlora"),
    *("use_dora", "use_rslora"),
)
"""Entries of an adapter's configuration that change its result and that `model.lora` lacks."""
EXPERTS = {
    "gate_up_proj": ("w1", "w3", "gate_proj", "up_proj"),
    "down_proj": ("w2", "down_proj"),
    "gate.weight": ("gate",),
}
"""The parameters of experts and routers that `peft` adapts, and the targets from which it does."""
BASE_KEPT = ("true", "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` with which `peft` does not change the base's weights."""


def add_adapters(model: Any, lora: LoraSettings, apart: list[str]) -> None:
    """Add adapters, except in `apart`, and freeze all but them and `modules_to_save`."""
    require("peft", "model.lora")
    from peft import LoraConfig, inject_adapter_in_model

    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    whole = modules_to_save(model, lora)
    excluded = [rf"{re.escape(name)}(\..*)?" for name in (*apart, *whole)]
    targets: Any = lora.targets
    if targets in ([], ["all-linear"]):
        targets = "all-linear"
        # Mamba's kernels read this weight without its layer, so `peft` rejects an adapter there.
        if getattr(model.config, "model_type", "") in MAMBA:
            excluded.append(r".*\.out_proj")
    elif not all(re.fullmatch(r"[\w.]+", target) for target in targets):
        targets = any_of(targets)  # regular expressions
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        fan_in_fan_out="Conv1D" in kinds.values(),  # transposed, as in GPT-2
        target_modules=targets,
        exclude_modules="|".join(excluded) or None,
    )
    try:
        with warnings.catch_warnings():
            # a merged export unties an adapted head
            warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`")
            warnings.filterwarnings("ignore", "You have passed exclude_modules=.* no modules were")
            inject_adapter_in_model(config, model, low_cpu_mem_usage=True)
    except ValueError as error:
        names = ", ".join(sorted({n.rpartition(".")[2] for n, k in kinds.items() if k in LINEAR}))
        problem = f"model.lora.targets: {first_line(error)}"
        raise UserError(f"{problem} This model's layers: {names}") from None
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name)
    for name in whole:
        model.get_submodule(name).requires_grad_(True)


def any_of(patterns: list[str]) -> str:
    """A regular expression for the paths of modules that end with a match of one of `patterns`."""
    return rf"(.*\.)?({'|'.join(patterns)})"


def modules_to_save(model: nn.Module, lora: LoraSettings) -> list[str]:
    """The outermost modules that are trained whole; UserError if a pattern names none."""
    names = [
        name for name, module in model.named_modules() if any(True for _ in module.parameters())
    ]
    for pattern in lora.modules_to_save:
        if not any(re.fullmatch(any_of([pattern]), name) for name in names):
            last = sorted({name.rpartition(".")[2] for name in names if not name[-1:].isdigit()})
            problem = f"model.lora.modules_to_save: {pattern} names no module with weights"
            raise UserError(f"{problem}; this model's are named {', '.join(filter(None, last))}")
    outermost = list[str]()
    for name in names if lora.modules_to_save else ():
        inside = any(name.startswith(f"{outer}.") for outer in outermost)
        if not inside and re.fullmatch(any_of(lora.modules_to_save), name):
            outermost.append(name)
    return outermost


def adapter_settings(directory: Path) -> dict[str, Any]:
    """The `[model]` of an adapter of `peft` or of our export; UserError for an unknown kind."""
    config = read_json(directory / CONFIG)
    plain = {"peft_type": "LORA", "bias": "none"}
    unlike = [key for key in UNLIKE_OURS if config.get(key)]
    unlike += [key for key, value in plain.items() if config.get(key, value) != value]
    # For fused experts `peft` itself writes patterns, which leave the scale alpha / r as it is.
    experts = config.get("target_parameters") or []
    ranks, alphas = (config.get(f"{key}_pattern") or {} for key in ("rank", "alpha"))
    scaled = {key: rank * config["lora_alpha"] / config["r"] for key, rank in ranks.items()}
    if set(experts) <= set(EXPERTS) and alphas == scaled:
        unlike = [key for key in unlike if not key.startswith(("target_", "rank_", "alpha_"))]
    initial = str(config.get("init_lora_weights") or True).lower()
    if initial not in BASE_KEPT:
        unlike.append(f"init_lora_weights = {initial}")
    if unlike or not config.get("base_model_name_or_path"):
        problem = f"has {', '.join(unlike)}" if unlike else "names no base"
        merge = "merge it with peft (merge_and_unload), save model and tokenizer, and name that"
        raise UserError(f"{directory / CONFIG} {problem}, which Windlass does not read: {merge}")
    # The tensors in the file say which modules have adapters, and which are whole.
    names = [name.removeprefix(PREFIX) for name in WeightFiles(directory, WEIGHTS).files]
    whole = [name for name in names if ".lora_" not in name and ".base_layer." not in name]
    targets = {name.partition(".lora_")[0] for name in names if ".lora_" in name}
    if experts:
        targets = {*config["target_modules"], *(old for key in experts for old in EXPERTS[key])}
    return {
        "kind": "hf",
        "name": config["base_model_name_or_path"],
        "revision": config.get("revision") or "",
        "lora": {
            "rank": config["r"],
            "alpha": config["lora_alpha"],
            "dropout": config.get("lora_dropout") or 0.0,
            "targets": sorted(targets),
            "modules_to_save": sorted({name.rpartition(".")[0] for name in whole}),
        },
    }


def fill_from_adapter(model: nn.Module, directory: Path) -> None:
    """Fill a network's adapters, and the modules trained whole, from the file of an adapter."""
    files = WeightFiles(directory, WEIGHTS).files
    ours, names = dict[str, Tensor](), dict[int, list[str]]()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        key = PREFIX + name.replace(".default", "")
        # `peft` writes the matrix of an adapted embedding or head, too.
        written = key in files and ".base_layer." in name
        if ".lora_" in name or parameter.requires_grad or written:
            ours[key] = parameter
            names.setdefault(id(parameter), []).append(key)
    problem = f"{directory}: the adapter does not fit the model"
    if set(ours) != set(files):
        lacks = {"it": sorted(set(ours) - set(files)), "the model": sorted(set(files) - set(ours))}
        text = ", and ".join(f"{who} lacks {keys[0]}" for who, keys in lacks.items() if keys)
        advice = "model.lora.targets and model.lora.modules_to_save name its modules"
        raise UserError(f"{problem}: {text}; {advice}")
    for same in names.values():
        values = [files[name].get_tensor(name).float() for name in same]
        if any(not torch.equal(values[0], value) for value in values):
            merge = "merge it with peft (merge_and_unload)"
            raise UserError(f"{problem}, which ties {' and '.join(same)}: {merge}")
        if values[0].shape != (shape := whole_shape(ours[same[0]])):
            shapes = f"{list(values[0].shape)}, not {list(shape)}"
            raise UserError(f"{problem}: {same[0]} has the shape {shapes}")
        assign(ours[same[0]], values[0])


def export_adapter(model: Any, lora: LoraSettings, base: str, directory: Path) -> dict[str, Tensor]:
    """Write the configuration for `PeftModel.from_pretrained`; returns the tensors of the file."""
    from peft import get_peft_model_state_dict

    config = model.peft_config["default"]
    config.base_model_name_or_path, config.task_type = base, "CAUSAL_LM"
    config.inference_mode = True
    # Our model has its adapters without the PeftModel that `from_pretrained` expects around it.
    tensors = get_peft_model_state_dict(model, save_embedding_layers=False)
    whole = modules_to_save(model, lora)
    trained = {id(p) for name in whole for p in model.get_submodule(name).parameters()}
    # A module that is tied to a trained one is written too, because `peft` unties them.
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    for name, module in model.named_modules():
        if name in whole or (module in ends and id(getattr(module, "weight", None)) in trained):
            config.modules_to_save = [*(config.modules_to_save or ()), name]
            tensors |= {f"{name}.{key}": value for key, value in module.state_dict().items()}
    config.save_pretrained(directory)
    return {PREFIX + name: tensor for name, tensor in tensors.items()}
