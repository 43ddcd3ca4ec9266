"""Dropout, and attention with a dropout mask.

Legend: B batch, T time, S time seen, H heads, K key and value heads, E width of a head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def draws_bits(x: Tensor) -> bool:
    """Whether Windlass draws the dropout masks of a tensor: on a CPU, outside compiled code."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def dropped(x: Tensor, rate: float) -> Tensor:
    """Dropout; it costs nothing at rate 0."""
    if not rate:
        return x
    return x * dropout_mask(x.shape, rate, x) if draws_bits(x) else F.dropout(x, rate)


def dropout_mask(shape: Sequence[int], rate: float, like: Tensor) -> Tensor:
    """A mask of 0 and 1 / (1 - rate) in the precision and on the device of `like`.

    Torch draws a mask on a CPU by one Bernoulli number for each element. 16 random bits for each
    take a sixth of the time, and change the rate by less than 1e-5.
    """
    if not draws_bits(like):
        return F.dropout(like.new_ones(shape), rate)
    count, lowest = math.prod(shape), -(1 << 15)
    words = torch.empty(-(-count // 4), dtype=torch.int64).random_(-(1 << 63), None)
    dropped_values = round(rate * (1 << 16))
    kept = words.view(torch.int16)[:count].view(shape) >= lowest + dropped_values
    return kept.to(like.dtype).mul_((1 << 16) / ((1 << 16) - dropped_values))


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor, mask: Tensor | None = None
) -> Tensor:
    """Attention with a dropout mask.

    Args:
        q, k, v: [B, H, T, E] and twice [B, K, S, E].
        keep: The dropout mask [B, H, T, S].
        mask: Numbers to add to the scores. Without it the last T of S tokens attend causally.
    """
    T, S = q.shape[2], k.shape[2]
    if q.shape[1] != k.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    if mask is None:
        mask = torch.full((T, S), -math.inf, dtype=q.dtype, device=q.device).triu(S - T + 1)
    assert mask.dtype != torch.bool  # a bool would add 1, not -inf
    scores = (q / math.sqrt(q.shape[3])) @ k.transpose(2, 3) + mask
    return (scores.softmax(-1) * keep).to(v.dtype) @ v
