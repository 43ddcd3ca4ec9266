"""The rows of the n-grams that end at each token, in a table that all n-grams share.

A token's embedding says nothing about the tokens before it; the first blocks must find them. A
table of n-grams knows the last 2 to `longest` tokens at once, and costs a look-up (arXiv
2501.16975). A hash selects the row, so some n-grams share one (arXiv 2412.09871, 3.2).

Legend: B batch, T tokens of a pass.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from windlass.model.cache import LayerCache
from windlass.model.documents import NO_TOKEN, Documents

MULTIPLIER = -7046029254386353131  # 2^64 / golden ratio, as a signed number (Knuth, TAOCP 3, 6.4)


def ngram_rows(
    tokens: Tensor,
    longest: int,
    rows: int,
    cache: LayerCache | None = None,
    documents: Documents | None = None,
) -> Tensor:
    """The row of each n-gram, n = 2 to `longest`, that ends at a token: int64 [B, T, longest - 1].

    Args:
        tokens: [B, T].
        rows: Of the table.
        cache: Where the last tokens of the pass before are; this pass leaves its own there.
        documents: An n-gram begins within the document of its last token.
    """
    new = tokens.shape[1]
    if cache is not None:
        if cache.length:
            tokens = torch.cat([cache.tokens, tokens], 1)
        cache.tokens = tokens[:, 1 - longest :]
    hashed, found = tokens, list[Tensor]()
    for k in range(1, longest):
        before = F.pad(tokens, (k, 0), value=NO_TOKEN)[:, : tokens.shape[1]]
        if documents is not None:
            before = documents.before(tokens, before, k)
        hashed = hashed * MULTIPLIER + before  # wraps
        found.append((hashed ^ (hashed >> 32)).remainder(rows))
    return torch.stack(found, -1)[:, -new:]
