"""From a recipe to a network, our own GPT or a model of `transformers`; its weights are filled afterwards."""

from __future__ import annotations

import difflib
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn

from windlass.errors import UserError
from windlass.model.gpt import GPT
from windlass.model.quantised import Linear4bit
from windlass.model.size import CountedSizes
from windlass.recipe import Recipe


def build_model(
    recipe: Recipe,
    vocab: int,
    device: str | torch.device = "meta",
    dtype: torch.dtype = torch.float32,
    run: Path | None = None,
) -> nn.Module:
    """The network of a recipe's `[model]`, its weights not yet filled; `device` and `dtype` are of the parameters.

    On the meta device it takes no memory: `parallelize` gives it storage, then `initialise` or a checkpoint gives it
    values. On any other device the storage is there, and what is in it is undefined. The embedding has `model.vocab` rows
    where that is set, else one for each of the tokenizer's `vocab` tokens. In the directory `run` a model of `transformers`
    may have left its configuration. Raises UserError where `model.vocab` is too small; or see `windlass.model.hf.build_hf`.
    """
    if recipe.model.kind == "hf":
        from windlass.model.hf import build_hf

        hf = build_hf(recipe, vocab, device, dtype, run)
        freeze(hf.model, recipe.model.freeze)
        return hf
    rows = recipe.model.vocab or vocab
    if rows < vocab:
        raise UserError(
            f"model.vocab = {rows} is too small for the tokenizer: write {vocab} or more, or 0"
        )
    with torch.device("meta"):
        model = GPT(recipe.model, rows).to(dtype)
    freeze(model, recipe.model.freeze)
    return model if torch.device(device).type == "meta" else model.to_empty(device=device)


def own_module(model: nn.Module, context: int) -> nn.Module:
    """A user's own module as `train` takes it: a causal language model of `transformers` is wrapped as `HfModel`."""
    if not all(hasattr(model, name) for name in ("config", "get_output_embeddings")):
        return model
    from windlass.model.hf import wrap

    return wrap(model, context)


def freeze(model: nn.Module, patterns: list[str]) -> None:
    """Take the parameters whose names match a pattern out of training; UserError where one matches none, or all match."""
    parameters = dict(
        model.named_parameters(remove_duplicate=False)
    )  # a tied one by each of its names
    for pattern in patterns:
        names = [name for name in parameters if fnmatchcase(name, pattern)]
        if not names:
            near = difflib.get_close_matches(pattern, parameters, n=4, cutoff=0.3)
            shown = ", ".join(list(dict.fromkeys([*near, *parameters]))[:4])
            raise UserError(
                f"model.freeze: no parameter is named {pattern}; among the {len(parameters)} are {shown}"
            )
        for name in names:
            parameters[name].requires_grad_(False)
    if patterns and not any(parameter.requires_grad for parameter in parameters.values()):
        raise UserError(
            f"model.freeze: {', '.join(patterns)} leave no parameter to train; leave one out"
        )


def read_sizes(recipe: Recipe, vocab: int = 0) -> CountedSizes:
    """The sizes of a recipe's model, counted without weights; our own needs the vocabulary. Raises UserError."""
    return sizes_of(build_model(recipe, vocab))


def sizes_of(model: nn.Module) -> CountedSizes:
    """Count a model's parameters, each once; they may be on the meta device, but not yet parallelized."""
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    config = getattr(model, "config", None)
    network = {} if config is None else hf_network(config.get_text_config())
    vocab = int(getattr(model, "vocab", 0))  # a user's own model may not say it
    in_4bit = sum(m.numbers for m in model.modules() if isinstance(m, Linear4bit))
    trained = sum(n for n, trained in sizes if trained)
    positions = (
        model.positions.weight.numel()
        if isinstance(model, GPT) and hasattr(model, "positions")
        else 0
    )
    return CountedSizes(
        sum(n for n, _ in sizes) + in_4bit, trained, vocab, network, positions, in_4bit
    )


def hf_network(config: Any) -> dict[str, Any]:
    """What a configuration of `transformers` says of the network, in the words of `[model]`."""
    names = {
        "layers": "num_hidden_layers",
        "heads": "num_attention_heads",
        "width": "hidden_size",
        "vocab": "vocab_size",
    }
    network = {
        own: value
        for own, name in names.items()
        if isinstance(value := getattr(config, name, None), int)
    }
    return {"architecture": config.model_type, **network}
