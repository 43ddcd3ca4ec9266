"""Values for a model of `transformers`: from safetensors files, a slice at a time, or fresh ones from a seed.

Works on whole parameters and on shards alike. Each rank reads only the rows that it holds, so that nobody holds the model
twice; no communication.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from windlass import hub
from windlass.errors import UserError, first_line
from windlass.hub import INDEX, SINGLE
from windlass.model.build import assign
from windlass.model.hf import HfModel, find_blocks, from_directory, is_adapter
from windlass.recipe.settings import ModelSettings


@torch.no_grad()
def fill(model: HfModel, seed: int, directory: Path | None = None) -> None:
    """Give every parameter its value, in place: from the files, or from the seed; adapters always from the seed.

    Buffers that are saved with the weights (a router's correction, for one) come from the files too; from scratch they keep
    the value that the architecture gives them.

    Raises:
        UserError: The files lack a parameter or a saved buffer, or have it in another shape; there are none but pickled ones.
    """
    parameters = dict(named_parameters(model))
    adapters = {name: p for name, p in parameters.items() if is_adapter(name)}
    for name, parameter in adapters.items():
        _fill_adapter(name, parameter, seed)
    rest: dict[str, Tensor] = {
        name.replace(".base_layer.", "."): p for name, p in parameters.items() if name not in adapters
    }
    if model.settings.from_scratch:
        _fill_from_seed(rest, model, seed)
    else:
        _fill_from_files({**rest, **dict(saved_buffers(model))}, model, directory or weights_directory(model))


def saved_buffers(model: HfModel) -> Iterator[tuple[str, Tensor]]:
    """Each buffer that is saved with the weights, under its name in `transformers`."""
    for path, module in model.model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield (f"{path}.{name}" if path else name).replace(".base_layer.", "."), buffer


def named_parameters(model: HfModel) -> Iterator[tuple[str, nn.Parameter]]:
    """Each parameter once, under its name in `transformers` (an adapted layer's own weights keep `.base_layer.`)."""
    yield from model.model.named_parameters()


class WeightFiles:
    """The tensors of a directory's safetensors files, by name."""

    def __init__(self, directory: Path):
        self.directory = directory
        self._open: dict[str, Any] = {}
        index = directory / INDEX
        if index.is_file():
            try:
                self.places: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(f"{index} is no index of safetensors files: {error}") from None
        elif (directory / SINGLE).is_file():
            self.places = dict.fromkeys(self._file(SINGLE).keys(), SINGLE)
        else:
            raise UserError(
                f"{directory} has no {SINGLE}: pickled weights are not opened, because they can run code; convert them "
                "with AutoModelForCausalLM.from_pretrained(...).save_pretrained(DIR)"
            )

    def _file(self, name: str) -> Any:
        from safetensors import SafetensorError, safe_open

        if name not in self._open:
            try:
                self._open[name] = safe_open(self.directory / name, framework="pt")
            except (OSError, SafetensorError) as error:
                raise UserError(f"{self.directory / name} cannot be read: {error}") from None
        return self._open[name]

    def find(self, name: str, prefix: str) -> str | None:
        """The name that a parameter has in the files: its own, or without or with the network's prefix; None: it is not there."""
        names = (name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}")
        return next((n for n in names if n in self.places), None)

    def slice(self, key: str) -> Any:
        """A tensor that is read when it is indexed."""
        return self._file(self.places[key]).get_slice(key)

    def tensor(self, key: str) -> Tensor:
        """A whole tensor."""
        found: Tensor = self._file(self.places[key]).get_tensor(key)
        return found


def _fill_from_files(parameters: dict[str, Tensor], model: HfModel, directory: Path) -> None:
    files, prefix = WeightFiles(directory), model.model.base_model_prefix
    found = {name: files.find(name, str(prefix)) for name in parameters}
    if missing := [name for name, key in found.items() if key is None]:
        _fill_through_transformers(parameters, model, directory, missing)
        return
    for name, parameter in parameters.items():
        stored = files.slice(found[name])  # type: ignore[arg-type]
        if tuple(stored.get_shape()) != tuple(parameter.shape):
            raise UserError(
                f"{directory}: {found[name]} has the shape {list(stored.get_shape())}, and the configuration says "
                f"{list(parameter.shape)}"
            )
        local, offsets = _local(parameter)
        if not local.dim():
            local.copy_(files.tensor(found[name]))  # type: ignore[arg-type]
            continue
        local.copy_(stored[tuple(slice(o, o + n) for o, n in zip(offsets, local.shape, strict=True))])


def _fill_through_transformers(
    parameters: dict[str, Tensor], model: HfModel, directory: Path, missing: list[str]
) -> None:
    """For files in an older layout, which `transformers` converts as it reads them; here each rank holds all for a while."""
    from transformers import AutoModelForCausalLM

    remote = model.settings.trust_remote_code
    try:
        whole, report = AutoModelForCausalLM.from_pretrained(
            directory, dtype="auto", trust_remote_code=remote, use_safetensors=True, output_loading_info=True
        )
    except Exception as error:  # other shapes, damaged files, code that came with the model
        raise UserError(f"{directory}: transformers cannot read the weights: {first_line(error)}") from None
    if lacking := sorted(set(report["missing_keys"]) & set(parameters)):
        raise UserError(f"{directory} lacks {len(lacking)} weights of its model, {lacking[0]} among them")
    values = {**dict(whole.named_parameters()), **dict(whole.named_buffers())}
    if unknown := [name for name in missing if name not in values]:
        raise UserError(f"{directory} lacks the weight {unknown[0]}")
    for name, parameter in parameters.items():
        assign(parameter, values[name])


def _fill_from_seed(parameters: dict[str, Tensor], model: HfModel, seed: int) -> None:
    """The architecture's own initialisation, a block at a time on the CPU, each a pure function of the seed and its name."""
    template = from_directory(model.directory, model.settings, torch.float32)
    done: set[str] = set()
    for prefix, unit in _units(template):
        for module in unit.modules():
            for key, parameter in module._parameters.items():
                if parameter is not None and parameter.is_meta:
                    module._parameters[key] = nn.Parameter(torch.zeros(parameter.shape, dtype=parameter.dtype))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_seed(seed, prefix))
            for module in reversed(list(unit.modules())):  # children before what holds them, as `transformers` does
                template._init_weights(module)  # type: ignore[operator]
        for key, value in unit.named_parameters(prefix):
            if key in parameters and key not in done:
                assign(parameters[key], value)
                done.add(key)
        unit.to("meta")
    if left := sorted(set(parameters) - done):
        raise UserError(f"model.from_scratch: {model.directory} does not say how {left[0]} begins")


def _units(template: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The blocks, and each module outside them that has parameters of its own."""
    blocks = find_blocks(template)
    inside = {id(m) for block in blocks for m in block.modules()}
    for name, module in template.named_modules():
        if any(module is block for block in blocks) or (id(module) not in inside and module._parameters):
            yield name, module


def _fill_adapter(name: str, parameter: nn.Parameter, seed: int) -> None:
    """LoRA's own start: the first matrix as in a linear layer, the second zero, so that nothing changes at first."""
    whole = torch.zeros(parameter.shape)
    if ".lora_A." in name or ".lora_embedding_B." in name:
        generator = torch.Generator().manual_seed(_seed(seed, name))
        nn.init.kaiming_uniform_(whole, a=5**0.5, generator=generator)
    assign(parameter, whole)


def _seed(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"windlass/hf/{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _local(parameter: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """What this rank holds of a parameter, and where it begins in the whole."""
    if not isinstance(parameter, DTensor):
        return parameter.data, (0,) * parameter.dim()
    _, offsets = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return parameter.to_local(), tuple(offsets)


FOLDER, RECORD = "origin", "origin.json"
CONFIGURATION = ("config.json", "generation_config.json")
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "chat_template.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "merges.txt", "vocab.txt",
)  # fmt: skip
CODE_FILES = "*.py"


def describe_origin(model: Any) -> dict[str, str]:
    """An `HfModel`'s name, the revision asked for, the commit that it was (of the Hub), and its configuration's SHA-256."""
    if known := read_origin(model.directory):
        return known
    config = (model.directory / "config.json").read_bytes()
    return {
        "name": model.settings.name,
        "revision": model.settings.revision,
        "commit": hub.commit_of(model.directory),
        "config_sha256": hashlib.sha256(config).hexdigest(),
    }


def save_origin(model: Any, run: Path) -> None:
    """Copy what a model is built from into its run, whole or not at all; once, at the run's first start."""
    folder = run / FOLDER
    if model.directory == folder or read_origin(folder):
        return
    partial = run / f".{FOLDER}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for name in (*CONFIGURATION, *TOKENIZER_FILES):
        if (model.directory / name).is_file():
            shutil.copyfile(model.directory / name, partial / name)
    for file in model.directory.glob(CODE_FILES):
        shutil.copyfile(file, partial / file.name)
    (partial / RECORD).write_text(json.dumps(describe_origin(model), indent=1) + "\n", encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def saved_origin(run: Path, settings: ModelSettings) -> Path | None:
    """The folder in a run that holds what its model is built from; None where there is none, or of another model."""
    known = read_origin(run / FOLDER)
    same = known.get("name") == settings.name and known.get("revision") == settings.revision
    return run / FOLDER if known and same else None


def weights_directory(model: HfModel) -> Path:
    """The directory with a model's first weights: beside its configuration, or where its name leads to.

    Raises:
        UserError: They are not to be had, or their configuration is not the one that the run began with.
    """
    folder = model.directory
    if not read_origin(folder) and all((folder / file).is_file() for file in hub.weight_files(folder)):
        return folder
    origin = describe_origin(model)
    found = hub.directory(origin["name"], origin["commit"] or origin["revision"], weights=True)
    config = found / "config.json"
    if not config.is_file() or hashlib.sha256(config.read_bytes()).hexdigest() != origin["config_sha256"]:
        raise UserError(
            f"{config} is not the configuration that this run began with, and there is no checkpoint yet: put it back, or start "
            "anew with --fresh"
        )
    return found


def read_origin(folder: Path) -> dict[str, Any]:
    """What `describe` said of the model that a folder was kept of; empty where it is no such folder."""
    try:
        found = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
