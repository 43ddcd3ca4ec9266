"""Batches for the loop: read ahead in the background, dealt to ranks as the batch plan says.

Which samples a step has, and in which micro-batch, is decided by arithmetic alone (`data/order.py`, `recipe/units.py`); the
thread here only reads them earlier than they are needed.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from windlass.data.order import Order, sample_order, step_samples
from windlass.data.samples import Samples
from windlass.recipe import BatchPlan
from windlass.recipe.settings import IGNORE_INDEX

CLOSE_SECONDS = 0.2
"""How long the end of a loader waits for its thread, which may be in a slow source; then it is left behind."""


@dataclass(frozen=True)
class MicroBatch:
    """Samples of one forward pass of one rank."""

    k: int
    """Its number in the step, over all ranks."""
    tokens: Tensor
    """[B, T], int64."""
    labels: Tensor
    """[B, T], int64; -100 where the token does not count."""


@dataclass(frozen=True)
class StepBatch:
    """This rank's share of one optimizer step."""

    step: int
    """The step about to be done, counted from 1."""
    first_sample: int
    """Global number of the step's first sample."""
    micro: list[MicroBatch]
    valid_tokens: int
    """Labels of this rank that count."""
    wait_ms: float = 0.0
    """How long the loop had to wait for it."""


class Plan:
    """Which samples a step has, in the order in which they are dealt: the same on every rank, a function of the step."""

    def __init__(
        self, samples: Samples, global_batch: int, seed: int, kind: str, skipped: Sequence[tuple[int, int]] = (),
        length_buckets: bool = False,
    ):  # fmt: skip
        self.samples, self.global_batch, self.seed, self.kind = samples, global_batch, seed, kind
        self.skipped = tuple(skipped)
        self.length_buckets = length_buckets and hasattr(samples, "length")
        self.epoch_samples = len(samples)
        self._orders: dict[int, Order] = {}

    def numbers(self, step: int) -> np.ndarray:
        """Global sample numbers of a step (counted from 1), int64 [global_batch]."""
        return step_samples(step - 1, self.global_batch, self.skipped)

    def indices(self, step: int) -> np.ndarray:
        """Samples of a step (counted from 1), int64 [global_batch]."""
        epochs, places = np.divmod(self.numbers(step), self.epoch_samples)
        found = np.empty_like(places)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            found[here] = self._order(epoch)[places[here]]
        if self.length_buckets:
            lengths = [self.samples.length(i) for i in found.tolist()]  # type: ignore[attr-defined]
            found = found[np.argsort(lengths, kind="stable")]
        return found

    def _order(self, epoch: int) -> Order:
        if epoch not in self._orders:
            self._orders = {e: o for e, o in self._orders.items() if e == epoch - 1}
            shards = getattr(self.samples, "shard_samples", None)
            self._orders[epoch] = sample_order(self.kind, self.seed, epoch, self.epoch_samples, shards)
        return self._orders[epoch]


class Loader:
    """Yields one `StepBatch` after another, without end; close it, or use it in a `with`.

    Args:
        samples: The training set.
        batch: How a step's samples are dealt.
        rank: Whose share is read.
        seed: The run's seed.
        kind: `data.order`.
        device: Where the tensors go; to CUDA from pinned memory, without waiting.
        prefetch: Steps read ahead; 0: read when asked.
        first_step: Steps already done: the first batch is that of step `first_step + 1`.
        skipped: Ranges [start, stop) of global sample numbers that are left out.
        length_buckets: Sort the samples of a step by length before they are dealt, so that a micro-batch has little padding.
    """

    def __init__(
        self, samples: Samples, batch: BatchPlan, rank: int, seed: int, kind: str = "shuffled",
        device: torch.device | str = "cpu", prefetch: int = 2, first_step: int = 0,
        skipped: Sequence[tuple[int, int]] = (), length_buckets: bool = False,
    ):  # fmt: skip
        if not len(samples):
            raise ValueError("there is no sample to load")
        self.device = torch.device(device)
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        reader = _Reader(
            Plan(samples, batch.global_batch, seed, kind, skipped, length_buckets), batch, rank, self.device
        )
        self._reader = reader
        self._next = first_step + 1
        self._queue: queue.Queue[StepBatch | BaseException] | None = None
        self._stop = threading.Event()
        self._failed: BaseException | None = None
        if prefetch:
            self._queue = queue.Queue(prefetch)
            self._thread = threading.Thread(
                target=_read_ahead,
                args=(reader, self._next, self._queue, self._stop),
                name="windlass-loader",
                daemon=True,
            )
            self._thread.start()
            self._finalizer = weakref.finalize(self, self._stop.set)  # the thread holds no reference to us

    def __iter__(self) -> Iterator[StepBatch]:
        return self

    def __next__(self) -> StepBatch:
        batch = self.poll(None)
        assert batch is not None
        return batch

    def poll(self, timeout: float | None = 0.0) -> StepBatch | None:
        """The next batch, or None where it is not there within `timeout` seconds (None: wait).

        What went wrong in the background is raised here, at every call from then on.
        """
        if self._failed is not None:
            raise self._failed
        if self._stop.is_set():
            raise ValueError("the loader is closed")
        started = time.perf_counter()
        found: StepBatch | BaseException
        if self._queue is None:
            found = self._reader.read(self._next, self._stop) or ValueError("the loader is closed")
        else:
            try:
                found = self._queue.get(block=timeout != 0, timeout=timeout or None)
            except queue.Empty:
                return None
        if isinstance(found, BaseException):
            self._failed = found
            raise found
        self._next += 1
        micro = [replace(m, tokens=self._to_device(m.tokens), labels=self._to_device(m.labels)) for m in found.micro]
        return replace(found, micro=micro, wait_ms=1e3 * (time.perf_counter() - started))

    def _to_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, non_blocking=True)

    def close(self, patience: float | None = CLOSE_SECONDS) -> None:
        """Stop reading ahead; may be called again.

        The thread ends after the read that it is in. It is waited for, for `patience` seconds (None: as long as that takes,
        for who goes on reading from the same source, which need not bear two readers), then left behind: it keeps no
        process alive.
        """
        self._stop.set()
        if self._queue is not None:
            with contextlib.suppress(queue.Empty):
                while True:  # a thread that waits for room goes on, and sees that it is over
                    self._queue.get_nowait()
            self._thread.join(patience)

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class _Reader:
    """Reads one rank's share of a step into (pinned) host memory."""

    def __init__(self, plan: Plan, batch: BatchPlan, rank: int, device: torch.device):
        self.plan, self.batch, self.rank, self.device = plan, batch, rank, device

    def read(self, step: int, stop: threading.Event) -> StepBatch | None:
        """The micro-batches of a step; None where it is to stop before all are read."""
        indices, size = self.plan.indices(step), self.batch.micro_batch
        micro, valid = [], 0
        for k in self.batch.micro_batches(self.rank):
            if stop.is_set():
                return None
            tokens, labels = self.plan.samples.read(indices[k * size : (k + 1) * size])
            valid += int((labels != IGNORE_INDEX).sum())
            micro.append(MicroBatch(k, self._host(tokens), self._host(labels)))
        return StepBatch(step, int(self.plan.numbers(step)[0]), micro, valid)

    def _host(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64))
        return tensor.pin_memory() if self.device.type == "cuda" else tensor


def _read_ahead(
    reader: _Reader, step: int, full: queue.Queue[StepBatch | BaseException], stop: threading.Event
) -> None:
    """Fill the queue until it is over or something goes wrong, which is then the last thing in the queue."""
    try:
        if reader.device.type == "cuda":
            torch.cuda.set_device(reader.device)  # a thread starts on device 0, and pinning would open a context there
        while (found := reader.read(step, stop)) is not None and _put(found, full, stop):
            step += 1
    except BaseException as error:
        _put(error, full, stop)


def _put(found: StepBatch | BaseException, full: queue.Queue[StepBatch | BaseException], stop: threading.Event) -> bool:
    while not stop.is_set():
        try:
            full.put(found, timeout=0.1)
        except queue.Full:
            continue
        return True
    return False


def eval_batches(
    samples: Samples,
    rank: int,
    world: int,
    micro_batch: int,
    limit_samples: int = 0,
    *,
    device: torch.device | str = "cpu",
) -> Iterator[MicroBatch]:
    """The first `limit_samples` samples (0: all), each once over all ranks, in equally many micro-batches on every rank.

    Rows past the last sample are filled up with a sample whose labels are all masked, so that every rank makes the same
    forward passes.
    """
    count = min(limit_samples, len(samples)) if limit_samples else len(samples)
    rounds = -(-count // (micro_batch * world))
    for turn in range(rounds):
        k = turn * world + rank
        wanted = np.arange(k * micro_batch, (k + 1) * micro_batch, dtype=np.int64)
        surplus = wanted >= count
        tokens, labels = samples.read(np.where(surplus, 0, wanted))
        labels = np.where(surplus[:, None], IGNORE_INDEX, labels)
        yield MicroBatch(
            k, *(torch.from_numpy(np.ascontiguousarray(a, dtype=np.int64)).to(device) for a in (tokens, labels))
        )
