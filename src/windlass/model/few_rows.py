"""Linear layers of few rows on a CPU: the next token of each of several texts."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

MOST_ROWS = 64
WEIGHTS = 2**20  # of a matrix; smaller ones stay in a core's cache


def few_rows(model: nn.Module) -> AbstractContextManager[Any]:
    """`FewRows`, or nothing if no matrix is large: it costs 2 us an operation."""
    matrices = (p for p in model.parameters() if p.dim() > 1 and p.device.type == "cpu")
    helps = torch.backends.mkl.is_available() and any(p.numel() >= WEIGHTS for p in matrices)
    return FewRows() if helps else nullcontext()


class FewRows(TorchFunctionMode):
    """Inside, float32 products of few rows with large matrices on a CPU use oneDNN, which takes two
    thirds of MKL's time here (docs/LOG.md). Without gradients.
    """

    def __init__(self) -> None:
        super().__init__()
        info = Path("/proc/cpuinfo")  # on CPUs of others than Intel, MKL has one thread for one row
        is_intel = not info.exists() or "GenuineIntel" in info.read_text(errors="replace")
        self.least = 4 if is_intel else 1

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is nn.functional.linear and not kwargs and not torch.is_autocast_enabled("cpu"):
            x, weight, bias = (*args, None)[:3]
            plain = type(weight) in (torch.Tensor, nn.Parameter) and weight.device.type == "cpu"
            few = self.least <= x.numel() // x.shape[-1] <= MOST_ROWS and weight.numel() >= WEIGHTS
            if plain and few and x.dtype == weight.dtype == torch.float32:
                return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return func(*args, **(kwargs or {}))
