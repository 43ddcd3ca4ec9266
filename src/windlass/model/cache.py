"""The keys and values of the tokens so far, for generation.

Legend: B batch, T new tokens, S tokens with them, K key and value heads, E head width.
"""

from __future__ import annotations

import torch
from torch import Tensor


class LayerCache:
    """One layer's keys and values of `length` tokens; the first pass allocates them."""

    def __init__(self, batch: int, capacity: int):
        self.batch, self.capacity, self.length = batch, capacity, 0
        self.keys = self.values = torch.empty(0)

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Add the keys and values [B, K, T, E] of T new tokens.

        Returns all keys and all values so far [B, K, S, E], and the mask [T, S] of the tokens that
        each new token sees. The mask is None if the cache was empty (then it is the causal mask)
        and for a single new token, which sees all.
        """
        start, stop = self.length, self.length + k.shape[2]
        assert k.shape[0] == self.batch and stop <= self.capacity, "the cache is too small"
        if not start:
            shape = (*k.shape[:2], self.capacity, k.shape[3])
            self.keys, self.values = k.new_empty(shape), v.new_empty(shape)
        self.keys[:, :, start:stop], self.values[:, :, start:stop], self.length = k, v, stop
        mask = None
        if start and stop - start > 1:
            mask = torch.ones(stop - start, stop, dtype=torch.bool, device=k.device).tril(start)
        return self.keys[:, :, :stop], self.values[:, :, :stop], mask
