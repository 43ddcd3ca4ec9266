"""Linear layers of few rows on a CPU: the next token of each of several texts."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

MOST_ROWS = 64
WEIGHTS = 2**20  # of a matrix; smaller ones stay in a core's cache


@functools.cache
def least_rows() -> int:
    """On CPUs of others than Intel, MKL computes one row on one thread."""
    info = Path("/proc/cpuinfo")
    return 4 if not info.exists() or "GenuineIntel" in info.read_text(errors="replace") else 1


def few_rows(model: nn.Module, rows: int) -> AbstractContextManager[Any]:
    """`FewRows`, or nothing if it would not help; it costs 2 us an operation."""
    if not least_rows() <= rows <= MOST_ROWS or not torch.backends.mkl.is_available():
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
        and least_rows() <= x.numel() // x.shape[-1] <= MOST_ROWS
        and type(weight) in (Tensor, nn.Parameter)
        and weight.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and not torch.is_autocast_enabled("cpu")
    )
