"""Keys and values of the tokens so far, so that each new token of a text is one column of work."""

from __future__ import annotations

import torch
from torch import Tensor


class LayerCache:
    """One layer's keys and values; the buffers are made at the first pass, in its dtype and on its device."""

    def __init__(self, batch: int, capacity: int):
        self.batch, self.capacity, self.length = batch, capacity, 0
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Add the keys and values [B, K, T, E] of T new tokens.

        Returns:
            All keys and all values so far [B, K, S, E], and which of them each new token sees [T, S]; None for the usual
            causal mask (nothing came before) and for a single new token (it sees all).
        """
        start, new = self.length, k.shape[2]
        stop = start + new
        assert k.shape[0] == self.batch and stop <= self.capacity, "a cache takes only as much as it was made for"
        if self.keys is None or self.values is None:
            shape = (self.batch, k.shape[1], self.capacity, k.shape[3])
            self.keys, self.values = k.new_empty(shape), v.new_empty(shape)
        self.keys[:, :, start:stop] = k
        self.values[:, :, start:stop] = v
        self.length = stop
        mask = None
        if start and new > 1:
            mask = torch.ones(new, stop, dtype=torch.bool, device=k.device).tril(start)
        return self.keys[:, :, :stop], self.values[:, :, :stop], mask


class Cache:
    """The caches of all layers."""

    def __init__(self, layers: int, batch: int, capacity: int):
        self.layers = [LayerCache(batch, capacity) for _ in range(layers)]

    @property
    def length(self) -> int:
        """Tokens in each row so far."""
        return self.layers[0].length
