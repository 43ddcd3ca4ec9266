"""A run as a directory that `transformers` loads: weights, configuration, tokenizer, model card.

If no architecture computes the same as our GPT, the export includes code (modeling_windlass.py).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tomli_w
import torch
from torch import Tensor, nn

from windlass import hub
from windlass.checkpoint.format import MODEL, Checkpoint
from windlass.data.chat import PLAIN, Template, stop_tokens
from windlass.data.tokenizer import Tokenizer
from windlass.errors import UserError, argument
from windlass.evaluation.source import Source, find_source, open_model, same_tokenizer
from windlass.fileio import new_directory, read_json
from windlass.ledger import decode
from windlass.model import convert, hf_files
from windlass.model.adapters import export_adapter
from windlass.model.quantised import Linear4bit
from windlass.parallel.ranks import alone
from windlass.recipe import Changes
from windlass.recipe.settings import LOSS_SUITE
from windlass.run import Run
from windlass.telemetry.measures import of_eval, show
from windlass.variables import scrub

CODE = Path(__file__).with_name("modeling_windlass.py")
CARD = Path(__file__).with_name("card.md")  # a template of jinja
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
TOKENIZER_CONFIG, GENERATION_CONFIG = "tokenizer_config.json", "generation_config.json"
OLDER_NAMES = (
    *("rope_theta", "rope_scaling", "partial_rotary_factor", "rope_local_base_freq"),
    *("rotary_pct", "rotary_emb_base", "original_max_position_embeddings", "n_ctx"),
)


def export(
    run: str | Path | Run,
    directory: str | Path,
    adapter: bool = False,
    push: str = "",
    dtype: str = "auto",
    weights: str = "raw",
    overrides: Changes = (),
) -> Path:
    """Write a run's model, tokenizer and model card for `transformers`; returns the directory.

    Args:
        run: `RUN` (its newest checkpoint), `RUN@STEP`, `RUN@best` or a checkpoint's path; or the
            directory of an adapter, to merge it into its base.
        directory: A new or empty directory.
        adapter: Write only the adapter (`model.lora`), for `peft`, instead of the merged model.
        push: Upload the directory to this repository of the Hub, `NAME/MODEL` (new: private).
        dtype: Precision of the weights: `fp32`, `bf16` or `fp16`. `auto`: of a merged model as its
            base's, else `fp32` as in training.
        weights: `raw`, or `average` for the averaged weights (`train.average`).
        overrides: Settings of its recipe to change, as `checkpoint.base=DIR`.

    Raises:
        UserError: The directory is not empty, the run lacks an adapter, or the Hub rejects it.
    """
    if dtype not in ("auto", *DTYPES):
        raise UserError(f"{argument('dtype', dtype)}: write auto, {', '.join(DTYPES)}")
    if push:
        hub.check_push(push)
    source, directory = find_source(run, overrides, weights=weights), Path(directory)
    if source.checkpoint is None and (adapter or not source.adapter):
        raise UserError(f"{run} is a directory of transformers already")
    if source.own_model:
        raise UserError(f"{run} is a run of {source.own_model}: save load_model(run, model=...)")
    if source.tokenizer is None:
        raise UserError(f"{run} lacks a tokenizer: give it to train as Data(tokenizer=...)")
    if adapter and not source.recipe.model.lora.rank:
        raise UserError(f"{run} has model.lora.rank=0: leave {argument('adapter')} out")
    checkpoint = source.open_checkpoint() if source.checkpoint else None
    whole_hf = source.recipe.model.kind == "hf" and not adapter
    dtype = "fp32" if dtype == "auto" and not whole_hf else dtype
    with new_directory(directory) as partial:
        if adapter:
            _write_adapter(source, partial, dtype)
        elif source.recipe.model.kind == "gpt" and checkpoint:
            _write_gpt(source, checkpoint, partial, dtype)
        else:
            _write_hf(source, partial, dtype)
        if checkpoint:
            text = card(source, checkpoint, push or directory.name, adapter)
            (partial / "README.md").write_text(text, encoding="utf-8")
        if "chat" in source.recipe.data.formats and not source.template.source:
            text = plain_template(source.tokenizer)
            (partial / "chat_template.jinja").write_text(text, encoding="utf-8")
        os.umask(umask := os.umask(0))  # it can only be read by setting it
        for file in partial.iterdir():  # some libraries let only the owner read what they write
            file.chmod(0o666 & ~umask)
    if push:
        hub.push(directory, push)
    return directory


def plain_template(tokenizer: Tokenizer) -> str:
    """The plain template with the tokenizer's begin and end of a text."""
    end = "" if tokenizer.eot is None else tokenizer.inner.id_to_token(tokenizer.eot)
    begin = "".join(map(tokenizer.inner.id_to_token, tokenizer.begin))
    text = PLAIN.replace("end_of_text", json.dumps(end, ensure_ascii=False))
    return text.replace("begin_of_text", json.dumps(begin, ensure_ascii=False))


def _write_gpt(source: Source, checkpoint: Checkpoint, directory: Path, dtype: str) -> None:
    settings, tokenizer, eot = source.recipe.model, source.tokenizer, source.tokenizer.eot
    rows = checkpoint.info(f"{MODEL}embedding.weight").shape[0]
    ends = _ids([eot], stop_tokens(tokenizer, source.template))
    # what `sample` reads first for an empty prompt
    special: dict[str, Any] = {"bos_token_id": tokenizer.prompt("")[0], "eos_token_id": ends}
    generation = {} if eot is None else {**special, "pad_token_id": eot}
    if rows > tokenizer.vocab:  # untrained rows of the embedding
        generation["suppress_tokens"] = list(range(tokenizer.vocab, rows))
    _write_json(directory / GENERATION_CONFIG, generation)

    def read(name: str) -> Tensor:
        return checkpoint.tensor(MODEL + name).float()

    if not convert.architecture(settings):
        config = convert.own_config(settings, rows)
        shutil.copyfile(CODE, directory / CODE.name)
        names = [name.removeprefix(MODEL) for name in checkpoint.names(MODEL)]
        save_weights(((name, read(name)) for name in names), directory, dtype)
    else:
        config = convert.config(settings, rows)
        save_weights(convert.to_hf(settings, read), directory, dtype)
    special |= {"bos_token_id": bos_of(tokenizer), "dtype": DTYPES[dtype]}
    _write_json(directory / "config.json", config | special)
    save_tokenizer(tokenizer, source.template, settings.context, directory)


def _write_hf(source: Source, directory: Path, dtype: str) -> None:
    model: Any = open_model(source, alone("cpu"))
    network = model.model
    for name, layer in list(network.named_modules()):
        if isinstance(layer, Linear4bit):
            network.set_submodule(name, layer.plain())
    # Give head and embedding a matrix each, if they share one and an adapter changes one use.
    ends = [network.get_input_embeddings(), network.get_output_embeddings()]
    first, last = (getattr(end, "weight", None) for end in ends)
    if first is last and any(hasattr(end, "get_base_layer") for end in ends):
        head = ends[1].get_base_layer() if hasattr(ends[1], "get_base_layer") else ends[1]
        head.weight = nn.Parameter(head.weight.detach().clone())
        for config in (network.config, network.config.get_text_config()):
            config.tie_word_embeddings = False
    wanted = getattr(torch, DTYPES[hf_files.stored_precision(model) if dtype == "auto" else dtype])
    exact = set(getattr(network, "_keep_in_fp32_modules_strict", None) or ())
    if wanted == torch.float16:
        exact |= set(getattr(network, "_keep_in_fp32_modules", None) or ())

    def cast(module: nn.Module, prefix: str = "") -> None:
        for name, tensor in (*module.named_parameters(prefix), *module.named_buffers(prefix)):
            if tensor.is_floating_point() and not any(part in name for part in exact):
                tensor.data = tensor.data.to(wanted)

    # Adapters of two parameters of one module are nested: the inner one first.
    for name, layer in reversed(list(network.named_modules())):
        if hasattr(layer, "get_base_layer"):  # adapted
            whole = layer.get_base_layer().float()  # `peft` adds in the base's precision
            layer.merge()
            network.set_submodule(name, whole)
            cast(whole, name)  # at once, so that few matrices are in float32
    cast(network)
    base = read_json(model.directory / "config.json")
    parts = [getattr(network.config, name, None) for name in network.config.sub_configs]
    for part in (network.config, *filter(None, parts)):
        part.dtype = wanted
    network.save_pretrained(directory)
    config = read_json(directory / "config.json")
    if "text_config" in config:
        config["text_config"] |= older_names(config["text_config"], base.get("text_config", {}))
    _write_json(directory / "config.json", config | older_names(config, base))
    for pattern in hf_files.PROCESSOR_FILES:
        _copy(model.directory.glob(pattern), directory)
    if source.recipe.model.trust_remote_code:
        _copy(model.directory.glob(hf_files.CODE_FILES), directory)
    _write_text_files(source, model, directory)


def older_names(config: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    """Entries of a configuration under the names of `transformers` 4, which other programs read."""
    rope, kind = config.get("rope_parameters") or {}, str(config.get("model_type"))
    names = ("rope_theta", "partial_rotary_factor")
    entries: dict[str, Any] = {}
    if kind.startswith("gemma3") and "sliding_attention" in rope:
        entries["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    if "rope_type" in rope:  # of all layers alike
        entries |= {name: rope[name] for name in names if name in rope}
        if rope["rope_type"] != "default":
            entries["rope_scaling"] = {k: v for k, v in rope.items() if k not in names}
    if kind == "gpt2":
        entries["n_ctx"] = config["n_positions"]
    return entries | {name: base[name] for name in OLDER_NAMES if name in base}


def _write_text_files(source: Source, model: Any, directory: Path) -> None:
    """The tokenizer, the chat template and the tokens that end a text, of base and training."""
    places = [model.directory / name for name in hf_files.TOKENIZER_FILES]
    files = [file for file in places if file.is_file()]
    template = source.template
    has_chats = source.run is None or "chat" in source.recipe.data.formats
    if not files or not same_tokenizer(source, model.directory):
        save_tokenizer(source.tokenizer, template, model.context, directory)
    elif not has_chats or template == Template.of_directory(model.directory):
        _copy(files, directory)
    else:  # the ids of the base, laid out in another way
        _copy([file for file in files if not file.name.startswith("chat_template")], directory)
        config = read_json(directory / TOKENIZER_CONFIG) | dict(template.tokens)
        config["chat_template"] = template.source or None
        _write_json(directory / TOKENIZER_CONFIG, config)
    _copy([model.directory / GENERATION_CONFIG], directory)
    entries = {GENERATION_CONFIG: read_json(directory / GENERATION_CONFIG)}
    if (directory / "config.json").is_file():  # an adapter has none
        entries["config.json"] = read_json(directory / "config.json")
    ends = list[int | None]()
    if source.recipe.model.from_scratch:  # the base's ids may be of another tokenizer
        entries[GENERATION_CONFIG]["bos_token_id"] = source.tokenizer.prompt("")[0]
        if "config.json" in entries:
            entries["config.json"]["bos_token_id"] = bos_of(source.tokenizer)
    else:
        for entry in entries.values():
            known = entry.get("eos_token_id")
            ends += known if isinstance(known, list) else [known]
    stops = {"eos_token_id": _ids(ends, stop_tokens(source.tokenizer, template))}
    for name, entry in entries.items():
        _write_json(directory / name, entry | stops)


def bos_of(tokenizer: Tokenizer) -> int | None:
    start = tokenizer.prompt("")[0]
    return None if start == tokenizer.eot and not tokenizer.begin else start


def _ids(first: Iterable[int | None], more: Iterable[int]) -> int | list[int] | None:
    """Token ids as a configuration has them: a number for one, a list for several."""
    ids = [i for i in dict.fromkeys([*first, *sorted(more)]) if i is not None]
    if len(ids) > 1:
        return ids
    return ids[0] if ids else None


def _copy(files: Iterable[Path], directory: Path) -> None:
    for file in files:
        if file.is_file():
            shutil.copyfile(file, directory / file.name)


def _write_adapter(source: Source, directory: Path, dtype: str) -> None:
    model: Any = open_model(source, alone("cpu"))
    base = Path(source.recipe.model.name).expanduser()
    local = base.is_dir() and (hub.repository_of(base) or str(base.resolve()))
    name = local or source.recipe.model.name.removeprefix("hf:")
    weights = export_adapter(model.model, source.recipe.model.lora, name, directory)
    save_weights(weights.items(), directory, dtype, stem="adapter_model")
    _write_text_files(source, model, directory)


def save_weights(
    tensors: Iterable[tuple[str, Tensor]], directory: Path, dtype: str, stem: str = "model"
) -> None:
    """Tensors as safetensors files of at most 5 GB; an index for several files."""
    from huggingface_hub import save_torch_state_dict

    # The format cannot hold views of another tensor's storage.
    wanted, copies = getattr(torch, DTYPES[dtype]), dict[str, Tensor]()
    for name, x in tensors:
        kind = wanted if x.is_floating_point() else x.dtype
        copies[name] = x.detach().to("cpu", kind, copy=True).contiguous()
    pattern = stem + "{suffix}.safetensors"
    save_torch_state_dict(copies, directory, filename_pattern=pattern, metadata={"format": "pt"})


def save_tokenizer(tokenizer: Tokenizer, template: Template, context: int, directory: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`, with the chat template if any."""
    inner = tokenizer.inner
    starts = [i for i in (*tokenizer.begin, tokenizer.start, tokenizer.eot) if i is not None]
    inner.save(str(directory / "tokenizer.json"))
    end = None if tokenizer.eot is None else inner.id_to_token(tokenizer.eot)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "bos_token": inner.id_to_token(starts[0]) if starts else None,
        "eos_token": end,
        "pad_token": end,
        **template.tokens,
    }
    if template.source:
        config["chat_template"] = template.source
    _write_json(directory / TOKENIZER_CONFIG, config)


def card(source: Source, checkpoint: Checkpoint, name: str, adapter: bool) -> str:
    from jinja2 import Environment, StrictUndefined

    run, step = source.run, checkpoint.step
    assert run is not None
    recipe = run.recipe  # the source's has other settings for reading
    lines = {str(line["suite"]): line for line in run.lines("eval", step=step)}
    if source.weights == "average":
        measured = {"loss": "average_loss", "full_loss": "full_average_loss"}
        line = lines.get(LOSS_SUITE, {})
        lines = {LOSS_SUITE: {k: line[name] for k, name in measured.items() if name in line}}
    losses = [line["loss"] for line in run.lines("train") if line["step"] <= step]
    own_code = recipe.model.kind == "gpt" and not convert.architecture(recipe.model)
    # Where the first weights come from: a repository of the Hub or a name; empty for new ones.
    m = recipe.model
    origin = m.init_from or ("" if m.kind == "gpt" or m.from_scratch else m.name)
    place = hf_files.saved_origin(run.path, m) if origin and not m.init_from else None
    commit = read_json(place / hf_files.RECORD).get("commit", "") if place else ""
    if not (repository := hub.repository_of(Path(origin).expanduser())):
        repository = origin.removeprefix("hf:") if origin.startswith("hf:") or commit else ""
    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined
    )
    return environment.from_string(CARD.read_text(encoding="utf-8")).render(
        name=name,
        adapter=adapter,
        recipe=recipe,
        step=step,
        tokens=checkpoint.counters["tokens"],
        loss=show(losses[-1], "loss") if losses else "",
        data=", ".join(f"`{scrub(one)}`" for one in recipe.data.sources),
        code=", trust_remote_code=True" if own_code else "",
        settings=tomli_w.dumps(scrub(recipe.tree())),
        scores=[
            (suite, measure, show(value, "loss"))
            for suite, line in lines.items()
            for measure, value in decode(line).items()
            if isinstance(value, float) and of_eval(measure).role in ("score", "derived")
        ],
        origin=Path(origin).name,
        commit=commit,
        repository=repository,
    )


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
