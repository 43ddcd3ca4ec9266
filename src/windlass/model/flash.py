"""Flash attention within documents, on a GPU. Its import brings torch's compiler with it."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

# In torch 2.11 the kernel takes fewer heads of keys without this argument.
GQA: Any = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def flash(
    q: Tensor, k: Tensor, v: Tensor, edges: tuple[Tensor, Tensor], longest_q: int, longest_k: int
) -> Tensor:
    """Causal attention of [B T, H, E] to [B S, K, E]; a document's last query sees its last key."""
    return varlen_attn(  # type: ignore[no-any-return]
        q, k, v, *edges, longest_q, longest_k, window_size=(-1, 0), **GQA
    )
