"""How large a GPT is: parameters, FLOPs, bytes. Arithmetic from the settings, without torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from windlass.recipe.network import ModelSettings

BYTES_FP32 = 4


@dataclass(frozen=True)
class Parameters:
    """Where the parameters of a GPT are; `total` is their sum, each tensor counted once. Biases count with their matrices."""

    embedding: int  # the token table; when the head is tied it is the head's matrix too
    positions: int  # the table of learned positions
    attention: int  # query, key, value and output projections of all blocks
    feed_forward: int
    norms: int  # before each sub-layer, and the final one
    head: int  # its own matrix and bias; 0 for a tied head without a bias
    tied: bool = False  # whether the head is the embedding's transpose

    @property
    def total(self) -> int:
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
    m, kv = settings, settings.width // settings.heads * settings.kv_heads_
    ups = 2 if m.activation == "swiglu" else 1
    norm = m.width * (2 if m.norm == "layernorm" and m.norm_bias else 1)
    return Parameters(
        embedding=vocab * m.width,
        positions=m.context * m.width if m.position == "learned" else 0,
        attention=m.layers
        * (m.width + m.attn_bias)
        * 2
        * (m.width + kv),  # a bias is one more column of inputs
        feed_forward=m.layers
        * (ups * (m.width + m.ff_bias) * m.ff_width_ + (m.ff_width_ + m.ff_bias) * m.width),
        norms=(2 * m.layers + m.final_norm) * norm,
        head=(0 if m.tie_head else vocab * m.width) + (vocab if m.head_bias else 0),
        tied=m.tie_head,
    )


def block_matrices(settings: ModelSettings) -> int:
    """Entries of the matrices of one block, without biases: what Muon takes."""
    bare = count(settings.model_copy(update={"attn_bias": False, "ff_bias": False}), vocab=0)
    return (bare.attention + bare.feed_forward) // settings.layers


def block_parameters(settings: ModelSettings) -> int:
    """Parameters of one block: the unit of sharding, checkpointing and compilation."""
    parts = count(settings, vocab=0)
    final = parts.norms // (2 * settings.layers + 1) if settings.final_norm else 0
    return (parts.non_embedding - final) // settings.layers


def flops_per_token(settings: ModelSettings, vocab: int, length: int = 0) -> int:
    """FLOPs of one token's forward and backward pass by the usual convention, with which MFU is computed: 6 N + 12 L d T.

    N is what every token is multiplied with, and 12 L d T is attention over all T places (`length`; 0: the model's context),
    the half that causality masks included (arXiv 2204.02311, appendix B). GPT-2 small at context 1,024: 855 MFLOP.
    """
    return 6 * count(settings, vocab).multiplied + 12 * settings.layers * settings.width * (
        length or settings.context
    )


def checkpoint_bytes(settings: ModelSettings, vocab: int, optimizer: str = "adamw") -> int:
    """Bytes of a checkpoint, without the few kB of documents: fp32 weights and optimizer state."""
    # AdamW has two moments of each parameter; Muon one of the blocks' matrices.
    tensors = 3 * count(settings, vocab).total
    return BYTES_FP32 * (
        tensors - (settings.layers * block_matrices(settings) if optimizer == "muon" else 0)
    )


Peaks = tuple[
    tuple[int, int, int], ...
]  # micro-batch, and the most bytes without and with gradients


@dataclass(frozen=True)
class CountedSizes:
    """The size of a model that is counted on its own parameters by `windlass.model.build.sizes_of`: of `transformers`, or
    our GPT with a part of it frozen."""

    total: int  # all parameters, each tensor once; with low-rank adapters those too
    trained: int  # that get gradients: all, the adapters alone, or those that `model.freeze` leaves
    vocab: int  # rows of its embedding
    network: dict[str, Any] = field(
        default_factory=dict
    )  # of `transformers`: architecture, layers, heads, ...
    positions: int = 0  # of `total` in our GPT's table of learned positions
    in_4bit: int = (
        0  # of all parameters those held in 4 bits, with a scale of 32 bits for each 64 of them
    )
    peaks: Peaks = ()  # of a step, where they were measured

    def peak(self, micro_batch: int) -> tuple[int, int]:
        """Bytes of a step beside weights and state, without and with gradients: on the line through those measured."""
        (n, *low), (m, *high) = self.peaks
        without, together = (
            a + (b - a) * (micro_batch - n) // (m - n) for a, b in zip(low, high, strict=True)
        )
        return without, together

    def weight_bytes(self, each: int = BYTES_FP32) -> int:
        """Bytes of the weights, with so many for each that is not in 4 bits."""
        return each * (self.total - self.in_4bit) + self.in_4bit * 9 // 16

    def flops_per_token(self) -> int:
        """FLOPs of a token's forward and backward pass, attention not counted: 6 N, and 4 N of the frozen weights."""
        return 4 * self.total + 2 * self.trained

    def checkpoint_bytes(self) -> int:
        """Bytes of a checkpoint with AdamW: all weights in fp32, and two moments of those that are trained."""
        return self.weight_bytes() + BYTES_FP32 * 2 * self.trained


def describe_network(network: dict[str, Any]) -> str:
    """`CountedSizes.network` in words: llama, 5 layers, 4 heads, width 64, vocabulary 512."""
    words = {
        "layers": "{} layers",
        "heads": "{} heads",
        "width": "width {}",
        "vocab": "vocabulary {:,}",
    }
    return ", ".join(
        [
            network["architecture"],
            *(text.format(network[k]) for k, text in words.items() if k in network),
        ]
    )


def describe_sizes(sizes: CountedSizes) -> str:
    """Parameters, those trained where they are not all, and of a model of `transformers` its network."""
    all_of_them = f"{sizes.total:,} parameters"
    if sizes.positions:  # as nanoGPT counts them
        rest = sizes.total - sizes.positions
        all_of_them += (
            f" ({f'{rest / 1e6:,.2f}M' if rest >= 1e6 else f'{rest:,}'} without positions)"
        )
    text = (
        all_of_them
        if sizes.trained == sizes.total
        else f"trainable {trainable(sizes.trained, sizes.total)}"
    )
    return f"{text}: {describe_network(sizes.network)}" if sizes.network else text


def trainable(trained: int, total: int) -> str:
    """What of a model is trained, as a report says it."""
    return f"{trained:,} of {total:,} ({100 * trained / total:.1f} %)"
