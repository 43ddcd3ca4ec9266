"""Mix the samples of several sources: a sample's source is a pure function of the sample's number.

The sequence has blocks, as in levanter's `data/mixture.py`, each with a whole number of samples of
each source in a random-looking order. At the end of each block a source has its exact share of all
samples so far, rounded up or down. A stage may cut a block.
"""

from __future__ import annotations

import bisect
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from windlass.data.batch import Batch, Samples, masks_documents, positions_of, unpadded_tokens
from windlass.data.order import permute, sample_indices
from windlass.recipe import DataSettings, Horizon
from windlass.recipe.settings import IGNORE_INDEX

BLOCK = 512  # samples, if no stage cuts it


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
        self._more, self._lock = blocks_of(stages, seed), threading.Lock()
        self._blocks = [next(self._more)]
        self._starts = [0]  # of these blocks

    def _blocks_at(self, numbers: np.ndarray) -> np.ndarray:
        """The places in `_blocks` of the blocks of samples, laid out if need be."""
        with self._lock:
            while self._starts[-1] <= numbers.max(initial=0):
                self._blocks.append(next(self._more))
                self._starts.append(self._blocks[-1].start)
        return np.searchsorted(self._starts, numbers, side="right") - 1

    def indices(self, numbers: np.ndarray) -> np.ndarray:
        """The samples of `samples` that global sample numbers have, int64 of the same shape."""
        # the source of each sample, and the sample's number in its source
        sources, own_numbers = np.empty_like(numbers), np.empty_like(numbers)
        blocks = self._blocks_at(numbers)
        for index in np.unique(blocks).tolist():
            here, block = blocks == index, self._blocks[index]
            source_at, number_at = layout(self.seed, block.start, block.counts)
            places = numbers[here] - block.start
            sources[here] = source_at[places]
            own_numbers[here] = block.before[source_at[places]] + number_at[places]
        indices = np.empty_like(numbers)
        for source in np.unique(sources).tolist():
            part, here = self.samples.parts[source], sources == source
            seed, shards = f"{self.seed}/source {source}", getattr(part, "shard_samples", None)
            inside = sample_indices(own_numbers[here], len(part), self.kind, seed, shards)
            indices[here] = self.samples.starts[source] + inside
        return indices

    def counts(self, stop: int) -> np.ndarray:
        """The samples of each source among the first `stop` ones, int64 [sources]."""
        block = self._blocks[int(self._blocks_at(np.array(stop)))]
        sources, _ = layout(self.seed, block.start, block.counts)
        before = sources[: stop - block.start]
        return block.before + np.bincount(before, minlength=len(block.counts))

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
    samples, rows = mixture.samples, list[dict[str, Any]]()
    counts = mixture.counts(horizon.steps * horizon.samples_per_step).tolist()
    for i, (name, part) in enumerate(zip(samples.names, samples.parts, strict=True)):
        tokens = unpadded_tokens(part)
        row = {
            "name": name,
            "weights": [round(s.weights[i] / sum(s.weights), 6) for s in mixture.stages],
            "samples": counts[i],
            "tokens": None if tokens is None else round(counts[i] * tokens / len(part)),
            "epochs": counts[i] / len(part),
        }
        rows.append(row)
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


def continue_stages(past: Sequence[Stage], planned: Sequence[Stage], sample: int) -> list[Stage]:
    """The stages of a run that continues at sample `at`: the past ones before it, then the plan's
    (a branch has other weights, or a longer run moves a stage)."""
    if not past:
        return list(planned)
    stages = [stage for stage in past if stage.start < sample]
    current = [stage for stage in planned if stage.start <= sample][-1]
    if not stages or stages[-1].weights != current.weights:
        stages.append(current._replace(start=sample))
    return stages + [stage for stage in planned if stage.start > sample]


class Block(NamedTuple):
    """BLOCK samples from number `start` on, fewer if the next stage begins inside of it."""

    start: int
    before: np.ndarray  # samples of each source before it, int64 [sources]
    counts: tuple[int, ...]  # samples of each source in a whole block


def blocks_of(stages: Sequence[Stage], seed: int) -> Iterator[Block]:
    """The blocks of a mixture, in order, without end."""
    before = np.zeros(len(stages[0].weights), np.int64)
    ends = [*(stage.start for stage in stages[1:]), math.inf]
    for stage, end in zip(stages, ends, strict=True):
        start = stage.start
        for counts in block_counts(stage.weights):
            if start >= end:
                break
            yield Block(start, before, counts)
            read = np.array(counts)
            if start + BLOCK > end:
                sources, _ = layout(seed, start, counts)
                read = np.bincount(sources[: int(end) - start], minlength=len(counts))
            before = before + read
            start += BLOCK


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
        self.unpadded_tokens = sum(unpadded_tokens(part) or 0 for part in self.parts)
        self.tokens: int = sum(getattr(p, "tokens", unpadded_tokens(p) or 0) for p in self.parts)

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
        batches = dict[int, Batch[np.ndarray]]()
        for source in np.unique(sources).tolist():
            inside = indices[sources == source] - self.starts[source]
            batches[source] = Batch(*self.parts[source].read(inside))
        shape = len(indices), max(batch.tokens.shape[1] for batch in batches.values())
        tokens, labels = np.zeros(shape, np.int64), np.full(shape, IGNORE_INDEX)
        documents = np.zeros(shape, np.int64)
        for source, batch in batches.items():  # padded to the same width
            rows, width = sources == source, batch.tokens.shape[1]
            tokens[rows, :width] = batch.tokens
            labels[rows, :width] = batch.labels
            if batch.documents is not None:
                documents[rows, :width] = batch.documents
                documents[rows, width:] = batch.documents[:, -1:]
        if all(batch.documents is None for batch in batches.values()):
            return Batch(tokens, labels, sources=sources)
        return Batch(tokens, labels, positions_of(documents), documents, sources)
