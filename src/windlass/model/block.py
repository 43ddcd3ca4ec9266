"""A block of a GPT: normalisation, causal self-attention, feed-forward layer.

Legend: B batch, T time (tokens of this pass), S time seen (T and the cached tokens), D model width,
H heads, K key and value heads, E = D / H width of a head.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from windlass.model.cache import LayerCache
from windlass.model.documents import Spans, attend
from windlass.model.rotary import RotaryEmbedding
from windlass.model.share import WHOLE, Rows, Share, drop
from windlass.recipe.network import ModelSettings


class Norm(nn.Module):
    """LayerNorm (arXiv 1607.06450) or RMSNorm (arXiv 1910.07467), with a weight, perhaps a bias."""

    def __init__(self, settings: ModelSettings):
        super().__init__()
        self.rms, self.eps = settings.norm == "rmsnorm", settings.norm_eps
        self.weight = nn.Parameter(torch.ones(settings.width))
        biased = settings.norm_bias and not self.rms
        self.bias = nn.Parameter(torch.zeros(settings.width)) if biased else None

    def forward(self, x: Tensor) -> Tensor:  # [..., D]
        # FSDP2 gathers weights in half precision; no CPU kernel mixes them with a float32 stream.
        weight, bias = self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype)
        with kept_low(x):
            if self.rms:
                return F.rms_norm(x, weight.shape, weight, self.eps)
            return F.layer_norm(x, weight.shape, weight, bias, self.eps)


class Attention(nn.Module):
    """Causal self-attention; neighbouring heads share a key and value head if there are fewer.

    `heads` and `kv_heads` are this rank's. If `cut_keys`, this rank computes only a part of a key
    and value head, the one with number `key_head`.
    """

    def __init__(self, m: ModelSettings):
        super().__init__()
        self.share, self.cut_keys, self.key_head = WHOLE, False, 0
        self.heads, self.kv_heads, self.head_width = m.heads, m.kv_heads_, m.width // m.heads
        self.qk_norm, self.norm_eps, self.dropout = m.qk_norm, m.norm_eps, m.dropout
        self.multiplier = m.multipliers.queries
        rows = (m.heads + 2 * m.kv_heads_) * self.head_width
        self.qkv = nn.Linear(m.width, rows, bias=m.attn_bias)
        self.out = nn.Linear(m.width, m.width, bias=m.attn_bias)

    def divide(self, share: Share) -> None:
        """Compute this rank's heads."""
        self.share = share
        if share.tensor is not None:
            rank, size = share.tensor.rank, share.tensor.size
            self.cut_keys = self.kv_heads < size
            self.key_head = rank * self.kv_heads // size
            self.heads, self.kv_heads = self.heads // size, max(1, self.kv_heads // size)

    def forward(
        self,
        x: Tensor,
        rotary: RotaryEmbedding | None = None,
        cache: LayerCache | None = None,
        rows: Rows | None = None,
        documents: Spans | None = None,
    ) -> Tensor:
        H, K, share = self.heads, self.kv_heads, self.share
        qkv = self.qkv(share.enter(x, rows))
        if self.cut_keys:
            qkv = share.share_keys(qkv, H * self.head_width, self.head_width, self.key_head)
        qkv = qkv.unflatten(-1, (H + 2 * K, self.head_width))  # [B, T, H + 2K, E]
        if rotary or self.qk_norm:
            qk, v = qkv.split([H + K, K], dim=2)  # one operation serves queries and keys
            if self.qk_norm:
                with kept_low(qk):
                    qk = F.rms_norm(qk, (self.head_width,), eps=self.norm_eps)
            if rotary:
                qk = rotary(qk)
            q, k = qk.to(v.dtype).split([H, K], dim=2)
        else:
            q, k, v = qkv.split([H, K, K], dim=2)
        q = multiplied(q, self.multiplier)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # [B, H or K, T, E]
        mask, rate = None, self.dropout if self.training else 0.0
        if cache:
            k, v, mask = cache.extend(k, v)  # [B, K, S, E]
        elif rows and (rate or rows.masks):
            y = share.attention(q, k, v, rows, rate)
            return self.project(y.transpose(1, 2).flatten(2))
        elif documents:
            y = documents.attention(q, k, v, rate)
            return self.project(y.transpose(1, 2).flatten(2))
        # A constant without a cache: a comparison with a varying size would break a graph.
        is_causal = mask is None and not (cache and q.shape[2] == 1)
        y = attend(q, k, v, mask, is_causal, rate)
        return self.project(y.transpose(1, 2).flatten(2))

    def project(self, y: Tensor) -> Tensor:
        """The output projection of this rank's heads."""
        return from_columns(self.out, y, self.share)


def from_columns(linear: nn.Linear, x: Tensor, share: Share) -> Tensor:
    """A linear layer with its columns divided over ranks; the whole bias is added to the sum."""
    if share.tensor is None:
        return linear(x)  # type: ignore[no-any-return]
    y = share.leave(F.linear(x, linear.weight))
    return y if linear.bias is None else y + linear.bias.to(y.dtype)


class FeedForward(nn.Module):
    """Two matrices with a non-linearity between them, or three with a gate."""

    def __init__(self, m: ModelSettings):
        super().__init__()
        self.share, self.activation = WHOLE, m.activation
        if m.activation == "swiglu":
            self.gate = nn.Linear(m.width, m.ff_width_, bias=m.ff_bias)
        self.up = nn.Linear(m.width, m.ff_width_, bias=m.ff_bias)
        self.down = nn.Linear(m.ff_width_, m.width, bias=m.ff_bias)

    def forward(self, x: Tensor, rows: Rows | None = None) -> Tensor:  # [B, T, D]
        x = self.share.enter(x, rows)
        h = self.up(x)
        match self.activation:
            case "swiglu":
                h = F.silu(self.gate(x)) * h
            case "gelu" | "gelu_tanh":
                h = F.gelu(h, approximate="tanh" if self.activation == "gelu_tanh" else "none")
            case "relu":
                h = F.relu(h)
            case "relu2":
                h = F.relu(h)
                h = h * h  # CUDA's autocast would compute `square` in float32
        return from_columns(self.down, h, self.share)


class Block(nn.Module):
    """Attention and feed-forward layer, each on the normalised stream and added to it."""

    def __init__(self, settings: ModelSettings):
        super().__init__()
        self.attn_norm, self.attn = Norm(settings), Attention(settings)
        self.ff_norm, self.ff = Norm(settings), FeedForward(settings)
        self.dropout = settings.dropout

    def forward(
        self,
        x: Tensor,
        rotary: RotaryEmbedding | None = None,
        cache: LayerCache | None = None,
        rows: Rows | None = None,
        documents: Spans | None = None,
    ) -> Tensor:
        rate = self.dropout if self.training else 0.0
        x = x + drop(self.attn(self.attn_norm(x), rotary, cache, rows, documents), rate, rows)
        return x + drop(self.ff(self.ff_norm(x), rows), rate, rows)


def kept_low(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """A context for the norm of `x`: autocast does not raise it to float32.

    The kernels add up in float32 by themselves.
    """
    low = x.dtype in (torch.bfloat16, torch.float16)
    return torch.autocast(x.device.type, enabled=False) if low else contextlib.nullcontext()


def multiplied(x: Tensor, factor: float) -> Tensor:
    """`x * factor`; it costs nothing for 1."""
    return x if factor == 1 else x * factor
