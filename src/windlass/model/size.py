"""How large a GPT is: parameters, FLOPs, bytes. Arithmetic from the settings, without torch."""

from __future__ import annotations

from dataclasses import dataclass

from windlass.recipe.settings import ModelSettings

BYTES_FP32 = 4


@dataclass(frozen=True)
class Parameters:
    """Where the parameters of a GPT are; `total` is their sum, each tensor counted once."""

    embedding: int
    """The token table; when the head is tied it is the head's matrix too."""
    positions: int
    """The table of learned positions."""
    attention: int
    """Query, key, value and output projections of all blocks, biases included."""
    feed_forward: int
    """Feed-forward layers of all blocks, biases included."""
    norms: int
    """Normalisations before each sub-layer and the final one."""
    head: int
    """The head's own matrix and bias; 0 for a tied head without a bias."""
    tied: bool = False
    """Whether the head is the embedding's transpose."""

    @property
    def total(self) -> int:
        """All parameters."""
        return self.embedding + self.positions + self.non_embedding + self.head

    @property
    def non_embedding(self) -> int:
        """Those of the blocks and the final norm: without token table, positions and head (N of arXiv 2001.08361)."""
        return self.attention + self.feed_forward + self.norms

    @property
    def multiplied(self) -> int:
        """Those that every token is multiplied with: all but the tables that are only looked up."""
        return self.non_embedding + self.head + (self.embedding if self.tied else 0)


def count(settings: ModelSettings, vocab: int) -> Parameters:
    """The parameters of a GPT with `vocab` rows in its embedding."""
    m = settings
    d, f, kv = m.width, m.ff_width_, m.width // m.heads * m.kv_heads_
    attention = _linear(d, d + 2 * kv, m.attn_bias) + _linear(d, d, m.attn_bias)
    ups = 2 if m.activation == "swiglu" else 1
    feed_forward = ups * _linear(d, f, m.ff_bias) + _linear(f, d, m.ff_bias)
    norm = d * (2 if m.norm == "layernorm" and m.norm_bias else 1)
    return Parameters(
        embedding=vocab * d,
        positions=m.context * d if m.position == "learned" else 0,
        attention=m.layers * attention,
        feed_forward=m.layers * feed_forward,
        norms=(2 * m.layers + m.final_norm) * norm,
        head=(0 if m.tie_head else vocab * d) + (vocab if m.head_bias else 0),
        tied=m.tie_head,
    )


def _linear(inputs: int, outputs: int, bias: bool) -> int:
    return inputs * outputs + (outputs if bias else 0)


def block_parameters(settings: ModelSettings) -> int:
    """Parameters of one block: the unit of sharding, checkpointing and compilation."""
    parts = count(settings, vocab=0)
    final = parts.norms // (2 * settings.layers + 1) if settings.final_norm else 0
    return (parts.non_embedding - final) // settings.layers


def flops_per_token(settings: ModelSettings, vocab: int, length: int = 0) -> int:
    """FLOPs of one token's forward and backward pass by the usual convention: 6 N + 12 L d T.

    N is what every token is multiplied with: all parameters but the tables that are only looked up (learned positions, and
    the embedding unless it is also the head). 12 L d T is attention over all T places, the half that causality masks
    included (arXiv 2204.02311, appendix B). GPT-2 small at context 1,024: 855 MFLOP. MFU is reckoned with it.

    Args:
        settings: The model.
        vocab: Rows of its embedding.
        length: T; 0: the model's context.
    """
    attention = 12 * settings.layers * settings.width * (length or settings.context)
    return 6 * count(settings, vocab).multiplied + attention


def block_matrices(settings: ModelSettings) -> int:
    """Entries of the matrices of one block, without biases: what each token is multiplied with, and what Muon takes."""
    m = settings
    d, kv = m.width, m.width // m.heads * m.kv_heads_
    return d * (d + 2 * kv) + d * d + (3 if m.activation == "swiglu" else 2) * d * m.ff_width_


def forward_flops(settings: ModelSettings, vocab: int, batch: int, length: int) -> int:
    """FLOPs of the matrix products of one forward pass over tokens [batch, length]: a multiplication and an addition each.

    Attention is counted over the full square, as `torch.utils.flop_counter` counts it. The backward pass takes twice as
    many (and a flash kernel repeats half of attention's forward pass in it).
    """
    attention = 2 * settings.width * length
    per_token = settings.layers * (block_matrices(settings) + attention) + vocab * settings.width
    return 2 * batch * length * per_token


def checkpoint_bytes(settings: ModelSettings, vocab: int, optimizer: str = "adamw") -> int:
    """Bytes of a checkpoint: fp32 weights and moments, without the few kB around them.

    AdamW keeps two moments of each parameter; Muon one of each matrix in the blocks.
    """
    tensors = 3 * count(settings, vocab).total
    if optimizer == "muon":
        tensors -= settings.layers * block_matrices(settings)
    return BYTES_FP32 * tensors


@dataclass(frozen=True)
class HfSizes:
    """The size of a model of `transformers`, counted on its own parameters by `windlass.model.hf.sizes_of`."""

    total: int
    """All parameters, each tensor once; with low-rank adapters those too."""
    trained: int
    """Parameters that get gradients: all, or the adapters alone."""
    vocab: int
    """Rows of its embedding."""

    def flops_per_token(self) -> int:
        """FLOPs of a token's forward and backward pass by the rule 6 N, attention not counted.

        Of a frozen weight it is 4 N: it needs no gradient of its own. A mixture of experts counts all of them.
        """
        return 4 * self.total + 2 * self.trained

    def checkpoint_bytes(self) -> int:
        """Bytes of a checkpoint with AdamW: all weights in fp32, and two moments of those that are trained."""
        return BYTES_FP32 * (self.total + 2 * self.trained)
