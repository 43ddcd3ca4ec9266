"""Read batches for the loop ahead in a thread; each rank reads its slices of the global batch.
Arithmetic alone decides which samples a step and a micro-batch have (`data/order.py`, `BatchPlan`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from queue import Empty, Queue
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from windlass.data.batch import Batch, Samples
from windlass.data.mixture import Mixture
from windlass.data.order import sample_indices
from windlass.recipe import BatchPlan
from windlass.recipe.settings import IGNORE_INDEX

CLOSE_SECONDS = 0.2  # for the thread, which may be in a slow source; then it is abandoned


@dataclass(frozen=True)
class MicroBatch:
    """The samples of one forward pass of one rank."""

    index: int  # its number in the step, over all data ranks
    batch: Batch[Tensor]


@dataclass(frozen=True)
class StepBatch:
    step: int  # the step about to be done, counted from 1
    micro: list[MicroBatch]
    valid_tokens: int  # unmasked labels of this rank
    unpadded_tokens: int  # its tokens without padding, masked prompts included
    wait_ms: float = 0.0  # how long the loop had to wait for it


class Loader(Iterator[StepBatch]):
    """Yields one `StepBatch` after another, without end; close it, or use it in a `with`."""

    def __init__(
        self,
        samples: Samples,
        batch: BatchPlan,  # how a step's samples are divided among ranks and micro-batches
        data_rank: int,  # whose share is read
        seed: int,
        kind: str = "shuffled",  # `data.order`
        device: torch.device | str = "cpu",  # to CUDA from pinned memory, without waiting
        first_step: int = 0,  # steps already done
        length_buckets: bool = False,  # sort a step's samples by length: less padding
        mixture: Mixture | None = None,  # which of the samples of several sources come next
    ):
        if not len(samples):
            raise ValueError("the set is empty")
        self.device = torch.device(device)
        self.samples, self.batch, self.data_rank = samples, batch, data_rank
        self.seed, self.kind, self.mixture = seed, kind, mixture
        self.length_buckets = length_buckets and hasattr(samples, "length")
        self._stop = threading.Event()
        self._error: BaseException | None = None
        # Two steps are read ahead: one is in the queue, and the thread waits with the next one.
        self._ready = Queue[StepBatch | BaseException](maxsize=1)
        self._thread = threading.Thread(
            target=self._read_ahead, args=(first_step + 1,), name="windlass-loader", daemon=True
        )
        self._thread.start()

    def __next__(self) -> StepBatch:
        return cast(StepBatch, self.poll(None))

    def poll(self, timeout: float | None = 0.0) -> StepBatch | None:
        """The next batch, or None if it does not come in `timeout` seconds; the thread's error."""
        if self._error is not None:
            raise self._error
        if self._stop.is_set():
            raise ValueError("the loader is closed")
        started = time.perf_counter()
        try:
            batch = self._ready.get(timeout=timeout)
        except Empty:
            return None
        if not isinstance(batch, StepBatch):
            self._error = batch
            raise batch
        micro = batch.micro
        if self.device.type != "cpu":
            micro = [MicroBatch(m.index, m.batch.to(self.device)) for m in micro]
        return replace(batch, micro=micro, wait_ms=1e3 * (time.perf_counter() - started))

    def close(self) -> None:
        """Stop reading ahead, and wait for the thread up to CLOSE_SECONDS."""
        self._stop.set()
        with suppress(Empty):  # if the thread waits for room
            self._ready.get_nowait()
        self._thread.join(CLOSE_SECONDS)

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _read(self, step: int) -> StepBatch | None:
        """This rank's micro-batches of a step (from 1), in host memory; None if it is closed."""
        per_step = self.batch.global_batch
        numbers = np.arange((step - 1) * per_step, step * per_step)
        if self.mixture:
            indices = self.mixture.indices(numbers)
        else:
            shards = getattr(self.samples, "shard_samples", None)
            indices = sample_indices(numbers, len(self.samples), self.kind, self.seed, shards)
        length: Any = getattr(self.samples, "length", None)
        if self.length_buckets:
            lengths = list(map(length, indices.tolist()))
            indices = indices[np.argsort(lengths, kind="stable")]
        size = self.batch.micro_batch
        micro = list[MicroBatch]()
        valid = unpadded = 0
        for index in self.batch.micro_batches(self.data_rank):
            if self._stop.is_set():
                return None
            rows = indices[index * size : (index + 1) * size]
            batch = Batch(*self.samples.read(rows))
            unmasked = int((batch.labels != IGNORE_INDEX).sum())
            valid += unmasked
            unpadded += sum(map(length, rows.tolist())) if length else unmasked
            batch = batch.map(to_tensor)
            pinned = self.device.type == "cuda"
            micro.append(MicroBatch(index, batch.map(Tensor.pin_memory) if pinned else batch))
        return StepBatch(step, micro, valid, unpadded)

    def _read_ahead(self, step: int) -> None:
        try:
            if self.device.type == "cuda":
                # A thread starts on device 0, and pinning would open a context there.
                torch.cuda.set_device(self.device)
            while (batch := self._read(step)) is not None:
                self._ready.put(batch)
                step += 1
        except BaseException as error:
            self._ready.put(error)


def to_tensor(field: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(field, dtype=np.int64))


def eval_batches(
    samples: Samples, data_rank: int, data_world: int, micro_batch: int, first: int, stop: int
) -> Iterator[Batch[Tensor]]:
    """The samples from `first` to `stop`, once over all data ranks, which get equal counts."""
    for turn in range(-(-(stop - first) // (micro_batch * data_world))):
        index = turn * data_world + data_rank
        wanted = first + np.arange(index * micro_batch, (index + 1) * micro_batch, dtype=np.int64)
        surplus = wanted >= stop
        batch = Batch(*samples.read(np.where(surplus, 0, wanted)))
        batch = batch._replace(labels=np.where(surplus[:, None], IGNORE_INDEX, batch.labels))
        yield batch.map(to_tensor)
