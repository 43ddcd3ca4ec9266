"""Frozen matrices in 4 bits under adapters (QLoRA, arXiv 2305.14314): NF4 in blocks of 64 numbers,
by `bitsandbytes`.

Codes and scales are buffers, saved, restored and moved like any other, and whole on each rank. A
copy of the matrix in the precision of the pass lives only during a product; the backward pass makes
it again.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn

from windlass.errors import require
from windlass.model.frozen import FrozenProduct, in_autocast

BLOCK = 64  # numbers that share a scale


class Linear4bit(nn.Linear):
    """A frozen linear layer; `quantise` gives its matrix values."""

    def __init__(self, like: nn.Linear):
        nn.Module.__init__(self)
        self.in_features, self.out_features = like.in_features, like.out_features
        self.bias = like.bias
        self.register_parameter("weight", None)
        # The name is one that `peft` knows.
        self.qweight = nn.Buffer(torch.empty(-(-self.numbers // 2), 1, dtype=torch.uint8))
        self.scales = nn.Buffer(torch.empty(-(-self.numbers // BLOCK)))

    @property
    def numbers(self) -> int:
        """Entries of the matrix."""
        return self.in_features * self.out_features

    def quantise(self, weight: Tensor) -> None:
        """Take the values of a matrix [out, in]."""
        weight = weight.to(self.qweight.device)
        codes, state = _bitsandbytes().quantize_4bit(weight, blocksize=BLOCK, quant_type="nf4")
        self.qweight.copy_(codes)
        self.scales.copy_(state.absmax)

    def matrix(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The matrix that the codes stand for."""
        bnb = _bitsandbytes()
        computed = torch.float32 if dtype == torch.float64 else dtype
        state = bnb.QuantState(
            absmax=self.scales.float(),
            shape=torch.Size([self.out_features, self.in_features]),
            blocksize=BLOCK,
            code=bnb.get_4bit_type("nf4", device=self.qweight.device),
            quant_type="nf4",
            dtype=computed,
        )
        whole: Tensor = bnb.dequantize_4bit(self.qweight, state)
        return whole.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = in_autocast(x)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return FrozenProduct.apply(x, self.matrix, bias)

    def plain(self) -> nn.Linear:
        """An ordinary layer that computes the same."""
        layer = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        layer.weight, layer.bias = nn.Parameter(self.matrix()), self.bias
        return layer


def _bitsandbytes() -> Any:
    """The functions of the package, which only real weights need."""
    require("bitsandbytes", 'model.lora.base = "4bit"')
    return importlib.import_module("bitsandbytes.functional")


def quantise_linear(blocks: list[nn.Module]) -> int:
    """Replace each linear layer in the blocks by a `Linear4bit`; returns their number."""
    count = 0
    for module in [module for block in blocks for module in block.modules()]:
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, Linear4bit(child))
                count += 1
    return count
