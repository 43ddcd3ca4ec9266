"""Causal attention with dropout, its cache, and attention within the documents of a row.

Within documents it is flash attention on a GPU in bf16 or fp16 without dropout, and a product for
each document on a CPU. Otherwise it takes a mask [B, 1, T, T], which all blocks share: with dropout
(so that the layout changes no dropout mask), in short rows, and in a CPU's compiled blocks.

Legend: B batch, T time (tokens of this pass), S time seen (T and the cached tokens), H heads, K key
and value heads, E width of a head.
"""

from __future__ import annotations

import inspect
import itertools
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from windlass.model.quantised import product_dtype


def dropped(x: Tensor, rate: float) -> Tensor:
    if not rate:
        return x
    if x.device.type == "cpu" and not torch.compiler.is_compiling():
        return x * dropout_mask(x.shape, rate, x)
    return F.dropout(x, rate)


def dropout_mask(shape: Sequence[int], rate: float, like: Tensor) -> Tensor:
    """A mask of 0 and 1 / (1 - rate) in the precision and on the device of `like`.

    On a CPU each element takes 16 bits of numpy's SFC64, which torch's generator seeds: several
    times faster than torch's own numbers (docs/LOG.md).
    """
    if like.device.type != "cpu" or torch.compiler.is_compiling():
        return F.dropout(like.new_ones(shape), rate)
    count, lowest = math.prod(shape), -(1 << 15)
    generator = np.random.SFC64(int(torch.randint(1 << 62, ())))
    words = torch.from_numpy(generator.random_raw(-(-count // 4)).view(np.int16))
    dropped_values = round(rate * (1 << 16))
    # In place, because torch converts a bool slowly.
    kept = torch.ge(words, lowest + dropped_values, out=words)[:count].view(shape)
    return kept.to(like.dtype).mul_((1 << 16) / ((1 << 16) - dropped_values))


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor, mask: Tensor | None = None
) -> Tensor:
    """Attention of [B, H, T, E] to [B, K, S, E] with a dropout mask [B, H, T, S].

    `mask` is added to the scores; without it the last T of S tokens attend causally.
    """
    T, S = q.shape[2], k.shape[2]
    if q.shape[1] != k.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    if mask is None:
        mask = torch.full((T, S), -math.inf, dtype=q.dtype, device=q.device).triu(S - T + 1)
    assert mask.dtype != torch.bool  # a bool would add 1, not -inf
    scores = (q / math.sqrt(q.shape[3])) @ k.transpose(2, 3) + mask
    return (scores.softmax(-1) * keep).to(v.dtype) @ v


HALF = (torch.float16, torch.bfloat16)
MASKED_TOKENS = 128  # in a row on a CPU; longer rows are faster with products (docs/LOG.md)


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Any = None, causal: bool = False, dropout: float = 0.0
) -> Tensor:
    """`scaled_dot_product_attention` of [B, H, T, E] to [B, K, S, E], for K heads or fewer."""
    masked = type(mask) is Tensor  # not torch's `CausalBias`
    if dropout and q.device.type == "cpu" and not torch.compiler.is_compiling():
        keep = dropout_mask((*q.shape[:3], k.shape[2]), dropout, q)
        return masked_attention(q, k, v, keep, mask if masked else None)
    # On a GPU only flash attention and cuDNN share heads of keys; torch's own product would compute
    # and keep all T x S scores.
    fused = q.device.type != "cuda" or (q.dtype == torch.bfloat16 and not masked)
    if q.shape[1] != k.shape[1] and not fused:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    gqa = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, mask, dropout, causal, enable_gqa=gqa)


class LayerCache:
    def __init__(self, batch: int, capacity: int):
        self.batch, self.capacity, self.length = batch, capacity, 0
        self.keys = self.values = torch.empty(0)

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Add keys and values [B, K, T, E]; returns all of them [B, K, S, E], and the mask [T, S].

        The mask is None if the cache was empty (causal), and for one new token, which sees all.
        """
        start, stop = self.length, self.length + k.shape[2]
        assert k.shape[0] == self.batch and stop <= self.capacity, "the cache is too small"
        if not start:
            shape = (*k.shape[:2], self.capacity, k.shape[3])
            self.keys, self.values = k.new_empty(shape), v.new_empty(shape)
        self.keys[:, :, start:stop], self.values[:, :, start:stop] = k, v
        self.length = stop
        mask = None
        if start and stop - start > 1:
            mask = torch.ones(stop - start, stop, dtype=torch.bool, device=k.device).tril(start)
        return self.keys[:, :, :stop], self.values[:, :, :stop], mask


class Documents:
    """The documents of a micro-batch, for `forward(..., documents=...)`.

    `numbers`: each token's document in its row [B, T], on the host. `positions`: its place there.
    """

    def __init__(self, numbers: Tensor, positions: Tensor):
        self.numbers, self.positions = numbers, positions

    @property
    def several(self) -> bool:
        return bool((self.numbers[:, 0] != self.numbers[:, -1]).any())

    def within(self, blocks: Sequence[Any], rate: float) -> Callable[[int, int], Spans]:
        """Spans from a first to before a last token, for blocks with dropout at `rate`."""
        device, attention = self.positions.device, blocks[0].attn
        dtype = product_dtype(attention.qkv.weight)
        if device.type == "cpu":
            compiled = any(hasattr(b.forward, "_torchdynamo_orig_callable") for b in blocks)
            short = self.numbers.shape[1] <= MASKED_TOKENS and self.several
            masked = compiled or short or rate > 0
        else:
            fits = attention.head_width % 8 == 0 and attention.head_width <= 256 and dtype in HALF
            flash = fits and torch.cuda.get_device_capability(device) >= (8, 0)
            masked = rate > 0 or not flash
        return partial(Spans, self, dtype=dtype if masked else None)


def documents_of(batch: Any, model: nn.Module) -> dict[str, Documents]:
    """The argument `documents` of a model's forward pass, if rows have several."""
    if batch.documents is None or not takes_documents(model):
        return {}
    return {"documents": Documents(batch.documents, batch.positions)}


def takes_documents(model: nn.Module) -> bool:
    """Whether a model's forward pass keeps documents apart; a user's module may not."""
    network = model.module if isinstance(model, DistributedDataParallel) else model
    return "documents" in inspect.signature(type(network).forward).parameters


class Spans:
    """The documents of all rows, end to end, by their lengths among the T queries and S keys."""

    def __init__(
        self, documents: Documents, first: int, stop: int, dtype: torch.dtype | None = None
    ):
        """For the tokens from `first` to before `stop` in each row, with a mask in `dtype` (None:
        without one). Tokens past the row's end (padding) belong to its last document."""
        numbers, device = documents.numbers, documents.positions.device
        rows, length = numbers.shape
        begins = torch.ones_like(numbers, dtype=torch.bool)
        begins[:, 1:] = numbers.diff(dim=1) != 0
        self.queries, self.keys = list[int](), list[int]()
        for row in begins:
            starts = [start for start in row.nonzero().flatten().tolist() if start < stop]
            for start, end in itertools.pairwise([*starts, stop]):
                self.queries.append(max(0, end - max(start, first)))
                self.keys.append(end - start)
        assert sum(self.queries) == rows * (stop - first) and sum(self.keys) == rows * stop
        self.mask: Tensor | None = None  # [B, 1, T, S], of numbers to add to the scores
        self.edges: tuple[Tensor, Tensor] | None = None
        if dtype is not None:
            # On the device, because the host waits for a large tensor's copy. In its last form,
            # because attention would convert it once for each block, and save the results.
            own = numbers.to(device, non_blocking=True)
            own = own[:, torch.arange(stop, device=device).clamp(max=length - 1)]
            seen = (own[:, first:, None] == own[:, None, :]).tril(first).unsqueeze(1)
            self.mask = torch.zeros(seen.shape, dtype=dtype, device=device)
            self.mask.masked_fill_(~seen, -torch.inf)
        elif device.type == "cuda":
            self.edges = edges_of(self.queries, device), edges_of(self.keys, device)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
        """Causal attention of [B, H, T, E] to [B, K, S, E] within each document."""
        if self.edges is not None:
            from windlass.model.flash import flash

            ends = end_to_end(q), end_to_end(k), end_to_end(v)
            y = flash(*ends, self.edges, q.shape[2], k.shape[2])
            return y.unflatten(0, (q.shape[0], -1)).transpose(1, 2)
        if self.mask is not None:
            return attend(q, k, v, self.mask, dropout=dropout)
        if self.queries == [k.shape[2]] * q.shape[0]:  # each row is one document
            return attend(q, k, v, causal=True, dropout=dropout)
        from torch.nn.attention.bias import causal_lower_right  # imports torch._dynamo

        lengths, outputs = (self.queries, self.keys, self.keys), list[Tensor]()
        # One `split` has one backward pass; slices would each write a gradient of the whole.
        parts = (end_to_end(x).split(n) for x, n in zip((q, k, v), lengths, strict=True))
        for document in zip(*parts, strict=True):
            own, seen = len(document[0]), len(document[1])
            if not own:
                continue
            last = None if own == seen else causal_lower_right(own, seen)
            heads = [x.transpose(0, 1).unsqueeze(0) for x in document]
            y = attend(heads[0], heads[1], heads[2], last, own == seen, dropout)
            outputs.append(y.squeeze(0).transpose(0, 1))
        return torch.cat(outputs).unflatten(0, (q.shape[0], -1)).transpose(1, 2)


def end_to_end(x: Tensor) -> Tensor:
    """[B, H, T, E] -> [B T, H, E]."""
    return x.transpose(1, 2).flatten(0, 1)


def edges_of(lengths: list[int], device: torch.device) -> Tensor:
    """Where documents begin, int32 [N + 1], padded by the end of all to a power of two N."""
    edges = list(itertools.accumulate(lengths, initial=0))
    size = 1 << (len(lengths) - 1).bit_length()
    padded = edges + [edges[-1]] * (size + 1 - len(edges))
    tensor = torch.tensor(padded, dtype=torch.int32).to(device, non_blocking=True)
    if compiler := sys.modules.get("torch._dynamo"):
        compiler.maybe_mark_dynamic(tensor, 0)  # one graph for every N
    return tensor
