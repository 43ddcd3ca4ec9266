"""The files of a model of `transformers`: its weights, streamed into parameters, and where it came from.

Weights are read from safetensors a slice at a time: each rank reads only the rows that it holds, without communication.
`RUN/origin` holds the configuration, the code and the tokenizer's files beside a record (`origin.json`). With it and a
checkpoint a run is complete: it is resumed, measured, sampled and exported also where its first weights are gone.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from windlass import hub
from windlass.errors import UserError, argument, first_line
from windlass.fileio import read_json, to_json
from windlass.model.gpt import assign
from windlass.recipe.network import ModelSettings

FOLDER, RECORD = "origin", "origin.json"
CONFIG_FILES = ("config.json", "generation_config.json")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
)
CODE_FILES = "*.py"
ADAPTER = "adapter_config.json"  # of an adapter in a directory of its own
UNLIKE_OURS = (
    "use_rslora",
    "use_dora",
    "lora_bias",
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
    "layers_to_transform",
    "trainable_token_indices",
    "target_parameters",
    "layer_replication",
    "use_qalora",
    "use_bdlora",
)
"""Entries of an adapter's configuration that change what it computes and that `model.lora` does not have."""


class WeightFiles:
    """The tensors of a directory's safetensors files, by name."""

    def __init__(self, directory: Path, file_name: str = ""):
        from safetensors import SafetensorError, safe_open

        self.files: dict[str, Any] = {}  # the open file of each tensor
        for name in [file_name] if file_name else hub.weight_files(directory):
            if not (directory / name).is_file():
                raise UserError(
                    f"{directory} has no {name}: pickled weights are not opened, because they can run code; convert them "
                    "with AutoModelForCausalLM.from_pretrained(...).save_pretrained(DIR)"
                )
            try:
                file = safe_open(directory / name, framework="pt")
            except (OSError, SafetensorError) as error:
                raise UserError(f"{directory / name} cannot be read: {error}") from None
            self.files |= dict.fromkeys(file.keys(), file)

    def find(self, name: str, prefix: str) -> str | None:
        """The name that a parameter has in the files: its own, or without or with the network's prefix; None: it is not there."""
        names = (name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}")
        return next((n for n in names if n in self.files), None)


def fill_from_files(
    tensors: dict[str, Tensor], directory: Path, prefix: str, remote_code: bool
) -> None:
    """Fill parameters and buffers, whole or sharded, by their names in `transformers`, from a directory; or UserError.

    `prefix` is the network's `base_model_prefix`, which some files leave out of the names.
    """
    files = WeightFiles(directory)
    keys = {name: key for name in tensors if (key := files.find(name, prefix)) is not None}
    if len(keys) < len(tensors):
        _fill_through_transformers(tensors, directory, remote_code)
        return
    for name, tensor in tensors.items():
        key, shape = keys[name], list(tensor.shape)
        stored = files.files[key].get_slice(key)  # read when it is indexed
        if (there := list(stored.get_shape())) != shape:
            raise UserError(
                f"{directory}: {key} has the shape {there}, and the configuration says {shape}"
            )
        if not shape:  # a scalar has no slices
            tensor.copy_(files.files[key].get_tensor(key))
            continue
        local, offsets = tensor.data, (0,) * tensor.dim()
        if isinstance(tensor, DTensor):
            local = tensor.to_local()
            _, offsets = compute_local_shape_and_global_offset(
                tensor.shape, tensor.device_mesh, tensor.placements
            )
        local.copy_(
            stored[tuple(slice(o, o + n) for o, n in zip(offsets, local.shape, strict=True))]
        )


def _fill_through_transformers(
    tensors: dict[str, Tensor], directory: Path, remote_code: bool
) -> None:
    """For files in an older layout, which `transformers` converts as it reads them; here each rank holds all for a while."""
    from transformers import AutoModelForCausalLM

    try:
        whole, report = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype="auto",
            trust_remote_code=remote_code,
            use_safetensors=True,
            output_loading_info=True,
        )
    except Exception as error:  # other shapes, damaged files, code that came with the model
        raise UserError(
            f"{directory}: transformers cannot read the weights: {first_line(error)}"
        ) from None
    values = {**dict(whole.named_parameters()), **dict(whole.named_buffers())}
    if lacking := sorted(
        (set(report["missing_keys"]) & set(tensors)) | (set(tensors) - set(values))
    ):
        raise UserError(
            f"{directory} lacks the weight {lacking[0]} of its model ({len(lacking)} in all)"
        )
    for name, tensor in tensors.items():
        assign(tensor, values[name])


def fill_from_seed(
    parameters: dict[str, Tensor], template: nn.Module, blocks: Sequence[nn.Module], seed: int
) -> None:
    """The architecture's own initialisation of parameters, whole or sharded, as a pure function of the seed and their names.

    A block, or a module outside them, at a time gets storage on the CPU in `template`, the network on the meta device.
    """
    left = dict(parameters)
    inside = {id(module) for block in blocks for module in block.modules()}
    for prefix, unit in template.named_modules():
        if not any(unit is block for block in blocks) and (
            id(unit) in inside or not unit._parameters
        ):
            continue
        for module in unit.modules():
            for key, parameter in module._parameters.items():
                if parameter is not None and parameter.is_meta:
                    module._parameters[key] = nn.Parameter(
                        torch.zeros(parameter.shape, dtype=parameter.dtype)
                    )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_seed(seed, prefix))
            for module in reversed(
                list(unit.modules())
            ):  # children before what holds them, as `transformers` does
                template._init_weights(module)  # type: ignore[operator]
        for name, value in unit.named_parameters(prefix):
            if name in left:
                assign(left.pop(name), value)
        unit.to("meta")
    if left:
        raise UserError(
            f"model.from_scratch: the architecture has no initial value for {min(left)}"
        )


def fill_adapter(name: str, parameter: Tensor, seed: int) -> None:
    """LoRA's own start: the first matrix as in a linear layer, the second zero, so that nothing changes at first."""
    whole = torch.zeros(parameter.shape)
    if ".lora_A." in name or ".lora_embedding_B." in name:
        nn.init.kaiming_uniform_(
            whole, a=5**0.5, generator=torch.Generator().manual_seed(_seed(seed, name))
        )
    assign(parameter, whole)


def adapter_settings(directory: Path) -> dict[str, Any]:
    """The settings `[model]` of an adapter that `peft` or `windlass export --adapter` wrote, and of its base; or UserError."""
    config = read_json(directory / ADAPTER)
    plain = {"peft_type": "LORA", "bias": "none"}
    unlike = [
        key
        for key, value in config.items()
        if (key in UNLIKE_OURS and value) or (key in plain and value != plain[key])
    ]
    targets, excluded = config.get("target_modules"), tuple(config.get("exclude_modules") or ())
    if unlike or not isinstance(targets, list) or not config.get("base_model_name_or_path"):
        problem = f"has {', '.join(unlike)}" if unlike else "names no base or no layers"
        merge = "merge it with peft (merge_and_unload), save the model and its tokenizer, and name that directory"
        raise UserError(f"{directory / ADAPTER} {problem}, which Windlass does not read: {merge}")
    lora = {
        "rank": config["r"],
        "alpha": config["lora_alpha"],
        "dropout": config.get("lora_dropout") or 0.0,
        "targets": [name for name in targets if not name.endswith(excluded)]
        if excluded
        else targets,
    }
    base = {"name": config["base_model_name_or_path"], "revision": config.get("revision") or ""}
    return {"kind": "hf", **base, "lora": lora}


def fill_from_adapter(model: nn.Module, directory: Path) -> None:
    """Fill the adapters of a network, whole or sharded, from `adapter_model.safetensors`; UserError if the two do not fit."""
    files = WeightFiles(directory, "adapter_model.safetensors")
    own = {
        f"base_model.model.{n.replace('.default', '')}": p
        for n, p in model.named_parameters()
        if ".lora_" in n
    }
    if differ := sorted(set(own) ^ set(files.files)):
        raise UserError(
            f"{directory}: the adapter does not fit the layers of its base: {differ[0]} ({len(differ)} in all)"
        )
    for name, parameter in own.items():
        assign(parameter, files.files[name].get_tensor(name).float())


def _seed(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"windlass/hf/{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def describe_origin(model: Any) -> dict[str, str]:
    """An `HfModel`'s name, the revision asked for, its commit (of the Hub), and its configuration's SHA-256."""
    config = hashlib.sha256((model.directory / "config.json").read_bytes()).hexdigest()
    return read_json(model.directory / RECORD) or {
        "name": model.settings.name,
        "revision": model.settings.revision,
        "commit": hub.commit_of(model.directory),
        "config_sha256": config,
    }


def save_origin(model: Any, run: Path) -> None:
    """Copy what an `HfModel` is built from into its run, whole or not at all; once, at the run's first start."""
    folder = run / FOLDER
    if model.directory == folder or read_json(folder / RECORD):
        return
    partial = run / f".{FOLDER}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for pattern in (*CONFIG_FILES, *TOKENIZER_FILES, CODE_FILES):
        for file in model.directory.glob(pattern):
            shutil.copyfile(file, partial / file.name)
    (partial / RECORD).write_bytes(to_json(describe_origin(model)))
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def saved_origin(run: Path, settings: ModelSettings) -> Path | None:
    """The folder in a run that holds what its model is built from; None where there is none, or of another model."""
    record = read_json(run / FOLDER / RECORD)
    same = record.get("name") == settings.name and record.get("revision") == settings.revision
    return run / FOLDER if record and same else None


def weights_directory(model: Any) -> Path:
    """The directory with an `HfModel`'s first weights: beside its configuration, or where its name leads to; or UserError."""
    folder: Path = model.directory
    if not read_json(folder / RECORD) and all(
        (folder / file).is_file() for file in hub.weight_files(folder)
    ):
        return folder
    origin = describe_origin(model)
    directory = hub.directory(origin["name"], origin["commit"] or origin["revision"], weights=True)
    config = directory / "config.json"
    if (
        not config.is_file()
        or hashlib.sha256(config.read_bytes()).hexdigest() != origin["config_sha256"]
    ):
        raise UserError(
            f"{config} is not the configuration of this run: restore it, or start over with {argument('fresh')}"
        )
    return directory
