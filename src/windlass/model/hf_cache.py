"""What a model of `transformers` remembers of the tokens that it has read, and whether it really does.

Attention keeps keys and values, a recurrent network its states; some architectures keep them in a way of their own and
swallow a cache that they do not know without a word. So after the first pass we look whether the cache has been filled. Where
it has not, the tokens themselves are kept and read again in each pass: slower, and as right as without a cache.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

CACHE_NAMES = ("past_key_values", "cache_params")
"""Under which name a network takes a cache of `transformers`: attention and most hybrids, Mamba."""


class Memory:
    """The cache of one batch of texts, and their tokens so far [B, T]."""

    def __init__(self, cache: Any, name: str):
        self.cache, self.name = cache, name
        self.tokens: Tensor | None = None

    def read(self, model: Any, tokens: Tensor, **how: Any) -> Tensor:
        """Logits [B, 1, V] of the last of the tokens [B, T], which follow those read before."""
        first = self.tokens is None
        self.tokens = tokens if self.tokens is None else torch.cat([self.tokens, tokens], 1)
        if not first and tokens.shape[1] > 1 and getattr(model, "_is_stateful", False):
            self.cache = None  # recurrent networks go on from their state by one token at a time
        if self.cache is None:
            logits: Tensor = model(input_ids=self.tokens, use_cache=False, **how).logits
            return logits[:, -1:]
        logits = model(input_ids=tokens, **{self.name: self.cache}, use_cache=True, **how).logits
        if first and not is_filled(self.cache, tokens.shape[1]):
            self.cache = None
        return logits[:, -1:]


def new_memory(model: nn.Module) -> Memory:
    """An empty memory for a model of `transformers`; without a cache where its forward pass takes none by name."""
    from transformers import DynamicCache

    accepted = inspect.signature(model.forward).parameters
    name = next((name for name in CACHE_NAMES if name in accepted), "")
    return Memory(DynamicCache(config=model.config) if name else None, name)


def is_filled(cache: Any, length: int) -> bool:
    """Whether a cache holds what follows from reading `length` tokens: every layer's keys or states."""
    kinds = [layer for layer in cache.layers if type(layer).__name__ != "DummyLayer"]
    return bool(kinds) and all(_layer_is_filled(layer, length) for layer in kinds)


def _layer_is_filled(layer: Any, length: int) -> bool:
    states = getattr(layer, "has_previous_state", None)
    keys = hasattr(layer, "keys")
    if states is None and not keys:
        return False
    if states is not None and not all(states.values()):
        return False
    return not keys or bool(layer.is_initialized and layer.get_seq_length() == length)
