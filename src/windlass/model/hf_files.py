"""The files of a model of `transformers`: its weights, streamed into parameters, and its origin.

Each rank reads only its slices. `RUN/origin` holds configuration, code, tokenizer and a record.
"""

from __future__ import annotations

import functools
import hashlib
import math
import shutil
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from windlass import hub
from windlass.errors import UserError, argument, first_line
from windlass.fileio import read_json, to_json
from windlass.model.sharding import assign, boxes_of, place_of, whole_shape
from windlass.recipe.network import ModelSettings
from windlass.seeds import seed_of

FOLDER, RECORD = "origin", "origin.json"
CONFIG_FILES = ("config.json", "generation_config.json")
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "chat_template.json", "tokenizer.model", "spiece.model"),
    *("sentencepiece.bpe.model", "vocab.json", "merges.txt", "vocab.txt"),
)
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_*_config.json")
CODE_FILES = "*.py"


class WeightFiles:
    def __init__(self, directory: Path, file_name: str = "", remote_code: bool = False):
        from safetensors import SafetensorError, safe_open

        self.directory, self.remote_code = directory, remote_code
        self.files: dict[str, Any] = {}  # the open file of each tensor
        for name in [file_name] if file_name else hub.weight_files(directory):
            if not (directory / name).is_file():
                why = "Windlass opens no pickled weights, because they can run code"
                convert = "AutoModelForCausalLM.from_pretrained(...).save_pretrained(DIR)"
                raise UserError(f"{directory} has no {name}. {why}; convert them with {convert}")
            try:
                file = safe_open(directory / name, framework="pt")
            except (OSError, SafetensorError) as error:
                raise UserError(f"{directory / name} cannot be read: {error}") from None
            self.files |= dict.fromkeys(file.keys(), file)

    def find(self, name: str, prefix: str) -> str | None:
        names = (name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}")
        return next((n for n in names if n in self.files), None)

    @functools.cached_property
    def converted(self) -> tuple[dict[str, Tensor], set[str]]:
        """The tensors of an older layout, converted in memory, and the names that it lacks."""
        from transformers import AutoModelForCausalLM

        options: dict[str, Any] = {"use_safetensors": True, "output_loading_info": True}
        options |= {"dtype": "auto", "trust_remote_code": self.remote_code}
        try:
            whole, report = AutoModelForCausalLM.from_pretrained(self.directory, **options)
        except Exception as error:  # other shapes, damaged files, code that came with the model
            problem = f"transformers cannot read the weights: {first_line(error)}"
            raise UserError(f"{self.directory}: {problem}") from None
        values = {**dict(whole.named_parameters()), **dict(whole.named_buffers())}
        return values, set(report["missing_keys"])


def fill_from_files(
    tensors: dict[str, Tensor], files: WeightFiles, prefix: str, longer: Collection[str] = ()
) -> None:
    """Fill parameters and buffers, whole or sharded, from files; UserError if they do not fit.

    Some files omit `prefix` from the names. Rows of added tokens in `longer` get the others' mean.
    """
    keys = {name: key for name in tensors if (key := files.find(name, prefix)) is not None}
    stored: dict[str, Any] = {n: files.files[key].get_slice(key) for n, key in keys.items()}
    if len(keys) < len(tensors):
        stored, lacking = files.converted
        if missing := (lacking & set(tensors)) | (set(tensors) - set(stored)):
            problem = f"{files.directory} lacks the weight {min(missing)} of its model"
            raise UserError(f"{problem} ({len(missing)} in all)")
    for name, tensor in tensors.items():
        source, shape = stored[name], list(whole_shape(tensor))
        is_slice = not isinstance(source, Tensor)  # of a file, read when it is indexed
        there = list(source.get_shape() if is_slice else source.shape)
        if name in longer and there[1:] == shape[1:] and there[0] < shape[0]:
            assign(tensor, with_mean_rows(source[:], shape[0]))
        elif there != shape:
            problem = f"{name} has the shape {there}, but the configuration says {shape}"
            raise UserError(f"{files.directory}: {problem}")
        elif shape:
            for offsets, box in boxes_of(tensor):
                box.copy_(source[place_of(offsets, box)])
        else:  # a scalar cannot be sliced
            tensor.copy_(files.files[keys[name]].get_tensor(keys[name]) if is_slice else source)


def with_mean_rows(values: Tensor, rows: int) -> Tensor:
    mean = values.double().mean(0, keepdim=True).to(values.dtype)
    return torch.cat([values, *[mean] * (rows - len(values))])


def fill_from_seed(
    parameters: dict[str, Tensor],
    template: nn.Module,
    blocks: Sequence[nn.Module],
    seed: int,
) -> None:
    """Initialise parameters, whole or sharded, as the architecture does, from only seed and names.

    One block or other module of `template`, on the meta device, gets storage at a time.
    """
    left = dict(parameters)
    inside = {id(module) for block in blocks for module in block.modules()}
    for prefix, unit in template.named_modules():
        is_block = any(unit is block for block in blocks)
        if not is_block and (id(unit) in inside or not unit._parameters):
            continue
        for module in unit.modules():
            for key, parameter in module._parameters.items():
                if parameter is not None and parameter.is_meta:
                    zeros = torch.zeros(parameter.shape, dtype=parameter.dtype)
                    module._parameters[key] = nn.Parameter(zeros)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed_of(f"windlass/hf/{seed}/{prefix}"))
            for module in reversed(list(unit.modules())):  # children first, as in `transformers`
                template._init_weights(module)  # type: ignore[operator]
        for name, value in unit.named_parameters(prefix, remove_duplicate=False):
            if name in left:
                assign(left.pop(name), value.detach())
        unit.to("meta")
    if left:
        problem = f"the architecture lacks an initial value for {min(left)}"
        raise UserError(f"model.from_scratch: {problem}")


def has_weights(folder: Path) -> bool:
    return all((folder / file).is_file() for file in hub.weight_files(folder))


def stored_precision(model: Any) -> str:
    """How an `HfModel`'s files hold most of its numbers: `bf16`, `fp16` or `fp32`.

    If the files are not here, as for a plan, config.json decides.
    """
    folder, numbers = model.directory, Counter[str]()
    if record := read_json(folder / RECORD):
        return str(record["precision"])
    if model.settings.from_scratch:
        return "fp32"
    if has_weights(folder):
        for name, file in WeightFiles(folder).files.items():
            stored = file.get_slice(name)
            numbers[stored.get_dtype()] += math.prod(stored.get_shape())
    else:
        config = read_json(folder / "config.json")
        places = (config, config.get("text_config") or {})
        named = [place.get(key) for place in places for key in ("dtype", "torch_dtype")]
        numbers.update(filter(None, named))
    short = {"BF16": "bf16", "bfloat16": "bf16", "F16": "fp16", "float16": "fp16"}
    return short.get(max(numbers, key=lambda name: numbers[name], default=""), "fp32")


def describe_origin(model: Any) -> dict[str, str]:
    """An `HfModel`'s name, revision, commit on the Hub, SHA-256 of its configuration, and the
    precision of its files."""
    config = hashlib.sha256((model.directory / "config.json").read_bytes()).hexdigest()
    return read_json(model.directory / RECORD) or {
        "name": model.settings.name,
        "revision": model.settings.revision,
        "commit": hub.commit_of(model.directory),
        "config_sha256": config,
        "precision": stored_precision(model),
    }


def save_origin(model: Any, run: Path) -> None:
    """Copy an `HfModel`'s configuration, code and tokenizer into its run, all or none."""
    folder = run / FOLDER
    if model.directory == folder:
        return
    partial = run / f".{FOLDER}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for pattern in (*CONFIG_FILES, *TOKENIZER_FILES, *PROCESSOR_FILES, CODE_FILES):
        for file in model.directory.glob(pattern):
            shutil.copyfile(file, partial / file.name)
    (partial / RECORD).write_bytes(to_json(describe_origin(model)))
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def saved_origin(run: Path, settings: ModelSettings) -> Path | None:
    record = read_json(run / FOLDER / RECORD)
    same = record.get("name") == settings.name and record.get("revision") == settings.revision
    return run / FOLDER if record and same else None


def weights_directory(model: Any) -> Path:
    """The directory of an `HfModel`'s weights; UserError if its configuration has changed."""
    folder: Path = model.directory
    if has_weights(folder):
        return folder
    origin = describe_origin(model)
    directory = hub.directory(origin["name"], origin["commit"] or origin["revision"], weights=True)
    config = directory / "config.json"
    digest = hashlib.sha256(config.read_bytes()).hexdigest() if config.is_file() else ""
    if digest != origin["config_sha256"]:
        advice = f"restore it, or start over with {argument('fresh')}"
        raise UserError(f"{config} is not the configuration of this run: {advice}")
    return directory
