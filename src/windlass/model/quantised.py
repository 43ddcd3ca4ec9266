"""Weights in bf16 or 4 bits (QLoRA, arXiv 2305.14314), and products in float8.

A copy of a frozen matrix in the precision of a pass lives only during a product.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from windlass.errors import UserError, require
from windlass.model.sharding import add_mixin

BF16 = torch.bfloat16


def lower_frozen(model: nn.Module) -> None:
    """Put the frozen matrices of linear layers, embeddings and experts in bf16."""
    mixins = dict[nn.Module, type[nn.Module] | None]()  # None: all parameters stay float32
    for module in model.modules():
        kind, name = type(module), type(module).__name__
        if module in mixins:
            continue
        if kind is nn.Linear or name == "Conv1D":
            mixins[module] = Bf16Linear
        elif kind is nn.Embedding or name.endswith("ScaledWordEmbedding"):
            mixins[module] = Bf16Embedding
        else:
            mixins[module] = Bf16Experts if name.endswith("Experts") else None
        # `peft` adds the product of an expert's adapter to the matrix, in the matrix's precision.
        if name == "ParamWrapper":
            mixins[module.get_base_layer()] = None
    others = [p for m, mixin in mixins.items() if mixin is None for p in m._parameters.values()]
    stay = {id(parameter) for parameter in others}  # a head tied to another kind of embedding
    lowered: dict[nn.Parameter, nn.Parameter] = {}
    for module, mixin in mixins.items():
        dimensions = 3 if mixin is Bf16Experts else 2
        has_low = False
        for name, p in module._parameters.items() if mixin else ():
            if p is None or p.dim() != dimensions or p.requires_grad or id(p) in stay:
                continue
            if p not in lowered:
                lowered[p] = nn.Parameter(p.detach().to(BF16), requires_grad=False)
            module._parameters[name] = lowered[p]
            has_low = True
        if mixin and has_low:
            add_mixin(module, mixin)


def lower_trained(model: nn.Module) -> None:
    """Put the trained float32 parameters in bf16 (`train.master`)."""
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype == torch.float32:
            parameter.data = parameter.data.to(BF16)
    for module in model.modules():
        if type(module) is nn.Embedding and module.weight.dtype == BF16:
            add_mixin(module, Bf16Embedding)


def product_dtype(x: Tensor) -> torch.dtype:
    """The precision of a product with `x`: autocast's, if it is on, else the precision of `x`."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def raised(weight: Tensor, x: Tensor) -> Tensor:
    """A matrix in the precision of a product with `x`; under autocast, which casts it, as it is."""
    return weight if torch.is_autocast_enabled(x.device.type) else weight.to(x.dtype)


class Bf16Linear(nn.Module):
    """Mixin of a linear layer (see `add_mixin`), like the next two."""

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


MULTIPLE = 16  # of both sizes of every operand, for the kernels of cuBLAS
FLOAT8_CAPABILITY = (8, 9)  # Ada and Hopper are the first GPUs with units for float8
NARROWEST = 128  # a smaller matrix gains nothing: adapters, the routers of experts


class TrainedInFloat8(nn.Module):
    """Mixin of a linear layer of torchao, which evaluates in the precision of a pass.

    It rounds its input before torchao does, whose backward pass then needs one byte a number.
    """

    def forward(self, x: Tensor) -> Tensor:
        from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic

        layer: Any = self
        if not self.training:
            return F.linear(x, layer.weight, layer.bias)
        dtype = layer.config.cast_config_input.target_dtype
        x = x.to(product_dtype(x))
        return super().forward(hp_tensor_to_float8_dynamic(x, dtype, layer.linear_mm_config))


def use_float8(blocks: list[nn.Module], device: torch.device) -> None:
    """Have the linear layers of `blocks` multiply in float8 in training, in place; UserError if
    none can. torchao emulates float8 on a CPU."""
    setting = 'train.precision = "float8"'
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    if device.type == "cuda" and torch.cuda.get_device_capability(device) < FLOAT8_CAPABILITY:
        problem = f"{torch.cuda.get_device_name(device)} is older than Ada and Hopper"
        raise UserError(f'{setting}: {problem}: write "auto"')

    def fits(module: Any, name: str) -> bool:
        sizes = module.in_features, module.out_features
        wide = min(sizes) >= NARROWEST and not any(size % MULTIPLE for size in sizes)
        return type(module) is nn.Linear and wide

    # `pad_inner_dim`: rows whose number MULTIPLE does not divide.
    config = Float8LinearConfig(emulate=device.type == "cpu", pad_inner_dim=True)
    convert_to_float8_training(nn.ModuleList(blocks), module_filter_fn=fits, config=config)
    inside = [module for block in blocks for module in block.modules()]
    converted = [module for module in inside if hasattr(module, "linear_mm_config")]
    if not converted:
        problem = f"no linear layer of a block has sizes from {NARROWEST} that {MULTIPLE} divides"
        raise UserError(f'{setting}: {problem}: write "auto"')
    for module in converted:
        add_mixin(module, TrainedInFloat8)
