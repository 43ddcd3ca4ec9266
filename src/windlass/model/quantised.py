"""Weights in bf16 or 4 bits (QLoRA, arXiv 2305.14314), and products in float8.

A copy of a frozen matrix in the precision of a pass lives only during a product.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from windlass.errors import UserError, require
from windlass.fileio import read_json
from windlass.model.sharding import become
from windlass.recipe.network import ModelSettings

BF16 = torch.bfloat16


def lower_frozen(model: nn.Module, settings: ModelSettings, directory: Path) -> None:
    """Put the frozen matrices of linear layers, embeddings and experts in bf16 if asked to.

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
    parts = {module: bf16_part(module) for module in model.modules()}
    for module in list(parts):
        # `peft` adds the product of an expert's adapter to the matrix, in the matrix's precision.
        if type(module).__name__ == "ParamWrapper":
            parts[module.get_base_layer()] = None  # type: ignore[operator]
    others = [p for m, part in parts.items() if part is None for p in m._parameters.values()]
    stay = {id(parameter) for parameter in others}  # a head tied to another kind of embedding
    lowered: dict[nn.Parameter, nn.Parameter] = {}
    for module, part in parts.items():
        if part is None:
            continue
        dimensions = 3 if part is Bf16Experts else 2
        matrices = {
            name: p
            for name, p in module._parameters.items()
            if p is not None and p.dim() == dimensions and not p.requires_grad and id(p) not in stay
        }
        for name, matrix in matrices.items():
            if matrix not in lowered:
                lowered[matrix] = nn.Parameter(matrix.detach().to(BF16), requires_grad=False)
            module._parameters[name] = lowered[matrix]
        if matrices:
            become(module, part)


def bf16_part(module: nn.Module) -> type[nn.Module] | None:
    """The class that a module with matrices in bf16 needs; None if they stay float32."""
    kind = type(module)
    if kind is nn.Linear or kind.__name__ == "Conv1D":
        return Bf16Linear
    if kind is nn.Embedding or kind.__name__.endswith("ScaledWordEmbedding"):
        return Bf16Embedding
    return Bf16Experts if kind.__name__.endswith("Experts") else None


def lower_trained(model: nn.Module) -> None:
    """Put the trained float32 parameters in bf16 (`train.master`)."""
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype == torch.float32:
            parameter.data = parameter.data.to(BF16)
    for module in model.modules():
        if type(module) is nn.Embedding and module.weight.dtype == BF16:
            become(module, Bf16Embedding)


def product_dtype(x: Tensor) -> torch.dtype:
    """The precision of a product with `x`: autocast's, if it is on, else the precision of `x`."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def raised(weight: Tensor, x: Tensor) -> Tensor:
    """A matrix in the precision of a product with `x`; under autocast, which casts it, as it is."""
    return weight if torch.is_autocast_enabled(x.device.type) else weight.to(x.dtype)


class Bf16Linear(nn.Module):
    """A linear layer; comes before its class in the order of inheritance, like the next two."""

    def forward(self, x: Tensor) -> Tensor:
        layer: Any = self
        weight = layer.weight if isinstance(self, nn.Linear) else layer.weight.T  # of a Conv1D
        x = x.to(product_dtype(x))
        y = F.linear(x, weight) if weight.dtype == x.dtype else FrozenProduct.apply(x, weight.to)
        return y if layer.bias is None else y + layer.bias.to(y.dtype)


class Bf16Embedding(nn.Module):
    """An embedding; its output is float32, as the residual stream."""

    def forward(self, tokens: Tensor) -> Tensor:
        table: Any = self
        x = nn.Embedding.forward(table, tokens)
        x = x.float() if x.dtype == BF16 else x
        # Gemma's own forward pass would round this factor to the precision of the table.
        return x * table.embed_scale if hasattr(table, "embed_scale") else x


class Bf16Experts(nn.Module):
    """The fused experts of a layer, with matrices [experts, outputs, inputs] or transposed.

    Their kernels compute in the precision of the matrices. In another one the backward pass raises
    the matrices and computes the layer again, so that no copy lives between the passes.
    """

    def forward(self, x: Tensor, *args: Any) -> Any:
        dtype = product_dtype(x)
        low = [name for name, p in self._parameters.items() if p is not None and p.dtype == BF16]
        if dtype == BF16 or not low:
            return super().forward(x, *args)

        def run(x: Tensor, *args: Any) -> Any:
            wide = {name: getattr(self, name).to(dtype) for name in low}
            return torch.func.functional_call(self, wide, (x, *args))  # comes back, without `low`

        if not torch.is_grad_enabled():
            return run(x, *args)
        return checkpoint(run, x, *args, use_reentrant=False, preserve_rng_state=False)


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


BLOCK = 64  # numbers that share a scale in 4 bits


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
        x = x.to(product_dtype(x))
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
FLOAT8_CAPABILITY = (8, 9)  # Ada and Hopper are the first GPUs with units for float8
NARROWEST = 128  # a smaller matrix gains nothing: adapters, the routers of experts


class Float8(NamedTuple):
    """A matrix, `scale * values`; a number that is not finite makes every product with it so."""

    values: Tensor  # in float8, in rows
    scale: Tensor  # float32

    @property
    def transposed(self) -> Float8:
        return Float8(self.values.T.contiguous(), self.scale)


def to_float8(x: Tensor, dtype: torch.dtype) -> Float8:
    largest = torch.linalg.vector_norm(x, math.inf, dtype=torch.float32)
    scale = largest.clamp(min=1e-12) / torch.finfo(dtype).max
    return Float8((x.float() / scale).to(dtype, memory_format=torch.contiguous_format), scale)


def float8_product(a: Float8, b: Float8, fast: bool = False) -> Tensor:
    """The product a @ b.T in bf16, of [M, K] and [N, K]; `fast`: a GPU may sum in fewer bits."""
    if a.values.device.type == "cpu":  # torch's own kernel takes minutes
        with torch.autocast("cpu", enabled=False):
            return (a.values.float() @ b.values.float().T * (a.scale * b.scale)).bfloat16()
    return torch._scaled_mm(
        a.values,
        b.values.T,
        scale_a=a.scale,
        scale_b=b.scale,
        out_dtype=torch.bfloat16,
        use_fast_accum=fast,
    )


class Float8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        a = to_float8(x, E4M3)
        ctx.save_for_backward(a.values, a.scale, w)
        # FSDP2 gathers weights in bf16; every strategy multiplies the same numbers.
        return float8_product(a, to_float8(w.bfloat16(), E4M3), fast=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        values, scale, w = ctx.saved_tensors
        g = to_float8(grad, E5M2)
        of_x = of_w = None
        if ctx.needs_input_grad[0]:
            of_x = float8_product(g, to_float8(w.bfloat16(), E4M3).transposed)
        if ctx.needs_input_grad[1]:
            of_w = float8_product(g.transposed, Float8(values, scale).transposed).to(w.dtype)
        return of_x, of_w


class Float8Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        # The kernel for the weights' gradient takes a multiple of MULTIPLE tokens.
        if not self.training or x[..., 0].numel() % MULTIPLE:
            return super().forward(x)
        y = Float8Product.apply(x.flatten(0, -2).bfloat16(), self.weight)
        y = y.unflatten(0, x.shape[:-1])
        return y if self.bias is None else y + self.bias.to(y.dtype)


def use_float8(blocks: list[nn.Module], device: torch.device) -> None:
    """Have the linear layers of `blocks` multiply in float8, in place; UserError if none can."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < FLOAT8_CAPABILITY:
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
