"""A run as a directory that `transformers` loads: weights, configuration, tokenizer, and a card that says where it is from."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from windlass.checkpoint import load
from windlass.checkpoint.reshard import MODEL
from windlass.data.chat import Template, stop_tokens
from windlass.errors import UserError
from windlass.evaluation.source import Source, alone, find_source, open_model, same_tokenizer
from windlass.fileio import read_json
from windlass.interop.export_tokenizer import save_tokenizer
from windlass.model import convert, hf_files

if TYPE_CHECKING:
    from windlass.data.tokenizer import Tokenizer
    from windlass.run import Run

FILE_BYTES = 4 * 10**9
"""Weights in one file, at most."""


def export(name: str, directory: Path) -> Path:
    """Write the weights of `name` as `transformers` reads them; adapters are merged into what they adapt.

    Args:
        name: `RUN`, `RUN@STEP`, `RUN@best` or a checkpoint's path.
        directory: A new or empty directory. It appears whole or not at all.

    Raises:
        UserError: No architecture computes what the model does (with what differs), or the directory holds something.
    """
    source = find_source(name)
    if source.checkpoint is None:
        raise UserError(f"{name} is a directory of transformers already")
    if directory.exists() and not directory.is_dir():
        raise UserError(f"{directory} is a file: name a new directory")
    if directory.is_dir() and any(directory.iterdir()):
        raise UserError(f"{directory} is not empty: name a new directory")
    partial = directory.with_name(f".{directory.name}.partial")
    if source.recipe.model.kind == "gpt":
        convert.architecture(source.recipe.model)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        if source.recipe.model.kind == "gpt":
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
    checkpoint = load.open_checkpoint(source.checkpoint, deep=False)

    def read(name: str) -> Tensor:
        return checkpoint.tensor(MODEL + name).float()

    vocab = checkpoint.shape(f"{MODEL}embedding.weight")[0]
    write_json(directory / "config.json", convert.config(settings, vocab, tokenizer.eot))
    write_json(directory / "generation_config.json", generation(tokenizer, source.template, vocab))
    save_weights(convert.to_hf(settings, read), directory)
    save_tokenizer(tokenizer, source.template, settings.context, directory)


def generation(tokenizer: Tokenizer, template: Template, rows: int) -> dict[str, Any]:
    """The generation config: where a text begins and ends, and that rows of a padded vocabulary, which nothing has taught,
    are never chosen. `rows` are those of the embedding.
    """
    found: dict[str, Any] = {}
    if tokenizer.eot is not None:
        ends = [tokenizer.eot, *sorted(stop_tokens(tokenizer, template) - {tokenizer.eot})]
        start = [*tokenizer.bos, tokenizer.eot][0]
        found = {
            "bos_token_id": start, "eos_token_id": ends if len(ends) > 1 else ends[0], "pad_token_id": tokenizer.eot,
        }  # fmt: skip
    if rows > tokenizer.vocab:
        found["suppress_tokens"] = list(range(tokenizer.vocab, rows))
    return found


def _write_hf(source: Source, directory: Path) -> None:
    model: Any = open_model(source, alone("cpu"))
    merge_adapters(model.model)
    model.model.save_pretrained(directory)
    origin, settings = model.directory, source.recipe.model
    files = [name for name in hf_files.TOKENIZER_FILES if (origin / name).is_file()]
    if not files or not same_tokenizer(source, origin):
        files = []
        save_tokenizer(source.tokenizer, source.template, model.context, directory)
    if settings.trust_remote_code:
        files += [file.name for file in origin.glob(hf_files.CODE_FILES)]
    for name in [*files, "generation_config.json"]:
        if (origin / name).is_file():
            shutil.copyfile(origin / name, directory / name)


def merge_adapters(model: nn.Module) -> None:
    """Put low-rank adapters into the layers that they adapt, in place; afterwards there are none."""
    adapted = [(name, module) for name, module in model.named_modules() if hasattr(module, "get_base_layer")]
    for name, layer in adapted:
        layer.merge()  # type: ignore[operator]
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, layer.get_base_layer())  # type: ignore[operator]


def save_weights(tensors: Iterable[tuple[str, Tensor]], directory: Path, file_bytes: int = FILE_BYTES) -> None:
    """Tensors as safetensors files of at most about `file_bytes`, with an index where there are several."""
    from safetensors.torch import save_file

    parts: list[dict[str, Tensor]] = [{}]
    names: list[list[str]] = []
    size = total = 0

    def flush() -> None:
        save_file(parts[0], directory / f"part-{len(names)}", {"format": "pt"})
        names.append(list(parts[0]))
        parts[0] = {}

    for name, tensor in tensors:
        count = tensor.numel() * tensor.element_size()
        if parts[0] and size + count > file_bytes:
            flush()
            size = 0
        # A copy of its own, and never a view of another tensor's storage, which the format does not know.
        parts[0][name] = tensor.detach().to(torch.device("cpu")).clone().contiguous()
        size, total = size + count, total + count
    flush()
    if len(names) == 1:
        (directory / "part-0").rename(directory / "model.safetensors")
        return
    places: dict[str, str] = {}
    for number, held in enumerate(names):
        file = f"model-{number + 1:05d}-of-{len(names):05d}.safetensors"
        (directory / f"part-{number}").rename(directory / file)
        places |= dict.fromkeys(held, file)
    write_json(directory / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": places})


def card(source: Source) -> str:
    """The model card: what it is, what it was measured at, and the recipe that made it."""
    run, recipe = source.run, source.recipe
    assert run is not None
    rows = "\n".join(f"| {suite} | {name} | {value} |" for suite, name, value in _results(run, source.step or 0))
    results = f"## Results at this step\n\n| suite | measure | value |\n|---|---|---|\n{rows}\n\n" if rows else ""
    base, origin = _base(source)
    return (
        f"---\nlibrary_name: transformers\n{base}tags:\n- windlass\n- text-generation\n---\n\n# {recipe.preset}\n\n"
        f"{origin}Trained with Windlass, recipe `{recipe.preset}` ({recipe.config_hash}), {source.step:,} steps.\n\n"
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
    kept = hf_files.saved_origin(source.run.path, m) if source.run and not m.init_from else None
    commit = read_json(kept / hf_files.RECORD).get("commit", "") if kept else ""
    if not name.startswith("hf:") and not commit:
        return "", f"Trained further from `{Path(name).name}`.\n\n"
    place, at = name.removeprefix("hf:"), f", commit `{commit}`" if commit else ""
    return f"base_model: {place}\n", f"Trained further from [{place}](https://huggingface.co/{place}){at}.\n\n"


MEASURES = ("loss", "perplexity", "bits_per_byte", "acc", "acc_norm", "exact_match", "f1")
"""What a suite's line has to say about a model; of the harness' tasks it is every `TASK/METRIC`."""


def _results(run: Run, step: int) -> list[tuple[str, str, str]]:
    """What was measured at a step, while training and by `windlass eval` (which counts where both did)."""
    found: dict[tuple[str, str], str] = {}
    measured = {str(line["suite"]): line for line in run.lines("eval", step=step)}
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        measured |= json.loads((run.path / "eval" / f"step-{step:08d}.json").read_text(encoding="utf-8"))["results"]
    for suite, line in measured.items():
        for key in [*MEASURES, *(key for key in line if "/" in key)]:
            if isinstance(line.get(key), float):
                found[suite, key] = f"{line[key]:.4f}"
    return [(suite, key, value) for (suite, key), value in found.items()]


def write_json(path: Path, value: Any) -> None:
    """Write indented JSON."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
