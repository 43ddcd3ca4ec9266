"""How much of a source a recipe reads: its first documents, up to a limit."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from windlass.data.corpus import Table
from windlass.data.locate import Member, S

FEW = 100  # the first ones of a source decide how validation data is held out (`split.py`)


@dataclass(frozen=True)
class Limit:
    """The first documents of a source that have `most` tokens, or characters; 0: all documents.

    Training reads at least FEW texts, or FEW groups of examples. Separate validation data, which
    counts characters, needs no minimum.
    """

    most: int
    is_val: bool = False  # of separate validation data

    def documents(self, table: Table) -> int | None:
        """The number of documents that are read; None if the table has too few."""
        if self.is_val:
            last = int(np.searchsorted(np.cumsum(table.characters), self.most))
        else:
            first = np.sort(np.unique(table.groups, return_index=True)[1])  # of each group
            few = int(first[FEW - 1]) if len(first) >= FEW else len(table)
            last = max(few, int(np.searchsorted(table.edges[1:], self.most)))
        return last + 1 if self.most and last < len(table) else None


class Need:
    """`Limit.documents` while the documents come, one after another."""

    def __init__(self, limit: Limit, table: Table | None = None):
        """`table` has the documents before."""
        self._limit, self._characters, self._groups = limit, 0, set[int]()
        if table is not None:
            self._characters = int(table.characters.sum())
            self._groups |= set(np.unique(table.groups)[:FEW].tolist())

    def is_met(self, group: int, characters: int, tokens: int) -> bool:
        """Whether a document is the last that is needed; `tokens`: of all documents up to it."""
        self._characters += characters
        if self._limit.is_val:
            return 0 < self._limit.most <= self._characters
        if len(self._groups) < FEW:
            self._groups.add(group)
        return len(self._groups) >= FEW and 0 < self._limit.most <= tokens


def with_limits(member: Member[S]) -> list[tuple[S, Limit]]:
    """The sources of a member, training first, with their limits: `data.max_tokens`, and for
    separate validation data `data.val_fraction` of it, in equal parts."""
    most = member.data.max_tokens
    characters = int(most * Fraction(str(member.data.val_fraction)))
    train, val = len(member.train), len(member.val)
    of_train = Limit(-(-most // max(1, train)))
    of_val = Limit(-(-characters // max(1, val)), is_val=True)
    return list(zip(member.sources, [of_train] * train + [of_val] * val, strict=True))
