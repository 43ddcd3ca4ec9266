"""Matrices in fewer bits: frozen ones in bf16 or 4 bits (QLoRA, arXiv 2305.14314), float8 products.

A copy of a frozen matrix in the precision of the pass lives only during a product.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from windlass.errors import UserError, require
from windlass.fileio import read_json
from windlass.model.share import become
from windlass.recipe.network import ModelSettings

HELD = torch.bfloat16
BLOCK = 64  # numbers that share a scale in 4 bits


def hold_frozen(model: nn.Module, settings: ModelSettings, directory: Path) -> None:
    """Hold the frozen matrices of linear layers and embeddings in bf16, in place, if asked to.

    With `model.frozen_precision = "auto"` if the files in `directory` are in bf16.
    """
    wanted = settings.frozen_precision
    if wanted == "auto" and not settings.from_scratch:
        config = read_json(directory / "config.json")
        places = (config, config.get("text_config") or {})
        named = [place.get(key) for place in places for key in ("dtype", "torch_dtype")]
        wanted = "bf16" if "bfloat16" in named else "fp32"
    if wanted != "bf16":
        return
    others = [p for m in model.modules() if _part_for(m) is None for p in m._parameters.values()]
    stay = {id(parameter) for parameter in others}  # a head tied to Gemma's embedding
    held: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        weight, part = module._parameters.get("weight"), _part_for(module)
        if part is None or weight is None or weight.requires_grad or id(weight) in stay:
            continue
        lower = nn.Parameter(weight.detach().to(HELD), requires_grad=False)
        module._parameters["weight"] = held.setdefault(weight, lower)
        become(module, part)


def hold_trained(model: nn.Module) -> None:
    """Hold the trained float32 parameters in bf16, in place (`train.master`)."""
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype == torch.float32:
            parameter.data = parameter.data.to(HELD)
    for module in model.modules():
        if type(module) is nn.Embedding and module.weight.dtype == HELD:
            become(module, HeldEmbedding)


def raised(weight: Tensor, x: Tensor) -> Tensor:
    """A matrix in the precision of a product with `x`; under autocast as it is."""
    return weight if torch.is_autocast_enabled(x.device.type) else weight.to(x.dtype)


class HeldLinear(nn.Module):
    """A linear layer; comes before its class in the order of inheritance."""

    def forward(self, x: Tensor) -> Tensor:
        layer: Any = self
        weight = layer.weight if isinstance(self, nn.Linear) else layer.weight.T  # of a Conv1D
        x = in_autocast(x)
        y = F.linear(x, weight) if weight.dtype == x.dtype else FrozenProduct.apply(x, weight.to)
        return y if layer.bias is None else y + layer.bias.to(y.dtype)


class HeldEmbedding(nn.Module):
    """An embedding; its output is float32, as the residual stream."""

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = super().forward(tokens)
        return x.float() if x.dtype == HELD else x


def _part_for(module: nn.Module) -> type[nn.Module] | None:
    if type(module) is nn.Linear or type(module).__name__ == "Conv1D":
        return HeldLinear
    # Gemma's embedding rounds a factor to the precision of its table.
    return HeldEmbedding if type(module) is nn.Embedding else None


def in_autocast(x: Tensor) -> Tensor:
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


class FrozenProduct(torch.autograd.Function):
    """A product with `matrix(dtype)`, which is made again for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, matrix: Callable[[torch.dtype], Tensor], bias: Tensor | None = None
    ) -> Tensor:
        ctx.matrix = matrix
        return F.linear(x, matrix(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad @ ctx.matrix(grad.dtype), None, None


class Linear4bit(nn.Linear):
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
        return self.in_features * self.out_features

    def quantise(self, weight: Tensor) -> None:
        weight = weight.to(self.qweight.device)
        codes, state = _bitsandbytes().quantize_4bit(weight, blocksize=BLOCK, quant_type="nf4")
        self.qweight.copy_(codes)
        self.scales.copy_(state.absmax)

    def matrix(self, dtype: torch.dtype = torch.float32) -> Tensor:
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
        layer = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        layer.weight, layer.bias = nn.Parameter(self.matrix()), self.bias
        return layer


def _bitsandbytes() -> Any:
    require("bitsandbytes", 'model.lora.base = "4bit"')
    return importlib.import_module("bitsandbytes.functional")


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16  # of both sizes of every operand, for the kernels of cuBLAS
CAPABILITY = (8, 9)  # Ada and Hopper are the first with units for float8
NARROWEST = 128  # a smaller matrix gains nothing: adapters, the routers of experts
Rounded = tuple[Tensor, Tensor]  # in float8, and the float32 scale that it is multiplied by


def rounded(x: Tensor, dtype: torch.dtype) -> Rounded:
    """A tensor in float8, in rows; a number that is not finite makes every product with it so."""
    largest = torch.linalg.vector_norm(x, math.inf, dtype=torch.float32)
    scale = largest.clamp(min=1e-12) / torch.finfo(dtype).max
    return (x.float() / scale).to(dtype, memory_format=torch.contiguous_format), scale


def product(a: Rounded, b: Rounded, fast: bool = False) -> Tensor:
    """The product a @ b.T in bf16, of [M, K] and [N, K]; `fast`: a GPU may sum in fewer bits."""
    if a[0].device.type == "cpu":  # torch's own kernel takes minutes
        with torch.autocast("cpu", enabled=False):
            return (a[0].float() @ b[0].float().T * (a[1] * b[1])).bfloat16()
    how: Any = {"out_dtype": torch.bfloat16, "use_fast_accum": fast}
    return torch._scaled_mm(a[0], b[0].T, scale_a=a[1], scale_b=b[1], **how)


def turned(a: Rounded) -> Rounded:
    return a[0].T.contiguous(), a[1]


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        a = rounded(x, E4M3)
        ctx.save_for_backward(*a, w)
        # FSDP2 gathers weights in bf16; every strategy multiplies the same numbers.
        return product(a, rounded(w.bfloat16(), E4M3), fast=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        x, scale, w = ctx.saved_tensors
        g, of_x, of_w = rounded(grad, E5M2), None, None
        if ctx.needs_input_grad[0]:
            of_x = product(g, turned(rounded(w.bfloat16(), E4M3)))
        if ctx.needs_input_grad[1]:
            of_w = product(turned(g), turned((x, scale))).to(w.dtype)
        return of_x, of_w


class Float8Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        # The kernel for the weights' gradient takes a multiple of MULTIPLE tokens.
        if not self.training or x[..., 0].numel() % MULTIPLE:
            return super().forward(x)
        y = _Product.apply(x.flatten(0, -2).bfloat16(), self.weight)
        y = y.unflatten(0, x.shape[:-1])
        return y if self.bias is None else y + self.bias.to(y.dtype)


def use_float8(blocks: list[nn.Module], device: torch.device) -> None:
    """Have the linear layers of `blocks` multiply in float8, in place; UserError if none can."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < CAPABILITY:
        problem = f"{torch.cuda.get_device_name(device)} is older than Ada and Hopper"
        raise UserError(f'train.precision = "float8": {problem}: write "auto"')
    count = 0
    for module in [module for block in blocks for module in block.modules()]:
        if type(module) is nn.Linear:
            sizes = module.in_features, module.out_features
            if min(sizes) >= NARROWEST and not any(size % MULTIPLE for size in sizes):
                module.__class__ = Float8Linear
                count += 1
    if not count:
        problem = f"no linear layer of a block has sizes from {NARROWEST} that {MULTIPLE} divides"
        raise UserError(f'train.precision = "float8": {problem}: write "auto"')
