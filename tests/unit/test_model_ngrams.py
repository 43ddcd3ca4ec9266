"""Rows of n-grams, against integers of Python; texts in parts, packed, and side by side."""

import pytest
import torch

from windlass.model.cache import LayerCache
from windlass.model.documents import Branches, Documents
from windlass.model.ngrams import ngram_rows

ROWS = 1009


def by_hand(text: list[int], longest: int) -> list[list[int]]:
    """The rows at each token; -1 stands before the first one, and numbers wrap at 2^63."""
    found = []
    for place in range(len(text)):
        hashed, own = text[place], []
        for k in range(1, longest):
            before = text[place - k] if place >= k else -1
            hashed = hashed * (2**64 - 7046029254386353131) + before
            hashed = (hashed + 2**63) % 2**64 - 2**63
            own.append((hashed ^ (hashed >> 32)) % ROWS)
        found.append(own)
    return found


def texts(*sizes: int) -> list[list[int]]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randint(50_000, (size,), generator=draw).tolist() for size in sizes]


@pytest.mark.parametrize("longest", [2, 3, 5])
def test_rows_by_hand(longest):
    rows = texts(40, 40)
    found = ngram_rows(torch.tensor(rows), longest, ROWS)
    assert found.tolist() == [by_hand(text, longest) for text in rows]
    assert len({row for text in found.tolist() for one in text for row in one}) > 70


@pytest.mark.parametrize("cuts", [[1] * 12, [1, 5, 1, 2, 3], [12]])
def test_a_text_in_parts(cuts):
    tokens, cache = torch.tensor(texts(12, 12)), LayerCache(2, 12)
    parts = []
    for part in tokens.split(cuts, 1):
        parts.append(ngram_rows(part, 4, ROWS, cache))
        cache.length += part.shape[1]
    assert torch.equal(torch.cat(parts, 1), ngram_rows(tokens, 4, ROWS))


def test_an_ngram_begins_in_its_document():
    parts = texts(5, 1, 2, 8)
    numbers = torch.tensor([[i for i, part in enumerate(parts) for _ in part]])
    places = torch.tensor([[place for part in parts for place in range(len(part))]])
    tokens = torch.tensor([[token for part in parts for token in part]])
    found = ngram_rows(tokens, 4, ROWS, documents=Documents(numbers, places))
    assert found[0].tolist() == [row for part in parts for row in by_hand(part, 4)]


def test_a_continuation_follows_the_beginning_of_its_row():
    """Three continuations lie one after the other, and each has the same text before it."""
    begin, *ends = texts(3, 2, 1, 4)
    numbers = [0] * 3 + [number for number, end in enumerate(ends, 1) for _ in end]
    places = [*range(3), *(3 + place for end in ends for place in range(len(end)))]
    branches = Branches(torch.tensor([numbers]), torch.tensor([places]))
    tokens = torch.tensor([begin + [token for end in ends for token in end]])
    found = ngram_rows(tokens, 5, ROWS, documents=branches)
    wanted = by_hand(begin, 5) + [row for end in ends for row in by_hand(begin + end, 5)[3:]]
    assert found[0].tolist() == wanted
