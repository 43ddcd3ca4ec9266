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
LEAST_PACKED = 4  # rows; with fewer, oneDNN reads a matrix as fast as memory gives it
MOST_PACKED = 2**30  # bytes of all matrices, since a packed one is a second copy
WEIGHTS = 2**20  # of a matrix; smaller ones stay in a core's cache


@functools.cache
def least_rows() -> int:
    """On CPUs of others than Intel, MKL computes one row on one thread."""
    info = Path("/proc/cpuinfo")
    return 4 if not info.exists() or "GenuineIntel" in info.read_text(errors="replace") else 1


class Products:
    """The products of one generation; it keeps what oneDNN needs from pass to pass."""

    def __init__(self, model: nn.Module):
        matrices = (p for p in model.parameters() if p.dim() > 1 and p.device.type == "cpu")
        large = [p for p in matrices if p.numel() >= WEIGHTS]
        self.helps = bool(large) and torch.backends.mkl.is_available()
        # By the parameter's identity, because the address of a gathered one may be another's later.
        self.packed: dict[int, Tensor | None] | None = None
        if sum(p.nbytes for p in large) <= MOST_PACKED:
            self.packed = dict.fromkeys(map(id, large))

    def of(self, rows: int) -> AbstractContextManager[Any]:
        """`FewRows`, or nothing if it would not help; it costs 2 us an operation."""
        if not self.helps or not least_rows() <= rows <= MOST_ROWS:
            return nullcontext()
        return FewRows(self.packed if rows >= LEAST_PACKED else None)


class FewRows(TorchFunctionMode):
    """Inside, float32 products of few rows with large matrices on a CPU use oneDNN.

    Torch's own choice is MKL, which needs 1.5 times as long here (docs/LOG.md). Without
    gradients.

    Args:
        packed: Matrices in oneDNN's own order, by the identity of a parameter, which stays as it
            is; a missing one is made. None: oneDNN reads all matrices in place.
    """

    def __init__(self, packed: dict[int, Tensor | None] | None = None):
        super().__init__()
        self.packed = packed

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not F.linear or kwargs or not suits(*args):
            return func(*args, **(kwargs or {}))
        x, weight, bias = args if len(args) == 3 else (*args, None)
        if self.packed is not None and id(weight) in self.packed:
            known = self.packed[id(weight)]
            if known is None:
                rows = x.numel() // x.shape[-1]
                known = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), rows)
                self.packed[id(weight)] = known
            weight = known
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


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
