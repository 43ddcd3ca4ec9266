"""Build a recipe's network, without values for its weights, or take the user's module."""

from __future__ import annotations

import difflib
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn

from windlass.errors import UserError
from windlass.model.gpt import GPT
from windlass.model.quantised import BF16, Linear4bit, lower_frozen, lower_trained
from windlass.model.sharding import materialise
from windlass.model.size import CountedSizes
from windlass.recipe import Recipe

NETWORK = {
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "width": "hidden_size",
    "vocab": "vocab_size",
}
"""Our names for the sizes of a model of `transformers`, and the names in its configuration."""


def build_model(
    recipe: Recipe, vocab: int, device: str | torch.device = "meta", run: Path | None = None
) -> nn.Module:
    """The network of a recipe's `[model]` on `device`, not initialised.

    `parallelize` gives the meta device's parameters storage; `initialise` or a checkpoint fills
    them. `vocab`: the tokenizer's tokens; `run` may hold a configuration of `transformers`.
    """
    if recipe.model.kind == "hf":
        from windlass.model.hf import build_hf
        from windlass.model.hf_files import stored_precision

        model: Any = build_hf(recipe, vocab, run)
        freeze(model.model, recipe.model.freeze)
        precision: str = recipe.model.frozen_precision
        if precision == "auto":
            precision = stored_precision(model)
        if precision == "bf16":
            lower_frozen(model.model)
    else:
        rows = recipe.model.vocab or vocab
        if rows < vocab:
            problem = f"model.vocab = {rows} is too small for the tokenizer"
            raise UserError(f"{problem}: write {vocab} or more, or 0")
        with torch.device("meta"):
            model = GPT(recipe.model, rows)
        freeze(model, recipe.model.freeze)
    if recipe.train.master == "bf16":
        lower_trained(model)
    device = torch.device(device)
    if device.type != "meta":
        materialise(model, device, device)
    return model  # type: ignore[no-any-return]


def freeze(model: nn.Module, patterns: list[str]) -> None:
    """Freeze the parameters whose names match; UserError if a pattern matches none, or all do."""
    parameters = dict(model.named_parameters(remove_duplicate=False))  # a tied one has two names
    for pattern in patterns:
        names = [name for name in parameters if fnmatchcase(name, pattern)]
        if not names:
            near = difflib.get_close_matches(pattern, parameters, n=4, cutoff=0.3)
            shown = ", ".join(list(dict.fromkeys([*near, *parameters]))[:4])
            problem = f"model.freeze: {pattern} is not the name of a parameter"
            raise UserError(f"{problem}; some of the {len(parameters)} names are {shown}")
        for name in names:
            parameters[name].requires_grad_(False)
    if patterns and not any(parameter.requires_grad for parameter in parameters.values()):
        problem = f"model.freeze: {', '.join(patterns)} leave no parameter to train"
        raise UserError(f"{problem}; drop one of them")


def read_sizes(recipe: Recipe, vocab: int = 0) -> CountedSizes:
    return sizes_of(build_model(recipe, vocab))


def sizes_of(model: nn.Module) -> CountedSizes:
    """Count the parameters of a model, not parallelized, perhaps on the meta device."""
    network: dict[str, Any] = {}
    if hasattr(model, "config"):
        config: Any = model.config.get_text_config()  # type: ignore[union-attr, operator]
        for own, name in NETWORK.items():
            if isinstance(value := getattr(config, name, None), int):
                network[own] = value
        network["architecture"] = config.model_type
    if apart := getattr(model, "apart", ()):
        network["apart"] = ", ".join(apart)
    if added := getattr(model, "added", 0):
        network["added"] = added
    parameters = list(model.parameters())
    in_4bit = sum(m.numbers for m in model.modules() if isinstance(m, Linear4bit))
    has_table = isinstance(model, GPT) and model.settings.position == "learned"
    return CountedSizes(
        total=sum(p.numel() for p in parameters) + in_4bit,
        trained=sum(p.numel() for p in parameters if p.requires_grad),
        vocab=int(getattr(model, "vocab", 0)),  # a user's model may lack it
        network=network,
        positions=model.positions.weight.numel() if has_table else 0,  # type: ignore
        in_4bit=in_4bit,
        in_bf16=sum(p.numel() for p in parameters if p.dtype == BF16),
    )


def own_module(model: nn.Module, context: int) -> nn.Module:
    """The user's module; wraps a causal language model of `transformers` as `HfModel`."""
    if not all(hasattr(model, name) for name in ("config", "get_output_embeddings")):
        return model
    from windlass.model.hf import wrap

    return wrap(model, context)
