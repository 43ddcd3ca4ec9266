"""Documents to tokens on all cores, in order.

Workers are threads, because the tokenizers release Python's lock: nothing is forked, nothing outlives us.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from windlass.data.tokenizer import Tokenizer

BATCH_CHARACTERS = 1 << 18
"""Text that a worker gets at once: enough that the hand-over costs nothing."""

Piece = tuple[int, str, bool, bool]
"""Number of the document, a stretch of it, whether it is its first and its last."""
Encoded = tuple[int, np.ndarray, bool]
"""Number of the document, tokens of a stretch of it (int64 [n]), whether it is its last."""


def encode_documents(
    texts: Iterator[str], first: int, tokenizer: Tokenizer, eot: int | None, workers: int
) -> Generator[list[Encoded], None, None]:
    """The tokens of documents, in their order, some at a time; those of a long document in several stretches.

    Args:
        texts: The documents; at most about two batches a worker are read ahead.
        first: The number of the first of them.
        tokenizer: Its `encode` is called in several threads at once.
        eot: Put before the tokens of each document that has any; None: nothing is.
        workers: Threads.
    """
    start = np.array([] if eot is None else [eot], dtype=np.int64)

    def encode(batch: list[Piece]) -> list[Encoded]:
        found = []
        for number, text, begins, ends in batch:
            tokens = tokenizer.encode(text)
            found.append((number, np.concatenate([start, tokens]) if begins and len(text) else tokens, ends))
        return found

    batches = _batches(texts, first, tokenizer)
    with ThreadPoolExecutor(workers) as pool:
        waiting: deque[Future[list[Encoded]]] = deque()
        try:
            while True:
                while len(waiting) < 2 * workers and (batch := next(batches, None)) is not None:
                    waiting.append(pool.submit(encode, batch))
                if not waiting:
                    return
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def _pieces(texts: Iterator[str], first: int, tokenizer: Tokenizer) -> Iterator[Piece]:
    for number, text in enumerate(texts, first):
        parts = list(tokenizer.stretches(text)) or [""]
        for place, part in enumerate(parts, 1):
            yield number, part, place == 1, place == len(parts)


def _batches(texts: Iterator[str], first: int, tokenizer: Tokenizer) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    size = 0
    for piece in _pieces(texts, first, tokenizer):
        batch.append(piece)
        size += len(piece[1]) + 64
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
