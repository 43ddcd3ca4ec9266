"""How much memory tensors take in real training steps: every operation's results, until the last
reference is gone.
"""

import gc
import threading
import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bare_trainer import bare_trainer, full_rows
from windlass.model.build import build_model
from windlass.model.gpt import initialise
from windlass.model.sharding import unwrap
from windlass.parallel.parallelize import parallelize
from windlass.recipe import Recipe


class MemoryMeter(TorchDispatchMode):
    """Counts the live bytes of all storages made inside of it, and the most of them.

    What a kernel allocates and frees again within one operation is not seen. FSDP2 frees parameters
    by resizing their storage, which is not an operation and is watched by itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.total = self.peak = 0
        self._lock = threading.RLock()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._see(getattr(leaf, "_local_tensor", leaf))
        return out

    def _see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.device.type != "meta" and storage._cdata not in self.live:
            self._set(storage._cdata, storage.nbytes())
            weakref.finalize(storage, self._set, storage._cdata, 0)

    def _set(self, key: int, size: int) -> None:
        with self._lock:
            self.total += size - self.live.pop(key, 0)
            if size:
                self.live[key] = size
            self.peak = max(self.peak, self.total)

    def __enter__(self) -> "MemoryMeter":
        original = self._resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            if storage._cdata in self.live:
                with self._lock:
                    self.total += size - self.live[storage._cdata]
                    self.live[storage._cdata] = size
                    self.peak = max(self.peak, self.total)
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)


def measured(join: Any, r: Recipe, vocab: int, micro: int, accumulation: int) -> tuple[int, int]:
    """On one rank, for `harness.run_ranks`: bytes at rest after two steps, and at the peak of the
    three after them.

    The lowest peak of the three: gloo's threads let go of a buffer some time after the collective
    has ended, and later where the machine is busy, so a peak can only be too high.
    """
    with join(r) as ranks, MemoryMeter() as meter:
        model = parallelize(build_model(r, vocab), ranks, r)
        initialise(unwrap(model), 0)
        trainer, batch = bare_trainer(model, r, ranks), full_rows(r, vocab, micro, accumulation)
        rest, peaks = 0, list[int]()
        for _ in range(5):
            gc.collect()
            rest = meter.peak = meter.total
            trainer.step(batch, 1.0)
            peaks.append(meter.peak)
        return rest, min(
            peaks[2:]
        )  # the first two make the optimizer's state, and what is kept from step to step
