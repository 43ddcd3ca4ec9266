"""How much of a source a recipe needs: the rest of a large one is not tokenized."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from windlass.data.shards import Row, ShardWriter
from windlass.data.split import FEW, LONG_TEXT, Corpus, held_out
from windlass.recipe import DataSettings


class Need:
    """Counts documents until a recipe has enough of them.

    The first FEW documents or groups decide how validation data is held out, so they are always
    needed.
    """

    def __init__(self, data: DataSettings, is_val: bool, tokens: int):
        """`tokens` for training, or the limit that validation data have a share of; 0: all."""
        share = Fraction(str(data.val_fraction))
        self.is_val, self.fraction = is_val, data.val_fraction
        self.tokens = int(tokens * share) if is_val else tokens
        self.documents = data.max_documents
        if is_val and self.documents:
            self.documents = max(1, int(self.documents * share)) if share else 0
        # tokens in the first shards, which are held out
        self._before = -data.val_shards * data.shard_tokens if not is_val else 0
        self._read, self._end, self._characters = 0, 0, 0  # documents; of the one being written
        self._groups = set[int]()  # FEW of them at most
        self.done = self._before  # training tokens, or characters of validation data

    @property
    def is_met(self) -> bool:
        return self.has_all_documents or (0 < self.tokens <= self.done and self._decides)

    @property
    def has_all_documents(self) -> bool:
        return 0 < self.documents <= self._read and self._decides

    @property
    def _decides(self) -> bool:
        return self._read >= FEW and len(self._groups) >= FEW

    def __call__(self, writer: ShardWriter, row: Row) -> bool:
        """Count a row; returns whether it ends a document and the need is met."""
        self._characters += row.characters
        if row.more:
            return False
        tokens, group = writer.tokens - self._end, np.array([row.group or row.text], np.uint64)
        self._count(np.array([tokens]), np.array([self._characters]), group)
        self._end, self._characters = writer.tokens, 0
        return self.is_met

    def counted(self, corpus: Corpus) -> Need:
        """Count the documents that are prepared."""
        table, self._characters = corpus.stream.table, corpus.index.resume[1]
        if len(table):
            edges, group = table.edges, "group" if corpus.index.masked else "text"
            self._count(np.diff(edges), table.characters, table.field(group))
            self._end = int(edges[-1])
        return self

    def _count(self, tokens: np.ndarray, characters: np.ndarray, groups: np.ndarray) -> None:
        """Count documents by their tokens and characters, and the hashes that hold them out."""
        self._read += len(tokens)
        if len(self._groups) < FEW:
            self._groups.update(np.unique(groups)[:FEW].tolist())
        if self.is_val:
            self.done += int(characters.sum())
        elif self._before or not self.fraction:
            self.done += int(tokens.sum())
        else:
            is_long = characters > LONG_TEXT
            trains = ~held_out(groups, self.fraction) & ~is_long
            self.done += int(tokens[trains].sum())
            self.done += int((tokens[is_long] * (1 - self.fraction)).astype(np.int64).sum())
