"""Attention within documents: rows of several documents, of which each attends to itself alone.

A row's documents have numbers, and positions restart in each (`Batch.documents`, `.positions`).
Legend: B batch, T time, H heads, E head width.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def document_arguments(batch: Any) -> dict[str, Tensor]:
    """The arguments of a model's forward pass for rows of several documents; none for others."""
    if batch.documents is None or batch.positions is None:
        return {}
    return {"documents": batch.documents, "positions": batch.positions}


class Documents:
    """The documents of one pass, from their numbers, int64 [B, T]; made once for all blocks.

    On a CPU each document is a product of its own, so attention costs the sum of their squared
    lengths. On a GPU, and in compiled blocks, whose shapes must not vary, it is a mask.
    """

    def __init__(self, numbers: Tensor, blocks: list[nn.Module]):
        compiled = any(hasattr(block.forward, "_torchdynamo_orig_callable") for block in blocks)
        self.spans: list[tuple[int, int, int]] = []  # row, start and stop
        self.mask: Tensor | None = None  # bool [B, 1, T, T]
        if compiled or numbers.device.type != "cpu":
            same = numbers[:, :, None] == numbers[:, None, :]
            self.mask = same.tril().unsqueeze(1)
            return
        length = numbers.shape[1]
        for row, starts in enumerate(numbers.diff(dim=1).ne(0)):
            edges = [0, *(starts.nonzero().flatten() + 1).tolist(), length]
            self.spans += [(row, a, b) for a, b in itertools.pairwise(edges)]

    def attention(self, q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        """Causal attention within each document; queries and result [B, H, T, E]."""
        how: Any = {"dropout_p": dropout, "enable_gqa": q.shape[1] != k.shape[1]}
        if self.mask is not None:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask, **how)
        causal, rows = (
            partial(F.scaled_dot_product_attention, is_causal=True),
            [list[Tensor]() for _ in q],
        )
        for row, start, stop in self.spans:
            own = (part[row : row + 1, :, start:stop] for part in (q, k, v))
            rows[row].append(causal(*own, **how))
        return torch.cat([torch.cat(parts, dim=2) for parts in rows])
