"""Mix the samples of several sources: a sample's source is a pure function of the sample's number.

The sequence has blocks, as in levanter's `data/mixture.py`, each with a whole number of samples of
each source in a random-looking order. At the end of each block a source has its exact share of all
samples so far, rounded up or down. A stage may cut a block.
"""

from __future__ import annotations

import bisect
import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from windlass.data.batch import Batch, Samples, masks_documents, positions_of, real_tokens
from windlass.data.order import permute, sample_indices
from windlass.recipe import DataSettings, Horizon
from windlass.recipe.settings import IGNORE_INDEX

BLOCK = 512  # samples, if no stage cuts it
MANY_EPOCHS = 4  # more repetitions of text are worth much less than new text (arXiv 2305.16264)


class Stage(NamedTuple):
    """The weights from a sample number on, until the next stage."""

    start: int
    weights: tuple[float, ...]  # of each source, of any sum


class Mixture:
    """The sequence of a mixture's samples. Threads may share it."""

    def __init__(
        self, samples: MixedSamples, stages: Sequence[Stage], seed: int, kind: str = "shuffled"
    ):
        """`kind` is `data.order`, for the order inside of each source."""
        self.samples, self.stages, self.seed, self.kind = samples, list(stages), seed, kind
        self._more = blocks_of(stages, seed)
        self._lock = threading.Lock()
        self._blocks = list[Block]()
        self._ends = list[int]()  # of these blocks

    def _lay(self, number: int) -> None:
        """Lay out the blocks up to the block of a sample."""
        with self._lock:
            while not self._ends or self._ends[-1] <= number:
                block = next(self._more)
                self._blocks.append(block)
                self._ends.append(block.start + block.length)

    def places(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The source of each sample number, and the sample's number in it, both int64."""
        self._lay(int(numbers.max(initial=0)))
        sources, own = np.empty_like(numbers), np.empty_like(numbers)
        at = np.searchsorted(self._ends, numbers, side="right")
        for index in np.unique(at).tolist():
            here = at == index
            block = self._blocks[index]
            of, number = layout(self.seed, block.start, block.counts)
            inside = numbers[here] - block.start
            sources[here] = of[inside]
            own[here] = np.asarray(block.before)[of[inside]] + number[inside]
        return sources, own

    def indices(self, numbers: np.ndarray) -> np.ndarray:
        """The samples of `samples` that global sample numbers have, int64 of the same shape."""
        sources, own = self.places(numbers)
        indices = np.empty_like(numbers)
        for source in np.unique(sources).tolist():
            part = self.samples.parts[source]
            here = sources == source
            seed = f"{self.seed}/source {source}"
            shards = getattr(part, "shard_samples", None)
            inside = sample_indices(own[here], len(part), self.kind, seed, shards)
            indices[here] = self.samples.starts[source] + inside
        return indices

    def counts(self, stop: int) -> np.ndarray:
        """The samples of each source among the first `stop` ones, int64 [sources]."""
        if stop <= 0:
            return np.zeros(len(self.samples.parts), np.int64)
        self._lay(stop - 1)
        at = bisect.bisect_right(self._ends, stop - 1)
        block = self._blocks[at]
        sources, _ = layout(self.seed, block.start, block.counts)
        inside = sources[: stop - block.start]
        return np.asarray(block.before) + np.bincount(inside, minlength=len(block.counts))

    def progress(self, samples: int) -> dict[str, float]:
        """Fields of a `train` line: samples and epochs of each source after `samples` samples."""
        fields, sources = dict[str, float](), self.samples
        counts = self.counts(samples).tolist()
        for name, part, count in zip(sources.names, sources.parts, counts, strict=True):
            fields[f"source.{name}.samples"] = count
            fields[f"source.{name}.epochs"] = count / len(part)
        return fields


def shares_of_run(mixture: Mixture, horizon: Horizon) -> list[dict[str, Any]]:
    """What a whole run reads of each source; `weights` are the shares in each stage."""
    counts = mixture.counts(horizon.steps * horizon.samples_per_step).tolist()
    rows = list[dict[str, Any]]()
    for i, (name, part) in enumerate(
        zip(mixture.samples.names, mixture.samples.parts, strict=True)
    ):
        tokens = real_tokens(part)
        rows.append(
            {
                "name": name,
                "weights": [round(s.weights[i] / sum(s.weights), 6) for s in mixture.stages],
                "samples": counts[i],
                "tokens": None if tokens is None else round(counts[i] * tokens / len(part)),
                "epochs": counts[i] / len(part),
            }
        )
    return rows


def stages_of(data: DataSettings, horizon: Horizon) -> list[Stage]:
    """The stages of a recipe's mixture, for a run."""
    weights = {part.name: part.weight for part in data.mix}
    stages = [Stage(0, tuple(weights.values()))]
    size = horizon.samples_per_step
    places = [size * horizon.steps_in(stage.start) for stage in data.stages]
    for start, stage in sorted(zip(places, data.stages, strict=True), key=lambda pair: pair[0]):
        weights |= stage.weights
        stages.append(Stage(start, tuple(weights.values())))
    return stages


def continue_stages(past: Sequence[Stage], planned: Sequence[Stage], at: int) -> list[Stage]:
    """The stages of a run that continues at sample `at`: the past ones before it, then the plan's
    (a branch has other weights, or a longer run moves a stage)."""
    if not past:
        return list(planned)
    stages = [stage for stage in past if stage.start < at]
    current = [stage for stage in planned if stage.start <= at][-1]
    if not stages or stages[-1].weights != current.weights:
        stages.append(current._replace(start=at))
    return stages + [stage for stage in planned if stage.start > at]


class Block(NamedTuple):
    """Some samples, from number `start` on."""

    start: int
    length: int  # under BLOCK if it is cut
    before: tuple[int, ...]  # samples of each source before it
    counts: tuple[int, ...]  # samples of each source in it, before it is cut


def blocks_of(stages: Sequence[Stage], seed: int) -> Iterator[Block]:
    """The blocks of a mixture, in order, without end."""
    start, done = 0, (0,) * len(stages[0].weights)
    while True:
        weights = [stage.weights for stage in stages if stage.start <= start][-1]
        switch = min((s.start for s in stages if s.start > start), default=math.inf)
        for counts in block_counts(weights):
            length = int(min(BLOCK, switch - start))
            read = counts
            if length < BLOCK:
                sources, _ = layout(seed, start, counts)
                read = tuple(np.bincount(sources[:length], minlength=len(counts)).tolist())
            yield Block(start, length, done, counts)
            start += length
            done = tuple(n + more for n, more in zip(done, read, strict=True))
            if start == switch:
                break


def block_counts(weights: Sequence[float]) -> Iterator[tuple[int, ...]]:
    """The samples of each source in one block after another.

    After `m` samples source `i` has `m * share` samples, rounded up or down. A sample is due in the
    first block at whose end the share rounded down contains it, and may come in the first block at
    whose end the share rounded up does. The samples that are due first come first, so none is late
    (earliest deadline first; R. Tijdeman, The chairman assignment problem, 1980).
    """
    exact = [Fraction(str(weight)) for weight in weights]
    whole = math.lcm(*(weight.denominator for weight in exact))
    shares = [int(weight * whole) for weight in exact]  # of their sum
    every = sum(shares)
    done = [0] * len(shares)
    total = 0
    while True:
        total += BLOCK
        after = [max(n, total * share // every) for n, share in zip(done, shares, strict=True)]
        if spare := total - sum(after):
            may = [i for i, share in enumerate(shares) if after[i] * every < total * share]
            may.sort(key=lambda i: Fraction(after[i] + 1, shares[i]))
            for i in may[:spare]:
                after[i] += 1
        yield tuple(n - before for n, before in zip(after, done, strict=True))
        done = after


@lru_cache(maxsize=16)
def layout(seed: int, start: int, counts: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The source of each place of a block, and its number among these, both int64 [BLOCK]."""
    sources = np.repeat(np.arange(len(counts)), counts)
    order = permute(np.arange(BLOCK), BLOCK, f"windlass/mixture/{seed}/{start}")
    sources, numbers = sources[order], np.empty(BLOCK, np.int64)
    for source, count in enumerate(counts):
        numbers[sources == source] = np.arange(count)
    return sources, numbers


class MixedSamples:
    """The samples of several sources, one source after another; with `spread` in turn."""

    def __init__(self, parts: Mapping[str, Samples], *, spread: bool = False):
        self.names, self.parts = list(parts), list(parts.values())
        sizes = [len(part) for part in self.parts]
        self.starts = np.cumsum([0, *sizes], dtype=np.int64)
        self._order: np.ndarray | None = None
        if spread:
            places = [np.arange(size) / size for size in sizes if size]
            self._order = np.argsort(np.concatenate(places), kind="stable")
        self.document_mask = any(map(masks_documents, self.parts))
        self.real_tokens = sum(real_tokens(part) or 0 for part in self.parts)
        self.tokens: int = sum(getattr(p, "tokens", real_tokens(p) or 0) for p in self.parts)

    def __len__(self) -> int:
        return int(self.starts[-1])

    @property
    def valid_tokens(self) -> int:
        return sum(getattr(part, "valid_tokens", 0) for part in self.parts)

    def length(self, index: int) -> int:
        index = index if self._order is None else int(self._order[index])
        source = bisect.bisect_right(self.starts, index) - 1
        part: Any = self.parts[source]
        return int(part.length(index - int(self.starts[source])))

    def read(self, indices: np.ndarray) -> Batch[np.ndarray]:
        indices = indices if self._order is None else self._order[indices]
        sources = np.searchsorted(self.starts, indices, side="right") - 1
        present = np.unique(sources).tolist()
        groups = [np.flatnonzero(sources == source) for source in present]
        batches = [
            Batch(*self.parts[source].read(indices[group] - self.starts[source]))
            for source, group in zip(present, groups, strict=True)
        ]
        back = np.argsort(np.concatenate(groups), kind="stable")
        width = max(batch.tokens.shape[1] for batch in batches)

        def joined(fields: Iterable[np.ndarray], **padding: Any) -> np.ndarray:
            """The rows in the order of `indices`, padded to the same width."""
            padded = [
                np.pad(rows, ((0, 0), (0, width - rows.shape[1])), **padding) for rows in fields
            ]
            return np.concatenate(padded)[back]

        tokens = joined(batch.tokens for batch in batches)
        labels = joined((batch.labels for batch in batches), constant_values=IGNORE_INDEX)
        if all(batch.documents is None for batch in batches):
            return Batch(tokens, labels, sources=sources)
        documents = joined(
            (
                np.zeros_like(batch.tokens) if batch.documents is None else batch.documents
                for batch in batches
            ),
            mode="edge",
        )
        return Batch(tokens, labels, positions_of(documents), documents, sources)
