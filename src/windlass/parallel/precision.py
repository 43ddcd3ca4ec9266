"""The precision of a model: autocast, and modules that compute in float32."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn

from windlass.model.attention import HALF
from windlass.model.quantised import Bf16Embedding
from windlass.model.sharding import become
from windlass.recipe import Recipe

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16, "float8": torch.bfloat16}
"""The precision of autocast and of gathered parameters."""


def resolve_precision(precision: str, device: torch.device) -> str:
    """`auto` resolved: bf16 on a GPU that has it, else fp16 on a GPU, fp32 on a CPU."""
    if precision != "auto":
        return precision
    if device.type == "cpu":
        return "fp32"
    return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"


def autocast(recipe: Recipe, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    low = LOW.get(resolve_precision(recipe.train.precision, device))
    return torch.autocast(device.type, dtype=low) if low else contextlib.nullcontext()


def raise_tables_and_norms(model: nn.Module, device: torch.device) -> None:
    """Have embeddings and norms compute in float32 although their parameters have low precision."""
    for module in list(model.modules()):
        kind, vectors = type(module), [p.dim() <= 1 for p in module.parameters()]
        is_norm = "norm" in kind.__name__.lower() and bool(vectors) and all(vectors)
        # Our norms raise their own weights; on CUDA autocast raises all.
        is_foreign = is_norm and not kind.__module__.startswith("windlass.")
        is_table = isinstance(module, nn.Embedding) and not isinstance(module, Bf16Embedding)
        if is_table or (is_foreign and device.type == "cpu"):
            become(module, InFloat32)


class InFloat32(nn.Module):
    """A module that raises its gathered low-precision parameters; comes before its class."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        parameters = self.named_parameters()
        wide = {name: p.float() for name, p in parameters if p.dtype in HALF}
        if not wide:
            return super().forward(*args, **kwargs)
        # It comes back here with the wide parameters in their places.
        return torch.func.functional_call(self, wide, args, kwargs)
