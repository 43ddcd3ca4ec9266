"""Training and evaluation mode of a module, perhaps the user's, and the loss that it returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from windlass.errors import UserError
from windlass.model.sharding import is_fsdp


def set_training(model: nn.Module) -> None:
    """Put a user's module in training mode: `from_pretrained` returns models in evaluation mode.

    A frozen part or a single layer inside a training module keeps its evaluation mode.
    """
    parts = [part for whole in model.modules() if whole.training for part in whole.children()]
    evaluating = [part for part in parts if not part.training]
    model.train()
    for part in evaluating:
        if not any(p.requires_grad for p in part.parameters()) or not list(part.children()):
            part.eval()


def scalar_loss(loss: Any) -> Tensor:
    """The loss that a model's forward pass returned; UserError if it is not a scalar tensor."""
    if isinstance(loss, Tensor) and loss.dim() == 0:
        return loss
    shape = f" of shape {list(loss.shape)}" if isinstance(loss, Tensor) else ""
    what = f"a {type(loss).__name__}{shape}"
    advice = "return a scalar, the loss summed over labels that are not -100"
    raise UserError(f"forward(tokens, labels) of your model returned {what}; {advice}")


@contextmanager
def keeping_modes(model: nn.Module) -> Iterator[None]:
    """Give every part of a module its mode (training or evaluation) back at the end."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:  # a whole before its parts
            if module.training != training:
                module.train(training)  # an override may do more: loralib adds adapters to weights


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Dropout off inside; afterwards modes are restored, and FSDP2's root is sharded again."""
    with keeping_modes(model):
        model.eval()
        try:
            yield
        finally:
            torch.clear_autocast_cache()
            for module in model.modules():
                if is_fsdp(module):
                    module.reshard()


@contextmanager
def casting_once(autocast: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Context of one of several passes with equal weights, of which only the first casts them."""
    torch.autocast_increment_nesting()
    try:
        with autocast():
            yield
    finally:
        torch.autocast_decrement_nesting()
