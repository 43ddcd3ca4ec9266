"""Activation checkpointing of blocks: memory for time, by recomputing in the backward pass."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

aten = torch.ops.aten

MATRIX_PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.linear.default}
ATTENTION = "_scaled_dot_product_"


def checkpoint_activations(blocks: Iterable[nn.Module], how: str) -> None:
    """Have each block forget its activations in the forward pass.

    `full` recomputes the whole block; `selective` keeps what matrix products and attention gave and recomputes the rest.
    The generators' states are restored for the recomputation, so that dropout draws the same masks. The blocks stay the
    modules they were: no name changes.
    """
    assert how in ("none", "full", "selective"), how
    if how == "none":
        return
    for block in blocks:
        block.forward = _checkpointed(block.forward, how == "selective")


def _checkpointed(forward: Callable[..., Any], selective: bool) -> Callable[..., Any]:
    context = {"context_fn": functools.partial(create_selective_checkpoint_contexts, keep)} if selective else {}

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **context, **kwargs)

    return run


def keep(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """The policy of `selective`: keep matrix products and attention.

    Attention that draws dropout itself is recomputed: if it were left out, the generator would stand elsewhere for the
    dropout after it, and the masks would differ from those of the forward pass.
    """
    if op in MATRIX_PRODUCTS:
        return CheckpointPolicy.MUST_SAVE
    if ATTENTION in str(op) and not _dropout(op, args, kwargs):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _dropout(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    for place, argument in enumerate(op._schema.arguments):
        if argument.name == "dropout_p":
            return float(args[place] if place < len(args) else kwargs.get("dropout_p", argument.default_value or 0.0))
    return 0.0
