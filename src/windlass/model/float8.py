"""Linear layers that multiply in float8, with one scale for each tensor (arXiv 2209.05433).

Inputs and weights are rounded to e4m3 (3 bits of mantissa, up to 448), gradients of outputs to e5m2
(2 bits, up to 57,344). The scale of a tensor moves its largest number to the format's largest; it
is computed anew in every pass, so a checkpoint has nothing to keep. Sums are float32, results bf16.

- The backward pass rounds the weight again, because a kept copy would be a whole one on each rank
  of FSDP2.
- Scales depend on all rows of a micro-batch. Evaluation multiplies in bf16, so that a row's result
  does not depend on the rows beside it.
- Without `train.compile` the rounding takes kernels of its own, and may cost what it saves.

A GPU multiplies with `torch._scaled_mm`. A CPU, whose kernel for it is 1,000 times slower than
float32's, multiplies the rounded numbers in float32.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from windlass.errors import UserError

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16  # of both sizes of every operand, for the kernels of cuBLAS
NARROWEST = 128  # a smaller matrix gains nothing: adapters, the routers of experts
CAPABILITY = (8, 9)  # Ada and Hopper are the first with units for float8
Rounded = tuple[Tensor, Tensor]
"""A tensor in float8, and the float32 scale that it is multiplied by."""


def rounded(x: Tensor, dtype: torch.dtype) -> Rounded:
    """A tensor in float8, in rows; what is not finite makes every product with it NaN or infinite."""
    largest = torch.linalg.vector_norm(x, math.inf, dtype=torch.float32)
    scale = largest.clamp(min=1e-12) / torch.finfo(dtype).max
    return (x.float() / scale).to(dtype, memory_format=torch.contiguous_format), scale


def product(a: Rounded, b: Rounded, fast: bool = False) -> Tensor:
    """The product a @ b.T in bf16, of [M, K] and [N, K], both contiguous.

    `fast`: a GPU may add up a part of the sums in fewer bits.
    """
    (x, x_scale), (y, y_scale) = a, b
    if x.device.type == "cpu":
        with torch.autocast("cpu", enabled=False):
            return (x.float() @ y.float().T * (x_scale * y_scale)).bfloat16()
    how: Any = {"scale_a": x_scale, "scale_b": y_scale, "use_fast_accum": fast}
    return torch._scaled_mm(x, y.T, out_dtype=torch.bfloat16, **how)


def turned(a: Rounded) -> Rounded:
    """The transposed tensor, whose rows have a multiple of MULTIPLE numbers."""
    x, scale = a
    if missing := -x.shape[0] % MULTIPLE:
        # Zeros add nothing to a product. Not every kernel that pads knows float8.
        x = F.pad(x.view(torch.uint8), (0, 0, 0, missing)).view(x.dtype)
    return x.T.contiguous(), scale


class _Product(torch.autograd.Function):
    """x @ w.T of x [M, K] in bf16 and w [N, K]."""

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
    """A linear layer that multiplies in float8 while it trains."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        y = _Product.apply(x.flatten(0, -2).bfloat16(), self.weight)
        y = y.unflatten(0, x.shape[:-1])
        return y if self.bias is None else y + self.bias.to(y.dtype)


def use_float8(blocks: list[nn.Module], device: torch.device) -> None:
    """Have the linear layers of `blocks` multiply in float8, in place; UserError if none can."""
    problem, count = "", 0
    if device.type == "cuda":
        about = torch.cuda.get_device_properties(device)
        problem = lacks_float8(about.name, (about.major, about.minor))
    if problem:
        raise UserError(f'train.precision = "float8": {problem}: write "auto"')
    for module in [module for block in blocks for module in block.modules()]:
        if type(module) is nn.Linear:
            sizes = module.in_features, module.out_features
            if min(sizes) >= NARROWEST and not any(size % MULTIPLE for size in sizes):
                module.__class__ = Float8Linear
                count += 1
    if not count:
        problem = f"no linear layer of a block has sizes from {NARROWEST} that {MULTIPLE} divides"
        raise UserError(f'train.precision = "float8": {problem}: write "auto"')


def lacks_float8(name: str, capability: tuple[int, int]) -> str:
    """Why a GPU cannot multiply in float8, or ""."""
    if capability >= CAPABILITY:
        return ""
    own, needed = (".".join(map(str, one)) for one in (capability, CAPABILITY))
    return f"{name} has compute capability {own}, and float8 needs {needed}"
