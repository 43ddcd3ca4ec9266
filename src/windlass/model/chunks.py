"""How many logits the loss holds at a time; the plan of memory uses it too. No torch."""

from __future__ import annotations

CHUNK_BYTES = {"cpu": 2**27, "cuda": 2**29}
"""Bytes of the logits that `loss.py` holds at a time. With fewer tokens in a chunk, a CPU's products
read the head's matrix from memory too often: 33 tokens of BLOOM's vocabulary take 1.4 times as long
as 133."""


def loss_chunk(tokens: int, vocab: int, each: int, device: str) -> int:
    """The tokens of a chunk of the loss, with `each` bytes for a logit; 0: logits of all tokens.

    Chunks are even. Autograd, which makes several copies, gets a quarter of CHUNK_BYTES or less.
    """
    limit = CHUNK_BYTES.get(device, CHUNK_BYTES["cuda"])
    if 4 * tokens * vocab <= limit // 4:
        return 0
    chunks = -(-tokens // max(1, limit // (each * vocab)))
    return -(-tokens // chunks)
