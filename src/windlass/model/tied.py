"""The lookup in a table that is also the head's matrix, with one gradient for both uses.

Autograd would make a gradient [V, D] for the lookup, full of zeros, and add it to the head's. Here
the rows are added to the head's gradient in place.

Legend: D model width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def look_up(table: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The rows [..., D] of tokens [...] in a table [V, D], and the table for the head's loss.

    Both results must have a gradient in the backward pass. The sums of a token's rows have the
    table's precision.
    """
    return _Tied.apply(table, tokens)  # type: ignore[no-any-return]


def one_gradient(table: Tensor) -> bool:
    """Whether a table should get one gradient: it is trained, and not rounded to half precision."""
    trains = torch.is_grad_enabled() and table.requires_grad
    return trains and table.dtype in (torch.float32, torch.float64)


class _Tied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(tokens)
        return F.embedding(tokens, table), table.view_as(table)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, rows: Tensor, gradient: Tensor) -> tuple[Tensor, None]:
        (tokens,) = ctx.saved_tensors
        tokens, rows = tokens.flatten(), rows.flatten(0, -2).to(gradient.dtype)
        # The order of the sums must not vary. On a CPU `index_put_` on several threads varies it. On
        # CUDA both sort the tokens with `train.deterministic`. Otherwise `index_add_` adds at once
        # what `index_put_` adds row by row for a frequent token. (The difference is not measured.)
        return gradient.index_add_(0, tokens, rows), None
