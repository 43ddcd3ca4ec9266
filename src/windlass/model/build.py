"""From a recipe to a network with its initial weights, our own GPT or a model of `transformers`.

Unusual: an initial weight is a pure function of the seed and the parameter's name. Each is drawn whole, in fp32 on the
CPU, and a sharded parameter takes its slice of it. No rank asks another, and any world size and strategy starts from the
same bits.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from windlass.errors import UserError
from windlass.model.gpt import GPT

if TYPE_CHECKING:
    from windlass.recipe import Recipe


def build_model(
    recipe: Recipe,
    vocab: int,
    device: str | torch.device = "meta",
    dtype: torch.dtype = torch.float32,
    run: Path | None = None,
) -> nn.Module:
    """The network of a recipe, its weights not yet filled.

    On the meta device it takes no memory: `parallelize` gives it storage, then `initialise` or a checkpoint gives it
    values. On any other device the storage is there, and what is in it is undefined.

    Args:
        recipe: Its section `[model]` is read.
        vocab: The tokenizer's vocabulary; the embedding has `model.vocab` rows where that is set.
        device: Where the parameters live.
        dtype: Of the parameters: the master weights.
        run: A run directory, where a model of `transformers` may have left its configuration.

    Raises:
        UserError: `model.vocab` is smaller than the tokenizer's vocabulary.
    """
    if recipe.model.kind == "hf":
        from windlass.model.hf import build_hf

        return build_hf(recipe, vocab, device, dtype, run)
    rows = recipe.model.vocab or vocab
    if rows < vocab:
        raise UserError(
            f"model.vocab = {rows} rows are too few for the tokenizer's vocabulary of {vocab}: "
            f"write {vocab}, or more for speed, or 0 for what the tokenizer has"
        )
    with torch.device("meta"):
        model = GPT(recipe.model, rows).to(dtype)
    return model if torch.device(device).type == "meta" else model.to_empty(device=device)


def generator(seed: int, name: str) -> torch.Generator:
    """A CPU generator of its own for each seed and parameter name."""
    digest = hashlib.blake2b(f"windlass/init/{seed}/{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


@torch.no_grad()
def initialise(model: nn.Module, seed: int) -> None:
    """Give every parameter its initial value, in place; parameters must have storage.

    Args:
        model: Not wrapped (see `unwrap`), plain or sharded. Has `initial_value(name, shape, generator) -> Tensor`, as `GPT`
            has, or `fill_weights(seed)`, as `HfModel` has.
        seed: `run.seed`.
    """
    owner: Any = model
    if hasattr(owner, "fill_weights"):
        owner.fill_weights(seed)
        return
    for name, parameter in owner.named_parameters():
        assert not parameter.is_meta, f"{name} is on the meta device: to_empty first"
        assign(parameter, owner.initial_value(name, parameter.shape, generator(seed, name)))


@torch.no_grad()
def assign(parameter: Tensor, full: Tensor) -> None:
    """Copy a full tensor into a parameter: all of it, or this rank's slice of a DTensor, without communication."""
    if not hasattr(parameter, "placements"):
        parameter.copy_(full)
        return
    from torch.distributed.tensor import distribute_tensor

    mesh: Any = parameter.device_mesh
    # `src_data_rank=None`: every rank has the whole tensor already, so nothing is sent.
    part = distribute_tensor(full.to(mesh.device_type), mesh, parameter.placements, src_data_rank=None)
    parameter.to_local().copy_(part.to_local())  # type: ignore[attr-defined]
