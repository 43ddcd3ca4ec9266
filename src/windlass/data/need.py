"""How much of a source a recipe needs: the rest of a large one is not tokenized."""

from __future__ import annotations

import numpy as np

from windlass.data.shards import Row, ShardWriter
from windlass.data.split import FEW, Corpus, training_tokens
from windlass.recipe import DataSettings


class Need:
    """Counts documents until a recipe has enough of them.

    The first FEW documents or groups decide how validation data is held out, so they are always
    needed.
    """

    def __init__(self, data: DataSettings, wanted: int, is_val: bool, corpus: Corpus):
        """Count what is prepared. `wanted`: tokens for training, or characters of separate
        validation data; 0: all."""
        self.data, self.wanted, self.is_val = data, wanted, is_val
        # training tokens, after those in the first shards that are held out, or characters
        self.done = 0 if is_val else -data.val_shards * data.shard_tokens
        self._groups = set[int]()  # FEW at most
        table, self._end = corpus.stream.table, 0
        # of the document that is being written
        self._characters = 0 if corpus.index.masked else corpus.index.resume[1]
        if len(table):
            groups = table.field("group" if corpus.index.masked else "text")
            self._count(np.diff(table.edges), table.characters, groups)
            self._end = int(table.edges[-1])

    @property
    def is_met(self) -> bool:
        return len(self._groups) >= FEW and 0 < self.wanted <= self.done

    def __call__(self, writer: ShardWriter, row: Row) -> bool:
        """Count a row; returns whether it ends a document and the need is met."""
        self._characters += row.characters
        if row.more:
            return False
        tokens, group = writer.tokens - self._end, np.array([row.group or row.text], np.uint64)
        self._count(np.array([tokens]), np.array([self._characters]), group)
        self._end, self._characters = writer.tokens, 0
        return self.is_met

    def _count(self, tokens: np.ndarray, characters: np.ndarray, groups: np.ndarray) -> None:
        """Count documents by their tokens and characters, and the hashes that hold them out."""
        if len(self._groups) < FEW:
            self._groups.update(np.unique(groups)[:FEW].tolist())
        if self.is_val:
            self.done += int(characters.sum())
            return
        self.done += int(training_tokens(self.data, tokens, characters, groups).sum())
