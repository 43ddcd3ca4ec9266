"""From a recipe to a network, our own GPT or a model of `transformers`; its weights are filled afterwards."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from windlass.errors import UserError
from windlass.model.gpt import GPT
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

        return build_hf(recipe, vocab, device, dtype, run)
    rows = recipe.model.vocab or vocab
    if rows < vocab:
        raise UserError(f"model.vocab = {rows} is too small for the tokenizer: write {vocab} or more, or 0")
    with torch.device("meta"):
        model = GPT(recipe.model, rows).to(dtype)
    return model if torch.device(device).type == "meta" else model.to_empty(device=device)
