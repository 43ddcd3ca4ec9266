"""Which token comes next: temperature, top-k and top-p over a number that is a pure function of (seed, index, place)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from windlass.errors import UserError


@dataclass(frozen=True)
class Sampling:
    """How to go on from a prompt."""

    max_tokens: int = 128
    """Tokens to generate, at most."""
    temperature: float = 1.0
    """Logits are divided by it; 0: always the likeliest token."""
    top_k: int = 0
    """Choose among the k likeliest tokens; 0: among all."""
    top_p: float = 1.0
    """Choose among the likeliest tokens that together have this probability (arXiv 1904.09751)."""
    seed: int = 0
    """With the text's index and the token's place it determines every choice."""
    stop: frozenset[int] = field(default_factory=frozenset)
    """Tokens that end a text; they are not part of it."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise UserError(f"max-tokens must be at least 1, not {self.max_tokens}")
        if not self.temperature >= 0:
            raise UserError(
                f"the temperature cannot be negative, and {self.temperature} is; 0 takes the likeliest token"
            )
        if self.top_k < 0:
            raise UserError(f"top-k must be 0 (all tokens) or more, not {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top-p is a probability above 0 and at most 1, not {self.top_p}")


def uniform(seed: int, index: int, place: int) -> float:
    """A number in [0, 1) on a grid of 2^-32, fixed for ever by its three arguments."""
    text = f"windlass/sample/{seed}/{index}/{place}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little") / 2**32


def choose(logits: Tensor, sampling: Sampling, draws: Sequence[float]) -> Tensor:
    """The next token of each row.

    Args:
        logits: [B, V]
        sampling: Temperature, top-k and top-p, applied in this order.
        draws: One number in [0, 1) a row; the token is where the cumulated probability passes it.

    Returns:
        Token ids [B], int64.
    """
    if sampling.temperature == 0:
        return logits.argmax(-1)
    kept = keep(logits.double() / sampling.temperature, sampling.top_k, sampling.top_p)
    # In float64 the sum of 2^18 probabilities is exact far below the grid of the draws.
    cumulated = kept.softmax(-1).cumsum(-1)
    draw = torch.tensor(draws, dtype=torch.float64, device=logits.device).unsqueeze(-1)
    place = torch.searchsorted(cumulated, draw * cumulated[:, -1:], right=True).squeeze(-1)
    return place.clamp_(max=logits.shape[-1] - 1)


def keep(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """The logits [B, V] with -inf at the tokens that top-k and top-p leave out; ties at the edge of top-k stay."""
    if 0 < top_k < logits.shape[-1]:
        edge = logits.topk(top_k, -1).values[:, -1:]
        logits = logits.masked_fill(logits < edge, -torch.inf)
    if top_p < 1:
        ordered, order = torch.sort(logits, dim=-1, descending=True, stable=True)
        probabilities = ordered.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities  # the likeliest token has 0 before it: it always stays
        left_out = torch.zeros_like(before, dtype=torch.bool).scatter(-1, order, before >= top_p)
        logits = logits.masked_fill(left_out, -torch.inf)
    return logits
