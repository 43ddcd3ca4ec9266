"""Rotary positions of queries and keys."""

from __future__ import annotations

import torch
from torch import Tensor


class RotaryEmbedding:
    """Rotary positions (arXiv 2104.09864): entries i and i + E/2 of a head turn by
    `position * theta ** (-2i / E)`.

    One pass makes it once for all blocks. It is not a module, so that no cast reaches its tables.
    """

    def __init__(self, theta: float, head_width: int, positions: Tensor, like: Tensor):
        dtype = torch.promote_types(like.dtype, torch.float32)
        half = torch.arange(0, head_width, 2, device=like.device, dtype=dtype) / head_width
        angles = positions.to(dtype).unsqueeze(-1) * theta**-half
        cos, sin = angles.cos(), angles.sin()
        self.cos = torch.cat([cos, cos], dim=-1).unsqueeze(-2)  # [T, 1, E] or [B, T, 1, E]
        self.sin = torch.cat([-sin, sin], dim=-1).unsqueeze(-2)

    def __call__(self, x: Tensor) -> Tensor:
        """Turn queries or keys [B, T, any, E]."""
        swapped = x.roll(x.shape[-1] // 2, dims=-1)
        return (x * self.cos + swapped * self.sin).to(x.dtype)
