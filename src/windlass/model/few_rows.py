"""Linear layers of few rows on a CPU: the next token of each of several texts."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

ROWS = range(4, 65)
WEIGHTS = 2**20  # of a matrix; smaller ones stay in a core's cache


def few_rows(model: nn.Module, rows: int) -> AbstractContextManager[Any]:
    """`FewRows`, or nothing if it would not help; it costs 2 us an operation."""
    if rows not in ROWS or not torch.backends.mkl.is_available():
        return nullcontext()
    large = any(p.dim() > 1 and p.numel() >= WEIGHTS for p in model.parameters())
    return FewRows() if large else nullcontext()


class FewRows(TorchFunctionMode):
    """Inside, float32 products of few rows with large matrices on a CPU use oneDNN.

    Torch's own choice is MKL, which needs 1.5 times as long here (docs/LOG.md). Without
    gradients.
    """

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is F.linear and not kwargs and suits(*args):
            x, weight, bias = args if len(args) == 3 else (*args, None)
            return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return func(*args, **(kwargs or {}))


def suits(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Whether a product is one that oneDNN computes faster."""
    return (
        weight.numel() >= WEIGHTS
        and x.numel() // x.shape[-1] in ROWS
        and type(weight) in (Tensor, nn.Parameter)
        and weight.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and not torch.is_autocast_enabled("cpu")
    )
