"""What a forward pass of our GPT keeps for the backward pass, in bytes, tensor by tensor.

Legend: n tokens in the micro-batch, d width, q and k width of all queries and of all keys, f hidden width, h heads,
V vocabulary; c bytes of a number in the pass's arithmetic, m bytes of a master weight. The residual stream and the norms
stay in the master's arithmetic; matrix products and what follows them are in the pass's.

The tests hold these sums against what PyTorch's allocator gave out, on a CPU. On CUDA norms and dropout have kernels of
their own, which keep less.
"""

from __future__ import annotations

from dataclasses import dataclass

from windlass.model.size import block_matrices
from windlass.recipe.settings import ModelSettings

CHUNK_BYTES = {"cpu": 2**25, "cuda": 2**29}
"""Logits that `windlass.model.loss` holds at a time; a test holds this equal to it."""

RNG_BYTES = {"cpu": 5056, "cuda": 5056 + 16}
"""The generators' states that activation checkpointing keeps for each block."""


@dataclass(frozen=True)
class Pass:
    """One forward pass of a micro-batch."""

    model: ModelSettings
    vocab: int
    batch: int
    compute_bytes: int
    """Bytes of a number in matrix products: 2 in bf16 and fp16."""
    master_bytes: int = 4
    device: str = "cpu"
    squares: bool = False
    """Attention without a kernel, whatever the settings say."""
    whole_logits: bool = False
    """The loss is made from all logits at once, whatever their size."""
    extra_hidden: int = 0
    """Copies of the feed-forward layer's inside that its activation keeps beyond those of ours."""
    frozen_head: bool = False
    """The head is not trained: no gradient is made of it."""

    @property
    def tokens(self) -> int:
        """Tokens, padding included."""
        return self.batch * self.model.context

    @property
    def stream(self) -> int:
        """One copy of the residual stream [B, T, D]."""
        return self.tokens * self.model.width * self.master_bytes

    @property
    def hidden(self) -> int:
        """One copy of the feed-forward layer's inside [B, T, F]."""
        return self.tokens * self.model.ff_width_ * self.compute_bytes


def _kv(m: ModelSettings) -> int:
    return m.width // m.heads * m.kv_heads_


def norm_bytes(p: Pass) -> int:
    """A normalisation keeps its input (the stream), and a mean and a scale a token."""
    if p.model.norm == "layernorm":
        return p.stream + 2 * p.tokens * p.master_bytes
    copies = 1 if p.device == "cuda" else 2  # without a kernel of its own it also keeps the scaled input
    return copies * p.stream + p.tokens * p.master_bytes


def dropout_bytes(p: Pass, numbers: int, width: int) -> int:
    """The mask of a dropout over so many numbers of so many bytes."""
    return 0 if not p.model.dropout else numbers * (1 if p.device == "cuda" else width)


def attention_bytes(p: Pass) -> int:
    """From the input of the projections to the input of the output projection."""
    m, n, c = p.model, p.tokens, p.compute_bytes
    d, k = m.width, _kv(m)
    kept = n * d * c
    wide = m.qk_norm and p.device == "cpu" and c < 4  # queries and keys are brought to fp32 to be normalised
    if m.qk_norm:
        kept += n * (m.heads + m.kv_heads_) * p.master_bytes + (n * (d + k) * 4 if wide else 0)
    plain = _plain_attention(p)
    if not plain or (m.qk_norm and not wide):
        kept += n * (d + 2 * k) * c  # queries, keys and values, which are one tensor
    if plain:
        return kept + _plain_bytes(p)
    if m.qk_norm or m.position == "rope":
        kept += n * (d + k) * c  # queries and keys again, after what was done to them
    return kept + n * d * c + n * m.heads * max(4, c)  # the result, and a log-sum-exp for each head


def _plain_attention(p: Pass) -> bool:
    """Whether no kernel takes it, so that whole T x T matrices are kept."""
    m = p.model
    if p.squares or p.device == "cpu":
        return p.squares or m.dropout > 0
    return p.compute_bytes >= 4 and m.kv_heads_ != m.heads


def _plain_bytes(p: Pass) -> int:
    m = p.model
    square = p.batch * m.heads * m.context**2
    wide = max(4, p.compute_bytes)  # the plain path computes in fp32
    squares = 3 if m.dropout else 1  # probabilities; with dropout its mask, and the product
    return square * wide * squares + 3 * p.tokens * m.width * wide + p.tokens * m.width * p.compute_bytes


def feed_forward_bytes(p: Pass) -> int:
    """From the input of the feed-forward layer to the input of its last matrix."""
    narrow = p.tokens * p.model.width * p.compute_bytes
    copies = {"gelu": 2, "gelu_tanh": 2, "relu": 1, "relu2": 2, "swiglu": 4}[p.model.activation]
    inputs = 2 if p.model.activation == "swiglu" and p.compute_bytes < p.master_bytes else 1  # autocast casts it twice
    return inputs * narrow + (copies + p.extra_hidden) * p.hidden


def block_bytes(p: Pass) -> int:
    """All that a block keeps without activation checkpointing, copies of its weights left out."""
    narrow = p.tokens * p.model.width
    return (
        2 * norm_bytes(p) + attention_bytes(p) + feed_forward_bytes(p) + 2 * dropout_bytes(p, narrow, p.compute_bytes)
    )


def weight_copies(p: Pass) -> int:
    """A block's matrices in the arithmetic of the pass, which autocast makes and the backward pass needs."""
    return block_matrices(p.model) * p.compute_bytes if p.compute_bytes < p.master_bytes else 0


def kept_by_block(p: Pass, checkpointing: str) -> int:
    """What a block keeps until the backward pass reaches it."""
    m, n, c = p.model, p.tokens, p.compute_bytes
    if checkpointing == "none":
        return block_bytes(p)
    kept = p.stream + RNG_BYTES[p.device]
    if checkpointing == "full":
        return kept
    products = n * (m.width + 2 * _kv(m)) * c + 2 * n * m.width * c + (2 if m.activation == "swiglu" else 1) * p.hidden
    attention = 0 if m.dropout else n * m.width * c + n * m.heads * max(4, c)
    return kept + products + attention


def recomputed(p: Pass, checkpointing: str) -> int:
    """What the backward pass of a block brings back before it begins."""
    return 0 if checkpointing == "none" else max(0, block_bytes(p) - kept_by_block(p, checkpointing))


def backward_bytes(p: Pass) -> int:
    """Gradients of activations beside what a block kept: of the stream, and of the feed-forward layer's inside."""
    return (
        p.stream + {"swiglu": 2, "relu2": 3}.get(p.model.activation, 1) * p.hidden
    )  # a square's takes two copies more


def root_bytes(p: Pass) -> int:
    """What lies outside the blocks and the loss: tokens and labels, dropout of the embedding, final norm, the head's input."""
    n, d = p.tokens, p.model.width
    kept = 16 * n + dropout_bytes(p, n * d, p.master_bytes)
    if p.model.position == "rope":
        kept += 2 * p.model.context * (d // p.model.heads) * p.master_bytes  # the tables that all blocks share
    if p.model.final_norm:
        kept += norm_bytes(p)
    return kept + n * d * (p.compute_bytes if p.compute_bytes < p.master_bytes else p.master_bytes)


@dataclass(frozen=True)
class Logits:
    """What the head and the loss take beside the rest."""

    forward: int
    """At most while the loss is made."""
    kept: int
    """From there to the backward pass."""
    backward: int
    """At most while the backward pass goes through them."""


def logits_bytes(p: Pass) -> Logits:
    """The head and the loss: whole logits where they are small, a chunk at a time where they are not."""
    n, V, d, c, m = p.tokens, p.vocab, p.model.width, p.compute_bytes, p.master_bytes
    wide = max(4, c)
    fit = max(1, CHUNK_BYTES[p.device] // (4 * V))
    copy = V * d * c if c < m else 0  # the head's matrix in the arithmetic of the pass
    if n <= fit or p.whole_logits:
        capped = n * V * c if p.model.logit_cap else 0
        return Logits(2 * n * V * wide + capped + copy, n * V * wide + capped + copy, 3 * n * V * wide + capped + copy)
    chunk = -(-n // -(-n // fit))
    of_head = 0 if p.frozen_head else V * d * m
    gradient = of_head + n * d * (c if c == m else c + m)
    slope = chunk * V * wide if p.model.logit_cap else 0
    inside = max(2 * chunk * V * wide, chunk * V * (wide + c) + (V * d * c if c < wide else 0)) + slope
    return Logits(gradient + copy + inside, of_head + n * d * m, of_head + n * d * m)
