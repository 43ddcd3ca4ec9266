"""The size of a GPT: parameters, FLOPs, bytes. Arithmetic from the settings, without torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from windlass.recipe.network import ModelSettings

BYTES_FP32 = 4
MASTER_BYTES = {"fp32": 4, "bf16": 2}  # of a weight, by `train.master`
UNIT_PARAMETERS = 2**20
"""Small blocks share a unit of FSDP2, with about this many parameters."""


@dataclass(frozen=True)
class Parameters:
    """The parameters of a GPT by place, biases with their matrices."""

    embedding: int  # the token table; when the head is tied it is the head's matrix too
    positions: int  # the table of learned positions
    block: int  # one of the blocks
    norm: int  # the final one
    non_embedding: int  # the blocks and the final norm (N of arXiv 2001.08361)
    head: int  # its own matrix; 0 for a tied head
    tied: bool = False  # whether the head is the embedding's transpose

    @property
    def total(self) -> int:
        return self.embedding + self.positions + self.non_embedding + self.head

    @property
    def multiplied(self) -> int:
        return self.non_embedding + self.head + (self.embedding if self.tied else 0)


def count(settings: ModelSettings, vocab: int) -> Parameters:
    m, kv = settings, settings.width // settings.heads * settings.kv_heads_
    ups = 2 if m.activation == "swiglu" else 1
    norm = m.width * (2 if m.norm == "layernorm" and m.norm_bias else 1)
    # A bias is one more column of inputs.
    attention = 2 * (m.width + m.attn_bias) * (m.width + kv)
    feed_forward = ups * (m.width + m.ff_bias) * m.ff_width_ + (m.ff_width_ + m.ff_bias) * m.width
    block = attention + feed_forward + 2 * norm
    return Parameters(
        embedding=vocab * m.width,
        positions=m.context * m.width if m.position == "learned" else 0,
        block=block,
        norm=m.final_norm * norm,
        non_embedding=m.layers * block + m.final_norm * norm,
        head=0 if m.tie_head else vocab * m.width,
        tied=m.tie_head,
    )


def block_matrices(settings: ModelSettings) -> int:
    """Entries of the matrices of one block, without biases; Muon trains these."""
    m, kv = settings, settings.width // settings.heads * settings.kv_heads_
    ups = 2 if m.activation == "swiglu" else 1
    return 2 * m.width * (m.width + kv) + (ups + 1) * m.width * m.ff_width_


def unit_blocks(blocks: int, parameters: int) -> int:
    """The consecutive blocks in a unit of FSDP2, if all blocks have `parameters` together."""
    units = min(blocks, -(-parameters // UNIT_PARAMETERS))
    return max(1, -(-blocks // max(1, units)))


def stage_layers(settings: ModelSettings, vocab: int, stages: int) -> list[int]:
    """The blocks of each stage, so that the slowest stage takes the least time.

    The last stage also computes the head. Later stages have more, as they hold fewer activations.
    """
    m = settings
    if stages == 1:
        return [m.layers]
    block = block_matrices(m) + m.context * m.width  # products a token; half of 2 T D in attention

    def slowest(last: int) -> int:
        others = -(-(m.layers - last) // (stages - 1))
        return max(others * block, last * block + vocab * m.width)

    last = min(range(1, m.layers - stages + 2), key=lambda n: (slowest(n), -n))
    each, more = divmod(m.layers - last, stages - 1)
    return [each + (stage >= stages - 1 - more) for stage in range(stages - 1)] + [last]


def flops_per_token(settings: ModelSettings, vocab: int, attended: float | None = None) -> int:
    """FLOPs of one token's forward and backward pass, 6 N + 12 L d T (arXiv 2204.02311, B).

    N parameters multiply every token; T is the context, or the mean positions `attended`.
    """
    seen = settings.context if attended is None else attended
    attention = round(12 * settings.layers * settings.width * seen)
    return 6 * count(settings, vocab).multiplied + attention


def block_of_moments(width: int) -> int:
    """The numbers of a row that share a scale in 8-bit moments; 0: moments are not in 8 bits."""
    return next((size for size in (256, 128, 64) if width % size == 0), 0)


def moment_bytes(optimizer: str, master: int = BYTES_FP32, width: int = 64) -> float:
    """Bytes of two moments of a weight of `master` bytes, in a matrix with rows of `width`."""
    block = block_of_moments(width) if optimizer == "adamw8bit" else 0
    return 2 * (1 + BYTES_FP32 / block) if block else 2.0 * master


Peaks = tuple[tuple[int, int, int], ...]  # micro-batch, peak bytes without and with gradients


@dataclass(frozen=True)
class CountedSizes:
    """The size of a model by a count of its parameters (`windlass.model.build.sizes_of`)."""

    total: int  # parameters, adapters included, each tensor once
    trained: int
    vocab: int  # rows of the embedding
    network: dict[str, Any] = field(default_factory=dict)  # of a model of `transformers`
    positions: int = 0  # parameters in our GPT's table of learned positions
    in_4bit: int = 0  # with a 32-bit scale for each 64
    in_bf16: int = 0
    peaks: Peaks = ()  # measured

    def peak(self, micro_batch: int) -> tuple[int, int]:
        """Bytes of a step besides weights and state, without and with gradients, from `peaks`."""
        (n, low, low_grads), (m, high, high_grads) = self.peaks[0], self.peaks[-1]
        more, each = micro_batch - n, max(1, m - n)
        grads = low_grads + (high_grads - low_grads) * more // each
        return low + (high - low) * more // each, grads

    @property
    def bytes_in_4bit(self) -> int:
        return self.in_4bit * 9 // 16  # codes and scales

    def weight_bytes(self, each: int = BYTES_FP32) -> int:
        """Bytes of the weights, with `each` for a weight that is in neither 4 bits nor bf16."""
        full = self.total - self.in_4bit - self.in_bf16
        return each * full + self.bytes_in_4bit + 2 * self.in_bf16

    def flops_per_token(self) -> int:
        """FLOPs per token without attention: 6 per trained parameter, 4 per frozen one."""
        return 4 * self.total + 2 * self.trained


def describe_network(network: dict[str, Any]) -> str:
    words = {"layers": "{} layers", "heads": "{} heads", "width": "width {}"}
    words |= {
        "vocab": "vocabulary {:,}",
        "added": "{:,} of its rows are new",
        "apart": "frozen because no text reaches it: {}",
    }
    parts = [text.format(network[key]) for key, text in words.items() if key in network]
    return ", ".join([network["architecture"], *parts])


def describe_sizes(sizes: CountedSizes) -> str:
    """Parameters, their trained part, and the network of a model of `transformers`."""
    text = f"{sizes.total:,} parameters"
    if sizes.trained != sizes.total:
        text = f"trainable {trainable(sizes.trained, sizes.total)}"
    elif sizes.positions:  # as nanoGPT counts them
        rest = sizes.total - sizes.positions
        shown = f"{rest / 1e6:,.2f}M" if rest >= 1e6 else f"{rest:,}"
        text += f" ({shown} without positions)"
    return f"{text}: {describe_network(sizes.network)}" if sizes.network else text


def trainable(trained: int, total: int) -> str:
    return f"{trained:,} of {total:,} ({100 * trained / total:.1f} %)"


CHUNK_BYTES = {"cpu": 2**27, "cuda": 2**29}
"""Bytes of the logits that `loss.py` holds at a time; small chunks read the head's matrix often."""


def loss_chunk(tokens: int, vocab: int, each: int, device: str) -> int:
    """The tokens of an even chunk of the loss, with `each` bytes for a logit; 0: all tokens.

    Autograd, which makes several copies, gets a quarter of CHUNK_BYTES or less.
    """
    limit = CHUNK_BYTES.get(device, CHUNK_BYTES["cuda"])
    if 4 * tokens * vocab <= limit // 4:
        return 0
    chunks = -(-tokens // max(1, limit // (each * vocab)))
    return -(-tokens // chunks)
