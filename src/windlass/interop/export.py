"""A run as a directory that `transformers` loads: weights, configuration, tokenizer, and a card that says where it is
from.

Our GPT becomes GPT-2 or Llama (model/convert.py), read from the checkpoint one tensor at a time. A model of
`transformers` stays what it is: it is opened, its adapters are merged, and it saves itself. The directory appears whole
or not at all.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from windlass.checkpoint.load import open_checkpoint
from windlass.checkpoint.reshard import MODEL
from windlass.data.chat import Template, stop_tokens
from windlass.data.tokenizer import Tokenizer
from windlass.errors import UserError
from windlass.evaluation.source import Source, alone, find_source, open_model, same_tokenizer
from windlass.fileio import read_json
from windlass.model import convert, hf_files
from windlass.run import Run

FILE_BYTES = 4 * 10**9
"""Weights in one file, at most."""
MEASURES = ("loss", "perplexity", "bits_per_byte", "acc", "acc_norm", "acc_per_token", "exact_match", "f1")
"""What the card takes from a suite's results; of lm-eval's tasks it is every `TASK/METRIC`."""


def export(run: str | Path | Run, directory: str | Path, adapter: bool = False) -> Path:
    """Write the model of a run as `transformers` reads it, with its tokenizer and a card; returns the directory.

    Args:
        run: `RUN` (its newest checkpoint), `RUN@STEP`, `RUN@best` or a checkpoint's path.
        directory: a new or empty directory.
        adapter: of a model with `model.lora`: only the adapter, as `peft` reads it, instead of the merged model.

    Raises:
        UserError: no architecture of `transformers` computes what the model does (with what differs), the directory
            holds something, or there is no adapter.
    """
    source, directory = find_source(run), Path(directory)
    model = source.recipe.model
    if source.checkpoint is None:
        raise UserError(f"{run} is a directory of transformers already")
    if directory.exists() and not directory.is_dir():
        raise UserError(f"{directory} is a file: name a new directory")
    if directory.is_dir() and any(directory.iterdir()):
        raise UserError(f"{directory} is not empty: name a new directory")
    if adapter and not model.lora.rank:
        raise UserError(f"{run} has no adapter (model.lora.rank is 0): leave --adapter out")
    if model.kind == "gpt":
        convert.architecture(model)
    partial = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        if adapter:
            _write_adapter(source, partial)
        elif model.kind == "gpt":
            _write_gpt(source, partial)
        else:
            _write_hf(source, partial)
        (partial / "README.md").write_text(card(source), encoding="utf-8")
        if directory.is_dir():
            directory.rmdir()
        partial.rename(directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return directory


def _write_gpt(source: Source, directory: Path) -> None:
    assert source.checkpoint is not None
    settings, tokenizer = source.recipe.model, source.tokenizer
    checkpoint = open_checkpoint(source.checkpoint, deep=False)  # find_source has verified it
    vocab = checkpoint.info(f"{MODEL}embedding.weight").shape[0]
    _write_json(directory / "config.json", convert.config(settings, vocab, tokenizer.eot))
    _write_json(directory / "generation_config.json", _generation_config(tokenizer, source.template, vocab))
    save_weights(convert.to_hf(settings, lambda name: checkpoint.tensor(MODEL + name).float()), directory)
    save_tokenizer(tokenizer, source.template, settings.context, directory)


def _generation_config(tokenizer: Tokenizer, template: Template, rows: int) -> dict[str, Any]:
    """Where a text begins and ends; and that the rows past the tokenizer's vocabulary (of `rows` in the embedding),
    which nothing has trained, are never chosen.
    """
    config: dict[str, Any] = {}
    if tokenizer.eot is not None:
        ends = [tokenizer.eot, *sorted(stop_tokens(tokenizer, template) - {tokenizer.eot})]
        config = {
            "bos_token_id": [*tokenizer.bos, tokenizer.eot][0], "eos_token_id": ends if len(ends) > 1 else ends[0],
            "pad_token_id": tokenizer.eot,
        }  # fmt: skip
    if rows > tokenizer.vocab:
        config["suppress_tokens"] = list(range(tokenizer.vocab, rows))
    return config


def _write_hf(source: Source, directory: Path) -> None:
    model: Any = open_model(source, alone("cpu"))
    merge_adapters(model.model)
    model.model.save_pretrained(directory)
    origin = model.directory
    files = [name for name in hf_files.TOKENIZER_FILES if (origin / name).is_file()]
    if not files or not same_tokenizer(source, origin):
        files = []
        save_tokenizer(source.tokenizer, source.template, model.context, directory)
    if source.recipe.model.trust_remote_code:
        files += [file.name for file in origin.glob(hf_files.CODE_FILES)]
    for name in [*files, "generation_config.json"]:
        if (origin / name).is_file():
            shutil.copyfile(origin / name, directory / name)


def _write_adapter(source: Source, directory: Path) -> None:
    """`adapter_config.json` and `adapter_model.safetensors`, for `PeftModel.from_pretrained(base, DIR)`."""
    from peft import get_peft_model_state_dict

    model: Any = open_model(source, alone("cpu"))
    config = model.model.peft_config["default"]
    config.base_model_name_or_path, config.task_type = source.recipe.model.name.removeprefix("hf:"), "CAUSAL_LM"
    config.inference_mode = True
    config.save_pretrained(directory)
    # A PeftModel holds the model as `base_model.model`; ours has its adapters put in without one.
    weights = {f"base_model.model.{name}": t for name, t in get_peft_model_state_dict(model.model).items()}
    save_weights(weights.items(), directory, stem="adapter_model")
    save_tokenizer(source.tokenizer, source.template, model.context, directory)


def merge_adapters(model: nn.Module) -> None:
    """Put low-rank adapters into the layers that they adapt, in place; afterwards there are none."""
    adapted = [(name, module) for name, module in model.named_modules() if hasattr(module, "get_base_layer")]
    for name, layer in adapted:
        layer.merge()  # type: ignore[operator]
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, layer.get_base_layer())  # type: ignore[operator]


def save_weights(
    tensors: Iterable[tuple[str, Tensor]], directory: Path, file_bytes: int = FILE_BYTES, stem: str = "model"
) -> None:
    """Tensors as safetensors files of at most about `file_bytes`, with an index where there are several."""
    from safetensors.torch import save_file

    part: dict[str, Tensor] = {}
    files: list[list[str]] = []  # the names in each file
    size = total = 0

    def flush() -> None:
        nonlocal part
        save_file(part, directory / f"part-{len(files)}", {"format": "pt"})
        files.append(list(part))
        part = {}

    for name, tensor in tensors:
        if part and size + tensor.nbytes > file_bytes:
            flush()
            size = 0
        # A copy of its own, and never a view of another tensor's storage, which the format does not know.
        part[name] = tensor.detach().to(torch.device("cpu")).clone().contiguous()
        size, total = size + tensor.nbytes, total + tensor.nbytes
    flush()
    if len(files) == 1:
        (directory / "part-0").rename(directory / f"{stem}.safetensors")
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(files):
        file = f"{stem}-{number + 1:05d}-of-{len(files):05d}.safetensors"
        (directory / f"part-{number}").rename(directory / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_json(directory / f"{stem}.safetensors.index.json", index)


def save_tokenizer(tokenizer: Tokenizer, template: Template, context: int, directory: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`, with the chat template where there is one."""
    inner = tokenizer.inner
    inner.save(str(directory / "tokenizer.json"))
    end = None if tokenizer.eot is None else inner.id_to_token(tokenizer.eot)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "bos_token": inner.id_to_token(tokenizer.bos[0]) if tokenizer.bos else end,
        "eos_token": end,
        "pad_token": end,
        **dict(template.special),
    }
    if template.source:
        config["chat_template"] = template.source
    _write_json(directory / "tokenizer_config.json", config)


# -- the card ---------------------------------------------------------------------------------------------------------


def card(source: Source) -> str:
    """The model card: what it is, what it was measured at, and the recipe that made it."""
    run, recipe, step = source.run, source.recipe, source.step or 0
    assert run is not None
    rows = "".join(f"| {suite} | {name} | {value:.4f} |\n" for suite, name, value in _results(run, step))
    results = f"## Results at this step\n\n| suite | measure | value |\n|---|---|---|\n{rows}\n" if rows else ""
    base, origin = _base(source)
    return (
        f"---\nlibrary_name: transformers\n{base}tags:\n- windlass\n- text-generation\n---\n\n# {recipe.preset}\n\n"
        f"{origin}Trained with Windlass, recipe `{recipe.preset}` ({recipe.config_hash}), {step:,} steps.\n\n"
        "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'model = AutoModelForCausalLM.from_pretrained("DIR")\ntokenizer = AutoTokenizer.from_pretrained("DIR")\n```\n\n'
        f"{results}## Recipe\n\n```toml\n{recipe.toml()}```\n"
    )


def _base(source: Source) -> tuple[str, str]:
    """The card's `base_model` and a sentence: what the weights began as; both empty for a model from scratch."""
    m = source.recipe.model
    name = m.init_from or ("" if m.kind == "gpt" or m.from_scratch else m.name)
    if not name:
        return "", ""
    origin = hf_files.saved_origin(source.run.path, m) if source.run and not m.init_from else None
    commit = read_json(origin / hf_files.RECORD).get("commit", "") if origin else ""
    if not name.startswith("hf:") and not commit:
        return "", f"Trained further from `{Path(name).name}`.\n\n"
    repo, at = name.removeprefix("hf:"), f", commit `{commit}`" if commit else ""
    return f"base_model: {repo}\n", f"Trained further from [{repo}](https://huggingface.co/{repo}){at}.\n\n"


def _results(run: Run, step: int) -> list[tuple[str, str, float]]:
    """What was measured at a step, while training and by `windlass eval` (which counts where both did)."""
    lines: dict[str, dict[str, Any]] = {str(line["suite"]): line for line in run.lines("eval", step=step)}
    lines |= read_json(run.path / "eval" / f"step-{step:08d}.json").get("results", {})
    return [
        (suite, key, line[key])
        for suite, line in lines.items()
        for key in [*MEASURES, *(key for key in line if "/" in key)]
        if isinstance(line.get(key), float)
    ]


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
