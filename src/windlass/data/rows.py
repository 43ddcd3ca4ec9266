"""Samples of unequal length, where only a part of each counts: questions with answers, conversations."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from windlass.recipe.settings import IGNORE_INDEX


class Rows:
    """Sequences held in memory, each with a mark on the tokens that are to be predicted.

    A row of n tokens gives n - 1 positions: the label of each is the token after it, or -100 where that is not marked.
    """

    def __init__(self, rows: Iterable[tuple[Sequence[int], Sequence[bool]]], pad: int):
        """Take (tokens, marks) pairs; `pad` fills rows up to the longest of a batch, with labels -100."""
        tokens, marks, ends = [], [], [0]
        for ids, counted in rows:
            assert len(ids) == len(counted) > 1, (len(ids), len(counted))
            tokens.append(np.asarray(ids, dtype=np.int32))
            marks.append(np.asarray(counted, dtype=bool))
            ends.append(ends[-1] + len(ids))
        self._tokens = np.concatenate(tokens) if tokens else np.zeros(0, np.int32)
        self._marks = np.concatenate(marks) if marks else np.zeros(0, bool)
        self._ends = np.asarray(ends, dtype=np.int64)
        self._marks[self._ends[:-1]] = False  # nothing comes before a row's first token to predict it from
        self.pad = pad

    def save(self, path: Path) -> None:
        """Write the rows to an `.npz` file."""
        with path.open("wb") as file:
            np.savez(file, tokens=self._tokens, marks=self._marks, ends=self._ends, pad=np.int64(self.pad))

    @staticmethod
    def load(path: Path) -> Rows:
        """Read what `save` wrote; raises OSError, ValueError or KeyError where it is not that."""
        found = Rows((), 0)
        with np.load(path, allow_pickle=False) as saved:
            found._tokens, found._marks, found._ends = saved["tokens"], saved["marks"], saved["ends"]
            found.pad = int(saved["pad"])
        return found

    def __len__(self) -> int:
        return len(self._ends) - 1

    def length(self, index: int) -> int:
        """Positions of a row: its tokens less one."""
        return int(self._ends[index + 1] - self._ends[index]) - 1

    @property
    def valid_tokens(self) -> int:
        """Labels that count, over all rows."""
        return int(self._marks.sum())

    def sample_tokens(self) -> float:
        """Labels that count, in the mean row."""
        return self.valid_tokens / max(1, len(self))

    @property
    def fingerprint(self) -> str:
        """SHA-256 over tokens, marks and edges: equal for equal rows in equal order."""
        digest = hashlib.sha256()
        for part in (self._tokens.astype("<i4"), self._marks.astype("u1"), self._ends.astype("<i8")):
            digest.update(part.tobytes())
        return digest.hexdigest()

    def read(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Tokens and labels [n, T] of the given rows, T being the longest of them."""
        width = max((self.length(int(i)) for i in indices), default=1)
        tokens = np.full((len(indices), width), self.pad, dtype=np.int64)
        labels = np.full((len(indices), width), IGNORE_INDEX, dtype=np.int64)
        for place, index in enumerate(indices):
            start, end = self._ends[index], self._ends[index + 1]
            row, marks = self._tokens[start:end], self._marks[start:end]
            tokens[place, : len(row) - 1] = row[:-1]
            labels[place, : len(row) - 1] = np.where(marks[1:], row[1:], IGNORE_INDEX)
        return tokens, labels


def choose(keys: Sequence[str], size: int, seed: int, purpose: str) -> list[int]:
    """The places of `size` of the keys (0: all), in their order: which ones is a pure function of seed, purpose and keys."""
    if not size or size >= len(keys):
        return list(range(len(keys)))

    def rank(place: int) -> bytes:
        text = f"windlass/choose/{purpose}/{seed}/{keys[place]}"
        return hashlib.blake2b(text.encode(), digest_size=16).digest()

    return sorted(sorted(range(len(keys)), key=rank)[:size])
