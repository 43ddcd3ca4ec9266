"""What a forward pass of our GPT keeps for the backward pass, in bytes, tensor by tensor.

Legend: N tokens of the micro-batch, D width, K width of all keys, F hidden width, H heads, V vocabulary; c bytes of a
number in matrix products, m bytes of a master weight. The residual stream and the norms stay in the master precision;
matrix products and what follows them are in the precision of the pass.

The tests compare these sums with what autograd saves and PyTorch's allocator hands out, on a CPU. On CUDA norms and
dropout have kernels of their own, which keep less.
"""

from __future__ import annotations

from dataclasses import dataclass

from windlass.model.size import block_matrices
from windlass.recipe.settings import ModelSettings

CHUNK_BYTES = {"cpu": 2**25, "cuda": 2**29}
"""Logits that `windlass.model.loss` holds at a time; that module needs torch, so a test keeps the two equal."""

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

    @property
    def tokens(self) -> int:
        """N, padding included."""
        return self.batch * self.model.context

    @property
    def stream(self) -> int:
        """One copy of the residual stream [N, D]."""
        return self.tokens * self.model.width * self.master_bytes

    @property
    def hidden(self) -> int:
        """One copy of the inside of the feed-forward layer [N, F]."""
        return self.tokens * self.model.ff_width_ * self.compute_bytes

    @property
    def kv_width(self) -> int:
        """K."""
        return self.model.width // self.model.heads * self.model.kv_heads_


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
    model, n, c, d, k = p.model, p.tokens, p.compute_bytes, p.model.width, p.kv_width
    saved = n * d * c  # the input
    upcast = model.qk_norm and p.device == "cpu" and c < 4  # queries and keys are cast to fp32 to be normalised
    if model.qk_norm:
        saved += n * (model.heads + model.kv_heads_) * p.master_bytes + (n * (d + k) * 4 if upcast else 0)
    # No kernel takes dropout on a CPU, or grouped queries in fp32 on CUDA: whole T x T matrices are saved then.
    plain = model.dropout > 0 if p.device == "cpu" else c >= 4 and model.kv_heads_ != model.heads
    if not plain or (model.qk_norm and not upcast):
        saved += n * (d + 2 * k) * c  # queries, keys and values, which are one tensor
    if plain:
        wide = max(4, c)  # the plain path computes in fp32
        squares = (
            p.batch * model.heads * model.context**2 * (3 if model.dropout else 1)
        )  # with its mask and the product
        return saved + squares * wide + 3 * n * d * wide + n * d * c
    if model.qk_norm or model.position == "rope":
        saved += n * (d + k) * c  # queries and keys again, after what was done to them
    return saved + n * d * c + n * model.heads * max(4, c)  # the result, and a log-sum-exp for each head


def feed_forward_bytes(p: Pass) -> int:
    """From the input of the feed-forward layer to the input of its last matrix."""
    copies = {"gelu": 2, "gelu_tanh": 2, "relu": 1, "relu2": 2, "swiglu": 4}[p.model.activation]
    inputs = 2 if p.model.activation == "swiglu" and p.compute_bytes < p.master_bytes else 1  # autocast casts it twice
    return inputs * p.tokens * p.model.width * p.compute_bytes + copies * p.hidden


def block_bytes(p: Pass) -> int:
    """All that a block keeps without activation checkpointing, copies of its weights left out."""
    dropouts = 2 * dropout_bytes(p, p.tokens * p.model.width, p.compute_bytes)
    return 2 * norm_bytes(p) + attention_bytes(p) + feed_forward_bytes(p) + dropouts


def weight_copies(p: Pass) -> int:
    """A block's matrices in the precision of the pass, which autocast makes and the backward pass needs."""
    return block_matrices(p.model) * p.compute_bytes if p.compute_bytes < p.master_bytes else 0


def saved_by_block(p: Pass, checkpointing: str) -> int:
    """What a block keeps until the backward pass reaches it."""
    if checkpointing == "none":
        return block_bytes(p)
    saved = p.stream + RNG_BYTES[p.device]
    if checkpointing == "full":
        return saved
    model, n, c, d = p.model, p.tokens, p.compute_bytes, p.model.width
    matrices = n * (d + 2 * p.kv_width) * c + 2 * n * d * c + (2 if model.activation == "swiglu" else 1) * p.hidden
    attention = 0 if model.dropout else n * d * c + n * model.heads * max(4, c)
    return saved + matrices + attention


def recomputed(p: Pass, checkpointing: str) -> int:
    """What the backward pass of a block computes again before it begins."""
    return 0 if checkpointing == "none" else max(0, block_bytes(p) - saved_by_block(p, checkpointing))


def backward_bytes(p: Pass) -> int:
    """Gradients of activations beside what a block saved: of the stream, and inside the feed-forward layer."""
    copies = {"swiglu": 2, "relu2": 3}.get(p.model.activation, 1)  # the derivative of a square takes two copies more
    return p.stream + copies * p.hidden


def root_bytes(p: Pass) -> int:
    """Outside the blocks and the loss: tokens and labels, dropout of the embedding, final norm, the head's input."""
    n, d = p.tokens, p.model.width
    saved = 16 * n + dropout_bytes(p, n * d, p.master_bytes)
    if p.model.position == "rope":
        saved += 2 * p.model.context * (d // p.model.heads) * p.master_bytes  # the tables that all blocks share
    if p.model.final_norm:
        saved += norm_bytes(p)
    return saved + n * d * min(p.compute_bytes, p.master_bytes)


@dataclass(frozen=True)
class Logits:
    """What the head and the loss take beside the rest."""

    forward: int
    """At most while the loss is computed."""
    saved: int
    """From there to the backward pass."""
    backward: int
    """At most while the backward pass goes through them."""


def logits_bytes(p: Pass) -> Logits:
    """The head and the loss: whole logits where they are small, a chunk at a time where they are not."""
    n, V, d, c, m = p.tokens, p.vocab, p.model.width, p.compute_bytes, p.master_bytes
    wide = max(4, c)
    chunk_limit = max(1, CHUNK_BYTES[p.device] // (4 * V))  # tokens
    head_copy = V * d * c if c < m else 0  # the head's matrix in the precision of the pass
    if n <= chunk_limit:
        capped = n * V * c if p.model.logit_cap else 0
        return Logits(*(copies * n * V * wide + capped + head_copy for copies in (2, 1, 3)))
    chunk = -(-n // -(-n // chunk_limit))  # equal chunks
    gradient = V * d * m + n * d * (c if c == m else c + m)  # made in the forward pass, chunk by chunk
    slope = chunk * V * wide if p.model.logit_cap else 0
    inside = max(2 * chunk * V * wide, chunk * V * (wide + c) + (V * d * c if c < wide else 0)) + slope
    return Logits(gradient + head_copy + inside, V * d * m + n * d * m, V * d * m + n * d * m)
